"""Which hosts are this very machine: for servers that trust it, and for the Host header that says where a request was
meant to go. A name that merely resolves to the loopback is none: that is how a foreign page gets here."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit


def is_loopback_host(host: str) -> bool:
    """Whether a host, without its port, is the loopback by name or address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def host_of(authority: str) -> str:
    """The host in ``host[:port]``, in lower case; "" for what is none."""
    try:
        parts = urlsplit(f"//{authority}")
        _ = parts.port
    except ValueError:
        return ""
    return (parts.hostname or "") if parts.netloc == authority and "@" not in authority else ""


def is_loopback_authority(authority: str) -> bool:
    """Whether ``host[:port]`` is the loopback."""
    return is_loopback_host(host_of(authority))
