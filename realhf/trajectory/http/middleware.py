"""Handles what every request passes through: body limits and decompression, the epoch header, compression of
answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from realhf.trajectory.base.refusal import Refusal
from realhf.trajectory.http.auth import route_path
from realhf.trajectory.wire.body import read_body
from realhf.trajectory.wire.body_budget import BodyBudget, BodyShare
from realhf.trajectory.wire.encode import GZIP_FROM_BYTES
from realhf.trajectory.wire.intake import is_msgpack


class ClientGone(Exception):
    """Is raised when the connection ended in the middle of the body."""


class BodyMiddleware:
    """Reads and decompresses bodies under the cap and within the budget of all of them. Handlers find the whole body
    in one message, and pushes in ``scope["traj.body"]`` without a copy."""

    def __init__(self, app: ASGIApp, max_bytes: int, budget: BodyBudget) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._budget = budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request; one with a body holds a share of the budget until its end."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if not ("content-length" in headers or "transfer-encoding" in headers):
            await self._app(scope, receive, send)
            return
        share = BodyShare(self._budget)
        try:
            await self._serve(scope, receive, send, headers, share)
        finally:
            share.release()

    async def _serve(self, scope: Scope, receive: Receive, send: Send, headers: Headers, share: BodyShare) -> None:
        encoding = headers.get("content-encoding", "")
        try:
            declared = headers.get("content-length", "")
            if declared.isdigit() and int(declared) > self._max_bytes:
                raise Refusal(413, f"the body is larger than {self._max_bytes} bytes")
            body = await read_body(
                _chunks(receive),
                encoding=encoding,
                max_bytes=self._max_bytes,
                allow_zstd=is_msgpack(headers.get("content-type")),
                take=share.take,
            )
        except Refusal as refusal:
            close = {"Connection": "close"} if refusal.status in (413, 503) else {}
            answer = JSONResponse({"detail": refusal.detail}, refusal.status, refusal.headers | close)
            await answer(scope, receive, send)
            return
        except ClientGone:
            return
        if encoding:
            mutable = MutableHeaders(scope=scope)
            del mutable["content-encoding"]
        scope["traj.body"] = body
        await self._app(scope, _replay(body, receive), send)


async def _chunks(receive: Receive) -> AsyncIterator[bytes]:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return


def _replay(body: bytes, receive: Receive) -> Receive:
    given = False

    async def replayed() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed


class EpochMiddleware:
    """Adds to every response the epoch in which it was made; a batch itself says in which it was formed."""

    def __init__(self, app: ASGIApp, epoch: Callable[[], int]) -> None:
        self._app = app
        self._epoch = epoch

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request with the header added."""

        async def with_epoch(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = message.get("headers", ())
                if not any(name == b"x-epoch" for name, _ in headers):
                    message["headers"] = [*headers, (b"x-epoch", b"%d" % self._epoch())]
            await send(message)

        await self._app(scope, receive, with_epoch if scope["type"] == "http" else send)


class CompressMiddleware:
    """Compresses answers from 1000 bytes on with gzip; batches bring their own compression."""

    def __init__(self, app: ASGIApp, level: int) -> None:
        self._app = app
        self._gzip = GZipMiddleware(app, minimum_size=GZIP_FROM_BYTES, compresslevel=max(1, level))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request, through gzip unless it is for a batch."""
        chosen = self._app if scope["type"] != "http" or route_path(scope) == "/batch" else self._gzip
        await chosen(scope, receive, send)
