"""Recognition of loopback hosts, and free local ports.

A name that only resolves to the loopback address does not count, because an attacker's web page can
use such a name (DNS rebinding).
"""

from __future__ import annotations

import contextlib
import ipaddress
import secrets
import socket
from functools import lru_cache
from urllib.parse import urlsplit


def is_loopback_host(host: str) -> bool:
    """Return whether ``host``, without port, is the name ``localhost`` or a loopback address."""
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return host.lower() == "localhost"
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def parse_host(authority: str) -> str:
    """Return the host of ``host[:port]`` in lower case; "" if the text does not have that form."""
    try:
        parts = urlsplit(f"//{authority}")
        _ = parts.port
    except ValueError:
        return ""
    return (parts.hostname or "") if parts.netloc == authority and "@" not in authority else ""


@lru_cache(maxsize=16)
def is_loopback_authority(authority: str) -> bool:
    """Return whether ``host[:port]`` is a loopback host."""
    return is_loopback_host(parse_host(authority))


_PORTS = range(20_000, 32_000)
"""Ports below the range from which Linux assigns ports to outgoing connections and to servers that
request any port."""


def free_port() -> int:
    """Return a loopback port without a listener.

    The kernel assigns it only on explicit request, so it stays free for a server that starts
    seconds later, or restarts.
    """
    for _ in range(100):
        port = secrets.choice(_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
