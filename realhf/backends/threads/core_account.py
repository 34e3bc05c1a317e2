"""Reads from the kernel how long this process's threads waited for a core.

Linux only. The time is the second number of ``/proc/<pid>/task/<tid>/schedstat``.
"""

from __future__ import annotations

import os
from typing import Protocol

_TASKS = "/proc/self/task"


class CoreAccount(Protocol):
    """Keeps a running total, in seconds times cores."""

    def waited_s(self) -> float:
        """Return how long threads of this process were ready to run and had no core."""
        ...


class LinuxCoreAccount:
    """Keeps one descriptor per thread open, so that asking costs a few microseconds a thread. Not thread-safe."""

    def __init__(self) -> None:
        self._files: dict[str, int] = {}
        self._seen: dict[str, int] = {}
        self._waited_ns = 0

    @staticmethod
    def open() -> LinuxCoreAccount | None:
        """Open the account; None where the kernel does not keep it."""
        try:
            with open(f"{_TASKS}/{os.getpid()}/schedstat", "rb") as file:
                return LinuxCoreAccount() if len(file.read().split()) == 3 else None
        except OSError:
            return None

    def waited_s(self) -> float:
        """See ``CoreAccount``."""
        threads = set(os.listdir(_TASKS))
        for gone in self._files.keys() - threads:
            self._forget(gone)
        for thread in threads:
            waited = self._waited_of(thread)
            if waited is not None:
                # The time that a thread waited before it was first seen belongs to no window.
                self._waited_ns += waited - self._seen.get(thread, waited)
                self._seen[thread] = waited
        return self._waited_ns * 1e-9

    def close(self) -> None:
        """Close all descriptors."""
        for thread in list(self._files):
            self._forget(thread)

    def _waited_of(self, thread: str) -> int | None:
        try:
            if thread not in self._files:
                self._files[thread] = os.open(f"{_TASKS}/{thread}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            return int(os.pread(self._files[thread], 128, 0).split()[1])
        except (OSError, IndexError):
            self._forget(thread)  # it ended meanwhile
            return None

    def _forget(self, thread: str) -> None:
        self._seen.pop(thread, None)
        descriptor = self._files.pop(thread, None)
        if descriptor is not None:
            os.close(descriptor)
