"""Common base of the HTTP handlers: reads request bodies, checks ownership, queues requests and
returns futures."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from realhf.tinker.access import OWNER
from realhf.tinker.service import TrainingService
from realhf.tinker.store import ModelRow
from realhf.tinker.wire import (
    JSON,
    PROTOBUF,
    BadRequest,
    SeqScanner,
    read_json,
    read_json_seq,
    read_seq,
    types,
)
from realhf.web.bodies import BodyBudget, BodyShare, check_declared_length, read_body
from realhf.web.refusal import Refusal

_CONCURRENT_BODIES = 4
"""Number of bodies of maximum size that may be read at the same time."""
_SMALL = 1 << 20
"""Maximum size in bytes of a body without data. Only ``forward_backward``, ``sample`` and telemetry
requests have data."""
_READ = "tinker.read"
"""Key of an ASGI scope under which the part of the body read so far is stored, until the request is
answered."""
_RETRIED_STATUSES = (401, 403, 408, 409, 429)
"""Response statuses after which the sequence number of a refused request stays free, because the
client sends the same request again or is not a client of this server."""
_SCAN_TIMEOUT_S = 10.0
"""Maximum seconds for which the rest of an oversized body is searched for its sequence number."""


class RequestHandler:
    """Base class with the functions that the HTTP handlers of a service share."""

    def __init__(self, service: TrainingService) -> None:
        self.service = service
        self.store = service.store
        self.options = service.options
        self._bodies = BodyBudget(_CONCURRENT_BODIES * service.options.max_body_mib << 20)

    async def body(self, request: Request, *, data: bool = False) -> bytes:
        """Return the decoded body of a request. The limit is ``--max-body-mib`` for a request with
        ``data`` and ``_SMALL`` bytes for any other. Raises Refusal for a body that is too large,
        too slow, or damaged."""
        largest = self.options.max_body_mib << 20
        beginning = b""
        max_bytes = largest if data else min(largest, _SMALL)
        hint = " (--max-body-mib)" if data else ""
        encoding = request.headers.get("content-encoding", "")

        async def chunks() -> AsyncIterator[bytes]:
            nonlocal beginning
            async for chunk in request.stream():
                beginning = beginning or chunk
                check_declared_length(request.scope, max_bytes, hint=hint)
                yield chunk

        share = BodyShare(self._bodies)
        try:
            body = await read_body(
                chunks(), encoding=encoding, max_bytes=max_bytes, allow_zstd=True, take=share.take
            )
        except Refusal:
            request.scope[_READ] = b"" if encoding else beginning
            raise
        finally:
            share.release()
        request.scope[_READ] = body
        return body

    def with_seq(
        self, kind: str, handler: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Wrap the handler of a kind of request that has a sequence number. If the handler refuses
        a request permanently, its number is recorded as failed. The client continues with the next
        number, and that request would otherwise wait forever."""

        async def handle(request: Request) -> Response:
            try:
                return await handler(request)
            except (Refusal, BadRequest) as error:
                status = getattr(error, "status", 400)
                if 400 <= status < 500 and status not in _RETRIED_STATUSES:
                    await self._skip(request, kind, str(getattr(error, "detail", error)), status)
                raise
            finally:
                request.scope.pop(_READ, None)

        return handle

    async def _skip(self, request: Request, kind: str, why: str, status: int) -> None:
        """Record the sequence number of a refused request as failed, if the number can be
        determined."""
        models, seq = await self._find_seq(request, status)
        for model in models:
            with suppress(Refusal):
                row = self.model(request, model)
                if seq is not None:
                    self.service.skip(row.owner, row.id, seq, why, kind)
                return

    async def _find_seq(self, request: Request, status: int) -> tuple[list[str], int | None]:
        """Return the model ids that a refused request may belong to, and its sequence number (None
        if it is unknown)."""
        read: bytes = request.scope.get(_READ, b"")
        if PROTOBUF in request.headers.get("content-type", ""):
            with suppress(BadRequest):
                model, seq = read_seq(read)
                return [model], seq
            return [], None
        if status != 413:
            return read_json_seq(read)
        # The body was too large, and only its beginning was read: search the rest.
        scanner = SeqScanner()
        scanner.feed(read)
        bytes_left = self.options.max_body_mib << 20
        # the stream was consumed, or ends early
        with suppress(TimeoutError, RuntimeError, ClientDisconnect):
            async with asyncio.timeout(_SCAN_TIMEOUT_S):
                async for chunk in request.stream():
                    bytes_left -= len(chunk)
                    if scanner.complete or bytes_left < 0:
                        break
                    scanner.feed(chunk)
        return scanner.models, scanner.seq

    async def parse(self, request: Request, kind: Any) -> Any:
        """Read the body and parse it as ``kind``, one of the client's request types. Raises
        BadRequest."""
        return read_json(kind, await self.body(request))

    def session(self, request: Request, session: str, *, alive: bool = True) -> dict[str, Any]:
        """Return the info of one of the client's sessions. With ``alive`` also record a heartbeat.
        Raises Refusal: 404 if the client has no such session, 410 if ``alive`` and the session has
        finished."""
        row = self.store.session(session)
        if row is None or row[0] != request.scope[OWNER]:
            raise Refusal(404, f"there is no session {session!r:.100}")
        _, _, has_finished, info = row
        if alive:
            if has_finished:
                raise Refusal(410, f"session {session} has finished")
            self.store.touch_session(session)
        return info

    def check_base(self, name: str | None) -> None:
        """Raise Refusal (400) unless ``name`` is a name of the base model."""
        names = self.options.names
        if name not in names:
            raise Refusal(
                400, f"base_model {name!r:.200} is not served here: {', '.join(sorted(names))}"
            )

    def check_optimizer(self, config: Any) -> None:
        """Raise Refusal (400) unless the optimizer is AdamW."""
        if config is not None and config.type != "adamw":
            raise Refusal(
                400,
                f"optimizer_config {config.type!r:.200} is not carried by this server: adamw is",
            )

    def new_model(
        self,
        request: Request,
        session: str,
        number: int,
        kind: str,
        options: dict[str, Any],
        body: bytes,
    ) -> Response:
        """Queue the request that creates a session's model ``number``; return its future. Raises
        Refusal."""
        owner = request.scope[OWNER]
        self.session(request, session)
        model = f"{session}:train:{check_number(number)}"
        return self.future(
            self.service.submit(owner, kind, model, 0, body, (session, options)), model
        )

    def model(self, request: Request, model: str) -> ModelRow:
        """Return one of the client's models. Raises Refusal (404) if the client has no such
        model."""
        row = self.store.model(model)
        if row is None or row.owner != request.scope[OWNER]:
            raise Refusal(404, f"there is no model {model!r:.200}")
        return row

    def submit(
        self, request: Request, kind: str, model: str, seq: int | None, body: bytes
    ) -> Response:
        """Queue a model's request ``seq``; return its future. Raises Refusal."""
        row = self.model(request, model)
        if row.unloaded:
            raise Refusal(400, f"model {model} was unloaded")
        if seq is None or seq < 1:
            raise Refusal(400, "seq_id is missing: requests of a model are numbered from 1")
        self.store.update_model(model, used=time.time())
        return self.future(self.service.submit(row.owner, kind, model, seq, body), model)

    def unload(self, request: Request, model: str) -> Response:
        """Queue an unload request and return its future. Repeated calls return the same future. The
        client does not number unload requests, so the request gets the next free sequence number.
        Raises Refusal."""
        row = self.model(request, model)
        seq = self.store.next_seq(model)
        last = self.store.request(f"{model}:{seq - 1}")
        if last is not None and last.kind == "unload_model":
            return self.future(last.id, model)
        if row.unloaded:
            raise Refusal(400, f"model {model} is no longer available")
        return self.future(self.service.submit(row.owner, "unload_model", model, seq, b"{}"), model)

    @staticmethod
    def future(name: str, model: str | None = None, **more: Any) -> Response:
        """Return the response that contains a future, the client's ``UntypedAPIFuture``."""
        return json_response(types.UntypedAPIFuture(request_id=name, model_id=model, **more))


def check_number(number: int | None) -> int:
    """Return a client's sequence number. Raises Refusal (400) if it is missing or out of range."""
    if number is None or not 0 <= number < 1 << 31:
        raise Refusal(400, f"the number {number!r:.50} is out of range")
    return number


def json_response(content: Any) -> Response:
    """Return a JSON response with an object of one of the client's types."""
    return Response(content.model_dump_json(), media_type=JSON)
