"""Makes a write count as done only when the kernel has it.

uvicorn lets up to 64 KiB wait in the process. A batch counts as sent only when none of it waits there: after a kill the
trainer must have it whole, or be given it again.
"""

from __future__ import annotations

from starlette.types import Send


def drain_writes(send: Send) -> bool:
    """Make every ``send`` on this connection first wait until all earlier writes have left the process. Return False
    where the ASGI server does not show its transport as uvicorn does."""
    transport = getattr(getattr(send, "__self__", None), "transport", None)
    limit = getattr(transport, "set_write_buffer_limits", None)
    if limit is None:
        return False
    limit(high=0)
    return True
