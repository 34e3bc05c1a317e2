"""The trajectory server beside the original Atropos server (atroposlib 0.4.0), in one run on the same cores.

    make bench-trajectory                      everything, about six minutes
    python benchmarks/trajectory.py --quick    fewer repeats, the original with shorter queues, about two minutes

The original runs in the side environment ``.venv-atropos`` under uvicorn with uvloop and httptools. Servers take turns
within every repeat; one client drives both. A ratio is taken per repeat, and the table shows the median and the range.
Ours runs with its embedded store (``sqlite``) unless the row says ``memory``.
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
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent))
from trajectory_load import Prober, bodies_of, drain, group_prefix, push, quantile, set_up, with_id

ROOT = Path(__file__).resolve().parent.parent
PEER_PYTHON = ROOT / ".venv-atropos" / "bin" / "python"
NO_PEER = f"the original is not installed: run `make bench-trajectory`, which makes {PEER_PYTHON.parent.parent.name}"
GROUP, TOKENS, BATCH, ENVS, CLIENTS, LIST = 8, 1024, 64, 4, 8, 8
PROBED = ("/status", "/status-env")
MSGPACK = {"Content_Type": "application/msgpack"}


@dataclass
class Table:
    """Measurements by row and server; one value for each repeat."""

    values: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def add(self, row: str, server: str, value: float) -> None:
        self.values.setdefault(row, {}).setdefault(server, []).append(value)


class Server:
    """One server process. ``kind``: original, sqlite or memory."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self._folder = kind, folder
        self.port = 18300 + random.randrange(1000)
        self.start()

    def start(self) -> None:
        if self.kind == "original":
            command = [str(PEER_PYTHON), "-m", "uvicorn", "atroposlib.api.server:app", "--log-level", "warning"]
        else:
            store = "memory" if self.kind == "memory" else f"sqlite:{self._folder / 'data'}"
            command = [sys.executable, "-m", "realhf.trajectory", "--store", store]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen([*command, "--port", str(self.port)], stdout=log, stderr=log, cwd=ROOT)
        deadline = time.monotonic() + 120
        while True:
            try:
                httpx.get(f"http://127.0.0.1:{self.port}/status", timeout=60)
                return
            except httpx.TransportError:
                assert self._process.poll() is None, (self._folder / "log").read_text()[-2000:]
                assert time.monotonic() < deadline, f"{self.kind} does not come up"
                time.sleep(0.02)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(10)

    @property
    def resident_mb(self) -> float:
        return psutil.Process(self._process.pid).memory_info().rss / 1e6

    @property
    def cpu_s(self) -> float:
        times = psutil.Process(self._process.pid).cpu_times()
        return times.user + times.system


@contextmanager
def running(kind: str) -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as folder:
        server = Server(kind, Path(folder))
        try:
            yield server
        finally:
            server.kill()


