"""A small server that speaks the public OpenEnv wire: its pages over HTTP, its sessions over a
WebSocket.

A game is a function ``play(kind, data, session)`` that answers ``reset`` and ``step`` with the data
of an observation; what it raises is an error frame, as ``Answer`` says.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from http import HTTPStatus
from typing import Any

from websockets.asyncio.server import ServerConnection, serve
from websockets.datastructures import Headers
from websockets.http11 import Request, Response

Game = Callable[[str, dict[str, Any], dict[str, Any]], Any]


class Fault(Exception):
    """Becomes an error frame with this code."""

    def __init__(self, code: str, message: str, **more: Any) -> None:
        super().__init__(message)
        self.frame = {"type": "error", "data": {"code": code, "message": message, **more}}


class HangUp(Exception):
    """The server drops the connection instead of answering."""


class Silence(Exception):
    """The server does not answer."""


class Raw(Exception):
    """The server answers with this text."""


class WireServer:
    """One running server. ``seen`` are the requests of all sessions, ``open`` the connections that
    are open."""

    def __init__(
        self, game: Game, action: Any, metadata: dict[str, Any] | None, capacity: int, page: str
    ) -> None:
        self.url = ""
        self.seen: list[tuple[str, dict[str, Any]]] = []
        self.open: set[ServerConnection] = set()
        self._game = game
        self._capacity = capacity
        self._pages = {
            "/schema": page or json.dumps({"action": action, "observation": {}, "state": {}})
        }
        if metadata is not None:
            self._pages["/metadata"] = json.dumps(metadata)

    def process_request(self, connection: ServerConnection, request: Request) -> Response | None:
        """Answer the pages; everything else is the socket's."""
        if request.path == "/ws":
            return None
        found = self._pages.get(request.path)
        status = HTTPStatus.OK if found is not None else HTTPStatus.NOT_FOUND
        body = (found or "").encode()
        headers = Headers({"Content-Type": "application/json", "Content-Length": str(len(body))})
        return Response(status.value, status.phrase, headers, body)

    async def serve_session(self, connection: ServerConnection) -> None:
        """Serve one session until its client leaves."""
        if len(self.open) >= self._capacity:
            await connection.send(json.dumps(Fault("CAPACITY_REACHED", "no free session").frame))
            return
        self.open.add(connection)
        session: dict[str, Any] = {}
        try:
            async for text in connection:
                message = json.loads(text)
                if message["type"] == "close":
                    return
                try:
                    answer = self._answer(message, session)
                except Silence:
                    continue
                except HangUp:
                    connection.transport.abort()
                    return
                await connection.send(answer)
        finally:
            self.open.discard(connection)

    def _answer(self, message: dict[str, Any], session: dict[str, Any]) -> str:
        if message["type"] == "state":
            return json.dumps({"type": "state", "data": {"step_count": 0}})
        self.seen.append((message["type"], message["data"]))
        try:
            data = self._game(message["type"], message["data"], session)
        except Fault as fault:
            return json.dumps(fault.frame)
        except Raw as raw:
            return str(raw)
        return json.dumps({"type": "observation", "data": data})


@contextlib.asynccontextmanager
async def serving(
    game: Game,
    action: Any,
    *,
    metadata: dict[str, Any] | None = None,
    capacity: int = 4,
    page: str = "",
) -> AsyncIterator[WireServer]:
    """Serve a game with this schema of its action inside the block; ``page`` replaces the page
    ``/schema``."""
    server = WireServer(game, action, metadata, capacity, page)
    async with serve(
        server.serve_session,
        "127.0.0.1",
        0,
        process_request=server.process_request,
        ping_interval=None,
    ) as listening:
        server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        try:
            yield server
        finally:
            for connection in [*server.open]:
                connection.transport.abort()


def seen(observation: Any, reward: Any = None, done: Any = False) -> dict[str, Any]:
    """The data of an observation frame."""
    return {"observation": observation, "reward": reward, "done": done}
