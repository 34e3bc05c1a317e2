"""HTTP routes of the training API, except those about checkpoints (``weights_routes``).

Request and response bodies have the client's own types. If possible, an invalid request is refused
before it gets a future (HTTP 400 to 429, which the client raises as ``APIStatusError``); otherwise
the future fails (``RequestFailedError``).
"""

from __future__ import annotations

import json
import secrets
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from realhf.tinker.access import OWNER, error_body, guard_rules
from realhf.tinker.request_handler import RequestHandler, check_number, json_response
from realhf.tinker.service import TrainingService
from realhf.tinker.store import FAILED
from realhf.tinker.weights_routes import WeightsRoutes, lora_fields
from realhf.tinker.wire import PROTOBUF, BadRequest, read_head, read_json, types
from realhf.web.guard import RequestGuard, refusal_response
from realhf.web.refusal import Refusal

LONG_POLL_S = 30.0
"""Seconds that ``retrieve_future`` waits for a result; the client's timeout is 45 s."""
Handler = Callable[[Request], Awaitable[Response]]
"""A function that answers a request."""


def build_app(service: TrainingService) -> Starlette:
    """Return the ASGI application of a service, which must be open."""
    routes = Routes(service)
    return Starlette(
        routes=[
            Route(f"/api/v1{path}", with_error_responses(handler), methods=[method])
            for method, path, handler in routes.table()
        ],
        middleware=[Middleware(RequestGuard, rules=guard_rules(service.options))],
    )


def with_error_responses(handler: Handler) -> Handler:
    """Wrap a handler so that refusals and store errors are returned as error responses."""

    async def guard(request: Request) -> Response:
        try:
            return await handler(request)
        except Refusal as refusal:
            return refusal_response(refusal, error_body)
        except BadRequest as error:
            return refusal_response(Refusal(400, str(error)), error_body)
        except sqlite3.Error as error:
            refusal = Refusal(507, f"the server cannot write this down ({error}); try again later")
            return refusal_response(refusal, error_body)

    return guard


