"""Messages of the request-reply protocol: a msgpack header frame and a msgpack payload frame.

Header fields: ``v`` protocol version, ``kind``, ``run`` id, ``session`` of the worker's process;
requests add ``id`` (16 random bytes), ``no`` (call number on the ordered lane, 0 on the immediate
lane), ``handler``, ``mfc``, ``step`` and ``deadline_ms``. Sizes are checked before anything is
decoded (docs/reference/dataflow.md 6).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import msgpack

from realhf.transport.errors import OtherProtocol, ProtocolError

PROTOCOL = 3
"""Version of the protocol; all processes of a run must have the same one."""
MAX_HEADER_BYTES = 1 << 20
MAX_PAYLOAD_BYTES = 64 << 20
MAX_DEPTH = 16
"""Maximum nesting depth of a header."""
MAX_HEADER_ITEMS = 1 << 16
"""Maximum number of entries in a list or map of a header."""
COUNTED_FROM_BYTES = 1 << 20
"""Payload size in bytes from which lists and maps are counted while decoding."""
MAX_PAYLOAD_CONTAINERS = 1 << 20
"""Maximum number of lists and maps in a payload. An empty list takes one byte on the wire and 64 in
memory, so a limit on bytes alone would let one message allocate gigabytes. Payloads smaller than
``COUNTED_FROM_BYTES`` are too small for that."""
HIGH_WATER_MARK = 10_000
"""Maximum number of messages that a socket queues per peer."""

T = TypeVar("T")


def pack_header(kind: str, run: str, session: bytes, **fields: Any) -> bytes:
    """Encode a header. Raises ProtocolError when it exceeds its limit."""
    header = _pack({"v": PROTOCOL, "kind": kind, "run": run, "session": session, **fields})
    if len(header) > MAX_HEADER_BYTES:
        raise ProtocolError(f"{kind} header of {len(header)} bytes exceeds {MAX_HEADER_BYTES}")
    return header


def _pack(value: Any) -> bytes:
    return cast(bytes, msgpack.packb(value))


def unpack_header(frame: Any) -> dict[str, Any]:
    """Decode a header. Raises ProtocolError unless it is a small, shallow msgpack map of this
    protocol version."""
    header = unpack_map(frame, MAX_HEADER_BYTES)
    if header.get("v") != PROTOCOL:
        raise OtherProtocol(header, PROTOCOL)
    return header


def unpack_map(frame: Any, limit: int) -> dict[str, Any]:
    """Decode a msgpack map of at most ``limit`` bytes and MAX_DEPTH levels. Raises ProtocolError
    for any other frame."""
    view = memoryview(frame)
    if view.nbytes > limit:
        raise ProtocolError(f"header of {view.nbytes} bytes exceeds {limit}")
    try:
        value = msgpack.unpackb(
            view, strict_map_key=True, max_array_len=MAX_HEADER_ITEMS, max_map_len=MAX_HEADER_ITEMS
        )
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise ProtocolError(
            f"header is not valid msgpack: {error or type(error).__name__}"
        ) from None
    if not isinstance(value, dict):
        raise ProtocolError(f"header is a {type(value).__name__}, expected a map")
    _check_depth(value)
    return value


def _check_depth(value: Any) -> None:
    # Level by level rather than by recursion: the depth is what is limited here.
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        children = [item.values() if type(item) is dict else item for item in level]
        level = [
            child
            for items in children
            for child in items
            if type(child) is dict or type(child) is list
        ]
        if not level:
            return
    raise ProtocolError(f"header is nested deeper than {MAX_DEPTH} levels")


def pack_payload(value: Any) -> bytes:
    """Encode a payload. Raises ProtocolError if the value is not plain data, or is too large for a
    control message."""
    try:
        payload = _pack(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ProtocolError(f"payload cannot be sent: {error}") from None
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise ProtocolError(
            f"payload of {len(payload)} bytes exceeds {MAX_PAYLOAD_BYTES}; tensors travel on the "
            f"data plane"
        )
    return payload


def unpack_payload(frames: Sequence[Any]) -> Any:
    """Decode the payload frame after the header; return None if there is none.

    Raises ProtocolError for more than one frame, for a payload that is too large (on the wire or as
    objects), and for anything but msgpack of plain data.
    """
    if not frames:
        return None
    if len(frames) > 1:
        raise ProtocolError(f"{len(frames)} payload frames, expected one")
    view = memoryview(frames[0])
    if view.nbytes > MAX_PAYLOAD_BYTES:
        raise ProtocolError(f"payload of {view.nbytes} bytes exceeds {MAX_PAYLOAD_BYTES}")
    count = _container_counter() if view.nbytes > COUNTED_FROM_BYTES else None
    try:
        return msgpack.unpackb(
            view, strict_map_key=False, max_ext_len=0, list_hook=count, object_hook=count
        )
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise ProtocolError(
            f"payload is not valid msgpack: {error or type(error).__name__}"
        ) from None


def _container_counter() -> Callable[[T], T]:
    """Build a msgpack hook that counts containers and raises ProtocolError when there are too
    many."""
    numbers = itertools.count(1)

    def count(container: T) -> T:
        if next(numbers) > MAX_PAYLOAD_CONTAINERS:
            raise ProtocolError(f"payload of more than {MAX_PAYLOAD_CONTAINERS} lists and maps")
        return container

    return count


def field(header: dict[str, Any], name: str, kind: type[T]) -> T:
    """Return a header field of the given type. Raises ProtocolError if it is missing or of a
    different type."""
    value = header.get(name)
    if type(value) is kind:
        return value
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ProtocolError(f"header field {name!r} is {value!r:.60}, expected {kind.__name__}")
    return value
