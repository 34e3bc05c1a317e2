"""Environment server: its application, and the thread that serves it over HTTP.

A stateless request starts an episode, plays one action, and discards the episode. It leases a slot
for that time, and gets 503 with Retry-After if none is free; the other routes need no slot. Source:
docs/reference/environment.md 2.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import stat
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, TypeVar

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, RedirectResponse
from pydantic import BaseModel, ConfigDict, Field, create_model
from starlette.routing import WebSocketRoute
from uvicorn.config import LOGGING_CONFIG

from realhf.base import process_clock
from realhf.base.event_loops import NEW_EVENT_LOOP
from realhf.env.server import mcp, wire
from realhf.env.server.access import MCP_PATH, error_body, guard_rules, has_own_check
from realhf.env.server.capacity import ServerMetrics, SlotLeases, capacity_body, watch_loop_lag
from realhf.env.server.config import ServerConfig
from realhf.env.server.interfaces import Player, Reply, ServedEnvironment
from realhf.env.server.mcp_endpoint import McpClients, McpEndpoint
from realhf.env.server.session import KILLED_WAIT_S, SessionEndpoint, kill_until_done
from realhf.web.bodies import BodyReader, BodyRules
from realhf.web.certificates import plaintext_warning, server_files
from realhf.web.connections import guarded_http
from realhf.web.guard import RequestGuard, refusal_response
from realhf.web.refusal import Refusal

_LOG = logging.getLogger(__name__)
T = TypeVar("T")
_MAX_BODY_BYTES = wire.MAX_FRAME_BYTES
_MAX_TIMEOUT_S = 3600.0
"""Largest allowed ``timeout_s`` of a request."""
_JSON = "application/json"
_STATELESS_KILLED_WAIT_S = 1.0
"""Seconds after ``timeout_s`` for which a request waits until its killed command has ended."""


class ResetRequest(BaseModel):
    """Body of POST /reset; further keys are ignored."""

    model_config = ConfigDict(extra="allow")
    seed: int | None = None
    episode_id: str | None = None
    task: dict[str, Any] | None = None
    task_id: int | str | None = None


class _StepRequest(BaseModel):
    model_config = ConfigDict(extra="allow")
    action: Any
    timeout_s: float | None = Field(default=None, gt=0, le=_MAX_TIMEOUT_S)
    request_id: str | None = Field(default=None, max_length=wire.MAX_NAME_CHARS)


def step_request(action: type[BaseModel]) -> type[BaseModel]:
    """Return the model of the body of POST /step for an environment's action."""
    return create_model(
        "StepRequest", __base__=_StepRequest, __doc__="Body of POST /step.", action=(action, ...)
    )


class StatelessPlayer:
    """Service of stateless requests, each of which performs one action on a leased slot."""

    def __init__(
        self, leases: SlotLeases, make_player: Callable[[Any], Player], threads: Executor
    ) -> None:
        self._leases = leases
        self._make_player = make_player
        self._threads = threads

    async def play(self, action: Callable[[Player], T], timeout_s: float | None = None) -> T:
        """Run ``action`` with a player and return its result.

        Raises Refusal (503) if no slot is free, WireError, or TimeoutError after ``timeout_s``.
        After a timeout the command is killed; if its thread still does not end, it keeps the slot.
        """
        slot = await self._leases.take()
        if slot is None:
            raise self._leases.refuse()
        work = None
        try:
            player = self._make_leased_player(slot)
            work = asyncio.get_running_loop().run_in_executor(self._threads, action, player)
            try:
                finished, _ = await asyncio.wait((work,), timeout=timeout_s)
            except asyncio.CancelledError:
                await kill_until_done(work, player.kill, KILLED_WAIT_S)
                raise
            if not finished:
                await kill_until_done(work, player.kill, _STATELESS_KILLED_WAIT_S)
                raise TimeoutError(f"no answer within {timeout_s:g} s")
            return work.result()
        finally:
            self._leases.give_back_after(slot, work)

    def _make_leased_player(self, slot: Any) -> Player:
        try:
            return self._make_player(slot)
        except Exception as error:
            _LOG.exception("no environment for a request")
            message = f"the environment could not be made ({type(error).__name__})"
            raise wire.WireError(wire.FACTORY_ERROR, message) from error


def build_app(
    served: ServedEnvironment,
    leases: SlotLeases,
    endpoint: SessionEndpoint,
    mcp_endpoint: McpEndpoint,
    stateless: StatelessPlayer,
    config: ServerConfig,
    metrics: ServerMetrics,
) -> FastAPI:
    """Build the application, without the pages of the environment."""
    app = FastAPI(title=served.title, description=served.about)
    app.router.routes.append(WebSocketRoute("/ws", endpoint))
    # The middleware that is added last is called first.
    app.add_middleware(McpClients, endpoint=mcp_endpoint)
    body_rules = BodyRules(
        _MAX_BODY_BYTES,
        error_body,
        length_required=True,
        media_type=_JSON,
        left_to_handler=lambda scope: has_own_check(scope, served.own_guard),
        decompress=False,
    )
    app.add_middleware(BodyReader, rules=body_rules)
    app.add_middleware(RequestGuard, rules=guard_rules(config, served.own_guard))
    _add_description(app, served, leases, metrics)
    _add_stateless(app, stateless, served)
    return app


