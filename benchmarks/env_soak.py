"""Episodes in a row over the real server, with processes killed now and then: does anything grow,
is any answer wrong?

Eight clients play the canonical solutions of tasks over WebSockets and reconnect every few
episodes. Every ``--kill-every`` episodes one of these is killed in turn: a client in the middle of
a step, a CLI worker, a simulator. Memory (PSS), descriptors and processes of the server's whole
process tree are sampled; a line is laid through each series after the warm-up, and what it gained
must stay below a tolerance.

    python benchmarks/env_soak.py [--episodes 10000] [--slots 8] [--kill-every 50] [--json FILE] [--plot FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from harness.process_tree import Footprint, footprint, named
from rich.console import Console
from rich.table import Table
from websockets.exceptions import InvalidStatus, WebSocketException
from websockets.sync.client import ClientConnection, connect

from realhf.aws.server.program import EnvServerProcess
from realhf.aws.tasks.loader import instantiate, load_templates

EPISODES_PER_CONNECTION = 10
WARM_UP = 0.3
TOLERANCE = {"pss_mb": 0.05, "files": 0.02, "processes": 0.02}
"""Acceptable growth over the whole measured part, as a fraction of the median."""
FLOOR = {"pss_mb": 10.0, "files": 8.0, "processes": 2.0}
"""Growth that is always acceptable: a slot that is just being cleaned temporarily lacks a simulator
and a worker."""
_CONNECT_S = 15.0
_MESSAGE_S = 60.0
_KILLS = ("client", "worker", "simulator")


@dataclass
class Tally:
    """Counts of events. ``wrong``: reference solutions that did not solve their task. ``refused``:
    connection attempts answered with 503."""

    episodes: int = 0
    steps: int = 0
    wrong: int = 0
    lost: int = 0
    refused: int = 0
    kills: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_KILLS, 0))
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True)
class Sample:
    """Resources of the server after this number of episodes and seconds."""

    episodes: int
    seconds: float
    footprint: Footprint


class Soak:
    """``episodes`` played on ``slots`` sessions of one server, with occasional kills."""

    def __init__(
        self, server: EnvServerProcess, episodes: int, slots: int, kill_every: int
    ) -> None:
        self.tally = Tally()
        self._url = server.url.replace("http", "ws", 1) + "/ws"
        self._pid = server.process.pid
        self._slots = slots
        self._episodes = episodes
        self._kill_every = kill_every
        self._numbers = iter(range(episodes))
        self._templates = [t.task_id for t in load_templates(tags=["starter"])]

    def run(self, sample_every: int) -> list[Sample]:
        """Play all episodes and return the samples of the server's resources."""
        began = time.monotonic()
        samples = []
        threads = [threading.Thread(target=self._client, daemon=True) for _ in range(self._slots)]
        for thread in threads:
            thread.start()
        due = 0
        while any(thread.is_alive() for thread in threads):
            if due <= self.tally.episodes < self._episodes - self._slots:
                samples.append(
                    Sample(self.tally.episodes, time.monotonic() - began, footprint(self._pid))
                )
                due = self.tally.episodes + sample_every
            time.sleep(0.05)
        return samples

    def _next(self) -> int | None:
        with self.tally.lock:
            return next(self._numbers, None)

    def _client(self) -> None:
        number = self._next()
        while number is not None:
            try:
                with connect(self._url, open_timeout=_CONNECT_S, max_size=None) as socket_:
                    for _ in range(EPISODES_PER_CONNECTION):
                        if number is None:
                            break
                        self._episode(socket_, number)
                        number = self._next()
            except InvalidStatus:  # the slot of a killed client is on its way back
                self.tally.refused += 1
                time.sleep(0.1)
            except (OSError, WebSocketException):
                with self.tally.lock:
                    self.tally.lost += 1
                time.sleep(0.05)
                number = self._next()

    def _episode(self, connection: ClientConnection, number: int) -> None:
        kill = self._kill_every and number % self._kill_every == self._kill_every - 1
        task = instantiate(self._templates[number % len(self._templates)], seed=number)
        reply = _ask(connection, "reset", {"task_id": task.task_id, "seed": number, "chaos": False})
        if kill:
            self._kill(_KILLS[number // self._kill_every % len(_KILLS)], connection)
        achieved = False
        for command in task.solution:
            reply = _ask(connection, "step", {"command": command})
            achieved = (
                reply["type"] == "observation" and reply["data"]["observation"]["task_achieved"]
            )
            self.tally.steps += 1
        with self.tally.lock:
            self.tally.episodes += 1
            # A killed worker or simulator belongs to some session, so one episode at that time may
            # fail.
            self.tally.wrong += not achieved

    def _kill(self, what: str, connection: ClientConnection) -> None:
        self.tally.kills[what] += 1
        if what == "client":
            connection.send(json.dumps({"type": "step", "data": {"command": "aws s3 ls"}}))
            connection.socket.shutdown(socket.SHUT_RDWR)
            raise ConnectionAbortedError("killed on purpose")
        module = (
            "realhf.aws.cli.zygote" if what == "worker" else "realhf.aws.simulator.ministack_server"
        )
        victims = named(self._pid, module)
        if victims:
            os.kill(random.choice(victims), signal.SIGKILL)


def _ask(connection: ClientConnection, kind: str, data: dict[str, Any]) -> dict[str, Any]:
    connection.send(json.dumps({"type": kind, "data": data}))
    return json.loads(connection.recv(timeout=_MESSAGE_S))


def growth(samples: Sequence[Sample]) -> dict[str, dict[str, Any]]:
    """Return for each resource its median, the growth of a fitted line over the measured part, the
    acceptable growth, and whether the growth is acceptable."""
    measured = samples[int(len(samples) * WARM_UP) :]
    result = {}
    for name, tolerance in TOLERANCE.items():
        episodes = np.array([sample.episodes for sample in measured], dtype=float)
        values = np.array([getattr(sample.footprint, name) for sample in measured], dtype=float)
        slope = float(np.polyfit(episodes, values, 1)[0]) if len(values) > 2 else 0.0
        gained = slope * float(np.ptp(episodes))
        median = float(np.median(values))
        allowed = max(FLOOR[name], tolerance * median)
        result[name] = {
            "median": round(median, 1),
            "max": round(float(values.max()), 1),
            "gained": round(gained, 2),
            "per_1000_episodes": round(1000 * slope, 3),
            "allowed": round(allowed, 1),
            "passes": gained <= allowed,
        }
    return result


def plot(samples: Sequence[Sample], path: Path) -> None:
    """Plot memory, descriptors and processes over the episodes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 6), layout="constrained")
    axes = figure.subplots(len(TOLERANCE), 1, sharex=True)
    for axis, (name, label) in zip(
        axes,
        (("pss_mb", "memory, MB (PSS)"), ("files", "open descriptors"), ("processes", "processes")),
        strict=True,
    ):
        axis.plot(
            [s.episodes for s in samples],
            [getattr(s.footprint, name) for s in samples],
            linewidth=1,
        )
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
    axes[-1].set_xlabel("episodes")
    figure.savefig(path, dpi=100)


def report(samples: Sequence[Sample], soak: Soak) -> dict[str, Any]:
    """Return all results, for JSON."""
    tally = soak.tally
    seconds = samples[-1].seconds
    disturbed = tally.kills["worker"] + tally.kills["simulator"]
    figures = growth(samples)
    return {
        "host": {
            "cpus": os.cpu_count(),
            "machine": platform.machine(),
            "python": platform.python_version(),
        },
        "episodes": tally.episodes,
        "steps": tally.steps,
        "seconds": round(seconds, 1),
        "episodes_per_s": round(tally.episodes / max(seconds, 1e-9), 1),
        "kills": tally.kills,
        "lost": tally.lost,
        "refused": tally.refused,
        "not_achieved": tally.wrong,
        "growth": figures,
        "passes": all(figure["passes"] for figure in figures.values())
        and tally.wrong <= disturbed
        and tally.lost <= sum(tally.kills.values()),
    }


def show(result: dict[str, Any]) -> None:
    """Print the tables."""
    table = Table(
        title=f"{result['episodes']} episodes, {result['steps']} steps in {result['seconds']} s "
        f"({result['episodes_per_s']} per second)"
    )
    for column in ("figure", "median", "max", "gained", "per 1000 episodes", "allowed", "verdict"):
        table.add_column(column, justify="left" if column == "figure" else "right")
    for name, row in result["growth"].items():
        table.add_row(
            name,
            str(row["median"]),
            str(row["max"]),
            str(row["gained"]),
            str(row["per_1000_episodes"]),
            str(row["allowed"]),
            "steady" if row["passes"] else "[red]grows",
        )
    console = Console(width=110)
    console.print(table)
    kills = ", ".join(f"{count} {name}s" for name, count in result["kills"].items())
    console.print(
        f"killed: {kills}; connections lost: {result['lost']}, refused: {result['refused']}; "
        f"episodes not achieved: {result['not_achieved']} (each must belong to a kill)"
    )
    console.print(
        "verdict: " + ("nothing grows, no wrong answer" if result["passes"] else "[red]FAILED")
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark. Return the exit status: 1 if a check failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--episodes", type=int, default=10_000)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument(
        "--kill-every", type=int, default=0, help="episodes between two kills (0: none)"
    )
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args(argv)
    with EnvServerProcess(arguments.slots) as server:
        soak = Soak(server, arguments.episodes, arguments.slots, arguments.kill_every)
        samples = soak.run(max(1, arguments.episodes // arguments.samples))
    result = report(samples, soak)
    show(result)
    if arguments.json:
        rows = [[s.episodes, round(s.seconds, 2), *vars(s.footprint).values()] for s in samples]
        arguments.json.write_text(json.dumps({**result, "samples": rows}, indent=1) + "\n")
    if arguments.plot:
        plot(samples, arguments.plot)
    return 0 if result["passes"] else 1


if __name__ == "__main__":
    sys.exit(main())
