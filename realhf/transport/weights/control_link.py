"""Carries messages between the publisher of a broadcast and a receiver: length (u32) and a msgpack map, over TCP.

Receiver: ``{checksum, name}``, then per broadcast ``{address}`` (its gloo address) and ``{end: got | broke}``.
Publisher: ``{gone}``, or per broadcast ``{seat: [rank, size]}`` and ``{addresses}`` (of all members, by rank) or
``{again}`` when a member was lost. The end of the connection is the end of the peer.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import Any

import msgpack

from realhf.transport.envelope import unpack_map
from realhf.transport.errors import ProtocolError

MAX_MESSAGE_BYTES = 1 << 20


class ControlLink:
    """Is one end of a connection. Sending is thread-safe; only one thread may receive."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._connection = connection
        # A socket has one timeout for both directions, and the two threads need one each.
        self._outgoing = connection.dup()
        self._sending = threading.Lock()

    @property
    def own_address(self) -> str:
        """This host's address on the way to the peer."""
        return str(self._connection.getsockname()[0])

    def send(self, timeout_s: float, **message: Any) -> None:
        """Send a message. Raises OSError when the peer is gone, TimeoutError when it does not read."""
        raw = msgpack.packb(message)
        assert raw is not None
        with self._sending:
            self._outgoing.settimeout(max(timeout_s, 0.001))
            self._outgoing.sendall(len(raw).to_bytes(4, "little") + raw)

    def receive(self, timeout_s: float) -> dict[str, Any]:
        """Return the next message. Raises TimeoutError, ConnectionError when the peer is gone, and ProtocolError on
        anything malformed."""
        deadline = time.monotonic() + timeout_s
        size = int.from_bytes(self._exactly(4, deadline), "little")
        if size > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"a message of {size} bytes")
        return unpack_map(self._exactly(size, deadline), MAX_MESSAGE_BYTES)

    def _exactly(self, size: int, deadline: float) -> bytes:
        raw = bytearray()
        while len(raw) < size:
            self._connection.settimeout(max(deadline - time.monotonic(), 0.001))
            part = self._connection.recv(size - len(raw))
            if not part:
                raise ConnectionResetError("the peer closed the connection")
            raw += part
        return bytes(raw)

    def hang_up(self) -> None:
        """End the connection for the peer and for a thread that receives here, and keep the descriptors."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection and release it. Call it on the thread that receives."""
        self.hang_up()
        self._connection.close()
        self._outgoing.close()
