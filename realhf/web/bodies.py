"""Limits of request bodies: their size before and after decompression, their transfer rate, and the
memory of all bodies together.

Source: docs/reference/trajectory.md 2.1, 3.8, 3.11.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from io import SEEK_END, BytesIO
from typing import TYPE_CHECKING, Any

import zstandard
from isal import isal_zlib

from realhf.web.refusal import Refusal

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

BODY = "web.body"
"""Key in an ASGI scope under which ``BodyReader`` stores the plain body once it has read it."""
INLINE_BYTES = 256 << 10
"""Size in bytes up to which compressed bodies are decompressed on the event loop; larger ones go to
a thread, which does not hold the GIL."""
INLINE_PLAIN_BYTES = 1 << 20
"""Size in bytes of the plain body above which decompression on the event loop is given up and
started again in a thread."""
GRACE_S = 30.0
"""Seconds that every body may take, whatever its size."""
MIN_BYTES_PER_S = 16 << 10
"""A body may take ``GRACE_S`` seconds, plus the time that its bytes received so far take at this
rate."""
MAX_MEMBERS = 10_000
"""Largest number of members of a compressed stream, because each costs a new decoder and a copy of
the slice in which it begins."""
_SLICE = 256 << 10
"""Bytes of a gzip body that are passed to the decoder at a time."""
_MAX_AT_ONCE_BYTES = 32 << 20
"""Largest stated length, in bytes, of a plain body that is decompressed in one step."""
_STEP = 1 << 20
"""Maximum bytes per step when a body is decompressed in several steps."""
_ZSTD_SLICE = 256
"""Bytes of a Zstandard stream that are passed to the decoder at a time. They are few, because four
bytes may decompress to 128 KiB, and the decoder does not stop in between."""
_BAD_GZIP: tuple[Any, ...] = (isal_zlib.IsalError, EOFError)
Take = Callable[[int], None]
"""Function that counts bytes that are held from now on; raises Refusal if there is no room for
them."""


def declared_length(scope: Scope) -> int | None:
    """Return the Content-Length of a request; None if it is missing or not a number."""
    values = [value for name, value in scope["headers"] if name.lower() == b"content-length"]
    return int(values[0]) if len(values) == 1 and values[0].isdigit() else None


def check_declared_length(
    scope: Scope, max_bytes: int, *, required: bool = False, hint: str = "", code: str = ""
) -> None:
    """Raise Refusal (413) if a request's Content-Length is larger than ``max_bytes``, or is
    ``required`` and missing. ``hint``: the option that sets the limit. ``code``: error code of the
    refusal."""
    length = declared_length(scope)
    if length is None and required:
        raise Refusal(413, f"a body has a Content-Length of at most {max_bytes}{hint}", code=code)
    if length is not None and length > max_bytes:
        raise Refusal(413, f"the body is larger than {max_bytes} bytes{hint}", code=code)


def _count_nothing(nbytes: int) -> None:
    """Do nothing; used as ``Take`` where bytes are not counted."""


class _Pieces:
    """Pieces of a body, joined as they arrive.

    The buffer grows in place and returns its bytes without a copy, so that no piece is held twice.
    """

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

    ``encoding``: value of the Content-Encoding header. gzip is decompressed wherever it occurs in
    it, and zstd if ``allow_zstd``. ``take`` is called, from any thread, with each number of bytes
    that is held in addition. Raises Refusal: 413 for more than ``max_bytes``, compressed or not;
    400 for a damaged stream; 503 for a stream that stalls; and the errors of ``take``.
    """
    body = await _read_compressed(chunks, max_bytes, take)
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


async def _read_compressed(chunks: AsyncIterator[bytes], max_bytes: int, take: Take) -> bytes:
    """Return the body as it was sent. This is a separate function so that its buffer is freed
    before decompression. Raises Refusal 503 for a body that arrives too slowly, because it takes
    memory that other requests need."""
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
                limit.reschedule(began + GRACE_S + pieces.size / MIN_BYTES_PER_S)
    except TimeoutError:
        raise Refusal(
            503,
            f"only {pieces.size} bytes of the body came in {loop.time() - began:.0f} s",
            {"Retry-After": "1"},
        ) from None
    return pieces.whole()


def gunzip(body: bytes, max_bytes: int, take: Take = _count_nothing) -> bytes | None:
    """Decompress one or more gzip members; return None if they contain more than ``max_bytes``.

    The last four bytes state the length of the plain body. If that is correct and not large, one
    step decompresses everything. Otherwise the steps are small, because each piece is in memory
    twice while it is appended to the result. Raises Refusal 400 (not gzip, truncated, corrupt).
    """
    stated_bytes = int.from_bytes(body[-4:], "little") + 1
    step = stated_bytes if _STEP < stated_bytes <= min(max_bytes, _MAX_AT_ONCE_BYTES) else _STEP
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
                step = _STEP  # the body is longer than stated
            fed = member.unused_data
            _check_members(members)
    except _BAD_GZIP as error:
        raise Refusal(400, f"the body is not valid gzip: {error}") from error
    return pieces.whole()


def unzstd(body: bytes, max_bytes: int, take: Take = _count_nothing) -> bytes | None:
    """Decompress Zstandard frames; return None if they contain more than ``max_bytes``. Raises
    Refusal 400."""
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
    if members > MAX_MEMBERS:
        raise Refusal(400, f"the compressed body has more than {MAX_MEMBERS} members")


def _too_large(max_bytes: int) -> Refusal:
    return Refusal(413, f"the body is larger than {max_bytes} bytes")


