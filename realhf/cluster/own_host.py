"""Says what the host that this process runs on has."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import sys
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from realhf.base.files import digest_of
from realhf.base.host_resources import memory_limit, usable_cores
from realhf.base.installation import IMPORT_ROOT
from realhf.base.process import boot_id, host_token
from realhf.cluster.messages import HostHello
from realhf.monitor.provenance import package_versions
from realhf.scheduler.gpus import gpus_anywhere
from realhf.transport.network import LOOPBACK_ADDRESS, address_towards, host_of, on_loopback


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


@cache
def made_of() -> dict[str, str]:
    """Return what computes on this host: a digest of the package's own files, Python, and the versions of packages."""
    source = digest_of(IMPORT_ROOT, ("realhf", "workers", "experiments", "configs"))
    versions = {name: version for name, version in package_versions(COMPUTING).items() if version}
    return {"source": source[:16], "Python": platform.python_version(), **versions}


def unlike(theirs: Mapping[str, str]) -> str:
    """Say how what a host is made of differs from what this one is, where results depend on it; "" if it does not. What
    a version says of its build, such as that for a GPU, does not count."""
    here = made_of()
    found = [
        f"{SAID.get(name, name)} {theirs.get(name, 'none')}, here {here.get(name, 'none')}"
        for name in ("source", *SAME)
        if theirs.get(name, "").partition("+")[0] != here.get(name, "").partition("+")[0]
    ]
    return "; ".join(found)


def describe(name: str, launcher: str, folder: Path, wants: Mapping[str, int]) -> HostHello:
    """Return what a host agent registers with at the endpoint tcp://HOST:PORT. Raises NetworkError when there is no
    route to it."""
    import psutil

    own = LOOPBACK_ADDRESS if on_loopback(launcher) else address_towards(host_of(launcher))
    return HostHello(
        name=name,
        cores=usable_cores(),
        memory_gib=min(psutil.virtual_memory().total, memory_limit() or sys.maxsize) / 2**30,
        gpus=[*own_gpus()],
        address=own,
        machine=host_token(),
        clock=time.time(),
        folder=str(folder),
        wants=dict(wants),
        made_of=made_of(),
    )


SAME = ("torch", "transformers", "tokenizers")
"""Packages whose versions decide what is computed; they have to be the same everywhere."""
COMPUTING = (*SAME, "numpy", "safetensors", "vllm")
SAID = {"source": "the package's files with the digest"}


WHOLE_BYTES = 64 << 20
PART_BYTES = 8 << 20
SAMPLES, SAMPLE_BYTES = 64, 1 << 16


def fingerprint(path: Path) -> str:
    """Return a digest by which two hosts compare a path: of a file's content, or of the names and contents of what is
    in a folder; "" where there is neither. Of a file above ``WHOLE_BYTES``, in a folder above ``PART_BYTES``, size and
    ``SAMPLES`` pieces count: who computes this gives signs of life beside it, and it may have the size of a disk."""
    digest = hashlib.sha256()
    try:
        if path.is_file():
            return _content(path, WHOLE_BYTES)
        if not path.is_dir():
            return ""
        for found in sorted(path.rglob("*")):
            if found.is_file():
                digest.update(f"{found.relative_to(path)}\0{_content(found, PART_BYTES)}\0".encode())
    except OSError:
        return ""
    return digest.hexdigest()


def _content(path: Path, whole_bytes: int) -> str:
    """Return a digest of a file: of all of it, or above ``whole_bytes`` of its size and pieces of it."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        if size <= whole_bytes:
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256(f"{size}\0".encode())
        for number in range(SAMPLES):
            file.seek((size - SAMPLE_BYTES) * number // (SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
        return digest.hexdigest()
