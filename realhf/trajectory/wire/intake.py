"""From a request body to validated groups, without ever holding the event loop for long.

Source: trajectory specification 2.1, 2.6, 3.8.
"""

from __future__ import annotations

import asyncio

from realhf.trajectory.refusal import Refusal
from realhf.trajectory.wire import json_groups, lax_groups, msgpack_groups
from realhf.trajectory.wire.incoming import Incoming
from realhf.trajectory.wire.offload import Offload

YIELD_BYTES = 128 << 10
"""Between groups of a body the event loop gets a turn after so many bytes."""
INLINE_BYTES = 4 << 20
"""Bodies beyond this are validated in another process,"""
INLINE_LAX_BYTES = 32 << 10
"""so are those with a group beyond this that needs the lax path, which is twenty times slower,"""
INLINE_NESTS = 50_000
"""and those with more objects and arrays than this."""
MSGPACK_TYPES = ("application/msgpack", "application/x-msgpack", "application/vnd.msgpack")


def is_msgpack(content_type: str | None) -> bool:
    """Whether a body of this type, or an answer of it, is MessagePack."""
    return content_type is not None and content_type.partition(";")[0].strip().lower() in MSGPACK_TYPES


async def parse_groups(
    body: bytes, content_type: str | None, *, listed: bool, int64: bool, offload: Offload
) -> list[Incoming]:
    """Groups of a push. ``listed``: the body is an array of them; ``int64``: tokens must fit 64 bits. Raises Refusal
    422 with ``loc``."""
    msgpack = is_msgpack(content_type)
    if not msgpack:
        check_json_type(content_type)
    if len(body) <= INLINE_BYTES and (msgpack or body.count(b"{") + body.count(b"[") <= INLINE_NESTS):
        async with offload.turn:
            groups = await _parse_here(body, msgpack, listed, int64)
        if groups is not None:
            return groups
    found = await offload.run(parse_all, body, msgpack, listed, int64)
    if isinstance(found, Refused):
        raise Refusal(found[0], found[1])
    return found


async def _parse_here(body: bytes, msgpack: bool, listed: bool, int64: bool) -> list[Incoming] | None:
    """None: this would take too long on the event loop."""
    loc: list[str | int] = ["body"]
    items = _split(body, loc, msgpack) if listed else [body]
    if items is None:
        return lax_groups.read_lax_list(body, loc, int64=int64) if len(body) <= INLINE_LAX_BYTES else None
    groups, since = [], 0
    for index, item in enumerate(items):
        group = _read_fast(item, [*loc, index] if listed else loc, msgpack)
        if group is None and len(item) > INLINE_LAX_BYTES:
            return None
        groups.append(group or lax_groups.read_lax(item, [*loc, index] if listed else loc, int64=int64))
        since += len(item)
        if since > YIELD_BYTES:
            since = 0
            await asyncio.sleep(0)
    return groups


class Refused(tuple[int, object]):
    """A Refusal on its way back from another process."""


def parse_all(body: bytes, msgpack: bool, listed: bool, int64: bool) -> list[Incoming] | Refused:
    """The same in one go, for a process of its own."""
    loc: list[str | int] = ["body"]
    try:
        items = _split(body, loc, msgpack) if listed else [body]
        if items is None:
            return lax_groups.read_lax_list(body, loc, int64=int64)
        places = [[*loc, index] for index in range(len(items))] if listed else [loc]
        return [_read_fast(item, place, msgpack) or lax_groups.read_lax(item, place, int64=int64)
                for item, place in zip(items, places, strict=True)]  # fmt: skip
    except Refusal as refusal:
        return Refused((refusal.status, refusal.detail))


def check_json_type(content_type: str | None) -> None:
    """A body without a type is taken for JSON; any other type than JSON is a 422."""
    if content_type is None:
        return
    kind = content_type.partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise Refusal(422, [{"type": "model_attributes_type", "loc": ["body"], "input": None,
                             "msg": f"Content-Type is {kind[:80]!r}; send application/json"}])  # fmt: skip


def _read_fast(data: bytes, loc: list[str | int], msgpack: bool) -> Incoming | None:
    if msgpack:
        return msgpack_groups.read_group(data, loc)
    return json_groups.read_group(data) or json_groups.read_known(data)


def _split(body: bytes, loc: list[str | int], msgpack: bool) -> list[bytes] | None:
    return msgpack_groups.split_list(body, loc) if msgpack else json_groups.split_list(body)
