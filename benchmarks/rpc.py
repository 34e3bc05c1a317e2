"""Request-reply latency and tensor transfer between processes, beside Ray's in the same run.

    python benchmarks/rpc.py [--rounds 7] [--calls 400] [--transfers 6] [--json FILE]

What is measured, alternating between the two within every round:

- *call*: one small payload (64 B, and 128 KiB) to a worker process and back. Ours: ``await
  master.call`` (ordered lane). Ray: ``ray.get(actor.echo.remote(payload))``.
- *transfer*: a driver asks process A to offer a 64 MB float32 array that it holds in private
  memory, then asks process B to obtain it and to answer; the time is what the driver sees for both
  requests, the copy into shared memory included. *transfer+read* is the same with B summing the
  array before it answers. Ours: TensorStore and DataPlane. Ray: ``ray.put`` in actor A, ``ray.get``
  in actor B, with a numpy array (Ray's best case: no copy on reading).

A ratio is taken per round; the table shows the median over rounds and the range.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

ELEMENTS = 16 << 20
MEGABYTES = ELEMENTS * 4 / 1e6
FETCH_TIMEOUT_S = 30.0
INSTALL_RAY = "Ray is not installed here: pip install -c constraints.txt -e '.[ray]'"


def serve(endpoint: str, name: str) -> None:
    """Run a worker process of our side."""
    import torch

    from realhf.api.sample import SequenceSample
    from realhf.transport.data_plane import DataPlane
    from realhf.transport.rpc_worker import RpcWorker
    from realhf.transport.tensor_store import TensorStore

    store = TensorStore(name)
    plane = DataPlane(name, "bench", store)
    plane.start()
    source = torch.from_numpy(np.ones(ELEMENTS, dtype=np.float32))

    def offer(sample_id: str) -> None:
        """Make the tensor available under this id."""
        store.put(SequenceSample.from_tensors([sample_id], {"x": source}, {"x": [[ELEMENTS]]}))

    def obtain(wish: dict[str, Any]) -> float:
        """Fetch the tensor, and return its last number or, with ``read``, the sum of all."""
        sample = plane.fetch(wish["endpoint"], [wish["id"]], ["x"], FETCH_TIMEOUT_S)
        return float(sample["x"].numpy().sum()) if wish["read"] else float(sample["x"][-1])

    ordered = {
        "echo": lambda payload: payload,
        "offer": offer,
        "obtain": obtain,
        "clear": store.clear,
    }
    worker = RpcWorker(
        name, "bench", 0, "bench", endpoint, ordered=ordered, data_endpoint=plane.endpoint
    )
    try:
        worker.run()
    finally:
        plane.close()


class Ours:
    """Our side: an RpcMaster with two worker processes."""

    async def start(self) -> None:
        """Start a master and two workers."""
        from realhf.transport.rpc_master import RpcMaster

        self.master = RpcMaster("bench")
        await self.master.start()
        command = [sys.executable, __file__, "--serve", self.master.endpoint]
        self.processes = [subprocess.Popen([*command, name]) for name in "ab"]
        await self.master.wait_for("ab", timeout_s=120)
        self.endpoint = self.master.roster["a"].data_endpoint

    async def call(self, payload: bytes) -> None:
        """Send bytes to a worker, which returns them."""
        await self.master.call("a", "echo", payload, timeout_s=30)

    async def transfer(self, number: int, read: bool) -> float:
        """Return the seconds that the transfer of a tensor from one worker to the other takes."""
        wish = {"endpoint": self.endpoint, "id": str(number), "read": read}
        started = time.perf_counter()
        await self.master.call("a", "offer", str(number), timeout_s=30)
        value = await self.master.call("b", "obtain", wish, timeout_s=60)
        elapsed = time.perf_counter() - started
        await self.master.call("a", "clear", [str(number)], timeout_s=30)
        _expect(value, read)
        return elapsed

    async def close(self) -> None:
        """Stop the master and the workers."""
        await self.master.close()
        for process in self.processes:
            process.wait(timeout=20)


class Rays:
    """Ray's side: two actors."""

    async def start(self) -> None:
        """Start Ray and two actors."""
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        import ray

        ray.init(
            num_cpus=2, include_dashboard=False, logging_level="ERROR", object_store_memory=1 << 30
        )

        class Actor:
            def __init__(self) -> None:
                self.source = np.ones(ELEMENTS, dtype=np.float32)

            def echo(self, payload: bytes) -> bytes:
                """Return the payload."""
                return payload

            def offer(self) -> list[Any]:
                """Make the tensor available, and return the reference for fetching it."""
                return [ray.put(self.source)]

            def obtain(self, refs: list[Any], read: bool) -> float:
                """Fetch the tensor, and return its last number or, with ``read``, the sum of
                all."""
                array = ray.get(refs[0])
                return float(array.sum()) if read else float(array[-1])

        remote = ray.remote(num_cpus=0.5)(Actor)
        self.ray, self.a, self.b = ray, remote.remote(), remote.remote()
        ray.get([self.a.echo.remote(b""), self.b.echo.remote(b"")])

    async def call(self, payload: bytes) -> None:
        """Send bytes to an actor, which returns them."""
        self.ray.get(self.a.echo.remote(payload))

    async def transfer(self, number: int, read: bool) -> float:
        """Return the seconds that the transfer of a tensor from one actor to the other takes."""
        started = time.perf_counter()
        refs = self.ray.get(self.a.offer.remote())
        value = self.ray.get(self.b.obtain.remote(refs, read))
        elapsed = time.perf_counter() - started
        _expect(value, read)
        return elapsed

    async def close(self) -> None:
        """Shut down Ray."""
        self.ray.shutdown()