async def throughput(server: Server, table: Table, groups: int) -> None:
    """Four ways to push, both ways to pull, latencies of a prober meanwhile."""
    rng = random.Random(0)
    prefixes = [group_prefix(rng, GROUP, TOKENS, env) for env in range(ENVS) for _ in range(2)]
    cases = [("plain", "/scored_data", 1, False), ("list of 8", "/scored_data_list", LIST, False),
             ("gzip", "/scored_data", 1, True), ("list of 8, gzip", "/scored_data_list", LIST, True)]  # fmt: skip
    for number, (name, path, per, zipped) in enumerate(cases):
        await set_up(server.port, envs=ENVS, batch_size=BATCH, group_size=GROUP, tokens=TOKENS)
        bodies = bodies_of([with_id(prefixes[i % len(prefixes)], i) for i in range(groups)], per)
        if zipped:
            few = [gzip.compress(body, 6) for body in bodies[: len(prefixes)]]
            bodies = [few[i % len(few)] for i in range(len(bodies))]
        headers = {"Content_Encoding": "gzip"} if zipped else {}
        before, cpu = server.resident_mb, server.cpu_s
        prober = Prober(server.port, PROBED)
        seconds = await push(server.port, path, bodies, CLIENTS, **headers)
        waits = prober.stop()
        table.add(f"push {name}: sequences/s", server.kind, groups * GROUP / seconds)
        table.add(f"push {name}: server CPU ms/group", server.kind, (server.cpu_s - cpu) / groups * 1e3)
        table.add("status-env p99 while pushing: ms", server.kind, quantile(waits["/status-env"], 0.99) * 1e3)
        if number == 0:
            wire = sum(map(len, bodies)) / 1e6
            table.add("memory for each queued byte", server.kind, (server.resident_mb - before) / wire)
        if number < 2:
            coding = ("gzip", "identity")[number]
            pulled = await drain(server.port, Accept_Encoding=coding)
            assert sorted(pulled.ids.values()) == [1] * groups, "each group exactly once"
            table.add(f"pull {coding}: sequences/s", server.kind, groups * GROUP / pulled.seconds)
            table.add(f"pull {coding}: p99 of a batch, ms", server.kind, quantile(pulled.latencies, 0.99) * 1e3)


async def long_queue(server: Server, table: Table, depth: int, minimum: float | None) -> None:
    """The first batch out of many small groups, and how long anybody waits meanwhile."""
    rng = random.Random(1)
    await set_up(server.port, envs=ENVS, batch_size=BATCH, group_size=GROUP, tokens=8, minimum=minimum)
    prefixes = [group_prefix(rng, GROUP, 8, env) for env in range(ENVS)]
    bodies = bodies_of([with_id(prefixes[i % ENVS], i) for i in range(depth)], 250)
    before, wire = server.resident_mb, sum(map(len, bodies)) / 1e6
    await push(server.port, "/scored_data_list", bodies, 4)
    name = f"{depth} groups queued" + ("" if minimum is None else ", minimums")
    table.add(f"{name}: memory for each byte", server.kind, (server.resident_mb - before) / wire)
    prober = Prober(server.port, PROBED)
    await asyncio.sleep(0.3)
    more = [with_id(prefixes[0], depth + i) for i in range(40)]
    extra = asyncio.create_task(push(server.port, "/scored_data", more, 1))
    pulled = await first_batches(server.port, 20)
    await extra
    waits = prober.stop()
    table.add(f"{name}: first batch, ms", server.kind, pulled[0] * 1e3)
    table.add(f"{name}: longest wait of any request, ms", server.kind,
              max(*pulled, *waits["/status"], *waits["/status-env"]) * 1e3)  # fmt: skip


async def first_batches(port: int, count: int) -> list[float]:
    from trajectory_load import Http

    http, found = Http(port), []
    for _ in range(count):
        asked = time.perf_counter()
        answer = await http.request("GET", "/batch", Accept_Encoding="identity")
        found.append(time.perf_counter() - asked)
        assert len(answer.body) > 64
    http.close()
    return found


def restart(server: Server, table: Table) -> None:
    """Kill the server and time its return with the queue it had."""
    server.kill()
    began = time.perf_counter()
    server.start()
    table.add("restart after kill -9 with that queue: s", server.kind, time.perf_counter() - began)
    queued = httpx.get(f"http://127.0.0.1:{server.port}/status").json()["queue_size"]
    assert queued > 1000, f"only {queued} groups came back"


