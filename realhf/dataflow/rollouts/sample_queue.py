"""Queue of the samples to be played, and queue of the workers' requests for samples.

With thousands of workers, most requests are waiting at any time. Waking all of them at each change
would make every arrival of a sample cost time proportional to the number of workers;
``PendingRequests`` wakes only a given number.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from realhf.api.sample import SequenceSample
from realhf.api.source import DataSource, SampleResult, SourceItem


def add_metadata(meta: SequenceSample, item: Mapping[str, Any]) -> SequenceSample:
    """Return ``meta`` with the metadata of its source item added.

    The item's values take precedence, so a rollout worker cannot change them.
    """
    return meta.annotated({name: [value] for name, value in item.items()})


@dataclass(frozen=True)
class QueuedTask:
    """A sample that waits to be admitted, with its history."""

    item: SourceItem
    """The data source's item for the sample."""
    attempt: int = 0
    """Number of the next attempt, from 0."""
    failures: int = 0
    """Number of attempts that the rollout worker reported as failed."""
    order: int | None = None
    """Number of its first admission; None before that."""
    deaths: int = 0
    """Number of attempts during which the process playing it died."""
    suspect: bool = False
    """Whether it may have caused such deaths. No worker gets two suspects at once."""


@dataclass
class SampleQueue:
    """Queue of tasks that is filled from a data source.

    Draws ``batch_size`` items at a time, as a synchronous run does, so that a curriculum sees the
    same requests. Requeued samples go first, in the order of their admission, so that the oldest is
    played first.
    """

    source: DataSource
    """Source of new samples."""
    batch_size: int
    """Number of items per draw."""
    recorded: set[str] = field(default_factory=set)
    """Ids of samples whose results the source recorded before a crash. They are not recorded again
    when the samples are retrained."""
    exhausted: bool = False
    """Whether the source has no more items."""
    draws: int = 0
    """Number of draws since this object was created."""
    drawn: deque[SourceItem] = field(default_factory=deque)
    """Items that have been drawn and not admitted yet."""
    _returned: list[tuple[int, str, QueuedTask]] = field(default_factory=list)
    """Heap of requeued tasks, by order of admission."""
    _suspects: list[tuple[int, str, QueuedTask]] = field(default_factory=list)
    """Heap of requeued suspects, by order of admission."""

    @property
    def n_returned(self) -> int:
        """Number of requeued samples that are waiting."""
        return len(self._returned) + len(self._suspects)

    @property
    def n_suspects(self) -> int:
        """Number of suspects among the requeued samples."""
        return len(self._suspects)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to take and the source is exhausted."""
        return self.exhausted and not self.drawn and not self.n_returned

    def take(self, *, suspects: bool = True) -> QueuedTask | None:
        """Remove and return the next task; None when there are no more. With ``suspects=False``
        suspects are skipped."""
        waiting = [heap for heap in (self._returned, self._suspects if suspects else None) if heap]
        if waiting:
            return heapq.heappop(min(waiting, key=lambda heap: heap[0][:2]))[-1]
        if not self.drawn and not self.exhausted:
            items = self.source.next_batch(self.batch_size)
            self.exhausted = len(items) < self.batch_size
            self.drawn.extend(items)
            self.draws += 1
        return QueuedTask(self.drawn.popleft()) if self.drawn else None

    def give_back(self, task: QueuedTask) -> None:
        """Requeue a task that is to be played again."""
        heap = self._suspects if task.suspect else self._returned
        heapq.heappush(heap, (-1 if task.order is None else task.order, task.item.id, task))

    def record(self, results: Sequence[SampleResult]) -> None:
        """Pass results to the source, except those of samples in ``recorded``."""
        new_results = [result for result in results if result.id not in self.recorded]
        self.recorded.difference_update(result.id for result in results)
        if new_results:
            self.source.record(new_results)

    def state(self) -> dict[str, Any]:
        """Return the state for the journal as JSON types: the source's state and the items not yet
        admitted."""
        return {
            "source": self.source.state_dict(),
            "drawn": [item.to_map() for item in self.drawn],
            "exhausted": self.exhausted,
            "recorded": sorted(self.recorded),
        }

    def load_state(self, state: Mapping[str, Any], admitted: Iterable[str]) -> None:
        """Restore what ``state`` returned, except for the items that have been ``admitted``
        since."""
        admitted_ids = set(admitted)
        self.source.load_state_dict(dict(state["source"]))
        self.drawn = deque(
            item
            for fields in state["drawn"]
            if (item := SourceItem(**fields)).id not in admitted_ids
        )
        self.exhausted = bool(state["exhausted"])
        self.recorded = set(state["recorded"])


class PendingRequests:
    """First-come, first-served queue of workers' requests that wait for capacity.

    Must be used on one event loop. A worker may have several requests.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[asyncio.Future[bool], None] = OrderedDict()
        self._of: dict[str, set[asyncio.Future[bool]]] = {}
        """Unfinished requests of each worker."""

    def __len__(self) -> int:
        return len(self._waiting)

    async def wait_turn(self, worker: str, timeout_s: float) -> bool:
        """Wait in the queue, from its end, for a turn. Returns True when it comes, False if
        ``timeout_s`` passes first.

        A caller that finds no capacity on its turn waits again, at the end of the queue. A caller
        that no longer needs its turn must pass it on with ``wake(1)``.
        """
        if timeout_s <= 0:
            return False
        loop = asyncio.get_running_loop()
        future: asyncio.Future[bool] = loop.create_future()
        self._waiting[future] = None
        self._of.setdefault(worker, set()).add(future)
        timer = loop.call_later(timeout_s, _end_wait, future, False)
        try:
            return await future
        except asyncio.CancelledError:
            if not future.cancelled() and future.result():
                self.wake(1)  # the turn came together with the cancellation
            raise
        finally:
            timer.cancel()
            self._waiting.pop(future, None)
            self._of[worker].discard(future)
            if not self._of[worker]:
                del self._of[worker]

    def wake(self, count: int | None = None) -> None:
        """Give the first ``count`` requests their turn; None: all of them."""
        remaining = len(self._waiting) if count is None else count
        while self._waiting and remaining > 0:
            remaining -= _end_wait(self._waiting.popitem(last=False)[0], True)

    def wake_worker(self, worker: str) -> None:
        """Give all requests of a worker their turn."""
        for future in self._of.get(worker, ()):
            self._waiting.pop(future, None)
            _end_wait(future, True)


def _end_wait(future: asyncio.Future[bool], has_turn: bool) -> bool:
    """End a wait; return False if it has ended already."""
    if future.done():
        return False
    future.set_result(has_turn)
    return True
