"""Master-side state shared by admission, held-out evaluation and the stream: sample locations and
the evaluation queue.

Both classes live in the master's event loop, do no I/O and change state synchronously. They are
below the modules that use them (``control``, ``held_out``, ``stream_loader``), which therefore need
not know each other.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from realhf.api.calls import EvaluatedRequest, EvaluationPart
from realhf.api.evaluation import EpisodeResult
from realhf.base import process_clock


class SampleLocations:
    """Location of each arrived sample: the model worker that stores it. Covers the samples whose
    accepted attempt may still be needed."""

    def __init__(self) -> None:
        self._worker_of: dict[str, str] = {}

    def record(self, sample_id: str, worker: str) -> None:
        """Record that ``worker`` stores a sample."""
        self._worker_of[sample_id] = worker

    def is_elsewhere(self, sample_id: str, worker: str) -> bool:
        """Return whether a worker other than ``worker`` is known to store the sample."""
        return self._worker_of.get(sample_id, worker) != worker

    def group_by_worker(self, ids: Iterable[str]) -> dict[str, list[str]]:
        """Group sample ids by the worker that stores them. Raises KeyError for an unknown id."""
        ids_of: dict[str, list[str]] = {}
        for sample_id in ids:
            ids_of.setdefault(self._worker_of[sample_id], []).append(sample_id)
        return ids_of

    def keep(self, is_needed: Callable[[str], bool]) -> None:
        """Forget all samples except those for which ``is_needed(id)`` is True."""
        self._worker_of = {i: worker for i, worker in self._worker_of.items() if is_needed(i)}


MAX_SHARE_ATTEMPTS = 3
"""Number of failures of one share, including deaths of the worker playing it, after which the
evaluation fails."""
EVALUATION_GRACE_S = 30.0
"""Seconds after a share's deadline until it is taken back from a worker that did not answer."""
_Key = tuple[int, int, bool]


class EvaluationFailed(RuntimeError):
    """Error: a share of a held-out evaluation failed too often, or no engine has the weights to
    evaluate."""


@dataclass
class _SharePlaying:
    """A share that a worker has taken and not answered yet."""

    part: EvaluationPart
    """The share."""
    worker: str
    """Incarnation of the worker that plays it."""
    expires: float
    """Time on ``process_clock``, in seconds, at which the share is taken back."""


class EvaluationQueue:
    """Queue of the shares of one held-out evaluation: waiting shares, shares being played, and
    results.

    At most ``max_concurrent`` shares (at least one) are played at once while there are also samples
    to play, so that an evaluation cannot starve training. Only one evaluation is queued at a time.
    """

    def __init__(self, max_concurrent: int) -> None:
        self._max_concurrent = max(1, max_concurrent)
        self._waiting: deque[EvaluationPart] = deque()
        self._playing: dict[_Key, _SharePlaying] = {}
        self._attempts: Counter[_Key] = Counter()
        self._results: dict[_Key, list[EpisodeResult]] = {}
        self._done: asyncio.Future[None] | None = None

    async def play(self, parts: Sequence[EvaluationPart]) -> dict[bool, list[EpisodeResult]]:
        """Queue all shares and wait until workers have played them.

        Returns a dict from ``greedy`` (True or False) to the results of those shares, in order.
        Raises EvaluationFailed when one share fails too often.
        """
        assert self._done is None, "one evaluation at a time"
        self._done = asyncio.get_running_loop().create_future()
        self._waiting.extend(parts)
        try:
            if parts:
                await self._done
            results: dict[bool, list[EpisodeResult]] = {}
            for part in parts:
                results.setdefault(part.greedy, []).extend(self._results[_key(part)])
            return results
        finally:
            self._done = None
            for state in (self._waiting, self._playing, self._attempts, self._results):
                state.clear()

    def take(self, worker: str, count: int, *, alone: bool) -> list[EvaluationPart]:
        """Assign up to ``count`` shares to a worker and return them.

        ``alone`` lifts the concurrency limit, because there are no samples that the worker could
        play instead.
        """
        limit = count if alone else min(count, self._max_concurrent - len(self._playing))
        shares: list[EvaluationPart] = []
        while self._waiting and len(shares) < limit:
            part = self._waiting.popleft()
            expires = process_clock.now() + part.deadline_s + EVALUATION_GRACE_S
            self._playing[_key(part)] = _SharePlaying(part, worker, expires)
            shares.append(part)
        return shares

    @property
    def has_waiting(self) -> bool:
        """Whether there are shares that no worker has taken yet."""
        return bool(self._waiting)

    def record(self, worker: str, request: EvaluatedRequest) -> None:
        """Record a worker's results for a share, or its failure. An answer for a share that no
        longer belongs to the worker is ignored."""
        key = (request.evaluation, request.part, request.greedy)
        entry = self._playing.get(key)
        if entry is None or entry.worker != worker:
            return
        if request.error:
            self._requeue(key, request.error)
            return
        del self._playing[key]
        self._results[key] = request.results
        if (
            not self._waiting
            and not self._playing
            and self._done is not None
            and not self._done.done()
        ):
            self._done.set_result(None)

    def worker_left(self, worker: str, reason: str) -> None:
        """Requeue the shares of a worker that died or stopped."""
        for key in [key for key, entry in self._playing.items() if entry.worker == worker]:
            self._requeue(key, f"{worker}: {reason}")

    def expire(self) -> None:
        """Requeue the shares whose deadline passed more than ``EVALUATION_GRACE_S`` ago."""
        now = process_clock.now()
        for key in [key for key, entry in self._playing.items() if entry.expires < now]:
            self._requeue(key, f"no answer from {self._playing[key].worker}")

    def _requeue(self, key: _Key, reason: str) -> None:
        self._waiting.append(self._playing.pop(key).part)
        self._attempts[key] += 1
        if (
            self._attempts[key] >= MAX_SHARE_ATTEMPTS
            and self._done is not None
            and not self._done.done()
        ):
            self._done.set_exception(
                EvaluationFailed(
                    f"{MAX_SHARE_ATTEMPTS} attempts at a share failed, at last: {reason}"
                )
            )


def _key(part: EvaluationPart) -> _Key:
    return part.evaluation, part.part, part.greedy
