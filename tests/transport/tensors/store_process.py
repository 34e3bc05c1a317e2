"""A real process that serves a store: ``python store_process.py shm|tcp``. Prints its endpoint,
then obeys lines on stdin: ``put ID ROWS``, ``clear ID``, ``nbytes``, ``quit``."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import torch

from realhf.api.sample import SequenceSample
from realhf.transport.data_plane import DataPlane
from realhf.transport.tensor_store import TensorStore


def main() -> None:
    torch.set_num_threads(1)
    store = TensorStore("owner")
    plane = DataPlane("owner", "run", store, shm=sys.argv[1] == "shm")
    plane.start()
    print(plane.endpoint, flush=True)
    for line in sys.stdin:
        command, *arguments = line.split()
        if command == "quit":
            break
        if command == "put":
            name = arguments[0]
            rows = int(arguments[1])
            data = {
                "x": torch.arange(rows) + int(name),
                "m": torch.arange(2 * rows).reshape(-1, 2) % 2 == 0,
            }
            lengths = {"x": [[rows]], "m": [[rows]]}
            store.put(SequenceSample.from_tensors([name], data, lengths, {"from": ["owner"]}))
        elif command == "clear":
            store.clear(arguments)
        print(store.nbytes, memory_files(), flush=True)
    plane.close()
    print(memory_files(), flush=True)


def memory_files() -> int:
    """Distinct shared memory files this process holds open."""
    inodes = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if "memfd:realhf" in os.readlink(descriptor):
                inodes.add(descriptor.stat().st_ino)
    return len(inodes)


if __name__ == "__main__":
    main()
