"""The requests for samples that wait, in the order in which they came.

With thousands of workers most requests wait most of the time. If each change let all of them look again, every sample
that arrives would cost the master a walk through all workers.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict


class PendingRequests:
    """Belongs to the running loop. A worker may have several requests."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[asyncio.Future[bool], None] = OrderedDict()
        self._of: dict[str, set[asyncio.Future[bool]]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    async def turn(self, worker: str, timeout_s: float) -> bool:
        """Wait behind those who came before; False when ``timeout_s`` passes first. Whoever gets a turn in vain waits
        again, behind all others; whoever does not want it any more passes it on, by ``wake(1)``."""
        if timeout_s <= 0:
            return False
        loop = asyncio.get_running_loop()
        future: asyncio.Future[bool] = loop.create_future()
        self._waiting[future] = None
        self._of.setdefault(worker, set()).add(future)
        timer = loop.call_later(timeout_s, _end, future, False)
        try:
            return await future
        except asyncio.CancelledError:
            if not future.cancelled() and future.result():
                self.wake(1)
            raise
        finally:
            timer.cancel()
            self._waiting.pop(future, None)
            self._of[worker].discard(future)
            if not self._of[worker]:
                del self._of[worker]

    def wake(self, count: int | None = None) -> None:
        """Give the first ``count`` their turn, or all."""
        left = len(self._waiting) if count is None else count
        while self._waiting and left > 0:
            left -= _end(self._waiting.popitem(last=False)[0], True)

    def wake_worker(self, worker: str) -> None:
        """Give all requests of a worker their turn."""
        for future in self._of.get(worker, ()):
            self._waiting.pop(future, None)
            _end(future, True)


def _end(future: asyncio.Future[bool], has_turn: bool) -> bool:
    """End a wait, unless it has ended already."""
    if future.done():
        return False
    future.set_result(has_turn)
    return True
