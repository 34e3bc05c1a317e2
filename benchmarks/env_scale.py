"""Many concurrent sessions on one server: memory, resets, and whether anybody starves.

Every session is a WebSocket client with its own task; all step at the same time, as fast as they
are answered. Printed by number of sessions: start of the server, memory of its whole process tree
(PSS), reset and step times, and the share of steps of the slowest session. Verdicts: 64 sessions in
at most 6 GB, p99 of a step below 20 times its p50, a reset at most 20 ms (p50, measured with one
session at a time).

    python benchmarks/env_scale.py [--sessions 1 8 64] [--rounds 20] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from harness.process_tree import footprint
from rich.console import Console
from rich.table import Table
from websockets.asyncio.client import ClientConnection, connect

from realhf.aws.server.program import EnvServerProcess

MAX_GB = 6.0
MAX_SPREAD = 20.0
MAX_RESET_MS = 20.0
_CONNECT_S = 60.0
_SCRIPT = (
    "aws s3api list-buckets",
    "aws sqs create-queue --queue-name q",
    "aws sqs list-queues",
    "aws dynamodb list-tables",
    "aws iam list-roles",
    "aws sns create-topic --name t",
)


async def _ask(connection: ClientConnection, kind: str, data: dict[str, Any]) -> float:
    """Send a message and return the milliseconds until the answer."""
    began = time.perf_counter()
    await connection.send(json.dumps({"type": kind, "data": data}))
    reply = json.loads(await connection.recv())
    assert reply["type"] == "observation", reply
    return 1000 * (time.perf_counter() - began)


async def _session(
    connection: ClientConnection, number: int, rounds: int
) -> tuple[list[float], list[float], float]:
    """Play ``rounds`` episodes on one session. Return (reset times in ms, step times in ms, time of
    the end)."""
    resets = []
    steps = []
    for turn in range(rounds):
        resets.append(await _ask(connection, "reset", {"task_id": 1, "seed": number * 1000 + turn}))
        for command in _SCRIPT:
            steps.append(await _ask(connection, "step", {"command": command}))
    return resets, steps, time.perf_counter()


async def _measure(url: str, pid: int, sessions: int, rounds: int) -> dict[str, Any]:
    connections = [await connect(url, open_timeout=_CONNECT_S) for _ in range(sessions)]
    try:
        for number, connection in enumerate(connections):
            await _session(connection, number, 1)
        alone = [await _ask(connections[0], "reset", {"task_id": 1, "seed": n}) for n in range(30)]
        began = time.perf_counter()
        played = await asyncio.gather(*(_session(c, n, rounds) for n, c in enumerate(connections)))
        seconds = time.perf_counter() - began
        held = footprint(pid)
    finally:
        for connection in connections:
            await connection.close()
    steps = np.concatenate([row[1] for row in played])
    resets = np.concatenate([row[0] for row in played])
    ends = [row[2] - began for row in played]
    return {
        "pss_mb": held.pss_mb,
        "files": held.files,
        "processes": held.processes,
        "reset_alone_p50_ms": float(np.median(alone)),
        "reset_p50_ms": float(np.median(resets)),
        "step_p50_ms": float(np.median(steps)),
        "step_p99_ms": float(np.percentile(steps, 99)),
        "step_max_ms": float(steps.max()),
        "spread": float(np.percentile(steps, 99) / np.median(steps)),
        "steps_per_s": len(steps) / seconds,
        "first_done_share": min(ends) / max(ends),
    }


def measure(sessions: int, rounds: int) -> dict[str, Any]:
    """Start a server with this number of sessions, play on all of them and return the
    measurements."""
    began = time.perf_counter()
    with EnvServerProcess(sessions, timeout_s=180.0) as server:
        start_s = time.perf_counter() - began
        url = server.url.replace("http", "ws", 1) + "/ws"
        figures = asyncio.run(_measure(url, server.process.pid, sessions, rounds))
    return {"sessions": sessions, "start_s": start_s, **figures}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark. Return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--rounds", type=int, default=20, help="episodes of each session")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    rows = [measure(sessions, arguments.rounds) for sessions in arguments.sessions]
    table = Table(title=f"environment server on {os.cpu_count()} CPUs")
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(
            *(f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values())
        )
    console = Console(width=170)
    console.print(table)
    verdicts = {
        f"memory at most {MAX_GB:g} GB": rows[-1]["pss_mb"] <= MAX_GB * 1024,
        f"p99 below {MAX_SPREAD:g} x p50": all(row["spread"] < MAX_SPREAD for row in rows),
        f"reset at most {MAX_RESET_MS:g} ms": all(
            row["reset_alone_p50_ms"] <= MAX_RESET_MS for row in rows
        ),
    }
    for verdict, reached in verdicts.items():
        console.print(f"{verdict}: {'reached' if reached else '[red]missed'}")
    if arguments.json:
        host = {
            "cpus": os.cpu_count(),
            "machine": platform.machine(),
            "python": platform.python_version(),
        }
        arguments.json.write_text(
            json.dumps({"host": host, "rows": rows, "verdicts": verdicts}, indent=1) + "\n"
        )
    return 0 if all(verdicts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
