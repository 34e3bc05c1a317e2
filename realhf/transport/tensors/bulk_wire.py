"""Defines what is said on a bulk connection: requests of fixed size, and answers that begin with theirs."""

from __future__ import annotations

import math
import struct
import time

from realhf.transport.network.sealed import Connection

REQUEST = struct.Struct("!16sIQI")
"""Number of the transfer, frame, start, length."""
ANSWER = struct.Struct("!BI")
"""What follows, and its bytes."""
PIECE, REFUSED = 0, 1
MOST_MESSAGE_BYTES = 4000
HANDSHAKE_S = 8.0
"""How long each step of a handshake may take, and the connection before it."""
STALL_S = 20.0
"""After this long without a byte the other end counts as lost."""
CALL_BYTES = 1 << 20
"""Bytes that one call of the system sends or receives at most; both fit into a core's cache on the way."""


def send(connection: Connection, view: memoryview) -> None:
    """Send all of a view. Raises OSError, TimeoutError among them."""
    for start in range(0, view.nbytes, CALL_BYTES):
        connection.sendall(view[start : start + CALL_BYTES])


def receive(connection: Connection, view: memoryview, deadline: float = math.inf) -> None:
    """Fill a view. Raises OSError, TimeoutError among them when something came and ``deadline`` (time.monotonic) is
    over, and ConnectionError when the other end has closed."""
    start, size = 0, view.nbytes
    while start < size:
        count = connection.recv_into(view[start : start + CALL_BYTES])
        if count == 0:
            raise ConnectionError("closed the connection")
        start += count
        if start < size and time.monotonic() >= deadline:
            raise TimeoutError


def received(connection: Connection, size: int) -> bytes:
    """Receive exactly ``size`` bytes, else as ``receive``."""
    found = bytearray(size)
    receive(connection, memoryview(found))
    return bytes(found)
