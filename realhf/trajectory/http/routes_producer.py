"""Endpoints for rollout handlers: register, poll, push.

Source: docs/reference/trajectory.md 2.4 to 2.7.
"""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request
from pydantic import ValidationError
from starlette.responses import Response

from realhf.trajectory.http.service import (
    EnvIdentifier,
    RegisterEnv,
    TrajectoryService,
    answer,
    idempotency,
    integer_header,
)
from realhf.trajectory.records import Incoming
from realhf.trajectory.state import push, registry
from realhf.trajectory.wire.intake import parse_groups
from realhf.trajectory.wire.lax_groups import ScoredData, problems
from realhf.web.bodies import BODY
from realhf.web.refusal import Refusal


def router(service: TrajectoryService) -> APIRouter:
    """Return a router with the producer endpoints of ``service``."""
    routes = APIRouter(tags=["environments"])
    engine = service.engine

    @routes.post("/register-env")
    async def register_env(env: RegisterEnv, request: Request) -> Response:
        """Register a rollout handler. It may start producing once the trainer has pulled its first
        batch."""
        await engine.read(registry.check_epoch, request.headers.get("x-epoch"))
        key, fingerprint = idempotency(request, request.scope.get(BODY, b""))
        (body, headers), _ = await engine.write(
            registry.run_once, key, fingerprint, registry.register_env, env.model_dump()
        )
        return answer(body, headers)

    @routes.post("/disconnect-env")
    async def disconnect_env(env: EnvIdentifier) -> Response:
        """Unregister a rollout handler. Groups that it already pushed can still be served."""
        return answer(await engine.write(registry.disconnect_env, env.env_id))

    @routes.get("/status-env", openapi_extra=_STATUS_ENV)
    @routes.post("/status-env", openapi_extra=_STATUS_ENV, operation_id="status_env_post")
    async def status_env(request: Request) -> Response:
        """Return the queue and batch numbers from which a rollout handler decides how fast to
        produce. The environment's id is sent as a JSON body or as ``?env_id=``."""
        with service.metrics.time_request("status-env"):
            env_id = _env_id(request)
            await engine.read(registry.check_epoch, request.headers.get("x-epoch"))
            if await engine.read(registry.heartbeat_due, env_id):
                await engine.write(registry.heartbeat, env_id)
            return answer(await engine.read(registry.status_env, env_id))

    @routes.post("/scored_data", openapi_extra=_body(_GROUP))
    async def scored_data(request: Request) -> Response:
        """Push one group."""
        return await _push(service, request, listed=False)

    @routes.post("/scored_data_list", openapi_extra=_body({"type": "array", "items": _GROUP}))
    async def scored_data_list(request: Request) -> Response:
        """Push several groups; either all are stored or none."""
        return await _push(service, request, listed=True)

    return routes


def _body(schema: dict[str, Any], *, required: bool = True) -> dict[str, Any]:
    content = {"application/json": {"schema": schema}}
    return {"requestBody": {"required": required, "content": content}}


_GROUP = ScoredData.model_json_schema()
_STATUS_ENV = _body(EnvIdentifier.model_json_schema(), required=False) | {
    "parameters": [
        {"name": "env_id", "in": "query", "required": False, "schema": {"type": "integer"}}
    ]
}


def _env_id(request: Request) -> int:
    body = request.scope.get(BODY, b"")
    try:
        if body:
            return EnvIdentifier.model_validate_json(body).env_id
        return EnvIdentifier.model_validate(dict(request.query_params)).env_id
    except ValidationError as error:
        raise Refusal(422, problems(error.errors(), ["body" if body else "query"])) from None


async def _push(service: TrajectoryService, request: Request, *, listed: bool) -> Response:
    with service.metrics.time_request("push"):
        body = request.scope.get(BODY, b"")
        key, fingerprint = idempotency(request, body)
        groups = await parse_groups(
            body,
            request.headers.get("content-type"),
            listed=listed,
            int64=not service.engine.state.options.is_strict("bound_integers"),
            offload=service.offload,
        )
        groups = _add_version(groups, integer_header(request, "x-policy-version"))
        refs = await service.engine.store.stage([group.data for group in groups])
        try:
            answered, headers = await service.engine.write(
                push.push, groups, refs, listed, key, fingerprint, request.headers.get("x-epoch")
            )
        except Refusal:
            raise
        except Exception:
            await service.engine.store.unstage(refs)
            raise
        return answer(answered, headers)


def _add_version(groups: list[Incoming], version: int | None) -> list[Incoming]:
    """Return the groups, with ``version`` (from the request header) filled in where a group has no
    version of its own."""
    if version is None:
        return groups
    return [
        group
        if group.policy_version is not None
        else msgspec.structs.replace(group, policy_version=version)
        for group in groups
    ]
