"""Frames exchanged with a contained child process: a 4-byte big-endian length, then JSON.

The child may be under the control of an agent, so what it sends is untrusted: size and time limits
are checked before its content is read.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

from realhf.base import process_clock

_HEADER = struct.Struct(">I")
"""Length of the JSON text, in bytes."""
_MAX_FRAME_BYTES = 64 << 20
"""Maximum size of a received frame; a larger one is a ``BadFrame``."""


class BadFrame(Exception):
    """Raised for an invalid answer from a child; the child must then no longer be used."""


def read_frame(stream: Any) -> dict[str, Any] | None:
    """Read the next frame of a binary stream, in the child; return None at the end of the
    stream."""
    header = stream.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    body = stream.read(_HEADER.unpack(header)[0])
    return json.loads(body)


def encode_frame(message: dict[str, Any]) -> bytes:
    """Encode a message as a frame."""
    body = json.dumps(message).encode("utf-8")
    return _HEADER.pack(len(body)) + body


def has_unsolicited_data(channel: socket.socket) -> bool:
    """Return whether the child has sent something without having been asked, or has closed the
    channel."""
    channel.setblocking(False)
    try:
        channel.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def receive_frame(channel: socket.socket, timeout_s: float) -> Any:
    """Return the content of the next frame, without reading beyond it.

    Raises TimeoutError after ``timeout_s`` seconds, and BadFrame for a frame that is too large,
    invalid or incomplete.
    """
    deadline = process_clock.now() + timeout_s
    (size,) = _HEADER.unpack(_receive(channel, _HEADER.size, deadline))
    if size > _MAX_FRAME_BYTES:
        raise BadFrame(f"a frame of {size} bytes")
    try:
        return json.loads(_receive(channel, size, deadline))
    except (ValueError, RecursionError) as error:
        raise BadFrame(f"not JSON: {error}") from None


def _receive(channel: socket.socket, size: int, deadline: float) -> bytes:
    """Return exactly ``size`` bytes. ``deadline`` is a time on the clock ``process_clock.now``.
    Raises TimeoutError and BadFrame."""
    parts: list[bytes] = []
    while size:
        remaining_s = deadline - process_clock.now()
        if remaining_s <= 0:
            raise TimeoutError
        channel.settimeout(remaining_s)
        try:
            part = channel.recv(min(size, 1 << 20))
        except TimeoutError:
            continue  # the deadline is checked above, and may not have passed
        except OSError as error:
            raise BadFrame(str(error)) from None
        if not part:
            raise BadFrame("the worker ended")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