def _expect(value: float, read: bool) -> None:
    if value != (ELEMENTS if read else 1.0):
        raise RuntimeError(f"the array arrived with {value} in it")


async def measure_calls(side: Ours | Rays, payload: bytes, calls: int) -> dict[str, float]:
    """Return the median and 99th percentile of a call's duration in one round, in microseconds."""
    times = []
    for _ in range(calls):
        started = time.perf_counter()
        await side.call(payload)
        times.append((time.perf_counter() - started) * 1e6)
    return {"p50": statistics.median(times), "p99": float(np.percentile(times, 99))}


async def measure_round(
    side: Ours | Rays, number: int, args: argparse.Namespace
) -> dict[str, float]:
    """Return all measurements of one round: microseconds for calls, MB/s for transfers."""
    out: dict[str, float] = {}
    for label, size in (("64 B", 64), ("128 KiB", 128 << 10)):
        for name, value in (await measure_calls(side, bytes(size), args.calls)).items():
            out[f"call {label} {name} [us]"] = value
    for label, read in (("transfer", False), ("transfer+read", True)):
        base = (number * 2 + read) * args.transfers
        times = [await side.transfer(base + i, read) for i in range(args.transfers)]
        out[f"{label} 64 MB [MB/s]"] = MEGABYTES / statistics.median(times)
    return out


async def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure both sides in turns in every round, and return the report."""
    sides: dict[str, Ours | Rays] = {"ours": Ours()}
    if importlib.util.find_spec("ray") is not None:
        sides["ray"] = Rays()
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    try:
        for side in sides.values():
            await side.start()
            await measure_round(
                side, -1 - len(rounds["ours"]), argparse.Namespace(calls=50, transfers=3)
            )
        for number in range(args.rounds):
            order = list(sides.items())
            for name, side in order if number % 2 == 0 else reversed(order):
                rounds[name].append(await measure_round(side, number, args))
    finally:
        for side in sides.values():
            await side.close()
    return {"machine": machine(), "settings": vars(args), "results": summarise(rounds)}


def machine() -> dict[str, Any]:
    """Return the properties of the machine and the software versions that the results depend on."""
    from importlib.metadata import PackageNotFoundError, version

    versions = {}
    for package in ("pyzmq", "msgpack", "torch", "numpy", "ray"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return {
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load_average": os.getloadavg(),
        "versions": versions,
    }


def summarise(rounds: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Return for each measurement the median and range of each side, and of the per-round ratio
    ours / Ray."""

    def spread(values: list[float]) -> dict[str, float]:
        """Return the median, minimum and maximum."""
        return {"median": statistics.median(values), "min": min(values), "max": max(values)}

    out: dict[str, Any] = {}
    for name in rounds["ours"][0]:
        columns = {side: [entry[name] for entry in entries] for side, entries in rounds.items()}
        out[name] = {side: spread(values) for side, values in columns.items()}
        if "ray" in columns:
            out[name]["ours/ray"] = spread(
                [o / r for o, r in zip(columns["ours"], columns["ray"], strict=True)]
            )
    return out


def show(report: dict[str, Any]) -> None:
    """Print the table."""
    print(f"{'':28} {'ours':>10} {'ray':>10} {'ours/ray (range over rounds)':>32}")
    for name, entry in report["results"].items():
        ray = f"{entry['ray']['median']:10.0f}" if "ray" in entry else f"{'-':>10}"
        ratio = entry.get("ours/ray")
        text = f"{ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})" if ratio else "-"
        print(f"{name:28} {entry['ours']['median']:10.0f} {ray} {text:>32}")
    if report["machine"]["versions"]["ray"] is None:
        print(INSTALL_RAY)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=400, help="calls per round and payload size")
    parser.add_argument("--transfers", type=int, default=6, help="transfers per round and kind")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(*args.serve)
        return
    del args.serve
    json_file = args.json
    del args.json
    report = asyncio.run(run(args))
    show(report)
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
