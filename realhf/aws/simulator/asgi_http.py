"""HTTP/1.1 server on the loopback for one ASGI application. It separates the agent's requests from
the environment's and counts both.

The agent's worker uses the port, and so does any other process that finds it. The port serves AWS
operations only, and no browsers. Set-up, grading and control use private connections of the owner,
which also reads the counts (``MiniStackProcess.requests``).

MiniStack's own server spends more time on HTTP than on the answers. Here a request costs one parse
of its head and one write of its answer. A client must wait for each answer before it sends the next
request. Bytes that arrive earlier might hide a request inside another one, so they end the
connection, as does everything that the HTTP grammar does not allow.

A process without free memory answers some requests and fails others, including its owner's, and its
data may be incomplete. It therefore ends itself, which the owner notices.
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
from realhf.aws.cli.pinned_http import (
    BadHttp,
    RequestHead,
    is_internal_path,
    parse_request_head,
    write_field,
)
from realhf.aws.simulator.account_state import AccountState, ModuleSwitches, TooLarge
from realhf.base.loopback import is_loopback_authority

RECENT_REQUESTS = 2000
"""Number of latest requests that are kept for reports."""
TARGET_CHARS = 500
"""Number of characters of a request's target that are kept."""
_SCOPE = re.compile(rb"Credential=[^/,]*/[0-9]+/[^/,]*/([a-z0-9-]+)/aws4_request")
"""Finds the service in a signature."""
_ACTION = re.compile(rb"(?:^|&)Action=([A-Za-z0-9]+)")
"""Finds the operation in a form."""
_FORM_BYTES = 4096
"""Number of bytes of a form that are searched for the operation."""
TRANSCRIPT_BYTES = 256 << 10
"""Maximum size of the transcript between two resets, in bytes."""
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t"}
"""Control characters, by their letter in JSON escapes."""
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))")
"""A JSON escape sequence."""


class ParsedRequests:
    """Counts of parsed requests, whatever their answers, and of refused requests by reason.

    The latest parsed requests are kept as dicts. ``number`` counts from 1. ``entrance`` is the way
    the request came in: ``port`` (the agent's worker, or any other process that finds the port),
    ``environment`` (the worker for the command lines of tasks) or ``owner``. ``service`` is the one
    in the signature. ``operation`` is the one that JSON and query protocols name, and "" for REST.

    Requests through the port that may have changed something are kept in full with their answers
    until the next reset. This *transcript* shows which names the agent used.
    """

    def __init__(self) -> None:
        self.count = 0
        self.entrances: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self._recent: deque[dict[str, Any]] = deque(maxlen=RECENT_REQUESTS)
        self._transcript: list[str] = []
        self._bytes_left = TRANSCRIPT_BYTES

    def add(self, entrance: str, head: RequestHead, body: bytes) -> None:
        """Count a parsed request that came in by ``entrance``."""
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

    def add_exchange(self, entrance: str, head: RequestHead, body: bytes, answer: bytes) -> None:
        """Add a request and its answer to the transcript if it came through the port and may have
        changed something."""
        reads = head.method in ("GET", "HEAD") or _operation(head, body).startswith(READ_PREFIXES)
        if entrance != "port" or reads:
            return
        exchange = head.target + b"\n" + body + b"\n" + answer.partition(b"\r\n\r\n")[2]
        self._bytes_left -= len(exchange)
        if self._bytes_left >= 0:
            self._transcript.append(_decode_variants(exchange.decode("utf-8", "replace")))

    def transcript(self) -> str | None:
        """Return the transcript since the last reset, or None if it exceeded its size limit."""
        return "\n".join(self._transcript) if self._bytes_left >= 0 else None

    def clear_transcript(self) -> None:
        """Clear the transcript. Called at each reset."""
        self._transcript.clear()
        self._bytes_left = TRANSCRIPT_BYTES

    def refuse(self, reason: str) -> None:
        """Count bytes that are not a valid request, or a request that is not permitted for its
        entrance."""
        self.refused[reason] += 1

    def report(self, after: int = 0) -> dict[str, Any]:
        """Return the counts, and the latest requests numbered above ``after``.

        Keys: ``count`` (parsed requests), ``entrances`` (parsed requests by entrance: ``port``,
        ``environment`` or ``owner``), ``refused`` (refused requests by reason), ``requests`` (the
        latest requests as dicts, see the class).
        """
        recent = [request for request in self._recent if request["number"] > after]
        return {
            "count": self.count,
            "entrances": self.entrances,
            "refused": self.refused,
            "requests": recent,
        }


def _decode_variants(text: str) -> str:
    """Return a text in all its decodings, one after another: the text itself, and without URL, XML
    and JSON escapes.

    JSON escapes are removed twice, for a document within a document. A name may itself look like an
    escape, so every variant is kept.
    """
    variants = {text: None}
    for decode in (unquote_plus, unescape, _without_escapes, _without_escapes):
        variants |= {decode(variant): None for variant in [*variants]}
    return "\n".join(variants)


