"""Hosts that are this machine, and free ports of it.

A name that merely resolves to the loopback address does not count, because a foreign page can be
given such a name.
"""

from __future__ import annotations

import contextlib
import ipaddress
import secrets
import socket
from functools import lru_cache
from urllib.parse import urlsplit


def is_loopback_host(host: str) -> bool:
    """Return whether ``host``, given without its port, is the loopback by name or address."""
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return host.lower() == "localhost"
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def host_of(authority: str) -> str:
    """Return the host in ``host[:port]`` in lower case; "" when the text is not of that form."""
    try:
        parts = urlsplit(f"//{authority}")
        _ = parts.port
    except ValueError:
        return ""
    return (parts.hostname or "") if parts.netloc == authority and "@" not in authority else ""


@lru_cache(maxsize=16)
def is_loopback_authority(authority: str) -> bool:
    """Return whether ``host[:port]`` is the loopback."""
    return is_loopback_host(host_of(authority))


_PORTS = range(20_000, 32_000)
"""Below those that Linux gives to whoever connects, or asks for any port."""


def free_port() -> int:
    """Return a port of the loopback that nobody listens on. The kernel gives it to nobody who does
    not name it, so it stays free for a server that starts some seconds later, or again."""
    for _ in range(100):
        port = secrets.choice(_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
