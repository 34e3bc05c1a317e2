"""Says which hosts are this machine, tells requests of foreign pages, and finds a free port.

A name that merely resolves to the loopback address does not count, because a foreign page can be given such a name. A
browser sends whatever page asks it to any port of its own machine, with or without an answer for the page. Such
requests say where they come from (Origin, Sec-Fetch-Site), or, when a foreign name was made to resolve to this address,
where they were meant to go (Host). Programs send no Origin and are not concerned.
"""

from __future__ import annotations

import contextlib
import ipaddress
import secrets
import socket
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from typing import Any
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


_OWN = frozenset({"same-origin", "none"})


def request_problem(
    scope: Mapping[str, Any],
    serves: Callable[[str], bool],
    *,
    unserved: str,
    schemes: Collection[str] = ("http", "https"),
) -> str:
    """Say why the request of an ASGI scope must not be served, "" for one that may: ``unserved`` where it is for a host
    that ``serves`` does not know, or that it is of a page of elsewhere. Somebody who follows a link from elsewhere is
    served: the page that sent them sees nothing of the answer. ``schemes`` are those of the server's own pages."""
    hosts, origins, site, mode, dest = (
        [value.decode("latin-1") for known, value in scope["headers"] if known.lower() == name]
        for name in (b"host", b"origin", b"sec-fetch-site", b"sec-fetch-mode", b"sec-fetch-dest")
    )
    if len(hosts) != 1 or not serves(host_of(hosts[0])):
        return unserved
    if origins and (len(origins) > 1 or not _is_origin(origins[0], hosts[0], schemes)):
        return "only pages of this server may call it; programs send no Origin"
    is_visit = scope.get("method") == "GET" and mode == ["navigate"] and dest == ["document"]
    return "" if set(site) <= _OWN or is_visit else "only pages of this server may call it"


def _is_origin(origin: str, host: str, schemes: Collection[str]) -> bool:
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    return parts.scheme in schemes and parts.netloc.lower() == host.lower()


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
