"""The event loop of processes that live on messages."""

from __future__ import annotations

import asyncio
import sys


def new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's, as the servers have it; asyncio's own on Windows, which uvloop lacks."""
    if sys.platform == "win32":
        return asyncio.new_event_loop()
    import uvloop

    return uvloop.new_event_loop()
