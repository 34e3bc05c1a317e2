"""WebSocket sessions of ``/ws``. A session holds one slot for its whole life.

Episodes run in a worker thread; the event loop only passes frames. If a step takes longer than
``_WATCH_AFTER_S``, the session also watches for the client's disconnection. Source:
docs/reference/environment.md 2.1, 2.4.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from concurrent.futures import Executor
from typing import Any

from starlette.types import Scope

from realhf.base import process_clock
from realhf.env.server import mcp, wire
from realhf.env.server.access import token_check
from realhf.env.server.capacity import RETRY_AFTER_S, ServerMetrics, SlotLeases, capacity_body
from realhf.env.server.config import ServerConfig
from realhf.env.server.injected_faults import HANG, UNAVAILABLE, SessionFaults
from realhf.env.server.interfaces import Player, Reply, ServedEnvironment
from realhf.env.server.wire import WireError, WireRequest
from realhf.web.guard import refuse_handshake

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
_WATCH_AFTER_S = 0.25
"""Seconds of a step after which the session also watches for the end of the connection. Quick steps
save the time that this takes."""
GRACE_S = 1.0
"""Seconds that a running command may take to end after its client has disconnected; then its worker
is killed."""
_KILL_AGAIN_S = 0.2
"""Seconds between two attempts to kill a worker."""
KILLED_WAIT_S = 10.0
"""Seconds to wait for a command's thread after its worker was killed."""
FAILED = "environment_failed"
"""Outcome of an episode that ended because the environment failed."""
_LOG = logging.getLogger(__name__)


class _NoAnswer(Exception):
    """Raised for a simulated fault that leaves a request without an answer. If ``hangs``, the
    connection stays open; otherwise it is closed."""

    def __init__(self, hangs: bool) -> None:
        super().__init__()
        self.hangs = hangs


class MeasuredPlayer:
    """``player`` of a session whose resets, steps and episodes are counted in ``metrics``."""

    def __init__(self, player: Player, served: ServedEnvironment, metrics: ServerMetrics) -> None:
        self.player = player
        self._served = served
        self._metrics = metrics
        self._template = ""

    def reset(self, data: dict[str, Any]) -> Reply:
        """Start an episode. Raises WireError."""
        began = time.perf_counter()
        observation, reward, done = self.player.reset(data)
        self._template = self._served.template(observation)
        self._metrics.reset_seconds.observe(time.perf_counter() - began)
        return observation, reward, done

    def step(self, action: dict[str, Any]) -> Reply:
        """Perform an action. Raises WireError."""
        began = time.perf_counter()
        try:
            observation, reward, done = self.player.step(action)
        except WireError as error:
            if error.code == wire.EXECUTION_ERROR:
                self._metrics.episodes.labels(FAILED, self._template).inc()
            raise
        self._metrics.step_seconds.observe(time.perf_counter() - began)
        if done:
            self._metrics.episodes.labels(self._served.outcome(observation), self._template).inc()
        return observation, reward, done

    def kill(self) -> None:
        """Abort the running call. May be called from another thread."""
        self._metrics.workers_killed.inc()
        self.player.kill()


