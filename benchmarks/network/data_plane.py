"""Fetches of tensors from another host, beside one TCP stream of iperf3 over the same cable in the
same run.

    python -m benchmarks.network.data_plane [--rounds 5] [--megabytes 512] [--json FILE]

Two network namespaces stand for the hosts (root, iproute2 and iperf3 are needed). In every round
one stream of iperf3 runs for two seconds, then a reader on the first host fetches a float32 array
of a store on the second, in pieces: once over TLS, once as with ``network.trusted``: unencrypted
after the handshake. The time is from the request to the decoded sample. Ratios are taken per round;
printed are medians and ranges, and the bytes that came for each second of CPU that both ends spent
in their processes. Both ends share this machine's cores, as iperf3's do.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.network.hosts import Host, NoNamespaces, two_hosts

if TYPE_CHECKING:
    from realhf.transport.network import Network

IPERF_S = 2
FETCH_S = 300.0
READY_S = 120.0
KEY = "x"
WAYS = ("encrypted", "trusted")


def _network(address: str, key_file: str, way: str) -> Network:
    from realhf.transport.network import Network, RunKeys

    return Network(address, address, RunKeys.read(Path(key_file)), trusted=way == "trusted")


def serve(address: str, key_file: str, trusted: str, megabytes: str) -> None:
    """Serve the array from a tensor store until standard input ends; print the process's CPU
    seconds for each input line."""
    import torch

    from realhf.api.sample import SequenceSample
    from realhf.transport.data_plane import DataPlane
    from realhf.transport.tensor_store import TensorStore

    store = TensorStore("owner")
    rows = int(megabytes) * 1_000_000 // 4
    store.put(SequenceSample.from_tensors(["a"], {KEY: torch.rand(rows)}, {KEY: [[rows]]}))
    plane = DataPlane("owner", "bench", store, network=_network(address, key_file, trusted))
    plane.start()
    print(plane.endpoint, flush=True)
    for _ in sys.stdin:
        print(time.process_time(), flush=True)
    plane.close()


def fetch(address: str, key_file: str, trusted: str, endpoint: str) -> None:
    """Fetch the array once for each line of standard input, and print wall seconds, CPU seconds and
    bytes."""
    from realhf.transport.data_plane import DataPlane
    from realhf.transport.tensor_store import TensorStore

    network = _network(address, key_file, trusted)
    plane = DataPlane("reader", "bench", TensorStore("reader"), network=network)
    plane.start()
    for _ in sys.stdin:
        began = time.perf_counter()
        cpu = time.process_time()
        data = plane.fetch(endpoint, ["a"], [KEY], FETCH_S).data
        assert data is not None
        print(time.perf_counter() - began, time.process_time() - cpu, data[KEY].nbytes, flush=True)
        del data
    plane.close()


def iperf(first: Host, second: Host) -> float:
    """Return the throughput of one TCP stream from the second host to the first, in bytes per
    second."""
    server = subprocess.Popen(
        [*first.enter, "iperf3", "-s", "-1", "-B", first.address], stdout=subprocess.DEVNULL
    )
    try:
        for _ in range(50):
            time.sleep(0.1)
            command = ["iperf3", "-c", first.address, "-t", str(IPERF_S), "-J"]
            done = subprocess.run(
                [*second.enter, *command], capture_output=True, text=True, check=False, timeout=60
            )
            found = json.loads(done.stdout or "{}")
            if "end" in found and "sum_received" in found["end"]:
                return found["end"]["sum_received"]["bits_per_second"] / 8
        raise RuntimeError(f"iperf3: {found.get('error')}")
    finally:
        server.kill()
        server.wait()


class Pair:
    """Processes of one owner on the second host and one reader on the first."""

    def __init__(self, first: Host, second: Host, keys: str, trusted: str, megabytes: int) -> None:
        self._owner = _start(second, "--serve", second.address, keys, trusted, str(megabytes))
        endpoint = _line(self._owner)
        self._reader = _start(first, "--fetch", first.address, keys, trusted, endpoint)

    def fetch(self) -> tuple[float, float]:
        """Fetch once. Return (bytes per second, bytes per CPU second of both processes)."""
        before = float(_ask(self._owner))
        seconds, cpu, nbytes = map(float, _ask(self._reader).split())
        return nbytes / seconds, nbytes / (cpu + float(_ask(self._owner)) - before)

    def close(self) -> None:
        """Kill both processes."""
        for process in (self._reader, self._owner):
            process.kill()
            process.wait()


def _start(host: Host, *words: str) -> subprocess.Popen[str]:
    command = [*host.enter, sys.executable, "-m", "benchmarks.network.data_plane", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line:
        raise RuntimeError("a process of the benchmark has ended")
    return line


def _ask(process: subprocess.Popen[str]) -> str:
    print("go", file=process.stdin, flush=True)
    return _line(process)


def measure(rounds: int, megabytes: int) -> list[dict[str, float]]:
    """Return one dict per round with all throughputs in bytes per second, and their ratios. Raises
    NoNamespaces."""
    from realhf.transport.network import RunKeys

    found = []
    with (
        tempfile.TemporaryDirectory() as folder,
        two_hosts() as (first, second),
        contextlib.ExitStack() as stack,
    ):
        keys = str(Path(folder) / "keys")
        RunKeys.make().write(Path(keys))
        pairs = {}
        for way in WAYS:
            pairs[way] = Pair(first, second, keys, way, megabytes)
            stack.callback(pairs[way].close)
        for number in range(rounds + 1):
            stream = iperf(first, second)
            row = {"iperf3": stream}
            for way, pair in pairs.items():
                rate, per_cpu = pair.fetch()
                row |= {way: rate, f"{way} ratio": rate / stream, f"{way} per CPU second": per_cpu}
            if number:  # the first one connects and imports
                found.append(row)
                print({name: f"{value:.3g}" for name, value in row.items()}, flush=True)
    return found


def main() -> int:
    """Run the benchmark and print the results. Return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--fetch", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(*args.serve)
        return 0
    if args.fetch:
        fetch(*args.fetch)
        return 0
    if shutil.which("iperf3") is None:
        print("iperf3 is missing (apt-get install iperf3)", file=sys.stderr)
        return 1
    try:
        found = measure(args.rounds, args.megabytes)
    except NoNamespaces as error:
        print(error, file=sys.stderr)
        return 1
    print(f"load {os.getloadavg()[0]:.1f}")
    for name in found[0]:
        unit = 1 if name.endswith("ratio") else 1e6
        values = [row[name] / unit for row in found]
        text = f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"
        print(f"{name:26} {text}{' MB/s' if unit > 1 else ' of one TCP stream'}")
    if args.json:
        args.json.write_text(
            json.dumps({"machine": platform.processor(), "cores": os.cpu_count(), "rounds": found})
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
