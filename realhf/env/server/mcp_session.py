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
from typing import Any, TypeVar

import anyio
import mcp_types as types  # pyright: ignore[reportMissingImports]
from mcp.server.lowlevel import Server  # pyright: ignore[reportMissingImports]
from mcp.server.streamable_http import (  # pyright: ignore[reportMissingImports]
    StreamableHTTPServerTransport,
)
from mcp.shared.exceptions import MCPError  # pyright: ignore[reportMissingImports]
from starlette.types import Receive, Scope, Send

import realhf
from realhf.env.server import wire
from realhf.env.server.config import ServerConfig
from realhf.env.server.interfaces import ServedEnvironment
from realhf.env.server.mcp import SERVER_ERROR
from realhf.env.server.mcp_endpoint import error_data
from realhf.env.server.session import GRACE_S, KILLED_WAIT_S, MeasuredPlayer, kill_until_done
from realhf.env.server.wire import WireError

T = TypeVar("T")
MAX_CALL_S = 3600.0
"""Seconds that a call may take, whatever the limits of the environment; then it is killed."""
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

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request of the session. A stream of notifications (GET) does not keep the
        session from being idle."""
        if scope["method"] != "POST":
            await self._transport.handle_request(scope, receive, send)
            return
        self._requests += 1
        if self._timer is not None:
            self._timer.cancel()
        try:
            await self._transport.handle_request(scope, receive, send)
        finally:
            self._requests -= 1
            if not self._requests:
                self._start_timer()

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

    async def _play(self, step: Callable[[], T]) -> T:
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

    async def _finish_or_kill(self, work: asyncio.Future[Any], grace_s: float) -> None:
        """Wait up to ``grace_s`` seconds for a step that its client does not wait for, then kill it. A killed
        step ends the episode."""
        await asyncio.wait((work,), timeout=grace_s)
        if not work.done():
            self._is_over = True
            await kill_until_done(work, self._player.kill, KILLED_WAIT_S)
        if work.done() and (error := work.exception()) is not None:
            _LOG.warning("a call that its client gave up failed: %s", error)


def _result(text: str, *, failed: bool, meta: Mapping[str, Any] | None = None) -> Any:
    """Return the result of a call."""
    content: Sequence[Any] = [types.TextContent(type="text", text=_encodable(text))]
    return types.CallToolResult(
        content=content, is_error=failed, **({"_meta": dict(meta)} if meta else {})
    )


def _encodable(text: str) -> str:
    """Return the text without lone surrogates."""
    return text.encode("utf-8", "replace").decode("utf-8")
