"""Hands out the shares of a held-out evaluation to rollout workers, beside the samples, and collects their results.

Lives in the master's event loop; every change of state is synchronous. Nothing of it is in the journal: an evaluation
trains nothing, and one that a killed run did not finish is played again from its start.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from realhf.api.calls import EvaluatedRequest
from realhf.api.evaluation import EpisodeResult
from realhf.api.streaming import EvaluationPart

MAX_ATTEMPTS = 3
"""A share that fails, or whose player dies, so often ends the evaluation."""
LATE_S = 30.0

_Key = tuple[int, int, bool]


class EvaluationFailed(RuntimeError):
    """An evaluation could not be played to its end."""


@dataclass
class _InPlay:
    part: EvaluationPart
    worker: str
    expires: float


class EvaluationBoard:
    """One evaluation at a time. ``most``: shares in play at once while there are samples to play as well."""

    def __init__(self, most: int) -> None:
        self._most = max(1, most)
        self._waiting: deque[EvaluationPart] = deque()
        self._in_play: dict[_Key, _InPlay] = {}
        self._attempts: Counter[_Key] = Counter()
        self._results: dict[_Key, list[EpisodeResult]] = {}
        self._over: asyncio.Future[None] | None = None

    async def play(self, parts: Sequence[EvaluationPart]) -> dict[bool, list[EpisodeResult]]:
        """Have all shares played. Returns the results by ``greedy``, in the order of the shares. Raises
        EvaluationFailed when one cannot be played."""
        assert self._over is None, "one evaluation at a time"
        self._over = asyncio.get_running_loop().create_future()
        self._waiting.extend(parts)
        try:
            if parts:
                await self._over
            found: dict[bool, list[EpisodeResult]] = {}
            for part in parts:
                found.setdefault(part.greedy, []).extend(self._results[_key(part)])
            return found
        finally:
            self._over = None
            for rest in (self._waiting, self._in_play, self._attempts, self._results):
                rest.clear()

    def take(self, worker: str, count: int, *, alone: bool) -> list[EvaluationPart]:
        """Return up to ``count`` shares for a worker. ``alone``: there are no samples that it could play instead."""
        room = count if alone else min(count, self._most - len(self._in_play))
        taken: list[EvaluationPart] = []
        while self._waiting and len(taken) < room:
            part = self._waiting.popleft()
            self._in_play[_key(part)] = _InPlay(part, worker, time.monotonic() + part.deadline_s + LATE_S)
            taken.append(part)
        return taken

    @property
    def waiting(self) -> bool:
        """Whether there are shares that nobody plays yet."""
        return bool(self._waiting)

    def evaluated(self, worker: str, request: EvaluatedRequest) -> None:
        """A worker has played a share, or failed to. What nobody waits for any more is ignored."""
        key = (request.evaluation, request.part, request.greedy)
        entry = self._in_play.get(key)
        if entry is None or entry.worker != worker:
            return
        if request.error:
            self._again(key, request.error)
            return
        del self._in_play[key]
        self._results[key] = request.results
        if not self._waiting and not self._in_play and self._over is not None and not self._over.done():
            self._over.set_result(None)

    def worker_left(self, worker: str, reason: str) -> None:
        """Others play what it had."""
        for key in [key for key, entry in self._in_play.items() if entry.worker == worker]:
            self._again(key, f"{worker}: {reason}")

    def expire(self) -> None:
        """Take back what was not answered long after its deadline."""
        now = time.monotonic()
        for key in [key for key, entry in self._in_play.items() if entry.expires < now]:
            self._again(key, f"no answer from {self._in_play[key].worker}")

    def _again(self, key: _Key, reason: str) -> None:
        self._waiting.append(self._in_play.pop(key).part)
        self._attempts[key] += 1
        if self._attempts[key] >= MAX_ATTEMPTS and self._over is not None and not self._over.done():
            self._over.set_exception(EvaluationFailed(f"{MAX_ATTEMPTS} attempts at a share failed, at last: {reason}"))


def _key(part: EvaluationPart) -> _Key:
    return part.evaluation, part.part, part.greedy
