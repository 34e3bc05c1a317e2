"""Serves HTTP/1.1 for one ASGI application on the loopback, counts what it parsed, and keeps the owner's entrance
apart.

The owner reads the count over the control connection (``MiniStackProcess.requests``); an agent's worker cannot.

MiniStack's own server spends more time in HTTP than in answering. Here a request costs one parse of its head and one
write of its answer; bodies arrive whole. A client waits for each answer before it sends the next request: bytes that
come earlier are an attempt to hide one request in another, and end the connection, as does everything that the grammar
does not allow.

A process that has no memory left answers some requests and fails others, reads of its owner among them, and what it
keeps may be half written: it ends itself, which its owner notices.

An agent's worker, and any other process that finds it, comes in by the ``port``: AWS alone, from no browser. Set-up,
grading and control come in by a connection of the ``owner``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from html import unescape
from http import HTTPStatus
from typing import Any, cast
from urllib.parse import unquote, unquote_plus

from realhf.aws.cli.command_table import READ_PREFIXES
from realhf.aws.cli.pinned_http import BadHttp, RequestHead, check_field, is_internal_path, parse_request_head
from realhf.aws.simulator.account_state import AccountState, ModuleSwitches, TooLarge
from realhf.base.loopback import is_loopback_authority

KEPT = 2000
TARGET_CHARS = 500
"""Characters kept of a request's target."""
_SCOPE = re.compile(rb"Credential=[^/,]*/[0-9]+/[^/,]*/([a-z0-9-]+)/aws4_request")
_ACTION = re.compile(rb"(?:^|&)Action=([A-Za-z0-9]+)")
_FORM_BYTES = 4096
KEPT_BYTES = 256 << 10
"""Most bytes of requests and answers that are kept between two resets."""
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t"}
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))")


class ParsedRequests:
    """Counts every request that was parsed, whatever its answer, and every one that was refused, by reason.

    The latest are kept. ``number`` counts from 1; ``entrance`` is ``port`` (the agent's worker, or any other process
    that finds it), ``environment`` (the worker for command lines of tasks) or ``owner``. ``service`` is what the
    signature names, ``operation`` what JSON and query protocols say, "" for REST.

    Of those that came by the port and may have changed something, all that they said and were answered is kept until
    the next reset, for whoever asks what was named in them."""

    def __init__(self) -> None:
        self.count = 0
        self.entrances: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self._recent: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._said: list[str] = []
        self._left = KEPT_BYTES

    def add(self, entrance: str, head: RequestHead, body: bytes) -> None:
        """Count a request."""
        self.count += 1
        self.entrances[entrance] += 1
        scope = _SCOPE.search(head.field(b"authorization"))
        self._recent.append(
            {
                "number": self.count,
                "entrance": entrance,
                "method": head.method,
                "target": head.target[:TARGET_CHARS].decode("ascii"),
                "service": scope[1].decode() if scope else "",
                "operation": _operation(head, body),
            }
        )

    def keep(self, entrance: str, head: RequestHead, body: bytes, answer: bytes) -> None:
        """Keep what a request of the port and its answer say, unless it only reads."""
        reads = head.method in ("GET", "HEAD") or _operation(head, body).startswith(READ_PREFIXES)
        if entrance != "port" or reads:
            return
        said = head.target + b"\n" + body + b"\n" + answer.partition(b"\r\n\r\n")[2]
        self._left -= len(said)
        if self._left >= 0:
            self._said.append(_readings(said.decode("utf-8", "replace")))

    def said(self) -> str | None:
        """Return what was kept since the last reset; None where it was too much."""
        return "\n".join(self._said) if self._left >= 0 else None

    def forget(self) -> None:
        """Forget what was said, at a reset."""
        self._said.clear()
        self._left = KEPT_BYTES

    def refuse(self, reason: str) -> None:
        """Count bytes that are not a request, or one that must not come from where it came."""
        self.refused[reason] += 1

    def report(self, after: int = 0) -> dict[str, Any]:
        """Return ``count``, the same by ``entrances``, ``refused`` by reason, and the ``requests`` numbered above
        ``after`` that are kept."""
        recent = [request for request in self._recent if request["number"] > after]
        return {"count": self.count, "entrances": self.entrances, "refused": self.refused, "requests": recent}


def _readings(text: str) -> str:
    """Return all that a text may say, as it is and with escapes undone: of URLs, of XML, and of JSON, twice for a
    document within a document. A name may look like an escape itself, so no reading takes another's place."""
    found = {text: None}
    for undo in (unquote_plus, unescape, _without_escapes, _without_escapes):
        found |= {undo(one): None for one in [*found]}
    return "\n".join(found)


