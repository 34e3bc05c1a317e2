"""Bounds how many bytes of request bodies the server holds at once, whoever sends them."""

from __future__ import annotations

import threading

from realhf.trajectory.base.refusal import Refusal


class BodyBudget:
    """Allows ``limit`` bytes for all bodies together, compressed and plain. They are counted as they arrive, not as
    they are announced, so that no client holds room by announcing much and sending nothing."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self.refused = 0
        self.lock = threading.Lock()


class BodyShare:
    """Counts what one request holds of the budget, until ``release``. Bodies are inflated in threads, so any thread may
    call ``take``."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._held = 0
        self._released = False

    def take(self, nbytes: int) -> None:
        """Take more bytes from the budget. Raises Refusal 503 when they do not fit, or when the request has ended
        meanwhile."""
        budget = self._budget
        with budget.lock:
            if budget.held + nbytes > budget.limit or self._released:
                budget.refused += 1
                raise Refusal(
                    503, f"the bodies of all requests together exceed {budget.limit} bytes", {"Retry-After": "1"}
                )
            budget.held += nbytes
            self._held += nbytes

    def release(self) -> None:
        """Give everything back."""
        with self._budget.lock:
            self._released = True
            self._budget.held -= self._held
            self._held = 0
