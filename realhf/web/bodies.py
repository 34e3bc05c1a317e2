"""Limits of request bodies: their size before and after decompression, their pace, and the memory
of all together.

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
"""Key of an ASGI scope that holds the plain body, once ``BodyReader`` has read it."""
INLINE_BYTES = 256 << 10
"""Size up to which compressed bodies are tried on the event loop; larger ones go to a thread,
without the GIL."""
INLINE_PLAIN_BYTES = 1 << 20
"""Size of the plain body above which decompression starts again in a thread."""
GRACE_S = 30.0
"""Seconds that every body may take."""
MIN_BYTES_PER_S = 16 << 10
"""Rate at which a body earns more time than ``GRACE_S``."""
MAX_MEMBERS = 10_000
"""Largest number of members of a stream: each costs a new decoder and a copy of the slice that it
began in."""
_SLICE = 256 << 10
"""Size of the slices in which a gzip body is fed to the decoder."""
_MAX_AT_ONCE_BYTES = 32 << 20
"""Largest stated length of a plain body that is decompressed in one step."""
_STEP = 1 << 20
"""Size of the steps in which other bodies are decompressed."""
_ZSTD_SLICE = 256
"""Size of the slices of a Zstandard stream: four bytes of it may mean 128 KiB, and its reader does
not stop in between."""
_BAD_GZIP: tuple[Any, ...] = (isal_zlib.IsalError, EOFError)
Take = Callable[[int], None]
"""Counts bytes that are held now; raises Refusal where there is no room for them."""


def declared_length(scope: Scope) -> int | None:
    """Return the Content-Length of a request; None without one, or for one that is not a number."""
    values = [value for name, value in scope["headers"] if name.lower() == b"content-length"]
    return int(values[0]) if len(values) == 1 and values[0].isdigit() else None


def check_declared_length(
    scope: Scope, max_bytes: int, *, required: bool = False, hint: str = "", code: str = ""
) -> None:
    """Raise Refusal (413) where the Content-Length of a request is larger than ``max_bytes``, or is
    ``required`` and missing. ``hint``: the option that sets the limit; ``code``: that of the
    refusal."""
    length = declared_length(scope)
    if length is None and required:
        raise Refusal(413, f"a body has a Content-Length of at most {max_bytes}{hint}", code=code)
    if length is not None and length > max_bytes:
        raise Refusal(413, f"the body is larger than {max_bytes} bytes{hint}", code=code)


def _count_nothing(nbytes: int) -> None:
    """Take bytes without counting them."""


class _Pieces:
    """Pieces of a body, joined as they come.

    The buffer grows in place and hands out its bytes without a copy, so that no piece is held
    twice.
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
        """Return all pieces in one."""
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

    ``encoding``: the Content-Encoding header, of which gzip is decompressed wherever it is
    contained, and zstd if ``allow_zstd``. ``take`` is called, from any thread, with the number of
    bytes that are held. Raises Refusal: 413 above ``max_bytes``, compressed or not; 400 for a
    damaged stream; 503 for one that stalls; and what ``take`` raises.
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
    """Return the body as it was sent. This function returns before decompression so that its buffer
    is freed. Raises Refusal 503 for a body that arrives too slowly: its bytes take room that others
    need."""
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
    """Decompress one or more gzip members; return None where they hold more than ``max_bytes``.

    The last four bytes state the length of the plain body. If that is true and not much, one step
    is enough; otherwise the steps are small, since each is held a second time while it is added to
    the others. Raises Refusal 400 (not gzip, truncated, corrupt).
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
                step = _STEP  # the stated length was not all of it
            fed = member.unused_data
            _check_members(members)
    except _BAD_GZIP as error:
        raise Refusal(400, f"the body is not valid gzip: {error}") from error
    return pieces.whole()


def unzstd(body: bytes, max_bytes: int, take: Take = _count_nothing) -> bytes | None:
    """Decompress Zstandard frames; return None where they hold more than ``max_bytes``. Raises
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
    """A limit of ``limit`` bytes for all bodies together, compressed and plain.

    Bytes count when they arrive, not when they are announced, so that no client takes room by
    announcing much and sending nothing.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used_bytes = 0
        self.refused_count = 0
        self.lock = threading.Lock()


class BodyShare:
    """The bytes of a budget that one request holds, until ``release``.

    Bodies are decompressed in threads, so any thread may call ``take``.
    """

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._used_bytes = 0
        self._released = False

    def take(self, nbytes: int) -> None:
        """Take more bytes from the budget. Raises Refusal 503 when they do not fit, or after
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
    """The connection ended in the middle of the body."""


def _no_type(content_type: str) -> bool:
    return False


def _none(scope: Scope) -> bool:
    return False


@dataclass(frozen=True)
class BodyRules:
    """The limits of the bodies of one server."""

    max_bytes: int
    """Largest body, before and after decompression."""
    form: Callable[[Refusal], Mapping[str, Any]]
    """Returns the JSON body of a refusal, as the API of the server writes errors."""
    budget: BodyBudget | None = None
    """Limit of all bodies together; None: there is none."""
    length_required: bool = False
    """Whether a POST needs a Content-Length; without one it is refused (413)."""
    media_type: str = ""
    """The only media type of a body that is not empty; others are refused (415). "": any. A page of
    another site can send JSON only after a preflight, which fails."""
    left_to_handler: Callable[[Scope], bool] = _none
    """Whether the handler of a request reads the body itself, after further checks; then only the
    announced length and type are looked at."""
    decompress: bool = True
    """Whether ``Content-Encoding`` is decoded."""
    zstd_types: Callable[[str], bool] = _no_type
    """Whether bodies of a Content-Type may come as zstd."""


class BodyReader:
    """An ASGI middleware that reads whole bodies within the limits.

    Handlers find the plain body in one message, and in ``scope[BODY]`` without a copy. A request
    holds its share of the budget until its end.
    """

    def __init__(self, app: ASGIApp, rules: BodyRules) -> None:
        self._app = app
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request, or refuse its body."""
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
            # The rest of the body is not read, so the connection cannot serve another request.
            close = {"Connection": "close"} if refusal.status in (413, 503) else {}
            answer = JSONResponse(
                self._rules.form(refusal), refusal.status, refusal.headers | close
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
        """Raise Refusal for a body that can be refused by the head of its request."""
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
    """Return the first value of a header; "" without one."""
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
    """Return a ``receive`` that gives the whole body first."""
    is_given = False

    async def replay() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
