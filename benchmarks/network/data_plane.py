"""Fetches of tensors from another host, beside one TCP stream of iperf3 over the same cable in the same run.

    python -m benchmarks.network.data_plane [--rounds 5] [--megabytes 512] [--json FILE]

Two network namespaces stand for the hosts (root, iproute2 and iperf3 are needed). In every round one stream of iperf3
runs for two seconds, then a reader on the first host fetches a float32 array of a store on the second, in pieces over
encrypted sockets; the time is from the request to the decoded sample. The ratio is taken per round; printed are the
median and the range. Both ends share this machine's cores, as iperf3's do.
"""

from __future__ import annotations

import argparse
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

from benchmarks.network.hosts import Host, NoNamespaces, two_hosts

IPERF_S = 2
FETCH_S = 300.0
READY_S = 120.0
KEY = "x"


def serve(address: str, key_file: str, megabytes: int) -> None:
    """Hold the array and serve it until standard input ends."""
    import torch

    from realhf.api.sample import SequenceSample
    from realhf.transport.network.keys import RunKeys
    from realhf.transport.network.network import Network
    from realhf.transport.tensors.data_plane import DataPlane
    from realhf.transport.tensors.store import TensorStore

    store, rows = TensorStore("owner"), megabytes * 1_000_000 // 4
    store.put(SequenceSample.from_tensors(["a"], {KEY: torch.rand(rows)}, {KEY: [[rows]]}))
    plane = DataPlane("owner", "bench", store, network=Network(address, address, RunKeys.read(Path(key_file))))
    plane.start()
    print(plane.endpoint, flush=True)
    sys.stdin.read()
    plane.close()


def fetch(address: str, key_file: str, endpoint: str) -> None:
    """Fetch the array once for every line of standard input; print seconds and bytes."""
    from realhf.transport.network.keys import RunKeys
    from realhf.transport.network.network import Network
    from realhf.transport.tensors.data_plane import DataPlane
    from realhf.transport.tensors.store import TensorStore

    network = Network(address, address, RunKeys.read(Path(key_file)))
    plane = DataPlane("reader", "bench", TensorStore("reader"), network=network)
    plane.start()
    for _ in sys.stdin:
        began = time.perf_counter()
        data = plane.fetch(endpoint, ["a"], [KEY], FETCH_S).data
        assert data is not None
        print(time.perf_counter() - began, data[KEY].nbytes, flush=True)
        del data
    plane.close()


def iperf(first: Host, second: Host) -> float:
    """Return the bytes per second that one stream brings from the second host to the first."""
    server = subprocess.Popen([*first.enter, "iperf3", "-s", "-1", "-B", first.address], stdout=subprocess.DEVNULL)
    try:
        for _ in range(50):
            time.sleep(0.1)
            command = ["iperf3", "-c", first.address, "-t", str(IPERF_S), "-J"]
            done = subprocess.run([*second.enter, *command], capture_output=True, text=True, check=False, timeout=60)
            found = json.loads(done.stdout or "{}")
            if "end" in found and "sum_received" in found["end"]:
                return found["end"]["sum_received"]["bits_per_second"] / 8
        raise RuntimeError(f"iperf3: {found.get('error')}")
    finally:
        server.kill()
        server.wait()


def measure(rounds: int, megabytes: int) -> list[dict[str, float]]:
    """Return the bytes per second of both, for every round. Raises NoNamespaces."""
    from realhf.transport.network.keys import RunKeys

    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder, two_hosts() as (first, second):
        keys = str(Path(folder) / "keys")
        RunKeys.make().write(Path(keys))

        def start(host: Host, *words: str) -> subprocess.Popen[str]:
            command = [*host.enter, sys.executable, "-m", "benchmarks.network.data_plane", *words]
            pipe = subprocess.PIPE
            return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)

        with start(second, "--serve", second.address, keys, str(megabytes)) as owner:
            assert owner.stdout is not None
            endpoint = owner.stdout.readline().strip()
            with start(first, "--fetch", first.address, keys, endpoint) as reader:
                assert reader.stdin is not None and reader.stdout is not None
                found = []
                for number in range(rounds + 1):
                    stream = iperf(first, second)
                    print("go", file=reader.stdin, flush=True)
                    seconds, nbytes = map(float, reader.stdout.readline().split())
                    if number:  # the first one connects and imports
                        found.append({"iperf3": stream, "fetch": nbytes / seconds, "ratio": nbytes / seconds / stream})
                        print({name: f"{value:.3g}" for name, value in found[-1].items()}, flush=True)
        return found


def main() -> int:
    """Measure and print. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--fetch", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve[0], args.serve[1], int(args.serve[2]))
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
    for name, unit in (("iperf3", 1e6), ("fetch", 1e6), ("ratio", 1)):
        values = [row[name] / unit for row in found]
        text = f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"
        print(f"{name:8} {text}{' MB/s' if unit > 1 else ' of one TCP stream'}")
    if args.json:
        args.json.write_text(json.dumps({"machine": platform.processor(), "cores": os.cpu_count(), "rounds": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
