"""Encrypts ZeroMQ sockets (CURVE) and admits peers by key (ZeroMQ's authentication protocol, ZAP 1.0).

A listener has a key pair, whoever connects has another and knows the listener's. Connections that have not shown a key
yet are bounded in number.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from realhf.transport.errors import AddressTaken, NetworkError
from realhf.transport.network.addresses import own_addresses

_log = logging.getLogger(__name__)
ENDPOINT = "inproc://zeromq.zap.01"
"""Where ZeroMQ asks, in each context of its own."""
_VERSION = b"1.0"
_FIELDS, _KEY_BYTES = 7, 32
HANDSHAKE_S = 8.0
"""How long a connection may take to show its key."""
SHARE, FEWEST = 8, 16
"""Strangers of one listener hold at most one of so many of the descriptors of this process, and so many in any case."""
_SHOWN_BYTES = 240
"""Who has acknowledged as much has shown a key: our greeting has 64 bytes, WELCOME 170, and READY follows only a key
that was taken. What a stranger sends says nothing: a long frame is read before anything of it is looked at."""
_ACKED_AT = 120
"""Where the kernel's ``tcp_info`` holds the bytes that were acknowledged."""
_WATCHED = zmq.EVENT_ACCEPTED | zmq.EVENT_ACCEPT_FAILED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED


class Authenticator:
    """Lets in whoever connects with a public key (Z85) that ``knows`` knows, which is asked on its own
    thread. Each message carries its sender's key as ``User-Id``. It ends with its context.

    It has to be there before a socket of the context listens: until then, the context refuses everybody.
    """

    def __init__(self, context: zmq.Context[Any], knows: Callable[[str], bool]) -> None:
        self._knows = knows
        self.refused = 0
        # A shadow's sockets are not closed by the context's ``destroy``, which may run on another thread than this one.
        self._socket = zmq.Context.shadow(context.underlying).socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(ENDPOINT)
        threading.Thread(target=self._run, name="authenticator", daemon=True).start()

    def _run(self) -> None:
        try:
            while True:
                self._socket.send_multipart(self._answer(self._socket.recv_multipart()))
        except zmq.ZMQError:
            # The context is being terminated, which waits until this socket is closed.
            self._socket.close(0)

    def _answer(self, request: list[bytes]) -> list[bytes]:
        number = request[1] if len(request) > 1 else b""
        asked = len(request) == _FIELDS and request[0] == _VERSION and request[5] == b"CURVE"
        key = z85.encode(request[6]) if asked and len(request[6]) == _KEY_BYTES else b""
        if key and self._knows(key.decode("ascii")):
            return [_VERSION, number, b"200", b"OK", key, b""]
        self.refused += 1
        if self.refused & (self.refused - 1) == 0:
            address = request[3].decode("ascii", "replace") if len(request) > 3 else "an unknown address"
            _log.warning("connection %d refused: %s has not the key of this run", self.refused, address)
        return [_VERSION, number, b"400", b"the key is not of this run", b"", b""]


class HandshakeLimit:
    """Keeps those who hold connections of a listener and never show a key from taking all descriptors of this process:
    one too many ends the oldest of them. ZeroMQ itself takes connections without end, and where there is no descriptor
    left, it tries again and again with a whole core. Made before the socket listens; it ends with the socket.

    ``most``: so many strangers at once; 0: as many as the limit of descriptors allows.
    """

    def __init__(self, listener: zmq.Socket[Any], most: int = 0) -> None:
        address = f"inproc://strangers-{id(self)}"
        listener.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))
        listener.monitor(address, _WATCHED)
        self._events = zmq.Context.shadow(listener.context.underlying).socket(zmq.PAIR)
        self._events.setsockopt(zmq.LINGER, 0)
        # Where no descriptor is left, ZeroMQ reports half a million failures a second: it waits for this thread then.
        self._events.setsockopt(zmq.RCVHWM, 1000)
        self._events.connect(address)
        self._most = most
        self._suspects: dict[int, None] = {}
        self._spare = self._kept_back()
        self.ended = 0
        threading.Thread(target=self._run, name="strangers", daemon=True).start()

    def _run(self) -> None:
        try:
            while True:
                found = recv_monitor_message(self._events)
                event, value = int(found["event"]), int(found["value"])
                port = int(bytes(found["endpoint"]).rpartition(b":")[2] or 0)
                if event == zmq.EVENT_MONITOR_STOPPED:
                    return
                if event == zmq.EVENT_ACCEPTED:
                    self._came(value, port)
                elif event == zmq.EVENT_ACCEPT_FAILED:
                    self._starved(port)
                else:
                    self._suspects.pop(value, None)
        except zmq.ZMQError:
            pass  # the context is being terminated, which waits until this socket is closed
        finally:
            self._events.close(0)
            if self._spare is not None:
                os.close(self._spare)

    def _came(self, descriptor: int, port: int) -> None:
        self._suspects.pop(descriptor, None)
        self._suspects[descriptor] = None
        most = self._most or max(FEWEST, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // SHARE)
        if self._spare is None:
            self._spare = self._kept_back()
        if len(self._suspects) > most:
            self._end_oldest(len(self._suspects) - most, port)

    def _starved(self, port: int) -> None:
        """Give up the descriptor that was kept back, so that the connection that waits can be taken, and ended."""
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None
        self._end_oldest(max(1, len(self._suspects) // 2), port)

    @staticmethod
    def _kept_back() -> int | None:
        try:
            return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None

    def _end_oldest(self, count: int, port: int) -> None:
        """End so many of the connections that have not shown a key yet, and forget those that have."""
        for descriptor in [*self._suspects]:
            if count == 0:
                return
            del self._suspects[descriptor]
            if _ended_if_strange(descriptor, port):
                count -= 1
                self.ended += 1
                if self.ended & (self.ended - 1) == 0:
                    _log.warning("port %d: %d connections ended that showed no key of this run", port, self.ended)


def _ended_if_strange(descriptor: int, port: int) -> bool:
    """End a connection of the listener at ``port`` to which hardly anything was said. ZeroMQ may have closed it
    meanwhile, and the number may be that of another file, which stays as it is."""
    try:
        connection = socket.socket(fileno=descriptor)
    except OSError:
        return False
    try:
        if connection.getsockname()[1] != port:
            return False
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKED_AT + 8)
        if len(info) < _ACKED_AT + 8 or struct.unpack_from("Q", info, _ACKED_AT)[0] >= _SHOWN_BYTES:
            return False
        with contextlib.suppress(OSError):  # it has ended by itself
            connection.shutdown(socket.SHUT_RDWR)
        return True
    except (OSError, IndexError, TypeError):
        return False
    finally:
        connection.detach()


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
    """Listen at ``address`` (tcp://...) with a socket of a context that has an ``Authenticator``, and return the
    endpoint. Raises as ``bound`` does."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt_string(zmq.CURVE_PUBLICKEY, own.public)
    socket.setsockopt_string(zmq.CURVE_SECRETKEY, own.secret)
    socket.setsockopt(zmq.ZAP_DOMAIN, b"run")
    # Without this a context that has no authenticator would take everybody.
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    HandshakeLimit(socket)
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
