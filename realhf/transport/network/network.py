"""Binds and connects the sockets of one process, see the package."""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import zmq

from realhf.api.config.network import WILDCARD, NetworkConfig
from realhf.base.loopback import is_loopback_host
from realhf.transport.errors import NetworkError
from realhf.transport.network.addresses import (
    LOOPBACK_ADDRESS,
    address_towards,
    host_of,
    on_loopback,
    own_addresses,
    resolved,
)
from realhf.transport.network.curve import Authenticator, bound, connect_encrypted, listen_encrypted
from realhf.transport.network.keys import RunKeys


def require_loopback(address: str) -> str:
    """Return the address if it is ``tcp://`` on a loopback interface. Raises NetworkError otherwise: without keys a
    socket takes everybody, so nothing may listen where another host can reach it."""
    if not on_loopback(address):
        raise NetworkError(
            f"refusing to listen on {address!r:.80}: without the keys of a run only tcp:// on a loopback address is "
            "allowed (network.bind makes keys, --key-file names them)"
        )
    return address


@dataclass(frozen=True)
class Network:
    """Says where this process listens (``host``), how others reach it (``advertised``), and with which keys.
    ``trusted`` is the option of that name. Raises NetworkError for another address than loopback without keys."""

    host: str = LOOPBACK_ADDRESS
    advertised: str = LOOPBACK_ADDRESS
    keys: RunKeys | None = None
    trusted: bool = False

    def __post_init__(self) -> None:
        if self.keys is None:
            require_loopback(f"tcp://{self.host}:0")

    @staticmethod
    def of_master(config: NetworkConfig, keys: RunKeys | None) -> Network:
        """Return the network of a master. Raises NetworkError naming the option that is wrong."""
        if not config.bind:
            return Network(keys=keys)
        host = config.bind if config.bind == WILDCARD else resolved(config.bind, "network.bind")
        if is_loopback_host(host) and not is_loopback_host(config.bind):
            raise NetworkError(
                f"network.bind={config.bind}: on this host the name means the loopback ({host}); give an address that "
                f"others reach, such as {', '.join(own_addresses()) or 'none here'}"
            )
        return Network(host, config.advertise or host, keys, config.trusted)

    @staticmethod
    def of_worker(config: NetworkConfig, keys: RunKeys | None, master: str) -> Network:
        """Return the network of a worker of the master at ``master``, tcp://HOST:PORT. Raises NetworkError when it
        cannot be reached from here."""
        own = LOOPBACK_ADDRESS if on_loopback(master) else address_towards(host_of(master))
        return Network(WILDCARD if config.bind == WILDCARD else own, own, keys, config.trusted)

    @property
    def protected(self) -> bool:
        """Whether sockets are encrypted and take nobody without the keys of the run."""
        return self.keys is not None

    @property
    def beyond_loopback(self) -> bool:
        """Whether other hosts can reach this process."""
        return not is_loopback_host(self.host)

    def reached_at(self, url: str) -> str:
        """Return the address at which others reach an HTTP server that listens at ``url`` in this process."""
        parts = urlsplit(url)
        return url if parts.hostname != WILDCARD else f"{parts.scheme}://{self.advertised}:{parts.port}"

    def with_token(self, url: str) -> str:
        """Return the address of an HTTP server of the run with the token that it wants, as ``http://:TOKEN@HOST:PORT``.
        Only the client that it is for takes it; it is in no message."""
        if self.keys is None:
            return url
        scheme, _, rest = url.partition("://")
        return f"{scheme}://:{self.keys.token}@{rest}"

    def context(self, io_threads: int = 1, *, sockets: int = 0) -> zmq.Context[Any]:
        """Make a context for sockets that listen; those that connect may share it. ``sockets``: so many may be open at
        once (0: ZeroMQ's own limit, about a thousand)."""
        context: zmq.Context[Any] = zmq.Context(io_threads=io_threads)
        if sockets:
            context.set(zmq.MAX_SOCKETS, sockets)  # counts until the first socket is made
        if self.keys is not None:
            known = self.keys.client_public
            Authenticator(context, lambda key: hmac.compare_digest(key, known))
        return context

    def listen(self, socket: zmq.Socket[Any], bind: str = "") -> str:
        """Listen with a socket of a context of ``context``, on any free port of ``host``, or at ``bind`` (tcp://...).
        Returns the endpoint at which others reach it. Raises AddressTaken, or NetworkError for an address that is not
        of this host, and for one other than loopback without keys."""
        address = bind or f"tcp://{self.host}:0"
        if self.keys is None:
            endpoint = bound(socket, require_loopback(address))
        else:
            endpoint = listen_encrypted(socket, address, self.keys.server)
        return endpoint if bind or self.host == self.advertised else self._told(endpoint)

    def _told(self, endpoint: str) -> str:
        return f"tcp://{self.advertised}:{endpoint.rpartition(':')[2]}"

    def connect(self, socket: zmq.Socket[Any], endpoint: str) -> None:
        """Connect to a listener of the run. Raises NetworkError for one that is not on the loopback where there are no
        keys: what is sent would be readable on the way."""
        if self.keys is None:
            if not on_loopback(endpoint):
                raise NetworkError(
                    f"{endpoint!r:.80} is not on the loopback, and this process has no keys of the run "
                    "(network.bind makes them, --key-file names them)"
                )
            socket.connect(endpoint)
        else:
            host_of(endpoint)
            connect_encrypted(socket, endpoint, self.keys.server_public, self.keys.client)


LOOPBACK = Network()
"""The network of a run that one host has for itself: nothing is encrypted, since nothing leaves it."""
