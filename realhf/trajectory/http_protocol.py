"""HTTP/1.1 whose writes count as done only when the kernel has them.

uvicorn lets up to 64 KiB wait in the process. A batch may be called sent only when nothing of it waits there: after a
kill the trainer must have it whole, or be given it again.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class DrainingProtocol(HttpToolsProtocol):
    """Every ``send`` first waits until what was written before has left the process."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)