def _add_description(
    app: FastAPI, served: ServedEnvironment, leases: SlotLeases, metrics: ServerMetrics
) -> None:
    @app.get("/", include_in_schema=False)
    async def root() -> Response:
        return RedirectResponse(served.home)

    @app.get("/health")
    async def health() -> Response:
        usable = served.pool.free_count + leases.active + leases.cleaning_count
        status, word = (200, "healthy") if usable > 0 else (503, "unhealthy")
        return JSONResponse({"status": word}, status)

    @app.get("/schema")
    async def schema() -> dict[str, Any]:
        return served.schema()

    @app.get("/metadata")
    async def metadata() -> dict[str, Any]:
        return served.metadata()

    @app.get("/state")
    async def state() -> dict[str, Any]:
        """Return the state before a reset, because stateless requests leave no episode open."""
        return served.blank_state()

    @app.get("/metrics")
    async def metrics_page() -> Response:
        return Response(metrics.page(), media_type="text/plain; version=0.0.4")


def _add_stateless(app: FastAPI, stateless: StatelessPlayer, served: ServedEnvironment) -> None:
    @app.exception_handler(Refusal)
    async def on_refusal(request: Request, error: Refusal) -> Response:
        return refusal_response(error, capacity_body)

    @app.exception_handler(wire.WireError)
    async def on_wire_error(request: Request, error: wire.WireError) -> Response:
        status = 422 if error.code == wire.VALIDATION_ERROR else 500
        kind = {"kind": error.kind} if error.kind else {}
        return JSONResponse({"detail": error.message, "code": error.code, **kind}, status)

    @app.exception_handler(RequestValidationError)
    async def on_invalid_body(request: Request, error: RequestValidationError) -> Response:
        """Report which fields are invalid, without their values, which may be long or not
        encodable."""
        problems = [
            {"loc": [str(part)[:64] for part in problem["loc"]], "msg": problem["msg"][:200]}
            for problem in error.errors()[:20]
        ]
        return Response(
            json.dumps({"detail": problems, "code": wire.VALIDATION_ERROR}), 422, media_type=_JSON
        )

    @app.exception_handler(TimeoutError)
    async def on_timeout(request: Request, error: TimeoutError) -> Response:
        return JSONResponse({"detail": str(error), "code": wire.EXECUTION_ERROR}, 504)

    @app.post("/reset")
    async def reset(body: ResetRequest | None = None) -> dict[str, Any]:
        data = served.check_reset(body.model_dump() if body else {})
        return _reply(await stateless.play(lambda player: player.reset(data)))

    async def step(body: _StepRequest) -> dict[str, Any]:
        action = served.check_action(body.action.model_dump())

        def play(player: Player) -> Reply:
            player.reset({})
            return player.step(action)

        return _reply(await stateless.play(play, body.timeout_s))

    step.__annotations__["body"] = step_request(served.action_model)
    app.post("/step")(step)

    @app.post(MCP_PATH)
    async def call(request: Request) -> Response:
        try:
            message = json.loads(await request.body())
        except (ValueError, RecursionError):
            return JSONResponse(mcp.rpc_error(None, mcp.PARSE_ERROR, "the body is not JSON"))
        answer = mcp.check_request(message, served)
        if answer is None:
            answer = await _call_tool(stateless, served, message)
        return JSONResponse(answer)


async def _call_tool(
    stateless: StatelessPlayer, served: ServedEnvironment, message: Mapping[str, Any]
) -> dict[str, Any]:
    def play(player: Player) -> dict[str, Any]:
        player.reset({})
        return mcp.answer_request(message, served, player, player.step)

    try:
        return await stateless.play(play)
    except Refusal as refusal:
        return mcp.rpc_error(
            message.get("id"), mcp.SERVER_ERROR, str(refusal), capacity_body(refusal)
        )
    except wire.WireError as error:
        return mcp.rpc_error(
            message.get("id"), mcp.SERVER_ERROR, error.message, {"code": error.code}
        )


def _reply(result: Reply) -> dict[str, Any]:
    observation, reward, done = result
    return {"observation": dict(observation), "reward": wire.finite_or_none(reward), "done": done}


class PortTaken(OSError):
    """Raised if the server's port is in use."""


