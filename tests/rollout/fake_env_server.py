"""A fake environment server: speaks the wire's frames without tasks, and misbehaves when told
to."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.http11 import Request, Response


class FakeEnvServer:
    """``misbehave(connection_number, message)`` returns None, or what to do instead of answering:
    "hang", "drop", "error" (an EXECUTION_ERROR frame), "late" (answer after 0.5 s) or a raw text to
    send. ``metadata`` is served at /metadata (None: 404); ids are echoed. ``messages``: what came,
    by connection; ``headers``: of the last request."""

    def __init__(
        self,
        misbehave: Callable[[int, dict[str, Any]], str | None] = lambda number, message: None,
        metadata: dict[str, Any] | None = None,
        port: int = 0,
    ) -> None:
        self._port = port
        self.connections = 0
        self.open = 0
        self.messages: list[tuple[int, dict[str, Any]]] = []
        self.headers: dict[str, str] = {}
        self._metadata = metadata
        self._misbehave = misbehave
        self._loop = asyncio.new_event_loop()
        self._server: Server | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> FakeEnvServer:
        self._thread.start()
        assert self._started.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server is not None
        self._loop.call_soon_threadsafe(self._server.close)
        asyncio.run_coroutine_threadsafe(self._server.wait_closed(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)

        async def start() -> None:
            self._server = await serve(
                self._session,
                "127.0.0.1",
                self._port,
                close_timeout=0.2,
                process_request=self._http,
            )
            self._started.set()

        self._loop.run_until_complete(start())
        self._loop.run_forever()

    def _http(self, connection: ServerConnection, request: Request) -> Response | None:
        self.headers = dict(request.headers.raw_items())
        if request.path == "/ws":
            return None
        if request.path != "/metadata" or self._metadata is None:
            return connection.respond(404, "no such page")
        return connection.respond(200, json.dumps(self._metadata))

    async def _session(self, connection: ServerConnection) -> None:
        number = self.connections
        self.connections += 1
        self.open += 1
        steps = 0
        try:
            async for text in connection:
                message = json.loads(text)
                self.messages.append((number, message))
                trick = self._misbehave(number, message)
                if message["type"] == "close" and trick is None:
                    return
                steps = 0 if message["type"] == "reset" else steps + (message["type"] == "step")
                if trick == "drop":
                    connection.transport.abort()
                    return
                if trick == "late":
                    await asyncio.sleep(0.5)
                elif trick == "error":
                    failure = {"code": "EXECUTION_ERROR", "message": "x"}
                    await connection.send(json.dumps({"type": "error", "data": failure}))
                    continue
                elif trick == "hang":
                    continue
                elif trick is not None:
                    await connection.send(trick)
                    continue
                echo = {"id": message["id"]} if "id" in message else {}
                await connection.send(json.dumps(self._reply(message, steps) | echo))
        finally:
            self.open -= 1

    def _reply(self, message: dict[str, Any], steps: int) -> dict[str, Any]:
        if message["type"] == "state":
            return {"type": "state", "data": {}}
        command = message.get("data", {}).get("command", "")
        task = {"task_id": 1, "difficulty": "warmup", "description": "task"}
        observation = {
            "command_success": True,
            "command_output": command,
            "error": "",
            "task": task,
            "hint_text": "",
            "task_achieved": steps >= 2,
            "partial_progress": min(1.0, steps / 2),
            "step_count": steps,
        }
        reward = 0.5 if steps else None
        return {
            "type": "observation",
            "data": {"observation": observation, "reward": reward, "done": steps >= 2},
        }
