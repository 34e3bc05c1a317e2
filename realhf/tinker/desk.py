"""Shared parts of the request handlers: reading bodies, checking ownership, and returning futures."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from realhf.tinker.access import OWNER
from realhf.tinker.service import Service
from realhf.tinker.store import ModelRow
from realhf.tinker.wire import JSON, PROTOBUF, BadRequest, NumberScan, json_number, read_json, read_number, types
from realhf.web.bodies import BodyBudget, BodyShare, check_declared_length, read_body
from realhf.web.refusal import Refusal

_BODIES_AT_ONCE = 4
"""Bodies of the largest size that may be read at once."""
_SMALL = 1 << 20
"""Largest body of a request without data, in bytes. Only ``forward_backward`` and ``sample`` have data."""
_READ = "tinker.read"
"""Key of an ASGI scope that holds the part of the body that was read, until the request is answered."""
_UNCOUNTED = (401, 403, 408, 409, 429)
"""Statuses of refusals that use up no number: the client repeats the request, or has no access."""
_REST_S = 10.0
"""Seconds that the rest of a too large body is searched for the number of its request."""


class Desk:
    """The parts that all request handlers of one service share."""

    def __init__(self, service: Service) -> None:
        self.service, self.store, self.options = service, service.store, service.options
        self._bodies = BodyBudget(_BODIES_AT_ONCE * service.options.max_body_mib << 20)

    async def body(self, request: Request, *, data: bool = False) -> bytes:
        """Return the plain body of a request. One with ``data`` may have ``--max-body-mib``, others ``_SMALL`` bytes.
        Raises Refusal for one that is too large, too slow, or damaged."""
        largest, beginning = self.options.max_body_mib << 20, b""
        most = largest if data else min(largest, _SMALL)
        hint = " (--max-body-mib)" if data else ""
        encoding = request.headers.get("content-encoding", "")

        async def chunks() -> AsyncIterator[bytes]:
            nonlocal beginning
            async for chunk in request.stream():
                beginning = beginning or chunk
                check_declared_length(request.scope, most, hint=hint)
                yield chunk

        share = BodyShare(self._bodies)
        try:
            body = await read_body(chunks(), encoding=encoding, max_bytes=most, allow_zstd=True, take=share.take)
        except Refusal:
            request.scope[_READ] = b"" if encoding else beginning
            raise
        finally:
            share.release()
        request.scope[_READ] = body
        return body

    def numbered(
        self, kind: str, handler: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Return the handler of a numbered request of this ``kind``. If it refuses one for good, the number counts as
        used: the client continues with the next number, which would wait for the refused one forever."""

        async def handle(request: Request) -> Response:
            try:
                return await handler(request)
            except (Refusal, BadRequest) as error:
                status = getattr(error, "status", 400)
                if 400 <= status < 500 and status not in _UNCOUNTED:
                    await self._skip(request, kind, str(getattr(error, "detail", error)), status)
                raise
            finally:
                request.scope.pop(_READ, None)

        return handle

    async def _skip(self, request: Request, kind: str, why: str, status: int) -> None:
        """Use up the number of a refused request, if the number can be found in what was read of it."""
        models, seq = await self._number_of(request, status)
        for model in models:
            with suppress(Refusal):
                row = self.model(request, model)
                if seq is not None:
                    self.service.skip(row.owner, row.id, seq, why, kind)
                return

    async def _number_of(self, request: Request, status: int) -> tuple[list[str], int | None]:
        """Return the models that a refused request may be for, and its number; None if unknown."""
        read: bytes = request.scope.get(_READ, b"")
        if PROTOBUF in request.headers.get("content-type", ""):
            with suppress(BadRequest):
                model, seq = read_number(read)
                return [model], seq
            return [], None
        if status != 413:
            return json_number(read)
        scan = NumberScan()
        scan.feed(read)
        left = self.options.max_body_mib << 20
        with suppress(TimeoutError, RuntimeError, ClientDisconnect):  # the body ended before, stalls, or is cut off
            async with asyncio.timeout(_REST_S):
                async for chunk in request.stream():
                    left -= len(chunk)
                    if scan.complete or left < 0:
                        break
                    scan.feed(chunk)
        return scan.models, scan.seq

    async def asked(self, request: Request, kind: Any) -> Any:
        """Return the body as an instance of a type of the client. Raises BadRequest."""
        return read_json(kind, await self.body(request))

    def session(self, request: Request, session: str, *, alive: bool = True) -> dict[str, Any]:
        """Record a heartbeat of a session and return its description. Raises Refusal."""
        found = self.store.session(session)
        if found is None or found[0] != request.scope[OWNER]:
            raise Refusal(404, f"there is no session {session!r:.100}")
        if alive:
            if found[2]:
                raise Refusal(410, f"session {session} has finished")
            self.store.see_session(session)
        return found[3]

    def check_base(self, name: str | None) -> None:
        """Raise Refusal for a base model that this server does not have."""
        names = self.options.names
        if name not in names:
            raise Refusal(400, f"base_model {name!r:.200} is not here: {', '.join(sorted(names))}")

    def check_optimizer(self, config: Any) -> None:
        """Raise Refusal for an optimizer that this server does not have."""
        if config is not None and config.type != "adamw":
            raise Refusal(400, f"optimizer_config {config.type!r:.200} is not carried by this server: adamw is")

    def new_model(
        self, request: Request, session: str, number: int, kind: str, options: dict[str, Any], body: bytes
    ) -> Response:
        """Queue the first request of a new model, which makes it; return its future."""
        owner = request.scope[OWNER]
        self.session(request, session)
        model = f"{session}:train:{counted(number)}"
        return self.promised(self.service.promise(owner, kind, model, 0, body, (session, options)), model)

    def model(self, request: Request, model: str) -> ModelRow:
        """Return a model of the client that sent the request. Raises Refusal."""
        row = self.store.model(model)
        if row is None or row.owner != request.scope[OWNER]:
            raise Refusal(404, f"there is no model {model!r:.200}")
        return row

    def promise(self, request: Request, kind: str, model: str, seq: int | None, body: bytes) -> Response:
        """Queue request number ``seq`` of a model; return its future."""
        row = self.model(request, model)
        if row.unloaded:
            raise Refusal(400, f"model {model} was unloaded")
        if seq is None or seq < 1:
            raise Refusal(400, "seq_id is missing: requests of a model are numbered from 1")
        self.store.change_model(model, used=time.time())
        return self.promised(self.service.promise(row.owner, kind, model, seq, body), model)

    def unload(self, request: Request, model: str) -> Response:
        """Queue an unload request, which the client does not number; repeated calls return the same future."""
        row, seq = self.model(request, model), self.store.next_seq(model)
        last = self.store.request(f"{model}:{seq - 1}")
        if last is not None and last.kind == "unload_model":
            return self.promised(last.id, model)
        if row.unloaded:
            raise Refusal(400, f"model {model} is not kept any more")
        return self.promised(self.service.promise(row.owner, "unload_model", model, seq, b"{}"), model)

    @staticmethod
    def promised(name: str, model: str | None = None, **more: Any) -> Response:
        """Return the answer with the future of this name."""
        return json_answer(types.UntypedAPIFuture(request_id=name, model_id=model, **more))


def counted(number: int | None) -> int:
    """Return the sequence number of a client. Raises Refusal if it is missing or out of range."""
    if number is None or not 0 <= number < 1 << 31:
        raise Refusal(400, f"the number {number!r:.50} is out of range")
    return number


def json_answer(answer: Any) -> Response:
    """Return a response with an instance of a type of the client."""
    return Response(answer.model_dump_json(), media_type=JSON)