def _without_escapes(text: str) -> str:
    """Return a text with its JSON escapes decoded."""
    return _ESCAPE.sub(
        lambda match: chr(int(match[1], 16)) if match[1] else _CONTROLS.get(match[2], match[2]),
        text,
    )


def _operation(head: RequestHead, body: bytes) -> str:
    """Return the operation that a request names in a header or a form, or "" for REST."""
    target = head.field(b"x-amz-target")
    if target:
        return target.rpartition(b".")[2].decode("latin-1")
    if head.field(b"content-type").startswith(b"application/x-www-form-urlencoded"):
        action = _ACTION.search(body[:_FORM_BYTES])
        return action[1].decode() if action else ""
    return ""


MAX_HEAD_BYTES = 256 * 1024
"""Maximum size of a request head, in bytes."""
_SPARE_BYTES = 8 << 20
"""Amount of memory that the process must be able to allocate after a failed request, in bytes. If
it cannot, it ends itself."""
_REASONS = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus
}
"""Status lines, by status code."""
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_PIPELINED = "bytes behind a request, before its answer"
"""Reason for refusing bytes that arrive before the previous request was answered."""
_HOP_BY_HOP = frozenset(
    {b"transfer-encoding", b"connection", b"keep-alive", b"upgrade", b"trailer"}
)
"""Headers of the application that this server drops, because it sets them itself or does not use
them."""
Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Message, Receive, Send], Awaitable[None]]


class HttpConnection(asyncio.Protocol):
    """Server side of one client connection. Its requests are recorded in ``parsed`` under
    ``entrance``. Malformed bytes close the connection."""

    def __init__(
        self, app: AsgiApp, loop: asyncio.AbstractEventLoop, parsed: ParsedRequests, entrance: str
    ) -> None:
        self._app = app
        self._loop = loop
        self._parsed = parsed
        self._entrance = entrance
        self._buffer = bytearray()
        self._head: RequestHead | None = None
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the new connection's transport."""
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Drop the transport. A response that is still being prepared will be discarded."""
        self._transport = None

    def data_received(self, data: bytes) -> None:
        """Buffer received bytes, and start answering once a request is complete. Refuse bytes that
        the grammar does not allow."""
        if self._transport is None or self._transport.is_closing():
            return
        try:
            if self._task is not None:
                raise BadHttp(_PIPELINED)
            self._buffer += data
            self._process_buffer()
        except BadHttp as error:
            self._refuse(str(error))
        except MemoryError:
            _end_if_exhausted()
            self._refuse("no memory for the request")

    def _process_buffer(self) -> None:
        """Start answering if the request in the buffer is complete. Raises BadHttp."""
        if self._head is None:
            self._head = self._parse_head()
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

    def _parse_head(self) -> RequestHead | None:
        """Return the head of the next request, or None if it is incomplete. Raises BadHttp."""
        end = self._buffer.find(b"\r\n\r\n")
        if end > MAX_HEAD_BYTES or (end < 0 and len(self._buffer) > MAX_HEAD_BYTES):
            raise BadHttp("the head of a request is too long")
        if end < 0:
            return None
        head = parse_request_head(bytes(self._buffer[:end]))
        del self._buffer[: end + 4]
        expected = head.field(b"expect")
        if expected and expected.lower() != b"100-continue":
            raise BadHttp("unsupported Expect header: only 100-continue is allowed")
        if expected and len(self._buffer) < head.length and self._transport is not None:
            self._transport.write(_CONTINUE)
        return head

    def _refuse(self, reason: str) -> None:
        """Answer 400 with the reason and close the connection. An answer in preparation is
        discarded."""
        self._parsed.refuse(reason)
        self._buffer.clear()
        self._head = None
        transport = self._transport
        self._transport = None
        if transport is not None:
            body = reason.encode()
            transport.write(
                _REASONS[400]
                + b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body)
                + body
            )
            transport.close()

    async def _answer(self, head: RequestHead, body: bytes) -> None:
        """Run the application for a request and send its answer."""
        response = _Response(head.method)
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await asyncio.Event().wait()
            return {"type": "http.disconnect"}

        try:
            await self._app(_build_scope(head), receive, response.send)
            data = response.to_bytes()
        except BadHttp as error:
            self._parsed.refuse(f"an answer: {error}")
            data = _REASONS[500] + b"content-length: 0\r\n\r\n"
        except Exception as error:
            # Only the owner gets the reason, because it may contain internals of the simulator.
            is_explained = self._entrance == "owner" and head.method != "HEAD"
            reason = (
                f"{type(error).__name__}: {error}".encode(errors="replace") if is_explained else b""
            )
            data = _REASONS[500] + b"content-length: %d\r\n\r\n" % len(reason) + reason
        # A failed request may have created something, so it belongs to the transcript as well.
        self._parsed.add_exchange(self._entrance, head, body, data)
        if data.startswith(b"HTTP/1.1 5"):
            _end_if_exhausted()
        self._task = None
        if self._transport is not None:
            self._transport.write(data)
            if head.field(b"connection").lower() == b"close":
                self._transport.close()


def _end_if_exhausted() -> None:
    """End this process if it has run out of memory."""
    try:
        bytearray(_SPARE_BYTES)
    except MemoryError:
        with contextlib.suppress(OSError):
            os.write(2, b"no memory is left; this process ends itself\n")
        os._exit(1)


class _Response:
    """The application's answer to one request, assembled from its ASGI messages and sent with a
    content length."""

    def __init__(self, method: str) -> None:
        self._method = method
        self._status = 500
        self._headers: list[tuple[bytes, bytes]] = []
        self._parts: list[bytes] = []

    async def send(self, message: dict[str, Any]) -> None:
        """Store one ASGI message from the application: the response start or a part of the body.
        The ``send`` callable of ASGI."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._headers = list(message.get("headers", []))
        elif message["type"] == "http.response.body":
            self._parts.append(bytes(message.get("body", b"")))

    def to_bytes(self) -> bytes:
        """Return the complete answer as bytes.

        Raises BadHttp for a header that could split the answer in two. An agent can request header
        values (``--response-content-type``).
        """
        body = b"".join(self._parts)
        head = [_REASONS.get(self._status) or f"HTTP/1.1 {self._status} Unknown\r\n".encode()]
        declared = b""
        for name, value in self._headers:
            line = write_field(name, value)
            lowered = name.lower()
            if lowered == b"content-length":
                declared = value if value.isdigit() else b""
            elif lowered not in _HOP_BY_HOP:
                head.append(line)
        if self._method == "HEAD":
            head.append(b"content-length: " + (declared or b"%d" % len(body)) + b"\r\n")
        elif self._status >= 200 and self._status not in (204, 304):
            head.append(b"content-length: %d\r\n" % len(body))
        head.append(b"\r\n")
        if self._method != "HEAD" and self._status not in (204, 304):
            head.append(body)
        return b"".join(head)


