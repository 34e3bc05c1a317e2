"""Description of the own host: name, GPUs, installed versions, and fingerprints of files."""

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

from realhf.base.files import digest_folders
from realhf.base.host_resources import memory_limit, usable_cores
from realhf.base.installation import IMPORT_ROOT
from realhf.base.process import boot_id, host_token
from realhf.cluster.messages import HostHello
from realhf.monitor.provenance import package_versions
from realhf.scheduler.gpus import global_gpu_names
from realhf.transport.network import (
    LOOPBACK_ADDRESS,
    find_route_address,
    is_loopback_endpoint,
    parse_host,
)


def host_name() -> str:
    """Return the host's name, reduced to the characters that file names and options allow."""
    return (
        re.sub(r"[^A-Za-z0-9_.-]", "-", os.uname().nodename.partition(".")[0]).strip("-._")[:63]
        or "host"
    )


def own_gpus() -> tuple[str, ...]:
    """Return the GPUs that this process sees, in its order.

    The names are equal for all processes of this machine, and different from those of other
    machines.
    """
    try:
        machine = boot_id()
    except OSError:
        machine = os.uname().nodename
    return global_gpu_names(machine)


@cache
def installed_versions() -> dict[str, str]:
    """Return a digest of the package's own files, and the versions of Python and of packages that
    affect results."""
    source = digest_folders(IMPORT_ROOT, ("realhf", "workers", "experiments", "configs"))
    versions = {
        name: version for name, version in package_versions(RECORDED_PACKAGES).items() if version
    }
    return {"source": source[:16], "Python": platform.python_version(), **versions}


def describe_differences(theirs: Mapping[str, str]) -> str:
    """Describe how a host's ``installed_versions`` differ from those here; "" if they do not.

    Only the package's files and the packages in ``MATCHING_PACKAGES`` count, without the build part of a version
    (+cpu).
    """
    here = installed_versions()
    different = [
        f"{LABELS.get(name, name)} {theirs.get(name, 'none')}, here {here.get(name, 'none')}"
        for name in ("source", *MATCHING_PACKAGES)
        if theirs.get(name, "").partition("+")[0] != here.get(name, "").partition("+")[0]
    ]
    return "; ".join(different)


def describe_host(name: str, launcher: str, folder: Path, wants: Mapping[str, int]) -> HostHello:
    """Return the registration of this host at the endpoint ``launcher`` (tcp://HOST:PORT).

    Raises NetworkError without a route to it.
    """
    import psutil

    own = (
        LOOPBACK_ADDRESS
        if is_loopback_endpoint(launcher)
        else find_route_address(parse_host(launcher))
    )
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
        made_of=installed_versions(),
    )


MATCHING_PACKAGES = ("torch", "transformers", "tokenizers")
"""Packages whose versions must be equal on all hosts, since results depend on them."""
RECORDED_PACKAGES = (*MATCHING_PACKAGES, "numpy", "safetensors", "vllm")
"""Packages whose versions are recorded."""
LABELS = {"source": "the package's files with the digest"}


WHOLE_BYTES = 64 << 20
"""Size up to which all of a file is digested."""
PART_BYTES = 8 << 20
"""The same for each file in a folder."""
SAMPLES = 64
"""Number of pieces that are digested of a larger file."""
SAMPLE_BYTES = 1 << 16
"""Size of such a piece."""


def fingerprint(path: Path) -> str:
    """Return a digest by which two hosts compare a path; "" if the path does not exist.

    Covers the content of a file, or names and contents of the files in a folder. Of a file larger
    than ``WHOLE_BYTES``, in a folder ``PART_BYTES``, it covers the size and ``SAMPLES`` pieces: the
    agent must send heartbeats, and files may be as large as a disk.
    """
    digest = hashlib.sha256()
    try:
        if path.is_file():
            return _digest_file(path, WHOLE_BYTES)
        if not path.is_dir():
            return ""
        for file in sorted(path.rglob("*")):
            if file.is_file():
                digest.update(
                    f"{file.relative_to(path)}\0{_digest_file(file, PART_BYTES)}\0".encode()
                )
    except OSError:
        return ""
    return digest.hexdigest()


def _digest_file(path: Path, whole_bytes: int) -> str:
    """Return a digest of a whole file, or, above ``whole_bytes``, of its size and pieces of it."""
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
