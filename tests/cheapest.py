"""Measures what something costs on a machine that may be busy with other things."""

from __future__ import annotations

import time
from collections.abc import Callable


def cheapest(work: Callable[[], object], below_s: float) -> float:
    """Return the least seconds of this thread's CPU that ``work`` took in ten times, or in as many
    as there were until it took less than ``below_s``. Others can make it dearer, and never
    cheaper."""
    least = float("inf")
    for _ in range(10):
        began = time.thread_time()
        work()
        least = min(least, time.thread_time() - began)
        if least < below_s:
            break
    return least
