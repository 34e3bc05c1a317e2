"""Finds the sockets that a process group opened, and closes them from outside: gloo has no other way to break off.

A rank that waits in a collective of gloo cannot be told to stop, and its peers wait with it. When one of its
connections closes, both ends fail at once.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

_PREFIX = "socket:"


class Sockets:
    """Collects the connections that are opened inside ``recording``. Those that other threads open meanwhile are
    collected too, so nothing else should begin at that time."""

    def __init__(self) -> None:
        self._held: dict[str, int] = {}

    def __len__(self) -> int:
        """How many sockets were collected."""
        return len(self._held)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Collect what is opened inside."""
        before = _open_sockets()
        yield
        self._held |= {name: fd for name, fd in _open_sockets().items() if name not in before}

    def listening(self) -> set[str]:
        """Return the addresses at which those of them listen that do."""
        return {address for fd in self._held.values() if (address := _listens_at(fd))}

    def shut(self) -> int:
        """End every connection that is still open, in both directions; return how many there were. The descriptors stay
        with their owner."""
        now, count = _open_sockets(), 0
        for name, fd in self._held.items():
            # A descriptor that was closed since may be another file by now.
            if now.get(name) == fd:
                count += _shut(fd)
        return count


def _open_sockets() -> dict[str, int]:
    """Return the sockets of this process, kernel's name to descriptor."""
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{entry}")
            if target.startswith(_PREFIX):
                found[target] = int(entry)
    return found


def _listens_at(fd: int) -> str:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as found:
        if found.family != socket.AF_UNIX and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return str(found.getsockname()[0])
    return ""


def _shut(fd: int) -> bool:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
        connection.getpeername()  # Raises OSError on a socket that listens: there is nothing to end.
        connection.shutdown(socket.SHUT_RDWR)
        return True
    return False
