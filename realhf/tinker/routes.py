"""The HTTP routes of the training API, except those about weights.

Bodies and answers are of the client's own types. A request that cannot be carried out is refused if that is known at
once (HTTP 400 to 429, which the client raises as ``APIStatusError``); otherwise its future fails
(``RequestFailedError``).
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
from realhf.tinker.desk import Desk, counted, json_answer
from realhf.tinker.service import Service
from realhf.tinker.store import FAILED
from realhf.tinker.weights_routes import WeightsRoutes, rank_of
from realhf.tinker.wire import PROTOBUF, BadRequest, read_head, read_json, types
from realhf.web.guard import RequestGuard, refusal_response
from realhf.web.refusal import Refusal

LONG_POLL_S = 30.0
"""Seconds that a request for the result of a future waits. The client waits 45."""
Handler = Callable[[Request], Awaitable[Response]]


def build_app(service: Service) -> Starlette:
    """Return the application of a service that is open."""
    routes = Routes(service)
    return Starlette(
        routes=[
            Route(f"/api/v1{path}", guarded(handler), methods=[method]) for method, path, handler in routes.table()
        ],
        middleware=[Middleware(RequestGuard, rules=guard_rules(service.options))],
    )


def guarded(handler: Handler) -> Handler:
    """Return a handler that answers with the error when ``handler`` refuses a request."""

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
    """The handlers of one service."""

    def __init__(self, service: Service) -> None:
        self._desk = Desk(service)
        self._weights = WeightsRoutes(self._desk)

    def table(self) -> list[tuple[str, str, Handler]]:
        """Return method, path and handler of each route."""
        run, counts = "/training_runs/{model}", self._desk.numbered
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
            ("POST", "/forward_backward", counts("forward_backward", self.forward_backward)),
            ("POST", "/optim_step", counts("optim_step", self.optim_step)),
            ("POST", "/save_weights", counts("save_weights", self._weights.save_weights)),
            ("POST", "/save_weights_for_sampler", counts("save_weights_for_sampler", self._weights.save_for_sampler)),
            ("POST", "/save_weights_external", counts("save_weights_external", self._weights.save_external)),
            ("POST", "/load_weights", counts("load_weights", self._weights.load_weights)),
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
            ("POST", "/{path:path}", counts("", self.unknown)),
        ]

    async def unknown(self, request: Request) -> Response:
        """Refuse an unknown request, as of another version of the client. Its number counts as used."""
        await self._desk.body(request)
        raise Refusal(404, f"this server has no request {request.url.path!r:.200}")

    # ---- what is known of everybody

    async def health(self, request: Request) -> Response:
        """Answer the health check."""
        return json_answer(types.HealthResponse(status="ok"))

    async def capabilities(self, request: Request) -> Response:
        """Name the base model."""
        ready = self._desk.service.ready
        names = dict.fromkeys([self._desk.options.public_name, *sorted(self._desk.options.names)])
        models = [
            types.SupportedModel(
                model_name=name, max_context_length=ready.longest if ready else None, trainable=True, sampleable=True
            )
            for name in names
        ]
        return json_answer(types.GetServerCapabilitiesResponse(supported_models=models))

    async def client_config(self, request: Request) -> Response:
        """Tell the client how large the parts of a batch may be: as large as a body."""
        await self._desk.body(request)
        most = max(1 << 20, (self._desk.options.max_body_mib << 20) // 4)
        return JSONResponse({"fwdbwd_max_chunk_bytes_count": most, "sample_max_concurrent_requests": 1024})

    async def dynamic_config(self, request: Request) -> Response:
        """Tell the client that samples can be cancelled."""
        await self._desk.body(request)
        return JSONResponse({"sample_cancel_enabled": True})

    async def telemetry(self, request: Request) -> Response:
        """Accept the telemetry of the client, and discard it."""
        await self._desk.body(request, data=True)
        return json_answer(types.TelemetryResponse(status="accepted"))

    # ---- sessions

    async def create_session(self, request: Request) -> Response:
        """Start a session."""
        asked = await self._desk.asked(request, types.CreateSessionRequest)
        if asked.project_id is not None:
            raise Refusal(400, "project_id is not carried by this server")
        self._desk.service.check_disk()
        session = f"s-{secrets.token_hex(8)}"
        info = {"tags": asked.tags, "user_metadata": asked.user_metadata, "display_name": asked.display_name}
        self._desk.store.add_session(session, request.scope[OWNER], info)
        return json_answer(types.CreateSessionResponse(session_id=session))

    async def heartbeat(self, request: Request) -> Response:
        """Record a heartbeat."""
        asked = await self._desk.asked(request, types.SessionHeartbeatRequest)
        self._desk.session(request, asked.session_id)
        return JSONResponse({"type": "session_heartbeat"})

    async def sessions(self, request: Request) -> Response:
        """List sessions."""
        return json_answer(types.ListSessionsResponse(sessions=self._desk.store.sessions(request.scope[OWNER])))

    async def session(self, request: Request) -> Response:
        """Describe a session."""
        session = request.path_params["session"]
        info = self._desk.session(request, session, alive=False)
        models = [row.id for row in self._desk.store.models(request.scope[OWNER]) if row.session == session]
        samplers = [row.id for row in self._desk.store.samplers(session)]
        metadata = {key: str(value) for key, value in (info.get("user_metadata") or {}).items()}
        return json_answer(
            types.GetSessionResponse(
                training_run_ids=models,
                sampler_ids=samplers,
                user_metadata=metadata,
                display_name=info.get("display_name"),
            )
        )

    async def finish_session(self, request: Request) -> Response:
        """End a session: its models leave the memory."""
        await self._desk.body(request)
        session = request.path_params["session"]
        self._desk.session(request, session, alive=False)
        self._desk.store.see_session(session, finished=True)
        self._desk.service.end_lapsed()
        return Response(status_code=204)

    # ---- training

    async def create_model(self, request: Request) -> Response:
        """Queue the creation of a model: adapters, or a full copy of the weights."""
        body = await self._desk.body(request)
        asked = read_json(types.CreateModelRequest, body)
        self._desk.check_base(asked.base_model)
        self._desk.check_optimizer(asked.optimizer_config)
        lora, full = asked.lora_config or types.LoraConfig(rank=0), self._desk.options.full_weights
        if asked.lora_config is None and not full:
            raise Refusal(400, "lora_config is missing: this server trains adapters, not all weights (--full-weights)")
        if full and not (lora.train_mlp and lora.train_attn and lora.train_unembed):
            raise Refusal(400, "lora_config: all weights train here (--full-weights), whatever they belong to")
        if not full and not 1 <= lora.rank <= self._desk.options.max_rank:
            raise Refusal(
                400, f"lora_config.rank {lora.rank} must be from 1 to {self._desk.options.max_rank} (--max-rank)"
            )
        if not (lora.train_mlp or lora.train_attn or lora.train_unembed):
            raise Refusal(400, "lora_config: one of train_mlp, train_attn and train_unembed is needed")
        options = {
            "base": asked.base_model,
            "rank": 0 if full else lora.rank,
            "seed": secrets.randbits(31) if lora.seed is None else lora.seed % (1 << 63),
            "mlp": lora.train_mlp,
            "attention": lora.train_attn,
            "unembedding": lora.train_unembed,
            "metadata": asked.user_metadata,
        }
        return self._desk.new_model(request, asked.session_id, asked.model_seq_id, "create_model", options, b"{}")

    async def unload_model(self, request: Request) -> Response:
        """Queue the unloading of a model; its checkpoints stay."""
        asked = await self._desk.asked(request, types.UnloadModelRequest)
        return self._desk.unload(request, asked.model_id)

    async def get_info(self, request: Request) -> Response:
        """Describe a model."""
        asked = await self._desk.asked(request, types.GetInfoRequest)
        row = self._desk.model(request, asked.model_id)
        data = {
            "arch": "causal_lm",
            "model_name": self._desk.options.public_name,
            "tokenizer_id": self._desk.options.public_name,
        }
        info = {"type": "get_info", "model_id": row.id, **rank_of(row.options)}
        return JSONResponse({**info, "model_data": data, "model_name": self._desk.options.public_name})

    async def forward_backward(self, request: Request) -> Response:
        """Queue a forward pass, or a forward and a backward pass."""
        if PROTOBUF not in request.headers.get("content-type", ""):
            with suppress(Refusal):  # only its number is read, which stands before the data
                await self._desk.body(request)
            raise Refusal(415, f"forward_backward takes a body of the type {PROTOBUF}")
        body = await self._desk.body(request, data=True)
        head = read_head(body)
        kind = "forward" if head.forward_only else "forward_backward"
        return self._desk.promise(request, kind, head.model, head.seq, body)

    async def optim_step(self, request: Request) -> Response:
        """Queue an optimizer step."""
        asked = await self._desk.asked(request, types.OptimStepRequest)
        if not isinstance(asked.optim_params, types.AdamParams):
            kind = asked.optim_params.type
            raise Refusal(400, f"optim_params of {kind} are not carried by this server: AdamParams are")
        body = json.dumps({"params": asked.optim_params.model_dump()}).encode()
        return self._desk.promise(request, "optim_step", asked.model_id, asked.seq_id, body)

    # ---- sampling

    async def create_sampler(self, request: Request) -> Response:
        """Create a sampler of saved weights, or of the base model."""
        asked = await self._desk.asked(request, types.CreateSamplingSessionRequest)
        self._desk.service.check_disk()
        self._desk.session(request, asked.session_id)
        folder = ""
        if asked.model_path is not None:
            folder = str(
                self._desk.service.shelf.folder_of(
                    self._desk.service.shelf.find(request.scope[OWNER], asked.model_path)
                )
            )
        else:
            self._desk.check_base(asked.base_model)
        sampler = f"{asked.session_id}:sample:{counted(asked.sampling_session_seq_id)}"
        owner = request.scope[OWNER]
        self._desk.store.add_sampler(sampler, owner, asked.session_id, folder, asked.model_path or "")
        return json_answer(types.CreateSamplingSessionResponse(sampling_session_id=sampler))

    def _sampler(self, request: Request, sampler: str) -> Any:
        row = self._desk.store.sampler(sampler)
        if row is None or row.owner != request.scope[OWNER]:
            raise Refusal(404, f"there is no sampler {sampler!r:.200}")
        return row

    async def join_sampler(self, request: Request) -> Response:
        """Give a further client of a sampler its number."""
        asked = await self._desk.asked(request, types.JoinSamplingSessionRequest)
        self._sampler(request, asked.sampling_session_id)
        return json_answer(
            types.JoinSamplingSessionResponse(client_counter=self._desk.store.new_clone(asked.sampling_session_id))
        )

    async def sampler(self, request: Request) -> Response:
        """Return the weights of a sampler."""
        row = self._sampler(request, request.path_params["sampler"])
        told = {"sampler_id": row.id, "base_model": self._desk.options.public_name, "model_path": row.path or None}
        return JSONResponse(told)

    async def sample(self, request: Request) -> Response:
        """Queue samples."""
        body = await self._desk.body(request, data=True)
        asked = read_json(types.SampleRequest, body)
        if asked.sampling_session_id is None or asked.seq_id is None:
            raise Refusal(400, "sampling_session_id and seq_id are needed; create_sampling_session gives the first")
        row = self._sampler(request, asked.sampling_session_id)
        self._desk.store.see_session(row.session)
        name = self._desk.service.promise(row.owner, "sample", row.id, asked.seq_id, body)
        return self._desk.promised(
            name, sample_sequence_ids=[f"{name}:{i}" for i in range(min(asked.num_samples, 1 << 16))]
        )

    # ---- promises

    async def retrieve(self, request: Request) -> Response:
        """Wait for the result of a future."""
        asked = await self._desk.asked(request, types.FutureRetrieveRequest)
        ended = await self._desk.service.outcome(request.scope[OWNER], asked.request_id, LONG_POLL_S)
        if ended is None:
            return JSONResponse({"type": "try_again", "request_id": asked.request_id, "queue_state": "active"}, 408)
        headers = {}
        if ended.info.get("version", -1) >= 0:
            headers = {"X-Weights-Version": str(ended.info["version"]), "X-Weights-Digest": str(ended.info["digest"])}
        if ended.state == FAILED:
            category = "user" if ended.theirs else "server"
            return JSONResponse({"error": ended.error, "category": category}, headers=headers)
        if ended.kind in ("forward", "forward_backward", "sample"):
            return Response(ended.result, media_type=PROTOBUF, headers=headers)
        return JSONResponse(_told(ended.kind, ended.target, ended.info), headers=headers)

    async def cancel(self, request: Request) -> Response:
        """Cancel a sample request."""
        try:
            name = str(json.loads(await self._desk.body(request))["request_id"])
        except (ValueError, KeyError, TypeError):
            raise Refusal(400, "request_id is missing") from None
        self._desk.service.cancel(request.scope[OWNER], name)
        return Response(status_code=204)


def _told(kind: str, model: str, info: Any) -> dict[str, Any]:
    """Return the answer of a request whose result is on the disk; the client ignores version and digest."""
    proof = {"weights_version": info.get("version"), "weights_digest": info.get("digest")}
    if kind in ("create_model", "unload_model"):
        return {"type": kind, "model_id": model, **proof}
    if kind == "optim_step":
        return {"metrics": info["numbers"], **proof}
    if kind == "load_weights":
        return {"type": kind, "path": info["path"], "model_id": model, **proof}
    if info["sampler"]:
        return {"type": kind, "path": None, "sampling_session_id": info["sampler"], **proof}
    return {"type": kind, "path": info["path"], **proof}