class Routes:
    """HTTP handlers of one service."""

    def __init__(self, service: TrainingService) -> None:
        self._handler = RequestHandler(service)
        self._weights = WeightsRoutes(self._handler)

    def table(self) -> list[tuple[str, str, Handler]]:
        """Return method, path and handler of each route."""
        run = "/training_runs/{model}"
        with_seq = self._handler.with_seq
        return [
            ("GET", "/healthz", self.health),
            ("GET", "/get_server_capabilities", self.capabilities),
            ("POST", "/client/config", self.client_config),
            ("POST", "/client/dynamic_config", self.dynamic_config),
            ("POST", "/telemetry", self.telemetry),
            ("POST", "/create_session", self.create_session),
            ("POST", "/session_heartbeat", self.heartbeat),
            ("GET", "/sessions", self.sessions),
            ("GET", "/sessions/{session}", self.session),
            ("POST", "/sessions/{session}/finish", self.finish_session),
            ("POST", "/create_model", self.create_model),
            ("POST", "/unload_model", self.unload_model),
            ("POST", "/get_info", self.get_info),
            ("POST", "/forward_backward", with_seq("forward_backward", self.forward_backward)),
            ("POST", "/optim_step", with_seq("optim_step", self.optim_step)),
            ("POST", "/save_weights", with_seq("save_weights", self._weights.save_weights)),
            (
                "POST",
                "/save_weights_for_sampler",
                with_seq("save_weights_for_sampler", self._weights.save_for_sampler),
            ),
            (
                "POST",
                "/save_weights_external",
                with_seq("save_weights_external", self._weights.save_external),
            ),
            ("POST", "/load_weights", with_seq("load_weights", self._weights.load_weights)),
            ("POST", "/create_sampling_session", self.create_sampler),
            ("POST", "/join_sampling_session", self.join_sampler),
            ("GET", "/samplers/{sampler}", self.sampler),
            ("POST", "/asample", self.sample),
            ("POST", "/cancel_future", self.cancel),
            ("POST", "/retrieve_future", self.retrieve),
            ("GET", "/training_runs", self._weights.runs),
            ("GET", run, self._weights.run),
            ("GET", f"{run}/checkpoints", self._weights.checkpoints),
            ("DELETE", run + "/checkpoints/{kind}/{name}", self._weights.delete_checkpoint),
            ("PUT", run + "/checkpoints/{kind}/{name}/ttl", self._weights.set_ttl),
            ("GET", run + "/checkpoints/{kind}/{name}/external_weights_urls", self._weights.urls),
            ("GET", "/download/{model}/{name}/{file:path}", self._weights.download),
            ("GET", "/checkpoints", self._weights.all_checkpoints),
            ("POST", "/weights_info", self._weights.weights_info),
            ("POST", "/{path:path}", with_seq("", self.unknown)),
        ]

    async def unknown(self, request: Request) -> Response:
        """Refuse a request that this server does not support, such as one from another client
        version. If it has a sequence number, that number is recorded as failed."""
        await self._handler.body(request)
        raise Refusal(404, f"this server has no request {request.url.path!r:.200}")

    # ---- server

    async def health(self, request: Request) -> Response:
        """Answer a health check."""
        return json_response(types.HealthResponse(status="ok"))

    async def capabilities(self, request: Request) -> Response:
        """Return the names and the context length of the base model."""
        ready = self._handler.service.ready
        names = dict.fromkeys(
            [self._handler.options.public_name, *sorted(self._handler.options.names)]
        )
        models = [
            types.SupportedModel(
                model_name=name,
                max_context_length=ready.longest if ready else None,
                trainable=True,
                sampleable=True,
            )
            for name in names
        ]
        return json_response(types.GetServerCapabilitiesResponse(supported_models=models))

    async def client_config(self, request: Request) -> Response:
        """Return the client's settings: the size of the parts into which it splits a batch, the
        number of samples it requests at the same time, and, for clients before 0.25, that passes
        are sent as protobuf."""
        await self._handler.body(request)
        max_chunk = max(1 << 20, (self._handler.options.max_body_mib << 20) // 4)
        return JSONResponse(
            {
                "fwdbwd_max_chunk_bytes_count": max_chunk,
                "sample_max_concurrent_requests": 1024,
                "proto_write_fwdbwd": True,
                "fwd_via_fwdbwd": True,
            }
        )

    async def dynamic_config(self, request: Request) -> Response:
        """Return the client's settings that may change at run time: that it cancels samples it no
        longer waits for."""
        await self._handler.body(request)
        return JSONResponse({"sample_cancel_enabled": True})

    async def telemetry(self, request: Request) -> Response:
        """Accept telemetry and discard it."""
        await self._handler.body(request, data=True)
        return json_response(types.TelemetryResponse(status="accepted"))

    # ---- sessions

    async def create_session(self, request: Request) -> Response:
        """Create a session."""
        parsed = await self._handler.parse(request, types.CreateSessionRequest)
        if parsed.project_id is not None:
            raise Refusal(400, "project_id is not carried by this server")
        self._handler.service.check_disk()
        session = f"s-{secrets.token_hex(8)}"
        info = {
            "tags": parsed.tags,
            "user_metadata": parsed.user_metadata,
            "display_name": parsed.display_name,
        }
        self._handler.store.add_session(session, request.scope[OWNER], info)
        return json_response(types.CreateSessionResponse(session_id=session))

    async def heartbeat(self, request: Request) -> Response:
        """Record a heartbeat of a session."""
        parsed = await self._handler.parse(request, types.SessionHeartbeatRequest)
        self._handler.session(request, parsed.session_id)
        return JSONResponse({"type": "session_heartbeat"})

    async def sessions(self, request: Request) -> Response:
        """List the sessions of the client."""
        return json_response(
            types.ListSessionsResponse(sessions=self._handler.store.sessions(request.scope[OWNER]))
        )

    async def session(self, request: Request) -> Response:
        """Return the models, samplers and metadata of a session."""
        session = request.path_params["session"]
        info = self._handler.session(request, session, alive=False)
        models = [
            row.id
            for row in self._handler.store.models(request.scope[OWNER])
            if row.session == session
        ]
        samplers = [row.id for row in self._handler.store.samplers(session)]
        metadata = {key: str(value) for key, value in (info.get("user_metadata") or {}).items()}
        return json_response(
            types.GetSessionResponse(
                training_run_ids=models,
                sampler_ids=samplers,
                user_metadata=metadata,
                display_name=info.get("display_name"),
            )
        )

    async def finish_session(self, request: Request) -> Response:
        """Finish a session and unload its models."""
        await self._handler.body(request)
        session = request.path_params["session"]
        self._handler.session(request, session, alive=False)
        self._handler.store.touch_session(session, finished=True)
        self._handler.service.unload_lapsed()
        return Response(status_code=204)

    # ---- training

    async def create_model(self, request: Request) -> Response:
        """Create a model with adapters or, with ``--full-weights``, one in which all weights
        train."""
        body = await self._handler.body(request)
        parsed = read_json(types.CreateModelRequest, body)
        self._handler.check_base(parsed.base_model)
        self._handler.check_optimizer(parsed.optimizer_config)
        lora = parsed.lora_config or types.LoraConfig(rank=0)
        full = self._handler.options.full_weights
        if parsed.lora_config is None and not full:
            raise Refusal(
                400,
                "lora_config is missing: this server trains adapters, not all weights "
                "(--full-weights)",
            )
        if full and not (lora.train_mlp and lora.train_attn and lora.train_unembed):
            raise Refusal(
                400, "lora_config: all weights train here (--full-weights), whatever they belong to"
            )
        if not full and not 1 <= lora.rank <= self._handler.options.max_rank:
            raise Refusal(
                400,
                f"lora_config.rank {lora.rank} must be from 1 to {self._handler.options.max_rank} "
                f"(--max-rank)",
            )
        if not (lora.train_mlp or lora.train_attn or lora.train_unembed):
            raise Refusal(
                400, "lora_config: one of train_mlp, train_attn and train_unembed is needed"
            )
        options = {
            "base": parsed.base_model,
            "rank": 0 if full else lora.rank,
            "seed": secrets.randbits(31) if lora.seed is None else lora.seed % (1 << 63),
            "mlp": lora.train_mlp,
            "attention": lora.train_attn,
            "unembedding": lora.train_unembed,
            "metadata": parsed.user_metadata,
        }
        return self._handler.new_model(
            request, parsed.session_id, parsed.model_seq_id, "create_model", options, b"{}"
        )

    async def unload_model(self, request: Request) -> Response:
        """Unload a model permanently; its checkpoints are kept."""
        parsed = await self._handler.parse(request, types.UnloadModelRequest)
        return self._handler.unload(request, parsed.model_id)

    async def get_info(self, request: Request) -> Response:
        """Return the base model, tokenizer and LoRA rank of a model."""
        parsed = await self._handler.parse(request, types.GetInfoRequest)
        row = self._handler.model(request, parsed.model_id)
        data = {
            "arch": "causal_lm",
            "model_name": self._handler.options.public_name,
            "tokenizer_id": self._handler.options.public_name,
        }
        info = {"type": "get_info", "model_id": row.id, **lora_fields(row.options)}
        return JSONResponse(
            {**info, "model_data": data, "model_name": self._handler.options.public_name}
        )

    async def forward_backward(self, request: Request) -> Response:
        """Run a forward pass, and a backward pass unless the request is ``forward_only``."""
        if PROTOBUF not in request.headers.get("content-type", ""):
            # only the sequence number is needed, so a small part of the body suffices
            with suppress(Refusal):
                await self._handler.body(request)
            raise Refusal(415, f"forward_backward takes a body of the type {PROTOBUF}")
        body = await self._handler.body(request, data=True)
        head = read_head(body)
        kind = "forward" if head.forward_only else "forward_backward"
        return self._handler.submit(request, kind, head.model, head.seq, body)

    async def optim_step(self, request: Request) -> Response:
        """Run an optimizer step (AdamW)."""
        parsed = await self._handler.parse(request, types.OptimStepRequest)
        if not isinstance(parsed.optim_params, types.AdamParams):
            kind = parsed.optim_params.type
            raise Refusal(
                400, f"optim_params of {kind} are not carried by this server: AdamParams are"
            )
        body = json.dumps({"params": parsed.optim_params.model_dump()}).encode()
        return self._handler.submit(request, "optim_step", parsed.model_id, parsed.seq_id, body)

    # ---- sampling

    async def create_sampler(self, request: Request) -> Response:
        """Create a sampler that uses a checkpoint or the base model."""
        parsed = await self._handler.parse(request, types.CreateSamplingSessionRequest)
        self._handler.service.check_disk()
        self._handler.session(request, parsed.session_id)
        folder = ""
        if parsed.model_path is not None:
            checkpoints = self._handler.service.checkpoints
            folder = str(
                checkpoints.folder_of(checkpoints.find(request.scope[OWNER], parsed.model_path))
            )
        else:
            self._handler.check_base(parsed.base_model)
        sampler = f"{parsed.session_id}:sample:{check_number(parsed.sampling_session_seq_id)}"
        owner = request.scope[OWNER]
        self._handler.store.add_sampler(
            sampler, owner, parsed.session_id, folder, parsed.model_path or ""
        )
        return json_response(types.CreateSamplingSessionResponse(sampling_session_id=sampler))

    def _sampler(self, request: Request, sampler: str) -> Any:
        row = self._handler.store.sampler(sampler)
        if row is None or row.owner != request.scope[OWNER]:
            raise Refusal(404, f"there is no sampler {sampler!r:.200}")
        return row

    async def join_sampler(self, request: Request) -> Response:
        """Return a client number for a further client of an existing sampler."""
        parsed = await self._handler.parse(request, types.JoinSamplingSessionRequest)
        self._sampler(request, parsed.sampling_session_id)
        return json_response(
            types.JoinSamplingSessionResponse(
                client_counter=self._handler.store.next_client_number(parsed.sampling_session_id)
            )
        )

    async def sampler(self, request: Request) -> Response:
        """Return the base model and the checkpoint of a sampler."""
        row = self._sampler(request, request.path_params["sampler"])
        base = self._handler.options.public_name
        return JSONResponse(
            {"sampler_id": row.id, "base_model": base, "model_path": row.path or None}
        )

    async def sample(self, request: Request) -> Response:
        """Sample sequences."""
        body = await self._handler.body(request, data=True)
        parsed = read_json(types.SampleRequest, body)
        if parsed.sampling_session_id is None or parsed.seq_id is None:
            raise Refusal(
                400,
                "sampling_session_id and seq_id are needed; create_sampling_session gives the "
                "first",
            )
        row = self._sampler(request, parsed.sampling_session_id)
        self._handler.store.touch_session(row.session)
        name = self._handler.service.submit(row.owner, "sample", row.id, parsed.seq_id, body)
        return self._handler.future(
            name,
            sample_sequence_ids=[f"{name}:{i}" for i in range(min(parsed.num_samples, 1 << 16))],
        )

    # ---- futures

    async def retrieve(self, request: Request) -> Response:
        """Wait for a future and return its result. After ``LONG_POLL_S`` return status 408, on
        which the client asks again."""
        parsed = await self._handler.parse(request, types.FutureRetrieveRequest)
        ended = await self._handler.service.wait_for(
            request.scope[OWNER], parsed.request_id, LONG_POLL_S
        )
        if ended is None:
            return JSONResponse(
                {"type": "try_again", "request_id": parsed.request_id, "queue_state": "active"}, 408
            )
        headers = {}
        if ended.info.get("version", -1) >= 0:
            headers = {
                "X-Weights-Version": str(ended.info["version"]),
                "X-Weights-Digest": str(ended.info["digest"]),
            }
        if ended.state == FAILED:
            category = "user" if ended.is_client_error else "server"
            return JSONResponse({"error": ended.error, "category": category}, headers=headers)
        if ended.kind in ("forward", "forward_backward", "sample"):
            return Response(ended.result, media_type=PROTOBUF, headers=headers)
        return JSONResponse(_build_result(ended.kind, ended.target, ended.info), headers=headers)

    async def cancel(self, request: Request) -> Response:
        """Cancel a ``sample`` request."""
        try:
            name = str(json.loads(await self._handler.body(request))["request_id"])
        except (ValueError, KeyError, TypeError):
            raise Refusal(400, "request_id is missing") from None
        self._handler.service.cancel(request.scope[OWNER], name)
        return Response(status_code=204)


def _build_result(kind: str, model: str, info: Any) -> dict[str, Any]:
    """Return the JSON result of a finished request. Besides the client's fields it contains the
    version and digest of the weights."""
    weights = {"weights_version": info.get("version"), "weights_digest": info.get("digest")}
    if kind in ("create_model", "unload_model"):
        return {"type": kind, "model_id": model, **weights}
    if kind == "optim_step":
        return {"metrics": info["numbers"], **weights}
    if kind == "load_weights":
        return {"type": kind, "path": info["path"], "model_id": model, **weights}
    if info["sampler"]:
        return {"type": kind, "path": None, "sampling_session_id": info["sampler"], **weights}
    return {"type": kind, "path": info["path"], **weights}
