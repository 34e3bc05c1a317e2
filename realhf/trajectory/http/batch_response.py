"""Writes a batch in pieces and reports whether it was sent or lost.

The report is queued right before the last, empty piece, when everything else has left the process. So the client cannot
ask again before the report counts, and a kill before it means that the batch is given again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

_LEAST_BYTES = 64 << 10
"""Number of bytes that are collected before they are sent together."""


class BatchResponse(Response):
    """Is an ASGI response. ``report(sent)`` is called exactly once, and must only queue its work."""

    def __init__(
        self, pieces: Sequence[bytes | memoryview], headers: Mapping[str, str], report: Callable[[bool], None]
    ) -> None:
        self.background = None
        self._pieces = pieces
        self._headers = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        self._report = report

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the pieces, then report."""
        gone = asyncio.ensure_future(_until_gone(receive))
        sent = False
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self._headers})
            for piece in _coalesced(self._pieces):
                if gone.done():
                    return
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": True})
            await asyncio.sleep(0)
            sent = not gone.done()
        finally:
            gone.cancel()
            self._report(sent)
        if sent:
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        with suppress(asyncio.CancelledError):
            await gone


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _coalesced(pieces: Sequence[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """Join small pieces and pass large ones as they are."""
    waiting: list[bytes | memoryview] = []
    size = 0
    for piece in pieces:
        waiting.append(piece)
        size += len(piece)
        if size >= _LEAST_BYTES:
            yield waiting[0] if len(waiting) == 1 else b"".join(waiting)
            waiting, size = [], 0
    if waiting:
        yield b"".join(waiting)
