"""Fetches pieces from another host, over one encrypted connection."""

from __future__ import annotations

import contextlib
import socket
import ssl
import time

from realhf.transport.errors import DataError, FetchTimeout, PeerLost
from realhf.transport.network.sealed import Connection
from realhf.transport.network.tls import RunTls
from realhf.transport.tensors import bulk_wire
from realhf.transport.tensors.pieces import Piece


class BulkLane:
    """Is one connection to the ``BulkDoor`` at ``host`` and ``port``, made at the first request; plain without ``tls``.
    One thread uses it. An error breaks it off; the next request makes another one."""

    def __init__(self, tls: RunTls | None, host: str, port: int) -> None:
        self._tls, self._address = tls, (host, port)
        self._name = f"{host}:{port}"
        self._connection: Connection | None = None

    def fetch(self, transfer: bytes, piece: Piece, into: memoryview, deadline: float) -> None:
        """Fill ``into`` with a piece. Raises PeerLost for a connection that broke or could not be made, FetchTimeout
        after ``deadline`` (time.monotonic), DataError for what the peer says instead."""
        message = ""
        try:
            connection = self._connected(deadline)
            connection.sendall(bulk_wire.REQUEST.pack(transfer, *piece))
            kind, size = bulk_wire.ANSWER.unpack(bulk_wire.received(connection, bulk_wire.ANSWER.size))
            if kind == bulk_wire.REFUSED and size <= bulk_wire.MOST_MESSAGE_BYTES:
                message = bulk_wire.received(connection, size).decode("utf-8", "replace")
            elif kind != bulk_wire.PIECE or size != into.nbytes:
                message = f"another piece than {tuple(piece)} was sent"
            else:
                self._fill(connection, into, deadline)
                return
        except OSError as error:
            self.close()
            if time.monotonic() >= deadline:
                raise FetchTimeout(f"{self._name} did not send all of a transfer before the deadline") from None
            raise PeerLost(f"{self._name} {_reason(error)}") from None
        self.close()
        raise DataError(f"{self._name} broke off a transfer: {message}")

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.close()
            self._connection = None

    def _connected(self, deadline: float) -> Connection:
        if self._connection is None:
            limit_s = _time_left(deadline, bulk_wire.HANDSHAKE_S)
            plain = socket.create_connection(self._address, timeout=limit_s)
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connection = self._tls.connect(plain) if self._tls is not None else plain
        self._connection.settimeout(_time_left(deadline, bulk_wire.STALL_S))
        return self._connection

    def _fill(self, connection: Connection, into: memoryview, deadline: float) -> None:
        """Receive in parts, so that a peer that sends one byte now and then does not outlive the deadline."""
        for start in range(0, into.nbytes, bulk_wire.CALL_BYTES):
            connection.settimeout(_time_left(deadline, bulk_wire.STALL_S))
            bulk_wire.receive(connection, into[start : start + bulk_wire.CALL_BYTES], deadline)


def _time_left(deadline: float, at_most: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return min(left, at_most)


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
        return f"refused the certificate of this run, or has another one: {error.reason or error}"
    if isinstance(error, TimeoutError):
        return f"sent nothing for {bulk_wire.STALL_S:g} s, or took no connection within {bulk_wire.HANDSHAKE_S:g} s"
    return str(error.strerror or error) or "closed the connection"