def listen(host: str, port: int) -> socket.socket:
    """Return a bound, listening socket that detects dead peers of its connections. Raises
    PortTaken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", 30),
        ("TCP_KEEPINTVL", 10),
        ("TCP_KEEPCNT", 3),
        ("TCP_NODELAY", 1),
    ):
        if hasattr(socket, option):
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    try:
        listener.bind((host, port))
        listener.listen(256)
    except OSError as error:
        listener.close()
        raise PortTaken(f"cannot listen on {host}:{port} (--port): {error.strerror}") from None
    listener_ref = weakref.ref(listener)
    os.register_at_fork(after_in_child=lambda: _leave_port(listener_ref()))
    return listener


def _leave_port(listener: socket.socket | None) -> None:
    """Close the sockets of the server's port in a process that an environment has forked. Otherwise
    the port would stay in use while that process lives, and clients would not notice the end of
    their sessions."""
    if listener is None or listener.fileno() < 0:
        return
    port = listener.getsockname()[1]
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as probe:
                    inherited = probe.family == listener.family and probe.getsockname()[1] == port
                if inherited:
                    os.close(int(name))


class _RefusalFilter(logging.Filter):
    """Logging filter that drops an error which uvicorn 0.54 logs for each handshake refused with an
    HTTP error (see ``refuse_handshake``), because uvicorn regards only accepted and closed
    handshakes as complete."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is logged."""
        return record.getMessage() != "ASGI callable returned without completing handshake."


def _log_config() -> dict[str, Any]:
    handlers = LOGGING_CONFIG["handlers"]
    return {
        **LOGGING_CONFIG,
        "filters": {"refusals": {"()": _RefusalFilter}},
        "handlers": {**handlers, "default": {**handlers["default"], "filters": ["refusals"]}},
    }


class EnvServer:
    """Application that is served on a thread of its own, so that the main thread is free for
    signals and RPC.

    ``ended`` is set when the thread ends.
    """

    def __init__(
        self, served: ServedEnvironment, config: ServerConfig, listener: socket.socket
    ) -> None:
        pool = served.pool
        self._metrics = ServerMetrics(pool.metrics, served.slots_are, served.slot_label)
        self._threads = ThreadPoolExecutor(config.pool_size + 2, thread_name_prefix="env-session")
        leases = SlotLeases(pool, config.pool_size, self._threads, self._metrics)
        self._endpoint = SessionEndpoint(leases, served, self._threads, config, self._metrics)
        self._mcp_endpoint = McpEndpoint(leases, served, self._threads, config, self._metrics)
        stateless = StatelessPlayer(leases, served.make_player, self._threads)
        app = build_app(
            served,
            leases,
            self._endpoint,
            self._mcp_endpoint,
            stateless,
            config,
            self._metrics,
        )
        self._page = served.mount(app)
        if warning := plaintext_warning(config.host, config.tls_cert, config.tls_names):
            _LOG.warning(warning)
        self._listener = listener
        self._address = listener.getsockname()[:2]
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                http=guarded_http("h11"),
                ws="websockets-sansio",
                ws_max_size=wire.MAX_FRAME_BYTES,
                ws_ping_interval=config.ws_ping_interval_s,
                ws_ping_timeout=config.ws_ping_timeout_s,
                ws_per_message_deflate=False,
                lifespan="off",
                log_config=_log_config(),
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=2,
                **{"loop": NEW_EVENT_LOOP, **server_files(config.tls_cert, config.tls_key)},  # pyright: ignore[reportArgumentType]
            )
        )
        self.ended = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="env-server", daemon=True)

    @property
    def url(self) -> str:
        """Base address of the server."""
        host, port = self._address
        scheme = "https" if self._server.config.is_ssl else "http"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    def start(self, timeout_s: float = 10.0) -> None:
        """Start serving. Raises RuntimeError if the server does not start."""
        self._thread.start()
        deadline = process_clock.now() + timeout_s
        while not self._server.started:
            if process_clock.now() > deadline or self.ended.is_set():
                raise RuntimeError(f"the environment server did not start within {timeout_s:g} s")
            time.sleep(0.005)

    def stop(self, timeout_s: float = 9.0) -> None:
        """Close all sessions with code 1001 and stop serving."""
        deadline = process_clock.now() + timeout_s
        if self._loop is not None and not self.ended.is_set():
            try:
                asyncio.run_coroutine_threadsafe(self._end_sessions(), self._loop).result(timeout_s)
            except TimeoutError:
                _LOG.error("sessions did not end within %g s", timeout_s)
            self._server.should_exit = True
            self._thread.join(max(0.5, deadline - process_clock.now()))
        if self._page is not None:
            self._page.close()

    async def _end_sessions(self) -> None:
        await self._mcp_endpoint.stop()
        await self._endpoint.stop()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=self._server.config.get_loop_factory()) as runner:
                self._loop = runner.get_loop()
                runner.run(self._serve())
        finally:
            self._threads.shutdown(wait=False)
            self.ended.set()

    async def _serve(self) -> None:
        watch = asyncio.create_task(watch_loop_lag(self._metrics))
        try:
            await self._server.serve(sockets=[self._listener])
        finally:
            watch.cancel()
