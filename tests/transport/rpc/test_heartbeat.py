"""Both ends of the heartbeat after they stood still themselves: they count no silence for the time.
Every worker is told what it has yet to know of the others, and those that serve nobody hear
less."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from realhf.base.process import host_token, start_time
from realhf.transport.envelope import unpack_payload
from realhf.transport.heartbeat import HeartbeatClient, HeartbeatServer
from realhf.transport.network import LOOPBACK
from realhf.transport.roster import RosterAnnouncer, WorkerInfo

SILENCE_S = 1.5
WAIT_S = 60.0


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(0)


LISTENS = """
import sys, threading, zmq
from realhf.base.process import host_token
from realhf.transport.heartbeat import HeartbeatClient, HeartbeatServer
from realhf.transport.network import LOOPBACK

lost = threading.Event()
context = zmq.Context()
if sys.argv[1] == "master":
    server = HeartbeatServer("run", context, LOOPBACK, interval_s=0.2, dead_after_s=3.0, on_death=lambda *_: lost.set())
    server.watch("w", b"session", pid=0, started=0, host="")
else:
    silent = context.socket(zmq.ROUTER)
    endpoint = f"tcp://127.0.0.1:{silent.bind_to_random_port('tcp://127.0.0.1')}"
    HeartbeatClient("run", b"session", context, endpoint, LOOPBACK, interval_s=0.2, lost_after_s=3.0,
                    master=(0, 0, ""), state=lambda: "idle", on_lost=lambda reason: lost.set())
print("listens", flush=True)
lost.wait(60.0)
print("lost" if lost.is_set() else "still there", flush=True)
"""
"""A side of the heartbeats whose other side says nothing, ever; it counts as lost after 3 s."""


@pytest.mark.nightly
@pytest.mark.parametrize("side", ["master", "worker"])
def test_who_stood_still_gives_the_others_their_time(side: str):
    """They were taken for dead as soon as it went on, before it could read what they had said
    meanwhile."""
    with subprocess.Popen(
        [sys.executable, "-c", LISTENS, side], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "listens\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(6.0)
        went_on = time.monotonic()
        process.send_signal(signal.SIGCONT)
        assert process.stdout.readline() == "lost\n"
        assert time.monotonic() - went_on > 1.0, "silence goes on from where it was"


def test_a_worker_of_another_host_says_how_busy_it_is(context: zmq.Context[zmq.Socket[bytes]]):
    """The load of its host comes with its signs of life; one beside the master says none, and
    nonsense is none."""
    server = HeartbeatServer(
        "run", context, LOOPBACK, interval_s=0.05, dead_after_s=60.0, on_death=lambda *_: None
    )
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
        self.announcer = RosterAnnouncer(self.roster, self.unlisted, self._send)

    def _send(self, name: str, version: int, payload: bytes) -> None:
        self.sent.setdefault(name, []).append((version, unpack_payload([payload])))

    def join(self, name: str, **addresses: Any) -> None:
        """Let a worker take part."""
        self.roster[name] = WorkerInfo(name, "kind", 0, "host", 1, **addresses)
        self.announcer.announce_later(self.roster[name])

    def leave(self, name: str) -> None:
        """Let it go."""
        self.announcer.announce_later(self.roster.pop(name))

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
        while told.announcer._timer is not None:
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
    told.announcer.announce("player")
    assert told.knows("player") == ["engine"]
    await pause(told)
    assert len(told.sent["player"]) == 1
    told.unlisted.add("engine")
    told.announcer.announce_later(told.roster["engine"])
    told.announcer.announce("player")
    assert told.sent["player"][-1][1]["workers"][0]["endpoints"] == {}, (
        "its services are not shown any more"
    )
    told.announcer.close()


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
