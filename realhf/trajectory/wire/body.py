"""Reads and decompresses request bodies under a cap, and within a budget of all bodies.

Source: docs/reference/trajectory.md 2.1, 3.8, 3.11.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from io import SEEK_END, BytesIO
from typing import Any

import zstandard
from isal import isal_zlib

from realhf.trajectory.records import Refusal

INLINE_BYTES = 256 << 10
"""Size up to which compressed bodies are tried on the event loop; larger ones go to a thread, without the GIL."""
INLINE_PLAIN_BYTES = 1 << 20
"""Size of the plain body from which inflating is begun again in a thread."""
GRACE_S, LEAST_BYTES_PER_S = 30.0, 16 << 10
"""How long a body may take, and the rate that gives it more time than that."""
MOST_MEMBERS = 10_000
"""Largest number of members of a stream: each costs a new decoder and a copy of the slice that it began in."""
_SLICE = 256 << 10
"""Size of the slices in which a gzip body is fed to the decoder."""
_MOST_AT_ONCE = 32 << 20
"""Largest stated length of a plain body that is inflated in one step."""
_STEP = 1 << 20
"""Size of the steps in which other bodies are inflated."""
_ZSTD_SLICE = 256
"""Size of the slices of a Zstandard stream: four bytes of it may mean 128 KiB, and its reader does not stop in
between."""
_BAD_GZIP: tuple[Any, ...] = (isal_zlib.IsalError, EOFError)
Take = Callable[[int], None]


def _free(nbytes: int) -> None:
    """Count nothing: the default of ``take``."""


class _Pieces:
    """Joins pieces as they come. They are never held beside the whole that they make: the buffer grows in its place,
    and gives its bytes away without a copy."""

    def __init__(self) -> None:
        self._buffer = BytesIO()
        self.size = 0

    def add(self, piece: bytes) -> None:
        """Append a piece. A single piece is kept without a copy."""
        if self.size:
            self._buffer.write(piece)
        else:
            self._buffer = BytesIO(piece)
            self._buffer.seek(0, SEEK_END)
        self.size += len(piece)

    def whole(self) -> bytes:
        """Return all pieces in one."""
        return self._buffer.getvalue()


async def read_body(
    chunks: AsyncIterator[bytes],
    *,
    encoding: str = "",
    max_bytes: int,
    allow_zstd: bool = False,
    take: Take = _free,
) -> bytes:
    """Return the plain body.

    ``encoding`` is the Content-Encoding header; gzip counts wherever it is contained. ``take`` is called, from any
    thread, with the bytes that are held. Raises Refusal 413 above ``max_bytes``, compressed or not, 400 for a damaged
    stream, 503 for one that stalls, and what ``take`` raises.
    """
    body = await _received(chunks, max_bytes, take)
    encoding = encoding.lower()
    if "gzip" in encoding:
        inflate = gunzip
    elif allow_zstd and "zstd" in encoding:
        inflate = unzstd
    else:
        return body
    plain = None
    if len(body) <= INLINE_BYTES:
        plain = inflate(body, min(INLINE_PLAIN_BYTES, max_bytes), _free)
        take(len(plain or b""))
    if plain is None:
        plain = await asyncio.to_thread(inflate, body, max_bytes, take)
    if plain is None:
        raise _too_large(max_bytes)
    return plain


async def _received(chunks: AsyncIterator[bytes], max_bytes: int, take: Take) -> bytes:
    """Return the body as it was sent. Its buffer is not held any longer when it is inflated. Raises Refusal 503 for one
    that hardly arrives: what there is of it holds room that others want."""
    pieces, loop = _Pieces(), asyncio.get_running_loop()
    began = loop.time()
    try:
        async with asyncio.timeout(GRACE_S) as limit:
            async for chunk in chunks:
                if pieces.size + len(chunk) > max_bytes:
                    raise _too_large(max_bytes)
                take(len(chunk))
                pieces.add(chunk)
                limit.reschedule(began + GRACE_S + pieces.size / LEAST_BYTES_PER_S)
    except TimeoutError:
        raise Refusal(
            503, f"only {pieces.size} bytes of the body came in {loop.time() - began:.0f} s", {"Retry-After": "1"}
        ) from None
    return pieces.whole()


def gunzip(body: bytes, max_bytes: int, take: Take = _free) -> bytes | None:
    """Inflate one or more gzip members; None where they hold more than ``max_bytes``.

    The last four bytes state the length of the plain body. If that is true and not much, one step is enough; otherwise
    the steps are small, since each is held a second time while it is added to the others. Raises Refusal 400 (not gzip,
    truncated, corrupt).
    """
    said = int.from_bytes(body[-4:], "little") + 1
    step = said if _STEP < said <= min(max_bytes, _MOST_AT_ONCE) else _STEP
    pieces, members, position, fed = _Pieces(), 0, 0, b""
    try:
        while position < len(body) or fed:
            member = isal_zlib.decompressobj(31)
            members += 1
            while not member.eof:
                if not fed:
                    fed = body[position : position + _SLICE]
                    position += len(fed)
                room = min(step, max_bytes - pieces.size + 1)
                take(room)
                part = member.decompress(fed, room)
                take(len(part) - room)
                if not part and not fed and not member.eof:
                    raise Refusal(400, "the gzip body is truncated")
                fed = member.unconsumed_tail
                pieces.add(part)
                if pieces.size > max_bytes:
                    return None
                step = _STEP  # the stated length was not all of it
            fed = member.unused_data
            _count(members)
    except _BAD_GZIP as error:
        raise Refusal(400, f"the body is not valid gzip: {error}") from error
    return pieces.whole()


def unzstd(body: bytes, max_bytes: int, take: Take = _free) -> bytes | None:
    """Inflate Zstandard frames; None where they hold more than ``max_bytes``. Raises Refusal 400."""
    pieces, frames, position = _Pieces(), 0, 0
    try:
        while position < len(body):
            frame = zstandard.ZstdDecompressor(max_window_size=1 << 27).decompressobj()
            frames += 1
            while not frame.eof:
                if position >= len(body):
                    raise Refusal(400, "the zstd body is truncated")
                part = frame.decompress(body[position : position + _ZSTD_SLICE])
                position += min(_ZSTD_SLICE, len(body) - position)
                if pieces.size + len(part) > max_bytes:
                    return None
                take(len(part))
                pieces.add(part)
            position -= len(frame.unused_data)
            _count(frames)
    except zstandard.ZstdError as error:
        raise Refusal(400, f"the body is not valid zstd: {error}") from error
    return pieces.whole()


def _count(members: int) -> None:
    if members > MOST_MEMBERS:
        raise Refusal(400, f"the compressed body has more than {MOST_MEMBERS} members")


def _too_large(max_bytes: int) -> Refusal:
    return Refusal(413, f"the body is larger than {max_bytes} bytes")


class BodyBudget:
    """Allows ``limit`` bytes for all bodies together, compressed and plain. They are counted as they arrive, not as
    they are announced, so that no client holds room by announcing much and sending nothing."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self.refused = 0
        self.lock = threading.Lock()


class BodyShare:
    """Counts what one request holds of the budget, until ``release``. Bodies are inflated in threads, so any thread may
    call ``take``."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._held = 0
        self._released = False

    def take(self, nbytes: int) -> None:
        """Take more bytes from the budget. Raises Refusal 503 when they do not fit, or when the request has ended
        meanwhile."""
        budget = self._budget
        with budget.lock:
            if budget.held + nbytes > budget.limit or self._released:
                budget.refused += 1
                raise Refusal(
                    503, f"the bodies of all requests together exceed {budget.limit} bytes", {"Retry-After": "1"}
                )
            budget.held += nbytes
            self._held += nbytes

    def release(self) -> None:
        """Give everything back."""
        with self._budget.lock:
            self._released = True
            self._budget.held -= self._held
            self._held = 0
