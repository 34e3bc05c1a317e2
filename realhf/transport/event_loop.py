"""Makes the event loop of processes that live on messages."""

from __future__ import annotations

import asyncio
import sys


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Make a uvloop, the loop that the servers use; on Windows, which uvloop does not support, one of asyncio."""
    if sys.platform == "win32":
        return asyncio.new_event_loop()
    import uvloop

    return uvloop.new_event_loop()
