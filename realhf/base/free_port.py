"""Finds a port of this machine for a server that starts later, or again."""

from __future__ import annotations

import contextlib
import secrets
import socket

_PORTS = range(20_000, 32_000)
"""Below those that Linux gives to whoever connects, or asks for any port."""


def free_port() -> int:
    """Return a port of the loopback that nobody listens on. The kernel gives it to nobody who does not name it, so it
    stays free for a server that starts some seconds later, or again."""
    for _ in range(100):
        port = secrets.choice(_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
