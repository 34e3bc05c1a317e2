"""Tries every layer of containment in a throw-away child of a zygote, each by acts that only this layer stops.

What the kernel's layers must stop is tried by C functions, which the interpreter's hooks do not see; what the hooks
must stop is something that the kernel would allow. Nothing here is believed because a call to install it returned.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from realhf.env.containment import sandbox
from realhf.env.containment.frames import frame
from realhf.env.containment.process_guard import BUBBLEWRAP, FILTER, HOOKS, LAYERS, LIMITS, NETWORK, ProcessGuard

PROBE = "probe"
"""Key of a fork request that asks for a probe."""


@dataclass(frozen=True)
class Attempt:
    """Records what was tried. ``stopped``: the layer stopped it, and not something else by chance; ``how``: in the
    kernel's or the hook's words."""

    layer: str
    act: str
    stopped: bool
    how: str


@dataclass(frozen=True)
class ProbeTargets:
    """Says what to try: the ``port`` of a listener on the host's loopback, a readable ``file`` of the host, a path that
    could be ``made`` on the host, and the ``folder`` that belongs to the probe. ``layers`` are the ones to try."""

    port: int
    file: str
    made: str
    folder: str
    layers: tuple[str, ...]


def run_probe(guard: ProcessGuard, request: Mapping[str, Any], fds: list[int]) -> None:
    """Try the layers, in the child, and send the attempts over the first descriptor. ``request`` is ``ProbeTargets`` as
    a map."""
    channel = socket.socket(fileno=fds[0])
    for fd in fds[1:]:
        os.close(fd)
    targets = ProbeTargets(**{**request, "layers": tuple(request["layers"])})
    os.makedirs(targets.folder, exist_ok=True)
    found = [_network(targets)] if NETWORK in targets.layers else []
    calls, unlinked = _Calls(), os.memfd_create("probe")
    with socket.socket() as unconnected:
        replace(guard, may_lack=frozenset(LAYERS)).apply(targets.folder)
        found += [*_hooks(), *_filtered(calls, unconnected, targets.port), *_limited(guard, unlinked)]
        if BUBBLEWRAP in targets.layers:
            found += _walled(calls, targets)
        channel.sendall(frame({"attempts": [vars(attempt) for attempt in found if attempt.layer in targets.layers]}))


class _Calls:
    """Calls C functions and reports the kernel's answer. They are bound before the hooks come, which let nobody bind
    any."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None)
        self.fork, self.socket, self.connect, self.execve, self.open = (
            libc.fork,
            libc.socket,
            libc.connect,
            libc.execve,
            libc.open,
        )
        self._errno = libc["__errno_location"]
        self._errno.restype = ctypes.POINTER(ctypes.c_int)

    def refused(self, layer: str, act: str, function: Any, *arguments: Any, by: tuple[int, ...]) -> Attempt:
        """Return whether the call failed with one of the errors ``by`` which the layer is known."""
        result = function(*arguments)
        number = self._errno()[0]
        if function is self.fork and result == 0:
            os._exit(0)
        if result != -1:
            return Attempt(layer, act, False, "possible")
        return Attempt(layer, act, number in by, errno.errorcode.get(number, str(number)))


def _network(targets: ProbeTargets) -> Attempt:
    """Connect plainly to the host's loopback, before any filter: only an empty network stops that."""
    act = "connect to the host"
    try:
        socket.create_connection(("127.0.0.1", targets.port), timeout=2.0).close()
    except OSError as error:
        return Attempt(NETWORK, act, True, _name(error))
    return Attempt(NETWORK, act, False, "possible")


def _filtered(calls: _Calls, unconnected: socket.socket, port: int) -> Iterator[Attempt]:
    denied = (errno.EPERM,)
    address = struct.pack("=HH4s8x", socket.AF_INET, socket.htons(port), socket.inet_aton("127.0.0.1"))
    yield calls.refused(FILTER, "fork", calls.fork, by=denied)
    yield calls.refused(FILTER, "make a socket", calls.socket, socket.AF_INET, socket.SOCK_STREAM, 0, by=denied)
    yield calls.refused(FILTER, "connect", calls.connect, unconnected.fileno(), address, len(address), by=denied)
    # The program does not exist: without a filter it is looked for and not found, and the child goes on.
    yield calls.refused(FILTER, "start a program", calls.execve, b"/nonexistent/program", None, None, by=denied)


def _walled(calls: _Calls, targets: ProbeTargets) -> Iterator[Attempt]:
    file, made, absent = targets.file.encode(), targets.made.encode(), (errno.ENOENT,)
    new, refused = os.O_CREAT | os.O_EXCL | os.O_WRONLY, (errno.EROFS, errno.ENOENT)
    yield calls.refused(BUBBLEWRAP, "read a file of the host", calls.open, file, os.O_RDONLY, by=absent)
    yield calls.refused(BUBBLEWRAP, "write on the host", calls.open, made, new, 0o600, by=refused)


def _hooks() -> Iterator[Attempt]:
    acts: Mapping[str, Callable[[], Any]] = {
        "open a file": lambda: os.open("/proc/self/status", os.O_RDONLY),
        "list a folder": lambda: os.listdir("/"),
        "fork": _fork,
        "start a program": lambda: os.posix_spawn("/nonexistent/program", ["program"], {}),
        "connect": lambda: socket.create_connection(("127.0.0.1", 1), timeout=1),
        "load a library": lambda: ctypes.CDLL(None),
    }
    for act, attempt in acts.items():
        try:
            attempt()
        except sandbox.Denied:
            yield Attempt(HOOKS, act, True, "denied")
        except OSError as error:
            yield Attempt(HOOKS, act, False, _name(error))
        else:
            yield Attempt(HOOKS, act, False, "possible")


def _fork() -> None:
    if os.fork() == 0:
        os._exit(0)


def _limited(guard: ProcessGuard, unlinked: int) -> Iterator[Attempt]:
    acts: Mapping[str, tuple[Callable[[], Any], int]] = {
        "take more memory": (lambda: mmap.mmap(-1, guard.memory_bytes, flags=mmap.MAP_PRIVATE), errno.ENOMEM),
        "share more memory": (lambda: mmap.mmap(-1, guard.address_bytes), errno.ENOMEM),
        "open more files": (lambda: os.dup2(unlinked, guard.open_files), errno.EBADF),
        "write a longer file": (lambda: os.pwrite(unlinked, b"x", guard.file_bytes), errno.EFBIG),
    }
    for act, (attempt, expected) in acts.items():
        try:
            attempt()
        except OSError as error:
            yield Attempt(LIMITS, act, error.errno == expected, _name(error))
        else:
            yield Attempt(LIMITS, act, False, "possible")


def _name(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, type(error).__name__)
