"""Limits of connections and request heads, for servers that run on uvicorn.

A connection is closed if no complete request head arrives in time, or if the head is too large. The
number of connections is limited, so that file descriptors are left for the work of the process.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from realhf.base.event_loops import ClockedLoop

_log = logging.getLogger(__name__)
HEAD_S = 10.0
"""Seconds within which a request head must be complete. They count from the start of the connection
or, for later requests, from the first byte."""
MAX_HEAD_BYTES = 64 << 10
"""Maximum bytes of a request line with its headers, and of anything else that a parser keeps until
it is complete."""
DESCRIPTORS_PER_CONNECTION = 2
"""Number of the process's file descriptors per allowed connection; connections thus use at most
half of them."""
MIN_CONNECTIONS = 32
"""Number of connections that are always allowed, even if there are few file descriptors."""


def use_all_descriptors() -> None:
    """Raise the limit of open file descriptors to the host's maximum, because idle connections
    exhaust the usual 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def guarded_http(kind: str = "auto", *, head_s: float = HEAD_S, max_connections: int = 0) -> Any:
    """Return a protocol class for ``uvicorn.Config(http=...)`` that replaces ``kind`` (h11,
    httptools or auto).

    A connection is closed if its request head is not complete within ``head_s`` seconds, or is
    larger than ``MAX_HEAD_BYTES`` (status 431). If there are more than ``max_connections`` (0: as
    many as the limit of file descriptors allows), the oldest idle connection is closed. A
    connection is idle if its request is incomplete, or if its client has read nothing of the answer
    for ``head_s``. If none is idle, the new connection is closed.
    """
    if kind == "auto":
        kind = "httptools" if find_spec("httptools") else "h11"
    name = {"h11": "H11Protocol", "httptools": "HttpToolsProtocol"}[kind]
    protocol = getattr(import_module(f"uvicorn.protocols.http.{kind}_impl"), name)
    return type(
        f"Guarded{name}",
        (_ConnectionLimits, protocol),
        {"head_s": head_s, "max_connections": max_connections, "ended": 0},
    )


def __getattr__(name: str) -> Any:
    """Provide the class that ``guarded_http()`` returns as
    ``realhf.web.connections:GuardedProtocol``, because uvicorn passes class names, not classes, to
    the processes that it starts."""
    if name == "GuardedProtocol":
        return guarded_http()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class HandshakeLoop(ClockedLoop):
    """Event loop for ``uvicorn.Config(loop=...)`` of servers with TLS.

    A connection without a TLS handshake is closed as early as one without a request. Unlike uvloop,
    this loop gives access to the bytes that wait to be sent.
    """

    async def create_server(self, *args: Any, **kwargs: Any) -> Any:
        """Listen with TLS."""
        return await super().create_server(*args, ssl_handshake_timeout=HEAD_S, **kwargs)