def _build_scope(head: RequestHead) -> dict[str, Any]:
    """Return the ASGI scope of a request."""
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
_BROWSER_HEADERS = frozenset({b"origin", b"sec-fetch-site", b"sec-fetch-mode"})
"""Headers that only browsers send."""


def port_app(app: AsgiApp, parsed: ParsedRequests) -> AsgiApp:
    """Return ``app`` as it is served on the port: without its control paths, for loopback hosts
    only, and not for browsers."""

    async def guard(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        reason = _refusal_reason(scope)
        if reason:
            parsed.refuse(reason)
            await _answer(send, 403, {"message": reason})
        else:
            await app(scope, receive, send)

    return guard


def _refusal_reason(scope: dict[str, Any]) -> str:
    """Return why a request through the port is refused, or "" if it is permitted."""
    if is_internal_path(scope["raw_path"].decode("ascii")):
        return "this path is not part of AWS"
    for name, value in scope["headers"]:
        if name in _BROWSER_HEADERS:
            return "a web page may not call a simulator"
        if name == b"host" and not is_loopback_authority(value.decode("latin-1")):
            return "this host is not served here"
    return ""


def owner_app(
    app: AsgiApp,
    seed: Callable[[int], None],
    switches: ModuleSwitches,
    parsed: ParsedRequests,
    state: AccountState,
) -> AsgiApp:
    """Return ``app`` with additional control paths: reset to a seed, request counts, module
    switches, and the account's records."""

    async def control(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        path = scope["path"]
        number = scope["query_string"] or b"0"
        if path == RESET_PATH:
            await app({**scope, "path": "/_ministack/reset", "query_string": b""}, receive, send)
            switches.restore()
            seed(int(number))
            state.forget()
            parsed.clear_transcript()
        elif path == REQUESTS_PATH:
            await _answer(send, 200, parsed.report(int(number)))
        elif path == SWITCHES_PATH:
            await _answer(send, 200, switches.values())
        elif path == SNAPSHOT_PATH:
            try:
                transcript = json.dumps(
                    ["", "said", "", "", 0, parsed.transcript()], separators=(",", ":")
                )
                await _send(send, 200, "\n".join([*state.report(), transcript]))
            except (
                TooLarge,
                RuntimeError,
            ) as error:  # RuntimeError: a thread changed a store during the report
                await _answer(send, 507, {"message": str(error)})
        else:
            await app(scope, receive, send)

    return control


async def _answer(send: Send, status: int, body: dict[str, Any]) -> None:
    """Send a response with a JSON body."""
    await _send(send, status, json.dumps(body, separators=(",", ":")))


async def _send(send: Send, status: int, text: str) -> None:
    """Send a response whose body is ``text``."""
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text.encode()})
