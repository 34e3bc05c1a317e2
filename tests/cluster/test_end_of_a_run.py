"""The end of a run, with hosts that do not do their part: it comes soon, and agents hear of it."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from realhf.base import process_clock
from realhf.cluster import control_endpoint
from realhf.cluster import scheduler as scheduler_module
from realhf.cluster.control_endpoint import ControlEndpoint, HostLost
from realhf.cluster.messages import EndWorker, Welcome
from realhf.cluster.options import ClusterOptions
from realhf.cluster.scheduler import ClusterScheduler
from tests.cluster.key_ring import KeyRing
from tests.cluster.strange_agent import ANSWER_S, OpenEndpoint, StrangeAgent

SOON_S = 30.0
"""Five seconds for hosts to say that they have heard, half of one for what is under way, and a busy
machine."""
FLOOD = """
import sys
from pathlib import Path
from realhf.cluster.messages import pack_message
from realhf.cluster.cluster_keys import HostKeys
from tests.cluster.strange_agent import StrangeAgent
agent = StrangeAgent(sys.argv[1], HostKeys.read(Path(sys.argv[2])).key_of("flood"), "flood")
agent.join()
frames = pack_message("ping", agent.session)
agent.socket.sndhwm = 100_000
print("begins", flush=True)
while True:
    agent.socket.send_multipart(frames)
"""


def closes(opened: OpenEndpoint) -> float:
    """Close the endpoint; how long it took. The port is free afterwards."""
    began = time.monotonic()
    opened.control.close()
    took = time.monotonic() - began
    with socket.create_server(("127.0.0.1", int(opened.control.endpoint.rpartition(":")[2]))):
        return took


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[OpenEndpoint]:
    with OpenEndpoint(tmp_path, dead_after_s=7.0) as made:
        yield made


def heard(agent: StrangeAgent, kind: str) -> bool:
    """Whether an agent hears this within a while."""
    end = time.monotonic() + ANSWER_S
    while time.monotonic() < end:
        if agent.next()[0] == kind:
            return True
    return False


def test_hosts_that_say_that_they_have_heard_are_not_waited_for(
    opened: OpenEndpoint, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(control_endpoint, "FAREWELL_TIMEOUT_S", 3 * ANSWER_S)
    agents = [opened.agent(name).join() for name in ("a", "b")]

    def part(agent: StrangeAgent) -> None:
        assert heard(agent, "over")
        agent.say("leave")

    threads = [threading.Thread(target=part, args=(agent,), daemon=True) for agent in agents]
    for thread in threads:
        thread.start()
    assert closes(opened) < ANSWER_S


@pytest.mark.nightly
def test_a_host_that_never_answers_delays_the_end_by_some_seconds(opened: OpenEndpoint):
    agent = opened.agent("a").join()
    assert closes(opened) < SOON_S
    assert heard(agent, "over")


def slowed(door: ControlEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the endpoint take a millisecond for each message."""
    listener = door._listener  # pyright: ignore[reportPrivateUsage]
    taken = listener._take  # pyright: ignore[reportPrivateUsage]

    def slow(*message: Any) -> None:
        time.sleep(0.001)
        taken(*message)

    monkeypatch.setattr(listener, "_take", slow)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_host_that_sends_faster_than_the_door_reads_does_not_hold_it_open(
    opened: OpenEndpoint, monkeypatch: pytest.MonkeyPatch
):
    """The endpoint went on to read, told nobody that the run was over, and kept its port. Here it
    is slow."""
    slowed(opened.control, monkeypatch)
    quiet = opened.agent("a").join()
    words = [
        sys.executable,
        "-c",
        FLOOD,
        opened.control.endpoint,
        str(opened.ring.file_of("flood")),
    ]
    floods = subprocess.Popen(
        words, stdout=subprocess.PIPE, cwd=Path(__file__).resolve().parents[2]
    )
    try:
        assert floods.stdout is not None and floods.stdout.readline() == b"begins\n"
        time.sleep(1.0)  # so that much lies there
        assert closes(opened) < SOON_S
        assert heard(quiet, "over")
    finally:
        floods.kill()
        floods.wait()
        assert floods.stdout is not None
        floods.stdout.close()


@pytest.mark.nightly
def test_a_silent_host_is_found_lost_after_this_process_was_paused(
    opened: OpenEndpoint, monkeypatch: pytest.MonkeyPatch
):
    """Its silence is counted without the pause."""
    opened.agent("a").join()
    pauses = process_clock.CLOCK._pauses  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(pauses, "paused_s", pauses.paused_s + 1.0)
    deadline = time.monotonic() + SOON_S
    lost = False
    while not lost and time.monotonic() < deadline:
        lost = any(isinstance(event, HostLost) for event in opened.control.events())
        time.sleep(0.05)
    assert lost


@pytest.mark.slow
def test_who_comes_when_the_door_closes_is_not_welcomed(opened: OpenEndpoint):
    """It was, and never told that the run was over: it took the launcher for lost nine seconds
    later."""
    agent = opened.agent("late")
    door = opened.control
    with door._lock:  # pyright: ignore[reportPrivateUsage]
        agent.hello()
        # the endpoint has its hello, and waits for the lock as it would for a launcher that closes
        # it
        time.sleep(0.2)
        door._closing = True  # pyright: ignore[reportPrivateUsage]
    door._listener.close()  # pyright: ignore[reportPrivateUsage]
    while (found := agent.heard()) is not None:
        assert not isinstance(found[1], Welcome)
    assert not door.events()


@pytest.mark.nightly
def test_who_comes_while_the_workers_of_a_run_end_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Nothing runs there; it was waited for until the time of all was over."""
    monkeypatch.setattr(scheduler_module, "STOP_LATE_S", 3 * ANSWER_S)
    keys = KeyRing(tmp_path / "key")
    options = ClusterOptions(
        address="127.0.0.1", port=0, key_file=str(tmp_path / "key"), dead_after_s=40.0
    )
    scheduler = ClusterScheduler(options, say=lambda text: None)
    endpoint = scheduler._open_endpoint().endpoint  # pyright: ignore[reportPrivateUsage]
    first = StrangeAgent(endpoint, keys, "a").join()
    second = StrangeAgent(endpoint, keys, "b")
    while "a" not in scheduler._table.hosts:  # pyright: ignore[reportPrivateUsage]
        scheduler.wait(0.05)

    def ends_late() -> None:
        first.hears(EndWorker)
        second.join()
        first.say("ended")

    thread = threading.Thread(target=ends_late, daemon=True)
    thread.start()
    began = time.monotonic()
    scheduler.stop(0.1)
    assert time.monotonic() - began < ANSWER_S
    thread.join(ANSWER_S)
    first.close()
    second.close()