class BodyBudget:
    """Limit of ``limit`` bytes for all bodies together, compressed and plain.

    Bytes count when they arrive, not when they are announced, so that a client cannot reserve room
    by announcing a large body and sending nothing.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used_bytes = 0
        self.refused_count = 0
        self.lock = threading.Lock()


class BodyShare:
    """Bytes of a budget that one request holds, until ``release``.

    Any thread may call ``take``, because bodies are decompressed in threads.
    """

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._used_bytes = 0
        self._released = False

    def take(self, nbytes: int) -> None:
        """Take more bytes from the budget. Raises Refusal 503 if they do not fit, or after
        ``release``."""
        budget = self._budget
        with budget.lock:
            if budget.used_bytes + nbytes > budget.limit or self._released:
                budget.refused_count += 1
                raise Refusal(
                    503,
                    f"the bodies of all requests together exceed {budget.limit} bytes",
                    {"Retry-After": "1"},
                )
            budget.used_bytes += nbytes
            self._used_bytes += nbytes

    def release(self) -> None:
        """Return all bytes to the budget."""
        with self._budget.lock:
            self._released = True
            self._budget.used_bytes -= self._used_bytes
            self._used_bytes = 0


class ClientGone(Exception):
    """Raised if the connection ended in the middle of the body."""


def _no_type(content_type: str) -> bool:
    return False


def _none(scope: Scope) -> bool:
    return False


@dataclass(frozen=True)
class BodyRules:
    """Limits for the bodies of one server's requests."""

    max_bytes: int
    """Largest body, before and after decompression."""
    error_body: Callable[[Refusal], Mapping[str, Any]]
    """Returns the JSON body for a refusal, in the error format of the server's API."""
    budget: BodyBudget | None = None
    """Limit for all bodies together; None for no limit."""
    length_required: bool = False
    """Whether a POST must have a Content-Length; it is refused without one (413)."""
    media_type: str = ""
    """The only media type allowed for a body that is not empty; others are refused (415). "" allows
    any. Restricting it to JSON keeps out pages of other sites, which can send JSON only after a
    preflight that fails."""
    left_to_handler: Callable[[Scope], bool] = _none
    """Whether a request's handler reads the body itself, after further checks. Then only the
    announced length and type are checked here."""
    decompress: bool = True
    """Whether ``Content-Encoding`` is decoded."""
    zstd_types: Callable[[str], bool] = _no_type
    """Whether bodies with this Content-Type may be compressed with zstd."""


class BodyReader:
    """ASGI middleware that reads whole bodies within the limits.

    Handlers get the plain body in one message, and without a copy in ``scope[BODY]``. A request
    holds its share of the budget until it ends.
    """

    def __init__(self, app: ASGIApp, rules: BodyRules) -> None:
        self._app = app
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request, or refuse it because of its body."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        names = {name.lower() for name, _ in scope["headers"]}
        length_required = self._rules.length_required and scope["method"] == "POST"
        if not (length_required or names & {b"content-length", b"transfer-encoding"}):
            await self._app(scope, receive, send)
            return
        share = None if self._rules.budget is None else BodyShare(self._rules.budget)
        try:
            await self._serve(scope, receive, send, _count_nothing if share is None else share.take)
        finally:
            if share is not None:
                share.release()

    async def _serve(self, scope: Scope, receive: Receive, send: Send, take: Take) -> None:
        from starlette.responses import JSONResponse

        try:
            self._check_head(scope)
            if self._rules.left_to_handler(scope):
                body = None
            else:
                body = await self._read(scope, receive, take)
        except ClientGone:
            return
        except Refusal as refusal:
            # The rest of the body is not read, so the connection cannot be used for another
            # request.
            close = {"Connection": "close"} if refusal.status in (413, 503) else {}
            answer = JSONResponse(
                self._rules.error_body(refusal), refusal.status, refusal.headers | close
            )
            await answer(scope, receive, send)
            return
        if body is None:
            await self._app(scope, receive, send)
            return
        if self._rules.decompress:
            scope["headers"] = [
                (name, value) for name, value in scope["headers"] if name != b"content-encoding"
            ]
        scope[BODY] = body
        await self._app(scope, _replay(body, receive), send)

    def _check_head(self, scope: Scope) -> None:
        """Raise Refusal for a body that can be refused because of the request's head alone."""
        rules = self._rules
        check_declared_length(
            scope, rules.max_bytes, required=rules.length_required and scope["method"] == "POST"
        )
        kind = _header(scope, b"content-type")
        if (
            rules.media_type
            and declared_length(scope) != 0
            and _media_type(kind) != rules.media_type
        ):
            raise Refusal(415, f"a body is {rules.media_type}")

    async def _read(self, scope: Scope, receive: Receive, take: Take) -> bytes:
        rules = self._rules
        return await read_body(
            _chunks(receive),
            encoding=_header(scope, b"content-encoding") if rules.decompress else "",
            max_bytes=rules.max_bytes,
            allow_zstd=rules.zstd_types(_header(scope, b"content-type")),
            take=take,
        )


def _header(scope: Scope, name: bytes) -> str:
    """Return the first value of a header; "" if it is missing."""
    return next(
        (value.decode("latin-1") for key, value in scope["headers"] if key.lower() == name), ""
    )


def _media_type(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


async def _chunks(receive: Receive) -> AsyncIterator[bytes]:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a ``receive`` that first delivers the whole body."""
    is_given = False

    async def replay() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
