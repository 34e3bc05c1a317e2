"""Bounds what strangers can hold of an HTTP server by uvicorn: how long a connection may wait for the head of its
request, how large that is, and how many connections there are, so that descriptors are left for the work of the
process."""

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
"""From the first byte of a request, or the connection before it, to the end of its head."""
MOST_HEAD_BYTES = 64 << 10
"""Bytes of a request line with its headers, and of anything else that a parser keeps until it is complete."""
SHARE, FEWEST = 2, 32
"""Connections hold at most one of so many of the descriptors of this process, and so many in any case."""


def use_all_descriptors() -> None:
    """Raise the limit of open descriptors to what the host allows: idle connections exhaust the usual 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def guarded_http(kind: str = "auto", *, head_s: float = HEAD_S, most: int = 0) -> Any:
    """Return what ``uvicorn.Config(http=...)`` takes in place of ``kind`` (h11, httptools or auto). A connection that
    sends no whole head within ``head_s``, or one of more than ``MOST_HEAD_BYTES`` (status 431), ends. One more than
    ``most`` (0: what the limit of descriptors allows) ends the oldest whose request has not come as a whole, or of
    whose answer nobody read anything for ``head_s``; it is not taken where all are at work."""
    if kind == "auto":
        kind = "httptools" if find_spec("httptools") else "h11"
    name = {"h11": "H11Protocol", "httptools": "HttpToolsProtocol"}[kind]
    protocol = getattr(import_module(f"uvicorn.protocols.http.{kind}_impl"), name)
    return type(f"Guarded{name}", (_Guarded, protocol), {"head_s": head_s, "most": most, "ended": 0})


def __getattr__(name: str) -> Any:
    """Let ``realhf.web.connections:GuardedProtocol`` name what ``guarded_http()`` returns, for processes that uvicorn
    starts and gives no classes to."""
    if name == "GuardedProtocol":
        return guarded_http()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class HandshakeLoop(ClockedLoop):
    """For ``uvicorn.Config(loop=...)``: its servers end a connection without a TLS handshake as early as one without a
    request, and show what waits to be sent (uvloop's do not)."""

    async def create_server(self, *args: Any, **kwargs: Any) -> Any:
        """Listen with TLS."""
        return await super().create_server(*args, ssl_handshake_timeout=HEAD_S, **kwargs)


class _Guarded:
    """Comes before a protocol of uvicorn, of which it uses ``loop``, ``transport``, ``connections`` and ``cycle``, the
    request that is at work or was the last."""

    head_s: float
    most: int
    ended = 0
    since = 0
    timer: asyncio.TimerHandle | None = None
    reading: asyncio.TimerHandle | None = None
    unread = 0
    stalled = False
    incomplete = 0
    """Bytes that came since the parser completed a head, a part of a body, or a request."""

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        """Leave the bound of a head to ``data_received``: that of h11 is another, and answers with 400."""
        config.h11_max_incomplete_event_size = config.h11_max_incomplete_event_size or 2 * MOST_HEAD_BYTES
        super().__init__(config, *args, **kwargs)  # pyright: ignore[reportCallIssue]

    def connection_made(self: Any, transport: asyncio.Transport) -> None:
        """Begin to wait for a request."""
        super().connection_made(transport)  # pyright: ignore[reportAttributeAccessIssue]
        self.since = time.monotonic_ns()
        self.timer = self.loop.call_later(self.head_s, self.late)
        most = self.most or max(FEWEST, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // SHARE)
        if len(self.connections) > most:
            unheard: list[Any] = [each for each in self.connections if isinstance(each, _Guarded) and each.unheard()]
            oldest = min(unheard, key=lambda each: each.since, default=self)
            kind = type(self)
            kind.ended += 1
            if kind.ended & (kind.ended - 1) == 0:  # strangers shall not fill the log
                _log.warning("more than %d connections: %d without a whole request were ended", most, kind.ended)
            oldest.transport.abort()
            self.connections.discard(oldest)  # it ends a little later; the next one must not choose it again

    def data_received(self: Any, data: bytes) -> None:
        """Wait no longer when a whole head has come, and again when a part of the next has. The parser gets no more at
        once than a head may have: httptools takes time that grows with the square of an endless one."""
        rest = memoryview(data)
        while rest and not self.transport.is_closing() and self.head_s < float("inf"):
            part = rest[: MOST_HEAD_BYTES + 1 - self.incomplete]
            rest = rest[len(part) :]
            self.incomplete += len(part)
            behind = self.past_head()  # a body whose answer is out may end here, and h11 waits for the next head
            super().data_received(part)  # pyright: ignore[reportAttributeAccessIssue]
            if behind or self.past_head():
                self.incomplete = 0
            if self.incomplete > MOST_HEAD_BYTES:
                self.refuse_head()
                return
        if not self.waits():
            self.wait_no_longer()
        elif self.timer is None:
            self.since = time.monotonic_ns()
            self.timer = self.loop.call_later(self.head_s, self.late)

    def past_head(self: Any) -> bool:
        """Return whether h11 is behind the head of a request; httptools calls the three methods below."""
        conn = getattr(self, "conn", None)
        return conn is not None and str(conn.their_state) != "IDLE"

    def on_headers_complete(self: Any) -> None:
        """Note that a head is complete."""
        self.incomplete = 0
        super().on_headers_complete()  # pyright: ignore[reportAttributeAccessIssue]

    def on_body(self: Any, body: bytes) -> None:
        """Note that a part of a body is complete."""
        self.incomplete = 0
        super().on_body(body)  # pyright: ignore[reportAttributeAccessIssue]

    def on_message_complete(self: Any) -> None:
        """Note that a request is complete."""
        self.incomplete = 0
        super().on_message_complete()  # pyright: ignore[reportAttributeAccessIssue]

    def refuse_head(self: Any) -> None:
        """End a connection whose head is too large. While a request is at work nothing can be said."""
        if not self.waits():
            self.transport.abort()
            return
        self.wait_no_longer()
        text = b"the head of a request has at most %d bytes" % MOST_HEAD_BYTES
        self.transport.write(
            b"HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Type: text/plain; charset=utf-8\r\n"
            b"Content-Length: %d\r\nConnection: close\r\n\r\n%s" % (len(text), text)
        )
        self.transport.close()

    def handle_websocket_upgrade(self: Any, *event: Any) -> None:
        """Leave the connection to another protocol."""
        super().handle_websocket_upgrade(*event)  # pyright: ignore[reportAttributeAccessIssue]
        self.head_s = float("inf")
        self.wait_no_longer()

    def connection_lost(self: Any, exc: Exception | None) -> None:
        """Wait no longer."""
        self.wait_no_longer()
        self.watch_no_longer()
        super().connection_lost(exc)  # pyright: ignore[reportAttributeAccessIssue]

    def pause_writing(self: Any) -> None:
        """Begin to watch whether the answer is read."""
        super().pause_writing()  # pyright: ignore[reportAttributeAccessIssue]
        self.unread = self.transport.get_write_buffer_size()
        self.reading = self.loop.call_later(self.head_s, self.watch)

    def resume_writing(self: Any) -> None:
        """Watch no longer."""
        self.watch_no_longer()
        super().resume_writing()  # pyright: ignore[reportAttributeAccessIssue]

    def watch(self: Any) -> None:
        """Note whether anything of the answer was read since the last time."""
        before, self.unread = self.unread, self.transport.get_write_buffer_size()
        self.stalled = self.unread == before
        self.reading = self.loop.call_later(self.head_s, self.watch)

    def watch_no_longer(self) -> None:
        """Stop the clock of the answer."""
        self.stalled = False
        if self.reading is not None:
            self.reading.cancel()
            self.reading = None

    def waits(self: Any) -> bool:
        """Return whether no request is at work on the connection."""
        return self.head_s < float("inf") and (self.cycle is None or self.cycle.response_complete)

    def unheard(self: Any) -> bool:
        """Return whether a request on the connection has not come as a whole, or its answer is not read: a body that
        stalls keeps nobody out."""
        if self.reading is not None:  # uvicorn counts an answer as complete when it has handed over its last byte
            return self.stalled
        return self.waits() or (self.cycle is not None and self.cycle.more_body)

    def wait_no_longer(self) -> None:
        """Stop the clock."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def late(self: Any) -> None:
        """End a connection whose request did not come."""
        self.timer = None
        if self.waits():
            self.transport.abort()
