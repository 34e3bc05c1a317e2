"""Encrypts ZeroMQ sockets (CURVE): a listener has a key pair, whoever connects has another and knows the listener's."""

from __future__ import annotations

import errno
from dataclasses import dataclass, field
from typing import Any

import zmq

from realhf.transport.errors import AddressTaken, NetworkError
from realhf.transport.network.addresses import own_addresses
from realhf.transport.network.doorkeeper import StrangersBound

KEY_CHARACTERS = 40
"""Length of a key in the printable form that ZeroMQ takes (Z85)."""
NO_CURVE = "network.bind: this installation of ZeroMQ has no CURVE, so it cannot encrypt"


@dataclass(frozen=True)
class CurvePair:
    """Is a public key and the secret one that belongs to it, both as Z85. Printed, it shows neither."""

    public: str = field(repr=False)
    secret: str = field(repr=False)

    @staticmethod
    def make() -> CurvePair:
        """Draw a pair. Raises NetworkError where ZeroMQ was built without encryption."""
        if not zmq.has("curve"):
            raise NetworkError(NO_CURVE)
        public, secret = zmq.curve_keypair()
        return CurvePair(public.decode("ascii"), secret.decode("ascii"))

    def fault(self, name: str = "") -> str:
        """Return what is wrong with the keys ``NAME_public`` and ``NAME_secret``, without showing them, or ""."""
        labels = [f"{name}_{side}".removeprefix("_") for side in ("public", "secret")]
        for label, key in zip(labels, (self.public, self.secret), strict=True):
            if fault := key_fault(key):
                return f"a key {label} {fault}"
        if zmq.curve_public(self.secret.encode("ascii")) != self.public.encode("ascii"):
            return f"keys {labels[0]} and {labels[1]} that do not belong together"
        return ""


def key_fault(key: str) -> str:
    """Return why a text is no key, or ""."""
    if len(key) != KEY_CHARACTERS:
        return f"of another length than {KEY_CHARACTERS}"
    try:
        zmq.curve_public(key.encode("ascii"))
    except zmq.ZMQError as error:
        if error.errno == errno.EINVAL:
            return "that is no Z85"
        raise NetworkError(NO_CURVE) from None
    return ""


def listen_encrypted(socket: zmq.Socket[Any], address: str, own: CurvePair) -> str:
    """Listen at ``address`` (tcp://...) with a socket of a context that has a ``Doorkeeper``, and return the endpoint.
    Raises as ``bound`` does."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt_string(zmq.CURVE_PUBLICKEY, own.public)
    socket.setsockopt_string(zmq.CURVE_SECRETKEY, own.secret)
    socket.setsockopt(zmq.ZAP_DOMAIN, b"run")
    # Without this a context that has no doorkeeper would take everybody.
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    StrangersBound(socket)
    return bound(socket, address)


def bound(socket: zmq.Socket[Any], address: str) -> str:
    """Bind a socket and return the endpoint. Raises AddressTaken, or NetworkError for an address that is not of this
    host."""
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        if error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV):
            there = ", ".join(own_addresses()) or "none but the loopback"
            raise NetworkError(f"{address}: no address of this host, which has {there} (network.bind)") from None
        raise AddressTaken(f"cannot listen on {address}: {error}") from None
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def connect_encrypted(socket: zmq.Socket[Any], endpoint: str, server_public: str, own: CurvePair) -> None:
    """Connect to the listener that has the secret key of ``server_public``."""
    socket.setsockopt_string(zmq.CURVE_SERVERKEY, server_public)
    socket.setsockopt_string(zmq.CURVE_PUBLICKEY, own.public)
    socket.setsockopt_string(zmq.CURVE_SECRETKEY, own.secret)
    socket.connect(endpoint)
