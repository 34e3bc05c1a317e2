"""Back-pressure of the sequence buffer: puts that wait for space, first come first served."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(eq=False)
class _PutWaiter:
    count: int
    future: asyncio.Future[None]


class SpaceQueue:
    """Space is *reserved* for a waiter at the moment it becomes free, so nobody can overtake it; the waiter
    turns the reservation into samples, or gives it back, with ``settle``."""

    def __init__(self, max_size: int, size: Callable[[], int]) -> None:
        self.max_size = max_size
        self.reserved = 0
        self._size = size
        self._waiters: list[_PutWaiter] = []

    def __len__(self) -> int:
        """Puts that wait."""
        return len(self._waiters)

    @property
    def busy(self) -> bool:
        """Somebody waits, or was given space that is not filled yet."""
        return bool(self._waiters) or self.reserved > 0

    def fits(self, count: int) -> bool:
        """Whether ``count`` more samples would fit beside those that are held and reserved."""
        return self._size() + self.reserved + count <= self.max_size

    def first_fits(self) -> bool:
        """The first waiter could go on now (it never should be able to while it waits)."""
        return bool(self._waiters) and self.fits(self._waiters[0].count)

    async def wait(self, count: int) -> None:
        """Until ``count`` places are reserved for the caller. A cancelled waiter holds no reservation."""
        waiter = _PutWaiter(count, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        try:
            await waiter.future
        except asyncio.CancelledError:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            elif not waiter.future.cancelled() and waiter.future.exception() is None:
                self.reserved -= count
            self.wake()
            raise

    def settle(self, count: int) -> None:
        """The caller of ``wait`` has put its samples, or failed to."""
        self.reserved -= count
        self.wake()

    def wake(self) -> None:
        """Reserve what became free for the first waiters."""
        while self._waiters:
            waiter = self._waiters[0]
            if not waiter.future.done():
                if not self.fits(waiter.count):
                    return
                self.reserved += waiter.count
                waiter.future.set_result(None)
            self._waiters.pop(0)

    def abort(self, error: BaseException) -> None:
        """Every waiter raises ``error``."""
        for waiter in self._waiters:
            if not waiter.future.done():
                waiter.future.set_exception(error)
        self._waiters.clear()