def _without_escapes(text: str) -> str:
    return _ESCAPE.sub(lambda match: chr(int(match[1], 16)) if match[1] else _CONTROLS.get(match[2], match[2]), text)


def _operation(head: RequestHead, body: bytes) -> str:
    target = head.field(b"x-amz-target")
    if target:
        return target.rpartition(b".")[2].decode("latin-1")
    if head.field(b"content-type").startswith(b"application/x-www-form-urlencoded"):
        action = _ACTION.search(body[:_FORM_BYTES])
        return action[1].decode() if action else ""
    return ""


MAX_HEAD_BYTES = 256 * 1024
_SPARE_BYTES = 8 << 20
"""What a process can still take after a request failed, or else has no memory left."""
_REASONS = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_PIPELINED = "bytes behind a request, before its answer"
_HOP_BY_HOP = frozenset({b"transfer-encoding", b"connection", b"keep-alive", b"upgrade", b"trailer"})
Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Message, Receive, Send], Awaitable[None]]


class HttpConnection(asyncio.Protocol):
    """Serves one client connection, by the ``entrance`` that ``parsed`` notes. Bytes that are not a request close
    it."""

    def __init__(self, app: AsgiApp, loop: asyncio.AbstractEventLoop, parsed: ParsedRequests, entrance: str) -> None:
        self._app = app
        self._loop = loop
        self._parsed = parsed
        self._entrance = entrance
        self._buffer = bytearray()
        self._head: RequestHead | None = None
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport of the new connection."""
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the transport; an answer under way is not sent any more."""
        self._transport = None

    def data_received(self, data: bytes) -> None:
        """Take bytes and start to answer once a request is whole; refuse everything that the grammar does not allow."""
        if self._transport is None or self._transport.is_closing():
            return
        try:
            if self._task is not None:
                raise BadHttp(_PIPELINED)
            self._buffer += data
            self._take()
        except BadHttp as error:
            self._refuse(str(error))
        except MemoryError:
            _end_if_exhausted()
            self._refuse("no memory for the request")

    def _take(self) -> None:
        """Start to answer the request in the buffer once it is whole. Raises BadHttp."""
        if self._head is None:
            self._head = self._take_head()
        head = self._head
        if head is None or len(self._buffer) < head.length:
            return
        if len(self._buffer) > head.length:
            raise BadHttp(_PIPELINED)
        body = bytes(self._buffer)
        self._head = None
        self._buffer.clear()
        self._parsed.add(self._entrance, head, body)
        self._task = self._loop.create_task(self._answer(head, body))

    def _take_head(self) -> RequestHead | None:
        end = self._buffer.find(b"\r\n\r\n")
        if end > MAX_HEAD_BYTES or (end < 0 and len(self._buffer) > MAX_HEAD_BYTES):
            raise BadHttp("the head of a request is too long")
        if end < 0:
            return None
        head = parse_request_head(bytes(self._buffer[:end]))
        del self._buffer[: end + 4]
        expected = head.field(b"expect")
        if expected and expected.lower() != b"100-continue":
            raise BadHttp("nothing but 100-continue can be expected")
        if expected and len(self._buffer) < head.length and self._transport is not None:
            self._transport.write(_CONTINUE)
        return head

    def _refuse(self, reason: str) -> None:
        """Answer with the reason, and close; an answer under way is not sent any more."""
        self._parsed.refuse(reason)
        self._buffer.clear()
        self._head = None
        transport = self._transport
        self._transport = None
        if transport is not None:
            body = reason.encode()
            transport.write(_REASONS[400] + b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body) + body)
            transport.close()

    async def _answer(self, head: RequestHead, body: bytes) -> None:
        response = _Response(head.method)
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await asyncio.Event().wait()
            return {"type": "http.disconnect"}

        try:
            await self._app(_scope(head), receive, response.send)
            data = response.to_bytes()
        except BadHttp as error:
            self._parsed.refuse(f"an answer: {error}")
            data = _REASONS[500] + b"content-length: 0\r\n\r\n"
        except Exception as error:
            told = self._entrance == "owner" and head.method != "HEAD"
            said = f"{type(error).__name__}: {error}".encode(errors="replace") if told else b""
            data = _REASONS[500] + b"content-length: %d\r\n\r\n" % len(said) + said
        self._parsed.keep(self._entrance, head, body, data)  # also of one that failed, which may have made something
        if data.startswith(b"HTTP/1.1 5"):
            _end_if_exhausted()
        self._task = None
        if self._transport is not None:
            self._transport.write(data)
            if head.field(b"connection").lower() == b"close":
                self._transport.close()


