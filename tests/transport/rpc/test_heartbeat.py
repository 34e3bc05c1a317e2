"""Both ends of the heartbeat after they stood still themselves: they count no silence for the time. Every worker is
told what it has yet to know of the others, and those that serve nobody hear less."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from realhf.base.process import host_token, start_time
from realhf.transport.envelope import unpack_payload
from realhf.transport.heartbeat import LATE_S, HeartbeatClient, HeartbeatServer, PauseDetector
from realhf.transport.network import LOOPBACK
from realhf.transport.roster import RosterNews, WorkerInfo

SILENCE_S = 1.5
WAIT_S = 60.0


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(0)


@pytest.mark.nightly
def test_a_master_that_stood_still_gives_its_workers_their_time(context: zmq.Context[zmq.Socket[bytes]]):
    """It took them for dead as soon as it went on, before it could read what they had said meanwhile."""
    dead: queue.SimpleQueue[float] = queue.SimpleQueue()
    server = HeartbeatServer(
        "run", context, LOOPBACK, interval_s=0.2, dead_after_s=SILENCE_S, on_death=lambda *_: dead.put(time.monotonic())
    )
    try:
        server.watch("w", b"session", pid=0, started=0, host="")
        with server._lock:  # pyright: ignore[reportPrivateUsage]
            time.sleep(2 * SILENCE_S)
            went_on = time.monotonic()
        assert dead.get(timeout=WAIT_S) - went_on > SILENCE_S / 2, "silence begins when it listens again"
    finally:
        server.close()


@pytest.mark.nightly
def test_a_worker_that_stood_still_gives_the_master_its_time(context: zmq.Context[zmq.Socket[bytes]]):
    lost: queue.SimpleQueue[float] = queue.SimpleQueue()
    paused, went_on = threading.Event(), [0.0]

    def state() -> str:
        if not paused.is_set():
            time.sleep(2 * SILENCE_S)
            went_on[0] = time.monotonic()
            paused.set()
        return "idle"

    silent = context.socket(zmq.ROUTER)
    port = silent.bind_to_random_port("tcp://127.0.0.1")
    client = HeartbeatClient(
        "run",
        b"session",
        context,
        f"tcp://127.0.0.1:{port}",
        LOOPBACK,
        interval_s=0.2,
        lost_after_s=SILENCE_S,
        master=(0, 0, ""),
        state=state,
        on_lost=lambda reason: lost.put(time.monotonic()),
    )
    try:
        assert lost.get(timeout=WAIT_S) - went_on[0] > SILENCE_S / 2
    finally:
        client.close()


def test_a_pause_is_what_goes_beyond_the_wait_of_its_caller(monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    monkeypatch.setattr("realhf.transport.heartbeat.time.monotonic", lambda: now[0])
    pauses, found = PauseDetector(1.0), []
    for passed in (0.1, 1.0, 1.0 + LATE_S / 2, 6.0, 0.5):
        now[0] += passed
        found.append(pauses.look())
    assert found == [0.0, 0.0, 0.0, 5.0, 0.0]


def test_a_pause_gives_nobody_more_than_the_time_that_passed(monkeypatch: pytest.MonkeyPatch):
    """Files may come for a minute without a look, and the last of them is heard at its end: silence begins there."""
    now = [100.0]
    monkeypatch.setattr("realhf.transport.heartbeat.time.monotonic", lambda: now[0])
    pauses = PauseDetector(1.0)
    now[0] = 160.0
    assert pauses.excused(159.0) == 160.0
    now[0] = 170.0
    assert pauses.excused(150.0) == 159.0


def test_a_worker_is_found_dead_though_the_master_stood_still_for_long(context: zmq.Context[zmq.Socket[bytes]]):
    dead: queue.SimpleQueue[str] = queue.SimpleQueue()
    server = HeartbeatServer(
        "run", context, LOOPBACK, interval_s=0.2, dead_after_s=SILENCE_S, on_death=lambda name, *_: dead.put(name)
    )
    try:
        server.watch("w", b"session", pid=0, started=0, host="")
        server._excuse(1000.0)  # pyright: ignore[reportPrivateUsage]
        assert dead.get(timeout=WAIT_S / 3)
    finally:
        server.close()


def test_a_worker_of_another_host_says_how_busy_it_is(context: zmq.Context[zmq.Socket[bytes]]):
    """The load of its host comes with its signs of life; one beside the master says none, and nonsense is none."""
    server = HeartbeatServer("run", context, LOOPBACK, interval_s=0.05, dead_after_s=60.0, on_death=lambda *_: None)
    clients: list[HeartbeatClient] = []
    try:
        for session, host in ((b"far", "another host"), (b"near", host_token())):
            server.watch("w", session, pid=0, started=0, host="")
            clients.append(
                HeartbeatClient(
                    "run",
                    session,
                    context,
                    server.endpoint,
                    LOOPBACK,
                    interval_s=0.05,
                    lost_after_s=60.0,
                    master=(os.getpid(), start_time(os.getpid()), host),
                    state=lambda: "idle",
                    on_lost=lambda _: None,
                )
            )
        deadline = time.monotonic() + WAIT_S
        while server.load(b"far") is None or "idle" not in server.state(b"near"):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        load = server.load(b"far")
        assert load is not None and 0 < load.busy_s < load.whole_s and 0 < load.memory < 1
        assert server.load(b"near") is None
    finally:
        for client in clients:
            client.close()
        server.close()


class Told:
    """What workers have been sent."""

    def __init__(self) -> None:
        self.roster: dict[str, WorkerInfo] = {}
        self.unlisted: set[str] = set()
        self.sent: dict[str, list[tuple[int, dict[str, Any]]]] = {}
        self.news = RosterNews(self.roster, self.unlisted, self._send)

    def _send(self, name: str, version: int, payload: bytes) -> None:
        self.sent.setdefault(name, []).append((version, unpack_payload([payload])))

    def join(self, name: str, **addresses: Any) -> None:
        """Let a worker take part."""
        self.roster[name] = WorkerInfo(name, "kind", 0, "host", 1, **addresses)
        self.news.changed(self.roster[name])

    def leave(self, name: str) -> None:
        """Let it go."""
        self.news.changed(self.roster.pop(name))

    def knows(self, name: str) -> list[str]:
        """The workers that one knows of, by what it was sent."""
        known: dict[str, Any] = {}
        for _, news in self.sent.get(name, []):
            known = {other: info for other, info in known.items() if other not in news["gone"]}
            known |= {worker["name"]: worker for worker in news["workers"]}
        return sorted(known)


async def pause(told: Told) -> None:
    """Until everybody was told."""
    async with asyncio.timeout(60):
        while told.news._timer is not None:
            await asyncio.sleep(0.001)


async def test_changes_that_come_together_are_told_together() -> None:
    told = Told()
    for name in ("engine", "trainer"):
        told.join(name, data_endpoint="tcp://here")
    for number in range(20):
        told.join(f"player/{number}")
    await pause(told)
    assert [len(sent) for sent in told.sent.values()] == [1] * 22, "one message for each"
    assert len(told.knows("engine")) == 22
    assert told.knows("player/3") == ["engine", "trainer"], "players do not hear of each other"
    told.leave("player/3")
    await pause(told)
    assert len(told.sent["player/4"]) == 1, "for them nothing has changed"
    assert "player/3" not in told.knows("engine")
    told.leave("trainer")
    await pause(told)
    assert told.knows("player/4") == ["engine"]


async def test_what_is_called_next_is_told_at_once_and_once() -> None:
    told = Told()
    told.join("engine", endpoints={"generation": "tcp://here"})
    told.join("player")
    told.news.tell("player")
    assert told.knows("player") == ["engine"]
    await pause(told)
    assert len(told.sent["player"]) == 1
    told.unlisted.add("engine")
    told.news.changed(told.roster["engine"])
    told.news.tell("player")
    assert told.sent["player"][-1][1]["workers"][0]["endpoints"] == {}, "its services are not shown any more"
    told.news.close()


async def test_a_successor_is_told_everything() -> None:
    told = Told()
    told.join("engine", data_endpoint="tcp://here")
    told.join("player")
    await pause(told)
    told.leave("player")
    told.sent.pop("player")
    told.join("player")
    await pause(told)
    assert told.knows("player") == ["engine"]
