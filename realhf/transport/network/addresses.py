"""Finds addresses: of names, of the interface that reaches a peer, of the parts of an endpoint."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

from realhf.base.loopback import is_loopback_host
from realhf.transport.errors import NetworkError

LOOPBACK_ADDRESS = "127.0.0.1"
_ANY_PORT = 9


def host_of(endpoint: str) -> str:
    """Return the host of ``tcp://HOST:PORT``. Raises NetworkError on anything else."""
    try:
        parts = urlsplit(endpoint)
        _ = parts.port
    except ValueError:
        parts = None
    # ZeroMQ would take more than this, such as ``tcp://interface;peer:port``.
    plain = parts is not None and parts.hostname and parts.scheme == "tcp" and parts.netloc.count(":") == 1
    if parts is None or not plain or set(parts.netloc) & set(";@*[]") or parts.path or parts.query:
        hint = "; IPv6 is not supported, give an IPv4 address or a name" if "::" in endpoint else ""
        raise NetworkError(f"{endpoint!r:.80} is not an address of the form tcp://HOST:PORT{hint}")
    return str(parts.hostname)


def on_loopback(endpoint: str) -> bool:
    """Return whether an endpoint ``tcp://HOST:PORT`` is on the loopback, by address or as ``localhost``."""
    try:
        return is_loopback_host(host_of(endpoint))
    except NetworkError:
        return False


def resolved(name: str, option: str) -> str:
    """Return the IPv4 address of a host name or address. Raises NetworkError naming the option."""
    try:
        found = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a name"
        raise NetworkError(f"{option}={name}: no IPv4 address of that name is known here: {reason}") from None
    return str(found[0][4][0])


def address_towards(host: str) -> str:
    """Return the own address on the way to ``host``. Nothing is sent. Raises NetworkError when there is no way."""
    target = resolved(host, "the master's address")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, _ANY_PORT))
        except OSError as error:
            raise NetworkError(f"no route from {socket.gethostname()} to {target}: {error.strerror}") from None
        return str(probe.getsockname()[0])


def own_addresses() -> list[str]:
    """Return the IPv4 addresses of this host, without the loopback's."""
    import psutil

    found = {
        entry.address
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family == socket.AF_INET and not is_loopback_host(entry.address)
    }
    return sorted(found)


def interface_of(address: str) -> str:
    """Return the name of the interface with this address. Raises NetworkError when there is none."""
    import psutil

    for name, entries in psutil.net_if_addrs().items():
        if any(entry.family == socket.AF_INET and entry.address == address for entry in entries):
            return name
    raise NetworkError(f"{socket.gethostname()} has no interface with the address {address}")
