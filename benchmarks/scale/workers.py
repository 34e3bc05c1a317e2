"""Simulated rollout workers of ``python -m benchmarks.scale``: many in one process, each of which
says to the master what a true one says. Nothing is played: a sample is finished as soon as enough
others are in flight.

    python -m benchmarks.scale.workers --part N --run-id ID --master URL --first N --workers N --in-flight N --slots N
        --lines N --rpc-lines N

``--lines``: connections to the master's admission; ``--rpc-lines``: pairs of connections to its
RPC, and connections for heartbeats. Workers share them where there are fewer than workers. Standard
input takes ``ask``, ``finish`` and ``drop N``.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgpack

from benchmarks.scale.wire import Lines, Wires
from realhf.api.calls import ALLOCATE, PLAY, AllocateRequest
from realhf.rollout.rollout_loop import HOLD_S
from realhf.transport.envelope import pack_header, pack_payload, unpack_header, unpack_payload
from realhf.transport.roster import WorkerInfo
from realhf.transport.sockets import collect_versions

BURST = 256
"""Number of samples that are finished at once."""
UNACKED = 2048
"""Maximum number of samples of one process that the trainer has not acknowledged yet."""
ENOUGH = 0.97
"""Fraction of the intended samples in flight above which samples are finished."""
STALL_S = 0.25
"""Seconds without a finished sample after which samples are finished even if too few are in flight,
because the trainer may be waiting for them."""


class Held(NamedTuple):
    """A sample in flight."""

    worker: int
    id: str
    attempt: int
    order: int
    version: int


@dataclass(slots=True)
class Simulated:
    """State of one simulated rollout worker."""

    name: str
    session: bytes = field(default_factory=lambda: os.urandom(16))
    free: int = 0
    asking: bool = False
    alive: bool = True
    playing: bool = False


class Part:
    """The simulated workers of this process. They are numbered from 0 here, and from ``first`` on
    in the run."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._run = args.run_id
        self._rng = random.Random(args.part)
        self._wires = Wires(max_sockets=args.lines + 3 * args.rpc_lines + 16)
        names = [f"rollout_worker/{args.first + n}" for n in range(args.workers)]
        self._workers = [Simulated(name, free=args.slots) for name in names]
        self._by_session = {worker.session: n for n, worker in enumerate(self._workers)}
        self._ordered = Lines(self._wires, args.master, args.rpc_lines, self._on_rpc)
        self._control = Lines(self._wires, args.master, args.rpc_lines, self._on_rpc)
        self._beats: Lines | None = None
        self._service: Lines | None = None
        self._stream: Lines | None = None
        self._interval = 2.0
        self._beaten = 0
        self._beat_at = 0.0
        self._held: list[Held] = []
        self._unacked = 0
        self._asks = self._finishes = self._over = False
        self._finished_at = 0.0
        self._asked: dict[int, int] = {}
        self._number = 0
        os.set_blocking(0, False)
        self._wires.watch(0, self._command)

    def run(self) -> None:
        """Simulate the workers until standard input ends."""
        node = os.uname().nodename
        versions = collect_versions()
        for n, worker in enumerate(self._workers):
            hello = pack_header(
                "hello", self._run, worker.session, versions=versions, node=node, lane="ordered"
            )
            self._ordered.send(n, [hello])
        while not self._over:
            self._wires.turn(0.02)
            self._beat()
            self._finish()
        self._wires.close()

    def _command(self) -> None:
        words = (os.read(0, 4096) or b"end\n").decode().split("\n")
        for word in filter(None, words):
            if word == "ask":
                self._asks = True
                for n in range(len(self._workers)):
                    self._ask(n)
            elif word.startswith("drop"):
                self._drop(int(word.split()[1]))
            self._finishes = self._finishes or word == "finish"
            self._over = self._over or word == "end"

    # ---- RPC

    def _on_rpc(self, line: int, frames: list[bytes]) -> None:
        header = unpack_header(frames[0])
        n = self._by_session.get(header["session"])
        if n is None or not self._workers[n].alive:
            return
        kind = header["kind"]
        if kind == "refused":
            raise RuntimeError(
                f"the master refused {self._workers[n].name}: {header.get('reason')}"
            )
        if kind == "hello_ack" and "heartbeat" not in header:
            self._introduce(n)
        elif kind == "hello_ack":
            self._interval = float(header["heartbeat_s"])
            if self._beats is None:
                self._beats = Lines(
                    self._wires,
                    header["heartbeat"],
                    self._args.rpc_lines,
                    lambda line, frames: None,
                )
        elif kind == "request" and header["handler"] == PLAY.name:
            self._play(n, PLAY.unpack(unpack_payload(frames[1:])))
            answer = pack_header("reply", self._run, header["session"], id=header["id"])
            self._ordered.send(n, [answer, pack_payload({})])

    def _introduce(self, n: int) -> None:
        worker = self._workers[n]
        info = WorkerInfo(
            worker.name, "rollout_worker", self._args.first + n, "elsewhere", os.getpid()
        )
        hello = pack_header(
            "hello",
            self._run,
            worker.session,
            versions=collect_versions(),
            node="elsewhere",
            lane="control",
            info=info.to_map(),
            started=0,
            host="",
            lanes={PLAY.name: "ordered"},
        )
        self._control.send(n, [hello])

    def _beat(self) -> None:
        """Send the heartbeats that are due."""
        if self._beats is None:
            return
        now = time.monotonic()
        if self._beat_at == 0.0 or now - self._beat_at > 2 * self._interval:
            self._beat_at = now - 0.02
        due = int((now - self._beat_at) / self._interval * len(self._workers))
        for _ in range(min(due, len(self._workers))):
            n = self._beaten = (self._beaten + 1) % len(self._workers)
            if self._workers[n].alive:
                ping = pack_header("ping", self._run, self._workers[n].session, state="idle")
                self._beats.send(n, [ping])
        self._beat_at += due * self._interval / len(self._workers)

    # ---- samples

    def _play(self, n: int, request: Any) -> None:
        if self._service is None:
            self._service = Lines(self._wires, request.control, self._args.lines, self._on_service)
            self._stream = Lines(self._wires, request.streams[0], 1, self._on_acked)
        self._workers[n].playing = True
        if self._asks:
            self._ask(n)

    def _ask(self, n: int) -> None:
        worker = self._workers[n]
        if (
            not worker.alive
            or not worker.playing
            or worker.asking
            or worker.free < 1
            or self._service is None
        ):
            return
        worker.asking = True
        self._number += 1
        self._asked[self._number] = n
        client = f"{worker.name}:{os.getpid()}"
        header = pack_header(
            "request", self._run, b"", id=self._number, method=ALLOCATE.name, client=client
        )
        self._service.send(
            n, [header, pack_payload(ALLOCATE.pack(AllocateRequest(worker.free, HOLD_S)))]
        )

    def _on_service(self, line: int, frames: list[bytes]) -> None:
        header = unpack_header(frames[0])
        n = self._asked.pop(header["id"])
        worker = self._workers[n]
        if header["kind"] != "reply":
            raise RuntimeError(f"the master answered {unpack_payload(frames[1:])}")
        worker.asking = False
        if not worker.alive:
            return
        leases = ALLOCATE.unpack_answer(unpack_payload(frames[1:]), "the master").leases
        worker.free -= len(leases or ())
        self._held += [
            Held(n, lease.id, lease.attempt, lease.order, lease.version) for lease in leases or ()
        ]
        if leases is None or leases:
            self._ask(n)

    def _finish(self) -> None:
        """Finish some samples, chosen at random from the older half, if enough samples are in
        flight."""
        now = time.monotonic()
        enough = len(self._held) + self._unacked >= ENOUGH * self._args.in_flight
        stalled = now - self._finished_at > STALL_S
        if (
            not self._finishes
            or not self._held
            or self._unacked >= UNACKED
            or not (enough or stalled)
        ):
            return
        self._finished_at = now
        older = range(max(1, len(self._held) // 2))
        burst = BURST if enough else max(1, len(self._held) // 50)
        chosen = set(self._rng.sample(older, min(burst, len(older))))
        done = [self._held[i] for i in chosen]
        self._held = [held for i, held in enumerate(self._held) if i not in chosen]
        self._unacked += len(done)
        assert self._stream is not None
        self._stream.send(0, [msgpack.packb([held[1:] for held in done])])
        for held in done:
            self._workers[held.worker].free += 1
            self._ask(held.worker)

    def _on_acked(self, line: int, frames: list[bytes]) -> None:
        self._unacked -= msgpack.unpackb(frames[0])

    def _drop(self, count: int) -> None:
        """Let the last ``count`` workers vanish, as if their hosts lost power."""
        gone = range(len(self._workers) - count, len(self._workers))
        for n in gone:
            self._workers[n].alive = False
            for lines in (self._ordered, self._control, self._beats, self._service):
                if lines is not None and len(lines) == len(self._workers):
                    lines.cut(n)
        self._held = [held for held in self._held if self._workers[held.worker].alive]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program. Return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("run-id", "master"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("part", "first", "workers", "in-flight", "slots", "lines", "rpc-lines"):
        parser.add_argument(f"--{name}", type=int, required=True)
    part = Part(parser.parse_args(argv))
    gc.freeze()
    part.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