class _ConnectionLimits:
    """Mixin to put in front of a uvicorn protocol class.

    It uses that class's ``loop``, ``transport``, ``connections`` and ``cycle``; ``cycle`` is the
    current request, or the last one.
    """

    head_s: float
    """Seconds that a request head may take; infinite once the connection is a WebSocket."""
    max_connections: int
    """Maximum number of connections; 0: as many as the limit of file descriptors allows."""
    ended = 0
    """Number of idle connections of this class that were closed in favour of new ones."""
    since = 0
    """Time at which the connection began to wait for a request, in nanoseconds of the monotonic
    clock."""
    timer: asyncio.TimerHandle | None = None
    """Timer for the request head; None while a request is served."""
    reading: asyncio.TimerHandle | None = None
    """Timer that checks whether the client reads; None while no part of an answer waits to be
    sent."""
    unread = 0
    """Bytes of the answer that were waiting to be sent at the last check of whether the client
    reads."""
    stalled = False
    """Whether the client has read nothing since that check."""
    incomplete = 0
    """Bytes received since the parser last completed a head, a part of a body, or a request."""

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        """Raise the limit of h11, which would answer 400, so that the limit in ``data_received``
        applies."""
        config.h11_max_incomplete_event_size = (
            config.h11_max_incomplete_event_size or 2 * MAX_HEAD_BYTES
        )
        super().__init__(config, *args, **kwargs)  # pyright: ignore[reportCallIssue]

    def connection_made(self: Any, transport: asyncio.Transport) -> None:
        """Start the timer for the request head, and close an idle connection if there are too
        many."""
        super().connection_made(transport)  # pyright: ignore[reportAttributeAccessIssue]
        self.since = time.monotonic_ns()
        self.timer = self.loop.call_later(self.head_s, self.close_late)
        max_connections = self.max_connections or max(
            MIN_CONNECTIONS,
            resource.getrlimit(resource.RLIMIT_NOFILE)[0] // DESCRIPTORS_PER_CONNECTION,
        )
        if len(self.connections) > max_connections:
            idle: list[Any] = [
                each
                for each in self.connections
                if isinstance(each, _ConnectionLimits) and each.is_idle()
            ]
            oldest = min(idle, key=lambda each: each.since, default=self)
            kind = type(self)
            kind.ended += 1
            if kind.ended & (kind.ended - 1) == 0:  # 1, 2, 4, ...: so strangers cannot fill the log
                _log.warning(
                    "more than %d connections: %d without a whole request were ended",
                    max_connections,
                    kind.ended,
                )
            oldest.transport.abort()
            # The connection ends a little later; the next new one must not choose it again.
            self.connections.discard(oldest)

    def data_received(self: Any, data: bytes) -> None:
        """Pass data to the parser, and stop or restart the timer for the request head.

        The parser gets at most as many bytes at once as a head may have, because the time that
        httptools takes grows with the square of the length of a head.
        """
        remainder = memoryview(data)
        while remainder and not self.transport.is_closing() and self.head_s < float("inf"):
            part = remainder[: MAX_HEAD_BYTES + 1 - self.incomplete]
            remainder = remainder[len(part) :]
            self.incomplete += len(part)
            # A body whose answer has been sent may end here; h11 then waits for the next head.
            was_past_head = self.is_past_head()
            super().data_received(part)  # pyright: ignore[reportAttributeAccessIssue]
            if was_past_head or self.is_past_head():
                self.incomplete = 0
            if self.incomplete > MAX_HEAD_BYTES:
                self.refuse_head()
                return
        if not self.is_waiting():
            self.stop_head_clock()
        elif self.timer is None:
            self.since = time.monotonic_ns()
            self.timer = self.loop.call_later(self.head_s, self.close_late)

    def is_past_head(self: Any) -> bool:
        """Return whether h11 has parsed the head of a request. httptools instead calls the three
        methods below."""
        conn = getattr(self, "conn", None)
        return conn is not None and str(conn.their_state) != "IDLE"

    def on_headers_complete(self: Any) -> None:
        """Record that a head is complete."""
        self.incomplete = 0
        super().on_headers_complete()  # pyright: ignore[reportAttributeAccessIssue]

    def on_body(self: Any, body: bytes) -> None:
        """Record that a part of a body is complete."""
        self.incomplete = 0
        super().on_body(body)  # pyright: ignore[reportAttributeAccessIssue]

    def on_message_complete(self: Any) -> None:
        """Record that a request is complete."""
        self.incomplete = 0
        super().on_message_complete()  # pyright: ignore[reportAttributeAccessIssue]

    def refuse_head(self: Any) -> None:
        """Close a connection whose head is too large, with status 431 unless another request is
        being served."""
        if not self.is_waiting():
            self.transport.abort()
            return
        self.stop_head_clock()
        text = b"the head of a request has at most %d bytes" % MAX_HEAD_BYTES
        self.transport.write(
            b"HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Type: text/plain; "
            b"charset=utf-8\r\n"
            b"Content-Length: %d\r\nConnection: close\r\n\r\n%s" % (len(text), text)
        )
        self.transport.close()

    def handle_websocket_upgrade(self: Any, *event: Any) -> None:
        """Pass the connection to the WebSocket protocol, which has its own limits."""
        super().handle_websocket_upgrade(*event)  # pyright: ignore[reportAttributeAccessIssue]
        self.head_s = float("inf")
        self.stop_head_clock()

    def connection_lost(self: Any, exc: Exception | None) -> None:
        """Stop both timers."""
        self.stop_head_clock()
        self.stop_reading_clock()
        super().connection_lost(exc)  # pyright: ignore[reportAttributeAccessIssue]

    def pause_writing(self: Any) -> None:
        """Start checking whether the client reads the answer."""
        super().pause_writing()  # pyright: ignore[reportAttributeAccessIssue]
        self.unread = self.transport.get_write_buffer_size()
        self.reading = self.loop.call_later(self.head_s, self.check_reading)

    def resume_writing(self: Any) -> None:
        """Stop checking whether the client reads the answer."""
        self.stop_reading_clock()
        super().resume_writing()  # pyright: ignore[reportAttributeAccessIssue]

    def check_reading(self: Any) -> None:
        """Record whether the client has read any of the answer since the last check."""
        before = self.unread
        self.unread = self.transport.get_write_buffer_size()
        self.stalled = self.unread == before
        self.reading = self.loop.call_later(self.head_s, self.check_reading)

    def stop_reading_clock(self) -> None:
        """Stop the timer that checks whether the client reads."""
        self.stalled = False
        if self.reading is not None:
            self.reading.cancel()
            self.reading = None

    def is_waiting(self: Any) -> bool:
        """Return whether the connection is waiting for a request."""
        return self.head_s < float("inf") and (self.cycle is None or self.cycle.response_complete)

    def is_idle(self: Any) -> bool:
        """Return whether the connection is idle: its request is incomplete, or its client reads
        nothing of the answer. A request whose body stalls is incomplete."""
        # uvicorn regards an answer as complete once its last byte has been passed to the transport.
        if self.reading is not None:
            return self.stalled
        return self.is_waiting() or (self.cycle is not None and self.cycle.more_body)

    def stop_head_clock(self) -> None:
        """Stop the timer for the request head."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def close_late(self: Any) -> None:
        """Close a connection whose request head did not arrive in time."""
        self.timer = None
        if self.is_waiting():
            self.transport.abort()
