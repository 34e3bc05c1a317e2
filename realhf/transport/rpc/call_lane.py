"""Keeps the calls that one lane of a worker has not answered yet, in the order in which it serves them.

A worker serves a lane strictly one call after another. So the deadline of a call begins when it is the next to be
served, not when it is sent: a short call behind a long one is not late because the other is long. Its wait is bounded
all the same, because each call before it has a deadline, and the death of a worker ends all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from realhf.transport.errors import ProtocolError, RemoteError, RpcError


@dataclass(slots=True, eq=False)
class PendingCall:
    """Holds a request that has no answer yet. When its caller gives it up, ``future`` is done, but the request keeps
    its place in the lane until the worker answers, because the worker may be in the middle of it."""

    id: bytes
    worker: str
    handler: str
    mfc: str
    step: int
    no: int
    timeout_s: float
    future: asyncio.Future[Any]
    timer: asyncio.TimerHandle | None = None


class CallLane:
    """Bounds the turn of each call of a lane. When a turn has lasted ``timeout_s``, the call leaves the lane and
    ``expire(call)`` is called."""

    def __init__(self, loop: asyncio.AbstractEventLoop, expire: Callable[[PendingCall], None]) -> None:
        self._loop, self._expire = loop, expire
        self._calls: dict[bytes, PendingCall] = {}

    def add(self, call: PendingCall) -> None:
        """Append a call that was sent."""
        self._calls[call.id] = call
        self._begin_next()

    def over(self, call: PendingCall) -> None:
        """Remove a call that the worker has answered or will never answer; the turn of the next one begins."""
        if call.timer is not None:
            call.timer.cancel()
        if self._calls.pop(call.id, None) is not None:
            self._begin_next()

    def clear(self) -> list[PendingCall]:
        """Empty the lane of a worker that is gone; return its calls, in order."""
        calls = list(self._calls.values())
        self._calls.clear()
        for call in calls:
            if call.timer is not None:
                call.timer.cancel()
        return calls

    def _begin_next(self) -> None:
        call = next(iter(self._calls.values()), None)
        if call is not None and call.timer is None:
            call.timer = self._loop.call_later(call.timeout_s, self._too_late, call)

    def _too_late(self, call: PendingCall) -> None:
        self.over(call)
        self._expire(call)


def remote_error(call: PendingCall, value: Any) -> RpcError:
    """Turn a worker's error answer to this call into an exception."""
    if not isinstance(value, dict):
        return ProtocolError(f"worker {call.worker!r} sent a malformed error")
    message = str(value.get("message", ""))
    if value.get("protocol"):
        return ProtocolError(f"worker {call.worker!r}: {message}")
    return RemoteError(
        worker=call.worker,
        handler=call.handler,
        mfc=call.mfc,
        step=call.step,
        kind=str(value.get("type", "")),
        message=message,
        remote_traceback=str(value.get("traceback", "")),
    )
