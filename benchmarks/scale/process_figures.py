"""Resources that this process uses: CPU by thread, memory, descriptors (Linux)."""

from __future__ import annotations

import os
import threading
from pathlib import Path

_TASKS = Path("/proc/self/task")


def thread_seconds() -> dict[str, float]:
    """Return the CPU seconds of this process by thread: ``loop`` is the calling thread, ``zmq`` the
    threads of ZeroMQ together; the others have their own names."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    found: dict[str, float] = {}
    for folder in _TASKS.iterdir():
        try:
            seconds = int((folder / "schedstat").read_text().split()[0]) / 1e9
            kernel_name = (folder / "comm").read_text().strip()
        except OSError:
            continue  # it has ended
        number = int(folder.name)
        name = "zmq" if kernel_name.startswith("ZMQ") else names.get(number, "others").split("_")[0]
        name = "loop" if number == threading.get_native_id() else name
        found[name] = found.get(name, 0.0) + seconds
    return found


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def descriptors() -> int:
    """Return the number of open descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))
