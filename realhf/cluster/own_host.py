"""Says what the host that this process runs on has."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path

from realhf.cluster.messages import HostHello
from realhf.scheduler.gpus import gpus_anywhere
from realhf.transport.network.addresses import LOOPBACK_ADDRESS, address_towards, host_of, on_loopback
from realhf.transport.process_id import boot_id, host_token


def host_name() -> str:
    """Return the host's name in a form that may stand in files and options."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", os.uname().nodename.partition(".")[0]).strip("-._")[:63] or "host"


def own_gpus() -> tuple[str, ...]:
    """Return the GPUs that this process sees, in its order, by names that are the same for every process of this
    machine and for no other machine's."""
    try:
        machine = boot_id()
    except OSError:
        machine = os.uname().nodename
    return gpus_anywhere(machine)


def describe(name: str, door: str, folder: Path, wants: Mapping[str, int]) -> HostHello:
    """Return what a host agent registers with at the door tcp://HOST:PORT. Raises NetworkError when there is no route
    to it."""
    import psutil

    own = LOOPBACK_ADDRESS if on_loopback(door) else address_towards(host_of(door))
    return HostHello(
        name=name,
        cores=len(os.sched_getaffinity(0)),
        memory_gib=psutil.virtual_memory().total / 2**30,
        gpus=[*own_gpus()],
        address=own,
        machine=host_token(),
        clock=time.time(),
        folder=str(folder),
        wants=dict(wants),
    )


WHOLE_BYTES = 64 << 20
SAMPLES, SAMPLE_BYTES = 64, 1 << 16


def fingerprint(path: Path) -> str:
    """Return a digest by which two hosts compare a path: of a file's content, of the names and sizes of what is in a
    folder; "" where there is neither. Of a file above ``WHOLE_BYTES`` size and ``SAMPLES`` pieces count: who computes
    this gives signs of life beside it, and a file may have the size of a disk."""
    digest = hashlib.sha256()
    try:
        if path.is_file():
            with path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(0)
                if size <= WHOLE_BYTES:
                    return hashlib.file_digest(file, "sha256").hexdigest()
                digest.update(f"{size}\0".encode())
                for number in range(SAMPLES):
                    file.seek((size - SAMPLE_BYTES) * number // (SAMPLES - 1))
                    digest.update(file.read(SAMPLE_BYTES))
                return digest.hexdigest()
        if not path.is_dir():
            return ""
        for found in sorted(path.rglob("*")):
            if found.is_file():
                digest.update(f"{found.relative_to(path)}\0{found.stat().st_size}\0".encode())
    except OSError:
        return ""
    return digest.hexdigest()
