"""Reads what clients of the training API send, checks that it is theirs to ask for, and hands out promises."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from realhf.tinker.access import OWNER
from realhf.tinker.service import Service
from realhf.tinker.shelf import Refused
from realhf.tinker.store import ModelRow
from realhf.tinker.wire import JSON, read_json, types
from realhf.trajectory.wire.body import BodyBudget, BodyShare, read_body

_BODIES_AT_ONCE = 4
"""So many bodies of the largest size may be read at once."""


class Desk:
    """Is where requests to one service come in."""

    def __init__(self, service: Service) -> None:
        self.service, self.store, self.options = service, service.store, service.options
        self._bodies = BodyBudget(_BODIES_AT_ONCE * service.options.max_body_mib << 20)

    async def body(self, request: Request) -> bytes:
        """Return the plain body. Raises Refused or Refusal for one that is too large, or damaged."""

        async def chunks() -> AsyncIterator[bytes]:
            async for chunk in request.stream():
                yield chunk

        most = self.options.max_body_mib << 20
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > most:
            raise Refused(413, f"a body has at most {self.options.max_body_mib} MiB (--max-body-mib)")
        share = BodyShare(self._bodies)
        try:
            encoding = request.headers.get("content-encoding", "")
            return await read_body(chunks(), encoding=encoding, max_bytes=most, allow_zstd=True, take=share.take)
        finally:
            share.release()

    async def asked(self, request: Request, kind: Any) -> Any:
        """Return the body as one of the client's types. Raises BadRequest."""
        return read_json(kind, await self.body(request))

    def session(self, request: Request, session: str, *, alive: bool = True) -> dict[str, Any]:
        """Note a sign of life, and return what was said of a session. Raises Refused."""
        found = self.store.session(session)
        if found is None or found[0] != request.scope[OWNER]:
            raise Refused(404, f"there is no session {session!r:.100}")
        if alive:
            if found[2]:
                raise Refused(410, f"session {session} has finished")
            self.store.see_session(session)
        return found[3]

    def check_base(self, name: str | None) -> None:
        """Raise Refused for a base model that is not here."""
        names = self.options.names
        if name not in names:
            raise Refused(400, f"base_model {name!r:.200} is not here: {', '.join(sorted(names))}")

    def new_model(
        self, request: Request, session: str, number: int, kind: str, options: dict[str, Any], body: bytes
    ) -> Response:
        """Promise a model, by the first of its requests."""
        owner = request.scope[OWNER]
        self.session(request, session)
        model = f"{session}:train:{number}"
        if self.store.model(model) is None:
            self.store.add_model(model, owner, session, options)
        return self.promised(self.service.promise(owner, kind, model, 0, body), model)

    def model(self, request: Request, model: str) -> ModelRow:
        """Return a model of whoever asks. Raises Refused."""
        row = self.store.model(model)
        if row is None or row.owner != request.scope[OWNER]:
            raise Refused(404, f"there is no model {model!r:.200}")
        return row

    def promise(self, request: Request, kind: str, model: str, seq: int | None, body: bytes) -> Response:
        """Promise the request number ``seq`` of a model."""
        row = self.model(request, model)
        if row.unloaded:
            raise Refused(400, f"model {model} was unloaded")
        if seq is None or seq < 1:
            raise Refused(400, "seq_id is missing: requests of a model are numbered from 1")
        self.store.change_model(model, used=time.time())
        return self.promised(self.service.promise(row.owner, kind, model, seq, body), model)

    @staticmethod
    def promised(name: str, model: str | None = None, **more: Any) -> Response:
        """Answer with a promise of this name."""
        return json_answer(types.UntypedAPIFuture(request_id=name, model_id=model, **more))


def json_answer(answer: Any) -> Response:
    """Return an answer of one of the client's types."""
    return Response(answer.model_dump_json(), media_type=JSON)
