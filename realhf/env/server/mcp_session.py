"""A session of one MCP client, whose tools are those of its episode.

The server and the transport are those of the official SDK. Its session manager is not used, because
it does not tell when a session ends, and a session here holds a slot of the environment. Source:
MCP 2025-11-25; mcp 2.3.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any

import anyio
import mcp_types as types  # pyright: ignore[reportMissingImports]
import pydantic_core
from mcp.server.lowlevel import Server  # pyright: ignore[reportMissingImports]
from mcp.server.streamable_http import (  # pyright: ignore[reportMissingImports]
    StreamableHTTPServerTransport,
    check_accept_headers,
)
from mcp.shared.exceptions import MCPError  # pyright: ignore[reportMissingImports]
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

import realhf
from realhf.env.server import wire
from realhf.env.server.config import ServerConfig
from realhf.env.server.interfaces import Reply, ServedEnvironment
from realhf.env.server.mcp import INVALID_PARAMS, INVALID_REQUEST, SERVER_ERROR, rpc_error
from realhf.env.server.mcp_endpoint import RefusedRequest, error_data
from realhf.env.server.session import GRACE_S, KILLED_WAIT_S, MeasuredPlayer, kill_until_done
from realhf.env.server.wire import WireError
from realhf.web.bodies import BODY

MAX_CALL_S = 3600.0
"""Seconds that a call may take, whatever the limits of the environment; then it is killed."""
ANSWER_S = MAX_CALL_S + GRACE_S + KILLED_WAIT_S
"""Seconds within which a request is answered or a call that waits gets nearer to its turn. A session
whose protocol fails to do so is ended, because its slot would stay leased."""
REWARD = "realhf-agents/reward"
DONE = "realhf-agents/done"
"""Keys of a result's ``_meta``, which is for the client's program and not for its model."""
_OVER = "the episode is over; another session begins another one"
_LOG = logging.getLogger(__name__)


class McpSession:
    """Session of an MCP client: an episode that has begun, and its tools.

    ``observation``: what the reset of ``player`` returned. ``expired_by``: the setting that ended
    the session because its client was silent; "" if none did.
    """

    def __init__(
        self,
        served: ServedEnvironment,
        player: MeasuredPlayer,
        observation: Mapping[str, Any],
        threads: Executor,
        config: ServerConfig,
    ) -> None:
        self.id = uuid.uuid4().hex
        self.expired_by = ""
        self._served = served
        self._player = player
        self._threads = threads
        self._config = config
        self._tools = [
            types.Tool.model_validate(dict(tool)) for tool in served.tools(player.player) or ()
        ]
        self._server = Server(
            served.title,
            version=realhf.__version__,
            instructions=_encodable(served.instructions(observation)),
            on_list_tools=self._list_tools,
            on_call_tool=self._call_tool,
        )
        # Each response is one JSON body: there are no notifications to the client in between.
        self._transport = StreamableHTTPServerTransport(self.id, is_json_response_enabled=True)
        self._turn = asyncio.Lock()
        self._is_over = False
        self._work: asyncio.Future[Any] | None = None
        self._requests = 0
        self._ids: set[str] = set()
        self._limits: set[asyncio.Timeout] = set()
        self._is_greeted = False
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def unfinished(self) -> asyncio.Future[Any] | None:
        """Future of a call whose thread has not ended although it was killed; None if there is
        none."""
        return None if self._work is None or self._work.done() else self._work

    async def start(self, is_over: bool) -> None:
        """Begin to answer requests. ``is_over``: whether the episode ended with its reset."""
        self._is_over = is_over
        ready = asyncio.Event()
        self._task = asyncio.create_task(self._run(ready), name="mcp-session")
        waiting = asyncio.ensure_future(ready.wait())
        await asyncio.wait((waiting, self._task), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()

    def end(self) -> None:
        """End the session; a running call is killed."""
        if self._task is not None:
            self._task.cancel()

    async def wait_until_ended(self) -> None:
        """Wait for the end of the session."""
        if self._task is not None:
            await asyncio.wait((self._task,))
        if self._timer is not None:
            self._timer.cancel()

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> int | None:
        """Answer a request of the session and return the status of the response; None if there was
        none. A stream of notifications (GET) does not keep the session from being idle."""
        status = None

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        if scope["method"] != "POST":
            await self._transport.handle_request(scope, receive, send_and_note)
            return status
        request = _parse_request(scope[BODY])
        # The SDK keys its requests by the text of their ids, and loses the first of two.
        key = None if request is None else str(request.id)
        if request is not None and key in self._ids:
            text = "a request with this id is under way"
            response = JSONResponse(rpc_error(request.id, INVALID_REQUEST, text), 400)
            await response(scope, receive, send_and_note)
            return status
        self._requests += 1
        if key is not None:
            self._ids.add(key)
        if self._timer is not None:
            self._timer.cancel()
        limit = asyncio.timeout(ANSWER_S)
        self._limits.add(limit)
        try:
            async with limit:
                await self._transport.handle_request(scope, receive, send_and_note)
        except TimeoutError:
            _LOG.error("an MCP session was ended: no answer within %g s", ANSWER_S)
            self.end()
            if status is None:
                answer = rpc_error(
                    request and request.id, SERVER_ERROR, f"no answer within {ANSWER_S:g} s"
                )
                await JSONResponse(answer, 504)(scope, receive, send_and_note)
        finally:
            self._limits.discard(limit)
            if key is not None:
                self._ids.discard(key)
            self._requests -= 1
            if not self._requests and self._task is not None and not self._task.done():
                self._start_timer()
        return status

    def _restart_limits(self) -> None:
        """Give every request its full time again, because the line of calls has advanced."""
        when = asyncio.get_running_loop().time() + ANSWER_S
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(when)

    def _start_timer(self) -> None:
        """Start the time that the client may be silent. It is short until the first message after
        ``initialize``."""
        idle_s = self._config.idle_timeout_s
        limit_s = idle_s if self._is_greeted else self._config.first_message_timeout_s or idle_s
        option = "idle_timeout_s" if self._is_greeted else "first_message_timeout_s"
        self._is_greeted = True
        if limit_s:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(limit_s, self._expire, limit_s, option)

    def _expire(self, limit_s: float, option: str) -> None:
        self.expired_by = option
        label = self._config.setting_label(option)
        _LOG.warning("an MCP session was ended: no message for %g s; %s", limit_s, label)
        self.end()

    async def _run(self, ready: asyncio.Event) -> None:
        """Serve the session until its client ends it, or it is cancelled."""
        try:
            async with self._transport.connect() as (reading, writing):
                ready.set()
                options = self._server.create_initialization_options()
                await self._server.run(reading, writing, options)
        except Exception:
            _LOG.exception("an MCP session failed")

    async def _list_tools(self, context: Any, params: Any) -> Any:
        del context, params
        return types.ListToolsResult(tools=self._tools)

    async def _call_tool(self, context: Any, params: Any) -> Any:
        """Play a call as a step. Mistakes of the client's model are results with ``isError``;
        failures of the environment are JSON-RPC errors."""
        del context
        call = {"name": params.name, "arguments": params.arguments or {}}
        if problem := self._served.call_problem(call):
            return _result(problem, failed=True)
        async with self._turn:
            self._restart_limits()
            if self._is_over:
                return _result(_OVER, failed=True)
            try:
                action = self._served.call_action(call)
                observation, reward, done = await self._play(partial(self._player.step, action))
            except WireError as error:
                if error.code == wire.VALIDATION_ERROR:
                    return _result(error.message, failed=True)
                self._is_over = not error.retryable
                raise MCPError(SERVER_ERROR, error.message, error_data(error)) from None
            self._is_over = done
        text, failed = self._served.tool_result(observation)
        meta = {REWARD: wire.finite_or_none(reward), DONE: done}
        return _result(text, failed=failed, meta=meta)

    async def _play(self, step: Callable[[], Reply]) -> Reply:
        """Run a step in a thread and return its result. Raises WireError, also after
        ``MAX_CALL_S``. If the client cancels the call or ends the session, the step is killed."""
        work = asyncio.get_running_loop().run_in_executor(self._threads, step)
        self._work = work
        try:
            await asyncio.wait((work,), timeout=MAX_CALL_S)
        except asyncio.CancelledError:
            # The SDK cancels by an anyio scope, which would interrupt every further wait.
            with anyio.CancelScope(shield=True):
                await self._finish_or_kill(work, GRACE_S)
            raise
        if not work.done():
            await self._finish_or_kill(work, 0.0)
            text = f"the call took longer than {MAX_CALL_S:g} s"
            raise WireError(wire.EXECUTION_ERROR, text, kind="timeout")
        return work.result()

    async def _finish_or_kill(self, work: asyncio.Future[Reply], grace_s: float) -> None:
        """Wait up to ``grace_s`` seconds for a step that its client does not wait for, then kill it.
        A killed step ends the episode."""
        await asyncio.wait((work,), timeout=grace_s)
        if not work.done():
            self._is_over = True
            await kill_until_done(work, self._player.kill, KILLED_WAIT_S)
        if not work.done():
            return
        if (error := work.exception()) is None:
            self._is_over = self._is_over or work.result()[2]
            return
        _LOG.warning("a call that its client gave up failed: %s", error)
        goes_on = isinstance(error, WireError) and (
            error.retryable or error.code == wire.VALIDATION_ERROR
        )
        self._is_over = self._is_over or not goes_on


def check_initialize(scope: Scope) -> None:
    """Check the request that begins a session, which needs no slot. Raises RefusedRequest."""
    accepts_json, _ = check_accept_headers(Request(scope))
    if not accepts_json:
        raise RefusedRequest(406, INVALID_REQUEST, "the client must accept application/json")
    request = _parse_request(scope[BODY])
    if request is None:
        text = "initialize is a request: jsonrpc is '2.0', id is a string or an integer"
        raise RefusedRequest(400, INVALID_REQUEST, text)
    try:
        types.InitializeRequestParams.model_validate(request.params or {}, by_name=False)
    except ValueError:
        text = "initialize needs protocolVersion, capabilities and clientInfo with name and version"
        raise RefusedRequest(400, INVALID_PARAMS, text) from None


def _parse_request(body: bytes) -> types.JSONRPCRequest | None:
    """Parse a body as the SDK does. Return None for one that is not a request, or invalid."""
    try:
        message = types.jsonrpc_message_adapter.validate_python(
            pydantic_core.from_json(body), by_name=False
        )
    except ValueError:
        return None
    return message if isinstance(message, types.JSONRPCRequest) else None


def _result(text: str, *, failed: bool, meta: Mapping[str, Any] | None = None) -> Any:
    """Return the result of a call."""
    content: Sequence[Any] = [types.TextContent(type="text", text=_encodable(text))]
    return types.CallToolResult(
        content=content, is_error=failed, **({"_meta": dict(meta)} if meta else {})
    )


def _encodable(text: str) -> str:
    """Return the text without lone surrogates."""
    return text.encode("utf-8", "replace").decode("utf-8")
