"""Makes a write count as done only when the kernel has it.

uvicorn lets up to 64 KiB wait in the process. A batch counts as sent only when none of it waits there: after a kill the
trainer must have it whole, or be given it again.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import Message, Send

_LOOK_S = 0.002


def drained_send(send: Send) -> Send | None:
    """Return ``send`` such that every call first waits until all earlier writes of the connection have left the
    process, and raises ConnectionResetError where the client went away before. None where the ASGI server does not show
    its transport as uvicorn does; under TLS uvloop's is hidden."""
    transport: Any = getattr(getattr(send, "__self__", None), "transport", None)
    if getattr(transport, "set_write_buffer_limits", None) is None:
        return None
    if transport.get_extra_info("sslcontext") is None:
        transport.set_write_buffer_limits(high=0)
        return send
    below = getattr(getattr(transport, "_ssl_protocol", None), "_transport", None)
    return None if below is None else _through_tls(send, transport, below)


def _through_tls(send: Send, transport: Any, below: Any) -> Send:
    """Look at both buffers: what is not encrypted yet, and what is encrypted and waits for the kernel, of which asyncio
    tells nobody."""

    async def drained(message: Message) -> None:
        while not below.is_closing() and (transport.get_write_buffer_size() or below.get_write_buffer_size()):
            await asyncio.sleep(_LOOK_S)
        if below.is_closing():  # what waited was dropped, and uvicorn hears of it a little later
            raise ConnectionResetError("the client has gone away")
        await send(message)

    return drained
