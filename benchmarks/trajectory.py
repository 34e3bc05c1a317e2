"""The trajectory server beside the original Atropos server (atroposlib 0.4.0), in one run on the
same cores.

    make bench-trajectory                                everything, about five minutes on two cores
    make bench-trajectory ARGS='--quick'                 one repeat, shorter queues for the original: ninety seconds
    python benchmarks/trajectory.py --json F --figure F.png

The original runs in the side environment ``.venv-atropos`` under uvicorn with uvloop and httptools.
The servers take turns within every repeat; one cheap client drives all of them, on the same cores.
A ratio is taken within a repeat, and the table shows its median and its range. ``sqlite`` is ours
with its embedded store, every push answered after its commit; ``memory`` is like for like. The
original's queue of 50,000 groups costs a minute, so it is measured once.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import importlib.metadata
import json
import os
import platform
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
from harness.trajectory_load import (
    Http,
    Prober,
    Pushed,
    bodies_of,
    drain,
    group_prefix,
    push,
    quantile,
    set_up,
    with_id,
)
from harness.trajectory_servers import PEER_PYTHON, Server, peer_versions, running
from harness.trajectory_table import KINDS, WAIT, Table, draw, goals

GROUP = 8
TOKENS = 1024
BATCH = 64
ENVS = 4
CLIENTS = 8
LIST = 8
DEPTH = 50_000
MANY_ENVS = 64
PROBED = ("/status", "/status-env")
PROBE_EVERY_S = 0.05
"""Interval of probes while throughput is measured. Without it, a server that answers faster would
get more probes and so more work."""
MSGPACK = {"Content_Type": "application/msgpack"}
CASES = (
    ("plain", "/scored_data", 1, False),
    ("list of 8", "/scored_data_list", LIST, False),
    ("gzip", "/scored_data", 1, True),
    ("list of 8, gzip", "/scored_data_list", LIST, True),
)
NO_PEER = (
    f"the original is not installed: `make bench-trajectory` makes {PEER_PYTHON.parent.parent.name}"
)


async def throughput(server: Server, table: Table, groups: int) -> None:
    """Measure four ways to push and two ways to pull groups of 8 x 1024 tokens, while a prober
    measures latency."""
    rng = random.Random(0)
    prefixes = [group_prefix(rng, GROUP, TOKENS, env) for env in range(ENVS) for _ in range(2)]
    for number, (way, path, per, zipped) in enumerate(CASES):
        await set_up(server.port, envs=ENVS, batch_size=BATCH, group_size=GROUP, tokens=TOKENS)
        bodies = bodies_of([with_id(prefixes[i % len(prefixes)], i) for i in range(groups)], per)
        headers = {}
        if zipped:
            few = [gzip.compress(body, 6) for body in bodies[: len(prefixes)]]
            bodies = [few[i % len(few)] for i in range(len(bodies))]
            headers = {"Content_Encoding": "gzip"}
        before = server.memory_mb
        cpu = server.cpu_s
        prober = Prober(server.port, PROBED, PROBE_EVERY_S)
        pushed = await push(server.port, path, bodies, CLIENTS, **headers)
        _note_push(server, table, way, groups, pushed, prober.stop(), server.cpu_s - cpu)
        if number == 0:
            size = sum(map(len, bodies)) / 2**20
            table.add(
                "memory of a queued group / its wire size",
                server.kind,
                (server.memory_mb - before) / size,
            )
        if number < 2:
            await _pull(server, table, ("gzip", "identity")[number], groups)


def _note_push(
    server: Server,
    table: Table,
    way: str,
    groups: int,
    pushed: Pushed,
    waits: dict[str, list[float]],
    cpu_s: float,
) -> None:
    kind = server.kind
    table.add(f"push {way}: sequences/s", kind, groups * GROUP / pushed.seconds)
    table.add(f"push {way}: p50, ms", kind, quantile(pushed.latencies, 0.5) * 1e3)
    table.add(f"push {way}: p99, ms", kind, quantile(pushed.latencies, 0.99) * 1e3)
    table.add(f"push {way}: server CPU, ms/group", kind, cpu_s / groups * 1e3)
    table.add("status p99 while pushing, ms", kind, quantile(waits["/status"], 0.99) * 1e3)
    table.add("status-env p99 while pushing, ms", kind, quantile(waits["/status-env"], 0.99) * 1e3)
    table.add("answers 503", kind, pushed.refused)


async def _pull(server: Server, table: Table, coding: str, groups: int) -> None:
    cpu = server.cpu_s
    pulled = await drain(server.port, Accept_Encoding=coding)
    cpu = server.cpu_s - cpu
    kind = server.kind
    batches = len(pulled.latencies)
    assert sorted(pulled.ids.values()) == [1] * groups, "each group exactly once"
    table.add(f"pull {coding}: sequences/s", kind, groups * GROUP / pulled.seconds)
    table.add(f"pull {coding}: p50 of a batch, ms", kind, quantile(pulled.latencies, 0.5) * 1e3)
    table.add(f"pull {coding}: p99 of a batch, ms", kind, quantile(pulled.latencies, 0.99) * 1e3)
    table.add(f"pull {coding}: server CPU, ms/batch", kind, cpu / batches * 1e3)
    table.add(f"pull {coding}: MB/batch", kind, pulled.wire_bytes / batches / 1e6)


async def long_queue(
    server: Server, table: Table, depth: int, minimum: float | None, pulls: int
) -> None:
    """Measure the first batch from a queue of many small groups, and the longest wait of any
    request while pushes and pulls continue."""
    rng = random.Random(1)
    name = f"{depth} queued" + ("" if minimum is None else ", minimums")
    kind = server.kind
    envs = ENVS if minimum is not None else MANY_ENVS
    await set_up(
        server.port, envs=envs, batch_size=BATCH, group_size=GROUP, tokens=8, minimum=minimum
    )
    prefixes = [group_prefix(rng, GROUP, 8, env) for env in range(envs)]
    bodies = bodies_of([with_id(prefixes[i % envs], i) for i in range(depth)], 250)
    before = server.memory_mb
    await push(server.port, "/scored_data_list", bodies, 4)
    table.add(f"{name}: memory, MB more than empty", kind, server.memory_mb - before)
    del bodies
    if minimum is None:
        quiet = Prober(server.port, ["/status-env"])
        await asyncio.sleep(2)
        calm = quantile(quiet.stop()["/status-env"], 0.99)
        table.add(f"{name}: status-env p99, 64 environments, ms", kind, calm * 1e3)
    prober = Prober(server.port, PROBED)
    await asyncio.sleep(0.3)
    more = [with_id(prefixes[0], depth + i) for i in range(2 * pulls)]
    pushing = asyncio.create_task(push(server.port, "/scored_data", more, 1))
    pulled = await _batches(server.port, pulls)
    pushed = await pushing
    waits = prober.stop()
    table.add(f"{name}: first batch, ms", kind, pulled[0] * 1e3)
    table.add(f"{name}: p99 of {pulls} more, ms", kind, quantile(pulled[1:], 0.99) * 1e3)
    every = (*pulled, *pushed.latencies, *waits["/status"], *waits["/status-env"])
    table.add(f"{name}: {WAIT}", kind, max(every) * 1e3)
    table.add(f"{name}: the prober's own delay, ms", kind, max(waits["clock"]) * 1e3)


async def _batches(port: int, count: int) -> list[float]:
    """Pull ``count + 1`` batches and return the seconds that each took."""
    http = Http(port)
    found = []
    for _ in range(count + 1):
        asked = time.perf_counter()
        answer = await http.request("GET", "/batch", Accept_Encoding="identity")
        found.append(time.perf_counter() - asked)
        assert len(answer.body) > 64, answer
    http.close()
    return found


def restart(server: Server, table: Table, depth: int) -> None:
    """Kill the server and measure how long a restart with its queue takes."""
    server.kill()
    began = time.perf_counter()
    server.start()
    table.add(f"{depth} queued: restart after kill -9, s", server.kind, time.perf_counter() - began)
    queued = httpx.get(f"http://127.0.0.1:{server.port}/status").json()["queue_size"]
    assert queued > depth * 0.9, f"only {queued} groups came back"


async def binary(server: Server, table: Table, groups: int) -> None:
    """Measure pushes and pulls in MessagePack, with lists of 32 groups of sequences of 512 tokens:
    int32 tokens and masks, float32 log-probabilities."""
    rng = np.random.default_rng(0)
    await set_up(server.port, envs=1, batch_size=256, group_size=GROUP, tokens=512)

    def tensor(dtype: str) -> dict[str, Any]:
        values = (
            rng.integers(0, 150_000, GROUP * 512).astype(dtype)
            if dtype == "<i4"
            else -rng.random(GROUP * 512)
        )
        return {
            "__t__": 1,
            "dtype": dtype[1:],
            "lens": np.full(GROUP, 512, "<u4").tobytes(),
            "data": values.astype(dtype).tobytes(),
        }

    one = msgspec.msgpack.encode(
        {
            "tokens": tensor("<i4"),
            "masks": tensor("<i4"),
            "scores": [1.0] * GROUP,
            "inference_logprobs": tensor("<f4"),
            "env_id": 0,
        }
    )
    body = b"\xdc" + (32).to_bytes(2, "big") + one * 32
    pushed = await push(server.port, "/scored_data_list", [body] * (groups // 32), 4, **MSGPACK)
    table.add("binary push: trajectories/s", server.kind, groups * GROUP / pushed.seconds)
    pulled = await drain(server.port, Accept="application/msgpack", Accept_Encoding="identity")
    assert len(pulled.latencies) == groups * GROUP // 256
    table.add("binary pull: trajectories/s", server.kind, groups * GROUP / pulled.seconds)


async def measure(arguments: argparse.Namespace) -> Table:
    """Measure every server in every repeat, in turn."""
    table = Table()
    for repeat in range(1, arguments.repeats + 1):
        for kind in KINDS:
            with running(kind) as server:
                say(f"repeat {repeat} of {arguments.repeats}: throughput, {kind}")
                await throughput(server, table, arguments.groups)
                if kind != "original":
                    await binary(server, table, 1920)
        for kind in KINDS[1:]:
            for minimum in (None, 0.1):
                with running(kind) as server:
                    say(f"repeat {repeat}: {DEPTH} queued, minimum {minimum}, {kind}")
                    await long_queue(server, table, DEPTH, minimum, 200)
                    if kind == "sqlite" and minimum is None:
                        restart(server, table, DEPTH)
    for depth, minimum in ((arguments.peer_depth, None), (arguments.peer_minimum_depth, 0.1)):
        with running("original") as server:
            say(f"{depth} queued, minimum {minimum}, original (once)")
            await long_queue(server, table, depth, minimum, 20)
    return table


def say(text: str) -> None:
    """Print progress."""
    print(f"... {text}", file=sys.stderr, flush=True)


def machine(cores: Sequence[int], load: float, repeats: int) -> str:
    """Return text about the machine and the software versions."""
    ours = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("fastapi", "msgspec", "uvicorn")
    )
    return (
        f"{platform.machine()}, {len(cores)} of {os.cpu_count()} cores for everything, load before "
        f"{load:.2f}, "
        f"after {os.getloadavg()[0]:.2f}, {repeats} repeats\n"
        f"Python {platform.python_version()}; ours: {ours}; the original: {peer_versions()}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print the table and the goals. Return the exit code. Missed goals do
    not affect it, because they depend on the machine."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--groups", type=int, default=400, help="groups of 8 x 1024 tokens in each throughput case"
    )
    parser.add_argument(
        "--peer-depth", type=int, default=DEPTH, help="queued groups for the original"
    )
    parser.add_argument(
        "--peer-minimum-depth", type=int, default=5000, help="the same with minimum allocations"
    )
    parser.add_argument(
        "--quick", action="store_true", help="one repeat, shorter queues for the original"
    )
    parser.add_argument(
        "--cores", type=int, default=2, help="so many of the cores are used, by servers and clients"
    )
    parser.add_argument("--json", type=Path, help="write every measurement here")
    parser.add_argument("--figure", type=Path, help="draw throughput and waits here")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.repeats = 1
        arguments.peer_depth = 10_000
        arguments.peer_minimum_depth = 1000
    if not PEER_PYTHON.exists():
        print(NO_PEER, file=sys.stderr)
        return 2
    cores = sorted(os.sched_getaffinity(0))[: arguments.cores]
    os.sched_setaffinity(0, cores)
    load = os.getloadavg()[0]
    table = asyncio.run(measure(arguments))
    found, missed = table.verdicts(goals(DEPTH))
    about = machine(cores, load, arguments.repeats)
    print(
        "\n".join(
            [
                about,
                "",
                *table.lines(),
                "",
                *found,
                f"{len(found) - missed} of {len(found)} goals reached",
            ]
        )
    )
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": about, "values": table.values}, indent=1))
    if arguments.figure:
        draw(table, arguments.figure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
