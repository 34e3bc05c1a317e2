"""A small HTTP/1.1 server for one ASGI application and few, trusted-framing clients on the loopback.

MiniStack's own server spends more time in HTTP than in answering. Here a request costs one parse of its head
and one write of its answer. Requests of one connection are answered in order; bodies arrive whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, cast
from urllib.parse import unquote

MAX_HEAD_BYTES = 256 * 1024
MAX_BODY_BYTES = 64 * 1024 * 1024
_REASONS = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Message, Receive, Send], Awaitable[None]]


class HttpConnection(asyncio.Protocol):
    """One client connection. A malformed request closes it."""

    def __init__(self, app: AsgiApp, loop: asyncio.AbstractEventLoop) -> None:
        self._app = app
        self._loop = loop
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None
        self._continued = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._task is None:
            self._next_request()

    def _next_request(self) -> None:
        transport = self._transport
        if transport is None:
            return
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > MAX_HEAD_BYTES:
                transport.close()
            return
        try:
            scope, headers = _parse_head(bytes(self._buffer[:end]))
            body, consumed = _take_body(self._buffer, end + 4, headers)
        except (ValueError, IndexError):
            transport.close()
            return
        if body is None:
            if headers.get(b"expect") and not self._continued:
                self._continued = True
                transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            return
        del self._buffer[:consumed]
        self._continued = False
        self._task = self._loop.create_task(self._answer(scope, body, headers))

    async def _answer(self, scope: dict[str, Any], body: bytes, headers: dict[bytes, bytes]) -> None:
        response = _Response(scope["method"])
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await asyncio.Event().wait()
            return {"type": "http.disconnect"}

        try:
            await self._app(scope, receive, response.send)
            data = response.to_bytes()
        except Exception:
            data = _REASONS[500] + b"content-length: 0\r\n\r\n"
        if self._transport is not None:
            self._transport.write(data)
            if headers.get(b"connection", b"").lower() == b"close":
                self._transport.close()
        self._task = None
        if self._buffer:
            self._next_request()


class _Response:
    """Collects what the application sends and frames it with a content length."""

    def __init__(self, method: str) -> None:
        self._method = method
        self._status = 500
        self._headers: list[tuple[bytes, bytes]] = []
        self._parts: list[bytes] = []

    async def send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._headers = list(message.get("headers", []))
        elif message["type"] == "http.response.body":
            self._parts.append(bytes(message.get("body", b"")))

    def to_bytes(self) -> bytes:
        body = b"".join(self._parts)
        head = [_REASONS.get(self._status) or f"HTTP/1.1 {self._status} Unknown\r\n".encode()]
        declared = False
        for name, value in self._headers:
            lowered = name.lower()
            if lowered == b"transfer-encoding":
                continue
            if lowered == b"content-length":
                if self._method != "HEAD":
                    continue
                declared = True
            head.append(name + b": " + value + b"\r\n")
        if not declared and self._status >= 200 and self._status != 204:
            head.append(b"content-length: %d\r\n" % len(body))
        head.append(b"\r\n")
        if self._method != "HEAD" and self._status not in (204, 304):
            head.append(body)
        return b"".join(head)


def _parse_head(head: bytes) -> tuple[dict[str, Any], dict[bytes, bytes]]:
    lines = head.split(b"\r\n")
    method, target, _version = lines[0].split(b" ")
    raw_path, _, query = target.partition(b"?")
    headers = []
    for line in lines[1:]:
        name, _, value = line.partition(b":")
        headers.append((name.lower(), value.strip()))
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method.decode("ascii"),
        "scheme": "http",
        "path": unquote(raw_path.decode("ascii")),
        "raw_path": raw_path,
        "query_string": query,
        "root_path": "",
        "headers": headers,
        "client": ("127.0.0.1", 0),
        "server": ("127.0.0.1", 0),
    }
    return scope, dict(headers)


def _take_body(buffer: bytearray, start: int, headers: dict[bytes, bytes]) -> tuple[bytes | None, int]:
    """The body and the index behind it, or None while it is incomplete. Raises ValueError when malformed."""
    if headers.get(b"transfer-encoding", b"").lower() == b"chunked":
        return _take_chunks(buffer, start)
    length = int(headers.get(b"content-length", b"0"))
    if not 0 <= length <= MAX_BODY_BYTES:
        raise ValueError("body too large")
    if len(buffer) < start + length:
        return None, 0
    return bytes(buffer[start : start + length]), start + length


def _take_chunks(buffer: bytearray, position: int) -> tuple[bytes | None, int]:
    parts: list[bytes] = []
    total = 0
    while True:
        line_end = buffer.find(b"\r\n", position)
        if line_end < 0:
            return None, 0
        size = int(bytes(buffer[position:line_end]).split(b";")[0], 16)
        total += size
        if size < 0 or total > MAX_BODY_BYTES:
            raise ValueError("body too large")
        chunk_end = line_end + 2 + size
        if size == 0:
            end = buffer.find(b"\r\n", chunk_end)
            return (None, 0) if end < 0 else (b"".join(parts), end + 2)
        if len(buffer) < chunk_end + 2:
            return None, 0
        parts.append(bytes(buffer[line_end + 2 : chunk_end]))
        position = chunk_end + 2
