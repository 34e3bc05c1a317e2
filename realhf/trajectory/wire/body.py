"""Request bodies: reading and decompression under a size limit, and within a memory budget for all
bodies.

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
"""Largest compressed body that is first tried on the event loop; larger ones go to a thread,
without the GIL."""
INLINE_PLAIN_BYTES = 1 << 20
"""Plain size at which decompression on the event loop is abandoned and restarted in a thread."""
GRACE_S = 30.0
LEAST_BYTES_PER_S = 16 << 10
"""Seconds that a body may take, and the transfer rate above which it may take longer."""
MOST_MEMBERS = 10_000
"""Most members of a stream; each costs a new decoder and a copy of the slice in which it starts."""
_SLICE = 256 << 10
"""Size of the slices in which a gzip body is fed to the decoder."""
_MOST_AT_ONCE = 32 << 20
"""Largest stated plain length that is decompressed in one step."""
_STEP = 1 << 20
"""Size of the steps in which other bodies are decompressed."""
_ZSTD_SLICE = 256
"""Size of the slices of a Zstandard stream: four bytes may expand to 128 KiB, and its decoder does
not stop in between."""
_BAD_GZIP: tuple[Any, ...] = (isal_zlib.IsalError, EOFError)
Take = Callable[[int], None]
"""Function that counts held bytes (negative to release) and may raise Refusal."""


def _count_nothing(nbytes: int) -> None:
    """Count nothing; the default of ``take``."""


class _Pieces:
    """Buffer that joins pieces as they arrive without holding them twice; the result is returned
    without a copy."""

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
        """Return all pieces joined."""
        return self._buffer.getvalue()


async def read_body(
    chunks: AsyncIterator[bytes],
    *,
    encoding: str = "",
    max_bytes: int,
    allow_zstd: bool = False,
    take: Take = _count_nothing,
) -> bytes:
    """Return the plain body.

    ``encoding`` is the Content-Encoding header; gzip counts wherever it is contained. ``take`` is
    called, from any thread, with the number of bytes held. Raises Refusal 413 above ``max_bytes``,
    compressed or not, 400 for a damaged stream, 503 for one that stalls, and the errors of
    ``take``.
    """
    body = await _receive(chunks, max_bytes, take)
    encoding = encoding.lower()
    if "gzip" in encoding:
        inflate = gunzip
    elif allow_zstd and "zstd" in encoding:
        inflate = unzstd
    else:
        return body
    plain = None
    if len(body) <= INLINE_BYTES:
        plain = inflate(body, min(INLINE_PLAIN_BYTES, max_bytes), _count_nothing)
        take(len(plain or b""))
    if plain is None:
        plain = await asyncio.to_thread(inflate, body, max_bytes, take)
    if plain is None:
        raise _too_large(max_bytes)
    return plain


async def _receive(chunks: AsyncIterator[bytes], max_bytes: int, take: Take) -> bytes:
    """Return the body as it was sent. Raises Refusal 503 for a body that arrives too slowly,
    because its bytes occupy the budget of other requests."""
    pieces = _Pieces()
    loop = asyncio.get_running_loop()
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


def gunzip(body: bytes, max_bytes: int, take: Take = _count_nothing) -> bytes | None:
    """Decompress one or more gzip members; None if they contain more than ``max_bytes``.

    The last four bytes state the length of the plain body. If that is plausible and not large, one
    step suffices; otherwise the steps are small, since each is held twice while it is appended.
    Raises Refusal 400 (not gzip, truncated, corrupt).
    """
    stated = int.from_bytes(body[-4:], "little") + 1
    step = stated if _STEP < stated <= min(max_bytes, _MOST_AT_ONCE) else _STEP
    pieces = _Pieces()
    members = 0
    position = 0
    fed = b""
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
            _check_members(members)
    except _BAD_GZIP as error:
        raise Refusal(400, f"the body is not valid gzip: {error}") from error
    return pieces.whole()


def unzstd(body: bytes, max_bytes: int, take: Take = _count_nothing) -> bytes | None:
    """Decompress Zstandard frames; None if they contain more than ``max_bytes``. Raises Refusal
    400."""
    pieces = _Pieces()
    frames = 0
    position = 0
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
            _check_members(frames)
    except zstandard.ZstdError as error:
        raise Refusal(400, f"the body is not valid zstd: {error}") from error
    return pieces.whole()


def _check_members(members: int) -> None:
    if members > MOST_MEMBERS:
        raise Refusal(400, f"the compressed body has more than {MOST_MEMBERS} members")


def _too_large(max_bytes: int) -> Refusal:
    return Refusal(413, f"the body is larger than {max_bytes} bytes")


class BodyBudget:
    """Budget of ``limit`` bytes for all bodies together, compressed and plain. Bytes are counted as
    they arrive, not as announced, so a client cannot reserve memory by announcing much and sending
    nothing."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self.refused = 0
        self.lock = threading.Lock()


class BodyShare:
    """Bytes of the budget that one request holds, until ``release``. Thread-safe, because bodies
    are decompressed in threads."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._held = 0
        self._released = False

    def take(self, nbytes: int) -> None:
        """Take more bytes from the budget. Raises Refusal 503 when they do not fit, or when the
        request has ended."""
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
        """Return all bytes."""
        with self._budget.lock:
            self._released = True
            self._budget.held -= self._held
            self._held = 0
