"""Exchanges frames between a process and the contained child that works for it: a 4-byte big-endian
length, then JSON.

What a child sends is read as the words of a process that an agent may have taken over: nothing is
believed before its size and its time are checked.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

from realhf.base import process_clock

_HEADER = struct.Struct(">I")
_MAX_FRAME_BYTES = 64 << 20


class BadFrame(Exception):
    """The child did not answer as it should, and must not be used again."""


def read_frame(stream: Any) -> dict[str, Any] | None:
    """Read the next frame; returns None at the end of the stream."""
    header = stream.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    body = stream.read(_HEADER.unpack(header)[0])
    return json.loads(body)


def frame(message: dict[str, Any]) -> bytes:
    """Encode a message as a frame."""
    body = json.dumps(message).encode("utf-8")
    return _HEADER.pack(len(body)) + body


def spoke_unasked(channel: socket.socket) -> bool:
    """Return whether something lies unread in the channel, or the worker closed it."""
    channel.setblocking(False)
    try:
        channel.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def receive_frame(channel: socket.socket, timeout_s: float) -> Any:
    """Return the next frame's content; no byte behind it is read. Raises TimeoutError, BadFrame."""
    deadline = process_clock.now() + timeout_s
    (size,) = _HEADER.unpack(_receive(channel, _HEADER.size, deadline))
    if size > _MAX_FRAME_BYTES:
        raise BadFrame(f"a frame of {size} bytes")
    try:
        return json.loads(_receive(channel, size, deadline))
    except (ValueError, RecursionError) as error:
        raise BadFrame(f"not JSON: {error}") from None


def _receive(channel: socket.socket, size: int, deadline: float) -> bytes:
    parts: list[bytes] = []
    while size:
        left = deadline - process_clock.now()
        if left <= 0:
            raise TimeoutError
        channel.settimeout(left)
        try:
            part = channel.recv(min(size, 1 << 20))
        except TimeoutError:
            continue  # it is over above, unless this process stood still
        except OSError as error:
            raise BadFrame(str(error)) from None
        if not part:
            raise BadFrame("the worker ended")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
