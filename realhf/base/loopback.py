"""Says which hosts are this machine: for servers that trust it, and for the Host header of a request.

A name that merely resolves to the loopback address does not count, because a foreign page can be given such a name.
"""

from __future__ import annotations

import ipaddress
from functools import lru_cache
from urllib.parse import urlsplit


def is_loopback_host(host: str) -> bool:
    """Return whether ``host``, given without its port, is the loopback by name or address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


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
