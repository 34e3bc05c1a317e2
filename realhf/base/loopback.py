"""Recognition of loopback hosts, and choice of free local ports.

A name that merely resolves to a loopback address does not count as a loopback host, because an
attacker's web page can use such a name (DNS rebinding).
"""

from __future__ import annotations

import contextlib
import ipaddress
import secrets
import socket
from functools import lru_cache
from urllib.parse import urlsplit

LOOPBACK_INTERFACE = "lo"
"""Network interface of this host alone."""


def is_loopback_host(host: str) -> bool:
    """Return whether ``host`` (without a port) is the name ``localhost`` or a loopback address."""
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return host.lower() == "localhost"
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def parse_host(authority: str) -> str:
    """Return the host in ``host[:port]`` in lower case; "" if the string does not have that
    form."""
    try:
        parts = urlsplit(f"//{authority}")
        _ = parts.port
    except ValueError:
        return ""
    return (parts.hostname or "") if parts.netloc == authority and "@" not in authority else ""


@lru_cache(maxsize=16)
def is_loopback_authority(authority: str) -> bool:
    """Return whether the host in ``host[:port]`` is a loopback host."""
    return is_loopback_host(parse_host(authority))


_PORTS = range(20_000, 32_000)
"""Ports below the range from which Linux assigns ports to outgoing connections and to servers that
request any free port."""


def free_port() -> int:
    """Return a loopback port on which nothing listens.

    The kernel assigns such a port only on explicit request, so it stays free for a server that
    starts some seconds later or restarts.
    """
    for _ in range(100):
        port = secrets.choice(_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