class SocketSession:
    """Session on one accepted WebSocket, until the client, an idle timeout or the server ends it.

    ``faults``: the simulated faults of the session.
    """

    def __init__(
        self,
        player: Player,
        served: ServedEnvironment,
        threads: Executor,
        metrics: ServerMetrics,
        config: ServerConfig,
        *,
        faults: SessionFaults | None = None,
    ) -> None:
        self._faults = faults
        self._player = MeasuredPlayer(player, served, metrics)
        self._served = served
        self._threads = threads
        self._metrics = metrics
        self._describe_setting = config.setting_label
        self._idle_timeout = config.idle_timeout_s or None
        self._first_timeout = config.first_message_timeout_s or self._idle_timeout
        self._has_spoken = False
        self._task: asyncio.Task[Any] | None = None
        self._in_flight: asyncio.Future[str] | None = None
        self._receiving: asyncio.Future[Message] | None = None
        self._idle = False
        self._stopping = False

    def stop(self) -> None:
        """End the session because the server shuts down: at once if it is idle, else after the
        running command. Must be called on the event loop."""
        self._stopping = True
        if self._idle and self._task is not None:
            self._task.cancel()

    @property
    def unfinished(self) -> asyncio.Future[str] | None:
        """Future of a request whose thread has not ended although its worker was killed; None if
        there is none."""
        return None if self._in_flight is None or self._in_flight.done() else self._in_flight

    async def serve(self, receive: Receive, send: Send) -> tuple[int, str] | None:
        """Answer frames until the session ends. Returns (code, reason) for the close frame, or None
        if the client has disconnected. A thread may use the slot until ``unfinished`` is done."""
        self._task = asyncio.current_task()
        try:
            return await self._serve_frames(receive, send)
        finally:
            if self._receiving is not None:
                self._receiving.cancel()

    async def _serve_frames(self, receive: Receive, send: Send) -> tuple[int, str] | None:
        while True:
            if self._stopping:
                return 1001, "server shutdown"
            try:
                message = await self._receive_next(receive)
            except TimeoutError:
                return self._close_silent()
            except asyncio.CancelledError:
                if not self._stopping or self._task is None:
                    raise
                self._task.uncancel()
                return 1001, "server shutdown"
            if message["type"] == "websocket.disconnect":
                return None
            self._has_spoken = True
            try:
                reply = await self._answer(message.get("text"), receive)
            except _NoAnswer as fault:
                if fault.hangs:
                    continue
                return 1011, "simulated fault"
            except Exception:
                return await self._report_failure(send)
            if reply is None:
                return 1000, ""
            try:
                await send({"type": "websocket.send", "text": reply})
            except OSError:
                return None

    def _close_silent(self) -> tuple[int, str]:
        """Count and log a client that was silent too long; return (code, reason) for its close
        frame."""
        if self._has_spoken:
            self._metrics.sessions_reaped.inc()
            option = self._describe_setting("idle_timeout_s")
            _LOG.warning(
                "a session was closed: no message for %g s; %s", self._idle_timeout, option
            )
            return 1001, "idle timeout"
        self._metrics.sessions_unused.inc()
        option = self._describe_setting("first_message_timeout_s")
        _LOG.warning(
            "a session was closed: no first message within %g s; %s", self._first_timeout, option
        )
        return 1001, "no first message"

    async def _report_failure(self, send: Send) -> tuple[int, str] | None:
        """Tell the client that the session itself failed, and end the session."""
        _LOG.exception("a session failed")
        self._metrics.errors.labels(wire.SESSION_ERROR).inc()
        error = WireError(wire.SESSION_ERROR, "the session failed and is closed; open another one")
        try:
            await send({"type": "websocket.send", "text": wire.encode_error(error)})
        except OSError:
            return None
        return 1011, "session error"

    async def _receive_next(self, receive: Receive) -> Message:
        timeout_s = self._idle_timeout if self._has_spoken else self._first_timeout
        self._idle = True
        try:
            if self._receiving is not None:
                pending = self._receiving
                self._receiving = None
                return await asyncio.wait_for(pending, timeout_s)
            async with asyncio.timeout(timeout_s):
                return await receive()
        finally:
            self._idle = False

    async def _answer(self, text: str | None, receive: Receive) -> str | None:
        """Return the text of the reply frame; None for a close request."""
        request_id = None
        try:
            if text is None:
                raise WireError(wire.VALIDATION_ERROR, "binary frames are not accepted")
            request = wire.parse_request(text, self._served.check_reset, self._served.check_action)
            request_id = request.request_id
            if request.kind == "close":
                return None
            if request.kind == "step" and self._faults is not None:
                await self._apply_faults(self._faults)
            return await self._run_in_thread(request, receive)
        except WireError as error:
            error.request_id = error.request_id if error.request_id is not None else request_id
            self._metrics.errors.labels(error.code).inc()
            return wire.encode_error(error)

    async def _apply_faults(self, faults: SessionFaults) -> None:
        """Apply the simulated faults to a step: delay it, or leave it unexecuted. Raises WireError
        or _NoAnswer."""
        if faults.latency_s:
            await asyncio.sleep(faults.latency_s)
        fault = faults.draw()
        if fault is None:
            return
        self._metrics.injected_faults.labels(fault).inc()
        if fault == UNAVAILABLE:
            text = "simulated fault: the step was not executed; send it again"
            raise WireError(wire.UNAVAILABLE, text, retryable=True)
        raise _NoAnswer(hangs=fault == HANG)

    async def _run_in_thread(self, request: WireRequest, receive: Receive) -> str:
        loop = asyncio.get_running_loop()
        work = self._in_flight = loop.run_in_executor(self._threads, self._run_request, request)
        try:
            finished, _ = await asyncio.wait((work,), timeout=_WATCH_AFTER_S)
            if not finished:
                await self._watch(work, receive)
        except asyncio.CancelledError:
            await self._finish_or_kill(work)
            raise
        if not work.done():
            raise WireError(
                wire.EXECUTION_ERROR, "the command did not end when its worker was killed"
            )
        return work.result()

    async def _watch(self, work: asyncio.Future[str], receive: Receive) -> None:
        """Wait for a slow command, while also watching for the end of the connection."""
        self._receiving = asyncio.ensure_future(receive())
        await asyncio.wait((work, self._receiving), return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return
        if self._receiving.result()["type"] == "websocket.disconnect":
            await self._finish_or_kill(work)
        else:
            await asyncio.wait((work,))

    async def _finish_or_kill(self, work: asyncio.Future[str]) -> None:
        """Wait up to ``GRACE_S`` for a command whose client is gone, then kill it."""
        finished, _ = await asyncio.wait((work,), timeout=GRACE_S)
        if not finished:
            await kill_until_done(work, self._player.kill, KILLED_WAIT_S)

    def _run_request(self, request: WireRequest) -> str:
        """Run the request in the worker thread and return its encoded reply. Raises WireError."""
        if request.kind == "state":
            return wire.encode_reply("state", self._player.player.state(), request.request_id)
        if request.kind == "mcp":
            return wire.encode_reply("mcp", self._mcp(request.data), request.request_id)
        play = self._player.reset if request.kind == "reset" else self._player.step
        observation, reward, done = play(request.data)
        return wire.encode_observation(observation, reward, done, request.request_id)

    def _mcp(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            served = self._served
            return mcp.check_request(message, served) or mcp.answer_request(
                message, served, self._player.player, self._player.step
            )
        except WireError as error:
            return mcp.rpc_error(
                message.get("id"), mcp.SERVER_ERROR, error.message, {"code": error.code}
            )


async def kill_until_done(
    work: asyncio.Future[Any], kill: Callable[[], None], limit_s: float
) -> None:
    """Kill a command's worker repeatedly until the command's thread ends, because the executor may
    retry a killed command once. If the thread has not ended after ``limit_s`` seconds, it still
    uses its slot when this function returns."""
    deadline = process_clock.now() + limit_s
    while not work.done():
        if process_clock.now() > deadline:
            _LOG.error("a command did not end within %g s after its worker was killed", limit_s)
            return
        kill()
        await asyncio.wait((work,), timeout=_KILL_AGAIN_S)


_STOP_SESSIONS_S = 5.0
"""Seconds that open sessions may take to end when the server stops."""
_STOP_RELEASES_S = 2.0
"""Seconds to wait after that until their slots are cleaned."""


class SessionEndpoint:
    """ASGI application for ``/ws``."""

    def __init__(
        self,
        leases: SlotLeases,
        served: ServedEnvironment,
        threads: Executor,
        config: ServerConfig,
        metrics: ServerMetrics,
    ) -> None:
        self._leases = leases
        self._served = served
        self._make_player = served.make_player
        self._threads = threads
        self._config = config
        self._metrics = metrics
        self._check_token = token_check(config)
        self._injected = config.injected if config.injected.describe() else None
        self._sessions: set[SocketSession] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lease a slot, accept the handshake and serve a session. The handshake is refused if the
        token is missing or no slot is free."""
        await receive()
        if refusal := self._check_token(scope):
            await refuse_handshake(
                scope, send, refusal.status, {"code": refusal.code, "message": refusal.detail}
            )
            return
        try:
            slot = await self._leases.take()
        except Exception as error:
            await self._refuse(scope, send, 500, self._report_no_environment(error))
            return
        if slot is None:
            retry = (b"retry-after", str(RETRY_AFTER_S).encode())
            await self._refuse(scope, send, 503, capacity_body(self._leases.refuse()), retry)
            return
        try:
            session = self._make_session(slot)
        except Exception as error:
            self._leases.give_back(slot)
            await self._refuse(scope, send, 500, self._report_no_environment(error))
            return
        await self._serve(session, slot, receive, send)

    def _make_session(self, slot: Any) -> SocketSession:
        return SocketSession(
            self._make_player(slot),
            self._served,
            self._threads,
            self._metrics,
            self._config,
            faults=self._injected.session() if self._injected else None,
        )

    async def _serve(self, session: SocketSession, slot: Any, receive: Receive, send: Send) -> None:
        self._sessions.add(session)
        close = None
        try:
            await send({"type": "websocket.accept"})
            self._metrics.sessions_opened.inc()
            close = await session.serve(receive, send)
        except OSError:
            pass
        finally:
            self._sessions.discard(session)
            self._leases.give_back_after(slot, session.unfinished)
        if close is not None:
            await send({"type": "websocket.close", "code": close[0], "reason": close[1]})

    async def stop(self) -> None:
        """Refuse new sessions, close the open ones with code 1001, and wait until their slots are
        cleaned."""
        self._leases.close()
        for session in list(self._sessions):
            session.stop()
        deadline = process_clock.now() + _STOP_SESSIONS_S
        while self._sessions and process_clock.now() < deadline:
            await asyncio.sleep(0.02)
        await self._leases.wait_until_cleaned(_STOP_RELEASES_S)

    def _report_no_environment(self, error: Exception) -> dict[str, Any]:
        """Count and log that an environment could not be created; return the error body for the
        client."""
        name = getattr(self._make_player, "__name__", type(self._make_player).__name__)
        _LOG.error("no environment for a new session (%s)", name, exc_info=error)
        self._metrics.errors.labels(wire.FACTORY_ERROR).inc()
        message = f"the environment could not be made ({type(error).__name__})"
        return {"code": wire.FACTORY_ERROR, "message": message, "factory_name": name}

    async def _refuse(
        self,
        scope: Scope,
        send: Send,
        status: int,
        body: dict[str, Any],
        *headers: tuple[bytes, bytes],
    ) -> None:
        if self._config.capacity_mode == "openenv":
            await send({"type": "websocket.accept"})
            await send({"type": "websocket.send", "text": wire.encode_reply("error", body)})
            await send({"type": "websocket.close", "code": 1000, "reason": ""})
            return
        await refuse_handshake(scope, send, status, body, *headers)