async def binary(server: Server, table: Table, groups: int) -> None:
    """MessagePack with tensors, 512 tokens: int32 tokens and masks, float32 log-probabilities; lists of 32 groups."""
    rng = np.random.default_rng(0)
    await set_up(server.port, envs=1, batch_size=256, group_size=GROUP, tokens=512)

    def tensor(dtype: str) -> dict[str, Any]:
        values = rng.integers(0, 150_000, GROUP * 512).astype(dtype) if dtype == "<i4" else -rng.random(GROUP * 512)
        return {"__t__": 1, "dtype": dtype[1:], "lens": np.full(GROUP, 512, "<u4").tobytes(),
                "data": values.astype(dtype).tobytes()}  # fmt: skip

    one = msgspec.msgpack.encode({"tokens": tensor("<i4"), "masks": tensor("<i4"), "scores": [1.0] * GROUP,
                                  "inference_logprobs": tensor("<f4"), "env_id": 0})  # fmt: skip
    body = b"\xdc" + (32).to_bytes(2, "big") + one * 32
    seconds = await push(server.port, "/scored_data_list", [body] * (groups // 32), 4, **MSGPACK)
    table.add("binary push: trajectories/s", server.kind, groups * GROUP / seconds)
    pulled = await drain(server.port, Accept="application/msgpack", Accept_Encoding="identity")
    assert len(pulled.latencies) == groups * GROUP // 256
    table.add("binary pull: trajectories/s", server.kind, groups * GROUP / pulled.seconds)


async def measure(arguments: argparse.Namespace) -> Table:
    table = Table()
    for repeat in range(arguments.repeats):
        for kind in ("original", "sqlite", "memory"):
            with running(kind) as server:
                say(f"repeat {repeat + 1} of {arguments.repeats}: throughput, {kind}")
                await throughput(server, table, arguments.groups)
                if kind != "original":
                    await binary(server, table, 960)
        for kind in ("sqlite", "memory"):
            for minimum in (None, 0.1):
                with running(kind) as server:
                    say(f"repeat {repeat + 1}: 50000 groups queued, minimum {minimum}, {kind}")
                    await long_queue(server, table, 50_000, minimum)
                    if kind == "sqlite" and minimum is None:
                        restart(server, table)
    for depth, minimum in ((arguments.peer_depth, None), (arguments.peer_minimum_depth, 0.1)):
        with running("original") as server:
            say(f"{depth} groups queued, minimum {minimum}, original (once)")
            await long_queue(server, table, depth, minimum)
    return table


def say(text: str) -> None:
    print(f"... {text}", file=sys.stderr, flush=True)


def show(table: Table) -> None:
    """Medians, and the ratio to the original with its range over the repeats."""
    print(f"{'':<58}{'original':>11}{'sqlite':>11}{'memory':>11}   sqlite to original")
    for row, servers in table.values.items():
        cells = "".join(f"{statistics.median(servers[kind]):>11.4g}" if kind in servers else f"{'-':>11}"
                        for kind in ("original", "sqlite", "memory"))  # fmt: skip
        pairs = list(zip(servers.get("sqlite", ()), servers.get("original", ()), strict=False))
        ratios = sorted(ours / theirs for ours, theirs in pairs if theirs)
        ratio = f"   {statistics.median(ratios):.3g} ({ratios[0]:.3g} to {ratios[-1]:.3g})" if ratios else ""
        print(f"{row:<58}{cells}{ratio}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--groups", type=int, default=400, help="groups of 8 x 1024 tokens in each throughput case")
    parser.add_argument("--peer-depth", type=int, default=50_000, help="queued groups for the original")
    parser.add_argument("--peer-minimum-depth", type=int, default=5000, help="the same with minimum allocations")
    parser.add_argument("--quick", action="store_true", help="one repeat, shorter queues for the original")
    parser.add_argument("--json", type=Path, help="write every measurement here")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.repeats, arguments.groups, arguments.peer_depth, arguments.peer_minimum_depth = 1, 400, 10_000, 1000
    if not PEER_PYTHON.exists():
        print(NO_PEER, file=sys.stderr)
        return 2
    load = os.getloadavg()[0]
    table = asyncio.run(measure(arguments))
    machine = f"{platform.machine()}, {os.cpu_count()} cores, load before {load:.2f}"
    print(f"{machine}, Python {platform.python_version()}, uvicorn {importlib.metadata.version('uvicorn')}, "
          f"{arguments.repeats} repeats")  # fmt: skip
    show(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(table.values, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
