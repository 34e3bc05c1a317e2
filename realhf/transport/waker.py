"""Wakes a thread that waits in a poller."""

from __future__ import annotations

import contextlib
import os


class Waker:
    """Wakes a poller through a pipe: ``wake``, called from any thread or signal handler, makes ``fileno()`` readable
    until ``clear``."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)

    def fileno(self) -> int:
        """Return the descriptor to poll for reading."""
        return self._read

    def wake(self) -> None:
        """Make the descriptor readable. Does nothing after ``close``."""
        with contextlib.suppress(OSError):
            os.write(self._write, b"\0")

    def clear(self) -> None:
        """Make the descriptor unreadable again."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._read, 4096)

    def close(self) -> None:
        """Close the pipe; later calls of ``wake`` have no effect."""
        read, write, self._read, self._write = self._read, self._write, -1, -1
        for descriptor in (read, write):
            if descriptor >= 0:
                os.close(descriptor)
