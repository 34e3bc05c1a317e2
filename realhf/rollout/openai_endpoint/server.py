"""Serves the endpoint on the caller's event loop, on loopback alone."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from types import TracebackType

import uvicorn

from realhf.base.http_guard import guarded_http
from realhf.rollout.openai_endpoint.app import build_app
from realhf.rollout.openai_endpoint.sessions import Session, Sessions

_START_S = 10.0
_STOP_S = 3.0


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no handlers: signals belong to the process around the server."""
        yield


class OpenAiServer:
    """Serves ``sessions``; an async context manager. ``url`` is its address once started."""

    def __init__(self, sessions: Sessions) -> None:
        self.sessions = sessions
        self.url = ""
        self._server = _Server(
            uvicorn.Config(
                build_app(sessions),
                http=guarded_http("h11"),
                ws="none",
                lifespan="off",
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=1,
            )
        )
        self._serving: asyncio.Task[None] | None = None

    def base_url(self, session: Session) -> str:
        """Return the base URL that the agent of a session gives its client."""
        return f"{self.url}/sessions/{session.key}/v1"

    async def start(self) -> None:
        """Listen on a free port, unless it does so already. Raises RuntimeError when the server does not come up."""
        if self._serving is not None and not self._serving.done():
            return
        listener = socket.create_server(("127.0.0.1", 0))
        self._serving = asyncio.ensure_future(self._server.serve(sockets=[listener]))
        deadline = asyncio.get_running_loop().time() + _START_S
        while not self._server.started:
            if self._serving.done() or asyncio.get_running_loop().time() > deadline:
                raise RuntimeError(f"the endpoint of black-box agents did not start within {_START_S:g} s")
            await asyncio.sleep(0.005)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"

    async def stop(self) -> None:
        """Stop serving; harmless when repeated."""
        serving, self._serving = self._serving, None
        if serving is None:
            return
        self._server.should_exit = True
        await asyncio.wait((serving,), timeout=_STOP_S)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    async def __aenter__(self) -> OpenAiServer:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()
