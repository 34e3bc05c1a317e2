"""Identifies a process and its host in a way that survives the reuse of process numbers (Linux)."""

from __future__ import annotations

import os
from pathlib import Path


def host_token() -> str:
    """Return a token that is equal for two processes exactly when they are on one host and can see each other's /proc
    entries: it names the kernel boot and the namespaces of processes and of the network. Empty where the system does
    not provide them."""
    try:
        return f"{boot_id()}/{os.readlink('/proc/self/ns/pid')}/{os.readlink('/proc/self/ns/net')}"
    except OSError:
        return ""


def boot_id() -> str:
    """Return what names the boot of this machine's kernel: equal in all its containers. Raises OSError where the system
    does not provide it."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_time(pid: int) -> int:
    """Return the start of a running process in clock ticks since boot; 0 when it is gone, dead or unreadable."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    state, *rest = stat[stat.rindex(")") + 2 :].split()
    return 0 if state in "ZX" else int(rest[18])


def open_process(pid: int, started: int) -> int | None:
    """Open a descriptor that becomes readable when the process ends; None where the system has no such descriptors.
    Raises ProcessLookupError when the process that started at ``started`` is gone."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except (AttributeError, OSError):
        return None
    if start_time(pid) != started:
        os.close(descriptor)
        raise ProcessLookupError(pid)
    return descriptor