def _end_if_exhausted() -> None:
    try:
        bytearray(_SPARE_BYTES)
    except MemoryError:
        with contextlib.suppress(OSError):
            os.write(2, b"no memory is left; this process ends itself\n")
        os._exit(1)


class _Response:
    """Collects what the application sends and frames it with a content length."""

    def __init__(self, method: str) -> None:
        self._method = method
        self._status = 500
        self._headers: list[tuple[bytes, bytes]] = []
        self._parts: list[bytes] = []

    async def send(self, message: dict[str, Any]) -> None:
        """Take a message of the application: the head, or a part of the body."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._headers = list(message.get("headers", []))
        elif message["type"] == "http.response.body":
            self._parts.append(bytes(message.get("body", b"")))

    def to_bytes(self) -> bytes:
        """Return the whole answer. Raises BadHttp for a header that could split it: headers that an agent asks for
        (``--response-content-type``) are among them."""
        body = b"".join(self._parts)
        head = [_REASONS.get(self._status) or f"HTTP/1.1 {self._status} Unknown\r\n".encode()]
        declared = b""
        for name, value in self._headers:
            check_field(name, value)
            lowered = name.lower()
            if lowered == b"content-length":
                declared = value if value.isdigit() else b""
            elif lowered not in _HOP_BY_HOP:
                head.append(name + b": " + value + b"\r\n")
        if self._method == "HEAD":
            head.append(b"content-length: " + (declared or b"%d" % len(body)) + b"\r\n")
        elif self._status >= 200 and self._status not in (204, 304):
            head.append(b"content-length: %d\r\n" % len(body))
        head.append(b"\r\n")
        if self._method != "HEAD" and self._status not in (204, 304):
            head.append(body)
        return b"".join(head)


def _scope(head: RequestHead) -> dict[str, Any]:
    raw_path, _, query = head.target.partition(b"?")
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": head.method,
        "scheme": "http",
        "path": unquote(raw_path.decode("ascii")),
        "raw_path": raw_path,
        "query_string": query,
        "root_path": "",
        "headers": list(head.fields),
        "client": ("127.0.0.1", 0),
        "server": ("127.0.0.1", 0),
    }


RESET_PATH = "/_realhf/reset"
REQUESTS_PATH = "/_realhf/requests"
SWITCHES_PATH = "/_realhf/switches"
SNAPSHOT_PATH = "/_realhf/snapshot"
_OF_BROWSERS = frozenset({b"origin", b"sec-fetch-site", b"sec-fetch-mode"})


def port_app(app: AsgiApp, parsed: ParsedRequests) -> AsgiApp:
    """Return ``app`` without its control paths, and for hosts of this machine alone."""

    async def guarded(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        reason = _reason(scope)
        if reason:
            parsed.refuse(reason)
            await _answer(send, 403, {"message": reason})
        else:
            await app(scope, receive, send)

    return guarded


def _reason(scope: dict[str, Any]) -> str:
    if is_internal_path(scope["raw_path"].decode("ascii")):
        return "this path is not part of AWS"
    for name, value in scope["headers"]:
        if name in _OF_BROWSERS:
            return "a web page may not call a simulator"
        if name == b"host" and not is_loopback_authority(value.decode("latin-1")):
            return "this host is not served here"
    return ""


def owner_app(
    app: AsgiApp, seed: Callable[[int], None], switches: ModuleSwitches, parsed: ParsedRequests, state: AccountState
) -> AsgiApp:
    """Return ``app`` with its control paths and ours: reset to a seed, the account of requests, the modules'
    switches, all that the account holds."""

    async def controlled(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        path = scope["path"]
        number = scope["query_string"] or b"0"
        if path == RESET_PATH:
            await app({**scope, "path": "/_ministack/reset", "query_string": b""}, receive, send)
            switches.restore()
            seed(int(number))
            state.forget()
            parsed.forget()
        elif path == REQUESTS_PATH:
            await _answer(send, 200, parsed.report(int(number)))
        elif path == SWITCHES_PATH:
            await _answer(send, 200, switches.values())
        elif path == SNAPSHOT_PATH:
            try:
                said = json.dumps(["", "said", "", "", 0, parsed.said()], separators=(",", ":"))
                await _send(send, 200, "\n".join([*state.report(), said]))
            except (TooLarge, RuntimeError) as error:  # one of its threads may change a store meanwhile
                await _answer(send, 507, {"message": str(error)})
        else:
            await app(scope, receive, send)

    return controlled


async def _answer(send: Send, status: int, body: dict[str, Any]) -> None:
    await _send(send, status, json.dumps(body, separators=(",", ":")))


async def _send(send: Send, status: int, text: str) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text.encode()})
