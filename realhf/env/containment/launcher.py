"""Start of a program of somebody else's with limits: ``python -I -S launcher.py ORDER PROGRAM
ARGUMENT ...``, where ORDER is the JSON of ``programs.LaunchOrder``.

The launcher limits its own process and, unless bubblewrap has done so, gives the program namespaces
of its own, so that all that it starts ends with it and nothing of it reaches a network. It uses the
standard library only, because the package is hidden in bubblewrap.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import resource
import signal
import socket
import struct
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38
_CLONE_NEWIPC = 0x08000000
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWPID = 0x20000000
_CLONE_NEWNET = 0x40000000
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 1
REFUSED = 125
"""Exit code if the program was not started because a limit could not be set."""
NOT_FOUND = 127
"""Exit code if the program cannot be executed."""


def main() -> None:
    """Set the limits and become the program, or the parent that waits for it."""
    order = json.loads(sys.argv[1])
    words = sys.argv[2:]
    libc = ctypes.CDLL(None, use_errno=True)
    if order["own_namespaces"]:
        _enter_namespaces(libc, network=order["network"])
    for kind, limit in (
        (resource.RLIMIT_DATA, order["memory_bytes"]),
        (resource.RLIMIT_FSIZE, order["file_bytes"]),
        (resource.RLIMIT_NOFILE, order["open_files"]),
        (resource.RLIMIT_CPU, order["cpu_s"]),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        ceiling = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (ceiling, ceiling))
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        _refuse("new privileges cannot be forbidden")
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    try:
        os.execvp(words[0], words)
    except OSError as error:
        print(f"{words[0]}: {error.strerror}", file=sys.stderr)
        os._exit(NOT_FOUND)


def _enter_namespaces(libc: ctypes.CDLL, *, network: bool) -> None:
    """Move this process to namespaces of its own. Returns in a child, which is the first process of
    its namespace, so that the kernel ends all others with it; the parent waits for its end."""
    flags = _CLONE_NEWUSER | _CLONE_NEWPID | _CLONE_NEWIPC | (0 if network else _CLONE_NEWNET)
    user = os.getuid()
    group = os.getgid()
    if libc.unshare(flags) != 0:
        what = "other processes" if network else "the network"
        _refuse(f"it cannot be kept from {what} here: unshare: {os.strerror(ctypes.get_errno())}")
    # A change of the user namespace clears it.
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{user} {user} 1"),
        ("gid_map", f"{group} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    if not network:
        _raise_loopback()
    child = os.fork()
    if child:
        for number in (0, 1):
            os.close(number)
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _raise_loopback() -> None:
    """Let programs of the namespace talk to each other over its loopback."""
    with socket.socket() as control:
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))


def _refuse(reason: str) -> None:
    print(reason, file=sys.stderr)
    os._exit(REFUSED)


if __name__ == "__main__":
    main()
