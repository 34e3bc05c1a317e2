"""A place ends what hangs, and so many threads may be left behind and no more."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from realhf.api.environment import AssistantMessage, Environment, EnvironmentFailure
from realhf.env.server.spec.slots import EnvironmentThread, EnvironmentThreads
from tests.env.server.spec.odd_environment import FakeOddEnvironment

GO = AssistantMessage("go")


@pytest.fixture
def hold() -> Iterator[threading.Event]:
    """Is set in the end, so that no thread is left behind."""
    event = threading.Event()
    yield event
    event.set()


def blocked_by(event: threading.Event) -> type[FakeOddEnvironment]:
    class FakeBlocked(FakeOddEnvironment):
        async def step(self, message: AssistantMessage) -> None:  # type: ignore[override]
            event.wait(60)

    return FakeBlocked


async def opened(env: Environment) -> None:
    await env.reset({}, seed=0)


def wait_for(places: EnvironmentThreads, stuck: int) -> None:
    deadline = time.monotonic() + 60
    while places.metrics()["stuck_threads"] != stuck:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
def test_no_session_opens_beside_too_many_threads(
    hold: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The places come back at once; when as many threads as allowed hang in the environment's code,
    nothing is free until one of them returns."""
    monkeypatch.setattr("realhf.env.server.spec.slots.MAX_STUCK", 2)
    monkeypatch.setattr("realhf.env.server.spec.slots.GRACE_S", 0.05)
    kind = blocked_by(hold)
    places = EnvironmentThreads("odd", lambda: kind(""), 8, 0.05)
    for number in range(2):
        place = places.acquire()
        with pytest.raises(
            EnvironmentFailure, match=r"test_places.py, line \d+, in step"
        ) as failure:
            place.run("step", lambda env: env.step(GO))
        assert failure.value.kind == "timeout"
        places.release(place)
        assert places.free_count == (8 if number == 0 else 0)
    with pytest.raises(RuntimeError, match="no session slot is free"):
        places.acquire()
    hold.set()
    wait_for(places, 0)
    assert places.free_count == 8


@pytest.mark.slow
def test_a_call_is_broken_off_from_another_thread(hold: threading.Event) -> None:
    """Its caller returns at once with the kind lost, also when the call blocks its loop."""
    del hold
    places = EnvironmentThreads("odd", lambda: FakeOddEnvironment(""), 1, 60.0)
    place = places.acquire()
    threading.Timer(0.2, place.kill).start()
    began = time.monotonic()
    with pytest.raises(EnvironmentFailure) as failure:
        place.run("step", lambda env: asyncio.sleep(3600))
    assert failure.value.kind == "lost" and time.monotonic() - began < 30
    place.run("reset", opened)
    places.release(place)
    assert places.free_count == 1 and places.metrics()["stuck_threads"] == 0


def test_an_instance_is_closed_once_and_on_its_own_loop() -> None:
    """Also after a failure; the next call makes another one."""
    loops: list[tuple[str, object]] = []

    class FakeWatched(FakeOddEnvironment):
        def __init__(self) -> None:
            super().__init__("")
            loops.append(("made", asyncio.get_running_loop()))

        async def close(self) -> None:
            loops.append(("closed", asyncio.get_running_loop()))

    async def failing(env: Environment) -> None:
        raise LookupError("away")

    place = EnvironmentThread("odd", FakeWatched, 30.0, lambda thread: None)
    place.run("reset", opened)
    with pytest.raises(
        EnvironmentFailure, match=r"LookupError: away \(.*test_places.py, line \d+\)"
    ):
        place.run("step", failing)
    place.run("reset", opened)
    place.close()
    place.close()
    assert [what for what, _ in loops] == ["made", "closed", "made", "closed"]
    assert len({id(loop) for _, loop in loops}) == 1


def test_without_a_thread_the_failure_is_one_of_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: object, **more: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("realhf.env.server.spec.slots.LoopThread", refused)
    with pytest.raises(EnvironmentFailure, match="Too many open files") as failure:
        EnvironmentThread("odd", lambda: FakeOddEnvironment(""), 1.0, lambda thread: None).run(
            "reset", opened
        )
    assert failure.value.kind == "capacity"
