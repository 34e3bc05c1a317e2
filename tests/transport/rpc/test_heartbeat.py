"""Both ends of the heartbeat after they stood still themselves: they count no silence for the time."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Iterator

import pytest
import zmq

from realhf.base.process import host_token, start_time
from realhf.transport.heartbeat import LATE_S, HeartbeatClient, HeartbeatServer, PauseDetector
from realhf.transport.network import LOOPBACK

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
