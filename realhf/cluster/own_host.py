"""Description of this host: its name, GPUs, installed versions and file fingerprints."""

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
    """Return this host's name with only the characters that file names and options allow."""
    return (
        re.sub(r"[^A-Za-z0-9_.-]", "-", os.uname().nodename.partition(".")[0]).strip("-._")[:63]
        or "host"
    )


def own_gpus() -> tuple[str, ...]:
    """Return the names of the GPUs that this process sees, in the order in which it sees them.

    All processes on this machine use the same names, and no other machine does.
    """
    try:
        machine = boot_id()
    except OSError:
        machine = os.uname().nodename
    return global_gpu_names(machine)


@cache
def installed_versions() -> dict[str, str]:
    """Return the versions of Python and of ``RECORDED_PACKAGES`` by name, and a digest of this
    package's files as ``source``."""
    source = digest_folders(IMPORT_ROOT, ("realhf", "workers", "experiments", "configs"))
    versions = {
        name: version for name, version in package_versions(RECORDED_PACKAGES).items() if version
    }
    return {"source": source[:16], "Python": platform.python_version(), **versions}


def describe_differences(theirs: Mapping[str, str]) -> str:
    """Describe how another host's ``installed_versions`` differ from this host's; "" if they do
    not.

    Only the package's files and ``MATCHING_PACKAGES`` are compared, without the build part of a
    version (such as ``+cpu``).
    """
    here = installed_versions()
    different = [
        f"{LABELS.get(name, name)} {theirs.get(name, 'none')}, here {here.get(name, 'none')}"
        for name in ("source", *MATCHING_PACKAGES)
        if theirs.get(name, "").partition("+")[0] != here.get(name, "").partition("+")[0]
    ]
    return "; ".join(different)


def describe_host(name: str, launcher: str, folder: Path, wants: Mapping[str, int]) -> HostHello:
    """Return the message that registers this host with the launcher at ``launcher``
    (tcp://HOST:PORT).

    Raises NetworkError if there is no route to the launcher.
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
"""Size in bytes up to which a file is digested completely."""
PART_BYTES = 8 << 20
"""Size in bytes up to which a file in a folder is digested completely."""
SAMPLES = 64
"""Number of pieces of a larger file that are digested."""
SAMPLE_BYTES = 1 << 16
"""Size of such a piece in bytes."""


def fingerprint(path: Path) -> str:
    """Return a digest of a file or folder, with which two hosts compare a path; "" if the path does
    not exist.

    The digest covers the content of a file, or the names and contents of all files in a folder. Of
    a file larger than ``WHOLE_BYTES`` (in a folder: ``PART_BYTES``) it covers only the size and
    ``SAMPLES`` pieces, because files may be huge, and the agent cannot send heartbeats while it
    reads.
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
    """Return a digest of a file's content or, if it is larger than ``whole_bytes``, of its size and
    ``SAMPLES`` pieces."""
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
