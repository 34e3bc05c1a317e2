"""Knows what is to be played, who asks for it and who has it in play.

With thousands of workers most requests wait most of the time. If each change let all of them look again, every sample
that arrives would cost the master a walk through all workers.
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


def with_metadata(meta: SequenceSample, item: Mapping[str, Any]) -> SequenceSample:
    """Return the sample's own metadata beside that of its task, which the rollout worker cannot change."""
    return meta.annotated({name: [value] for name, value in item.items()})


@dataclass(frozen=True)
class Task:
    """A sample that waits to be admitted. ``attempt`` counts from 0, ``failures`` those attempts that failed through
    the rollout's own fault, ``deaths`` those in which the process died that played it; ``suspect``: it must not be
    played beside another such; ``order`` is None before the first admission."""

    item: SourceItem
    attempt: int = 0
    failures: int = 0
    order: int | None = None
    deaths: int = 0
    suspect: bool = False


@dataclass
class SampleQueue:
    """Draws ``batch_size`` items at a time, as the synchronous run does, so that a curriculum sees the same requests;
    samples that came back go first, in the order of their admission, so that what waits longest is played first. A
    sample whose result was recorded before a crash is not recorded again (``recorded``). ``draws`` counts."""

    source: DataSource
    batch_size: int
    recorded: set[str] = field(default_factory=set)
    exhausted: bool = False
    draws: int = 0
    drawn: deque[SourceItem] = field(default_factory=deque)
    _returned: list[tuple[int, str, Task]] = field(default_factory=list)
    _suspects: list[tuple[int, str, Task]] = field(default_factory=list)

    @property
    def returned(self) -> int:
        """Samples that came back and wait."""
        return len(self._returned) + len(self._suspects)

    @property
    def suspects(self) -> int:
        """Samples that came back and must not be played beside another such."""
        return len(self._suspects)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to take, and the source has said that it has no more."""
        return self.exhausted and not self.drawn and not self.returned

    def take(self, *, suspects: bool = True) -> Task | None:
        """The next task, ``suspects`` among them or not; None when the source has no more."""
        waiting = [heap for heap in (self._returned, self._suspects if suspects else None) if heap]
        if waiting:
            return heapq.heappop(min(waiting, key=lambda heap: heap[0][:2]))[-1]
        if not self.drawn and not self.exhausted:
            items = self.source.next_batch(self.batch_size)
            self.exhausted = len(items) < self.batch_size
            self.drawn.extend(items)
            self.draws += 1
        return Task(self.drawn.popleft()) if self.drawn else None

    def give_back(self, task: Task) -> None:
        """It is to be played again."""
        heap = self._suspects if task.suspect else self._returned
        heapq.heappush(heap, (-1 if task.order is None else task.order, task.item.id, task))

    def record(self, results: Sequence[SampleResult]) -> None:
        """Tell the source, once per sample."""
        fresh = [result for result in results if result.id not in self.recorded]
        self.recorded.difference_update(result.id for result in results)
        if fresh:
            self.source.record(fresh)

    def state(self) -> dict[str, Any]:
        """The source's state and what is drawn but not admitted, JSON-able."""
        return {
            "source": self.source.state_dict(),
            "drawn": [item.to_map() for item in self.drawn],
            "exhausted": self.exhausted,
            "recorded": sorted(self.recorded),
        }

    def load_state(self, state: Mapping[str, Any], admitted: Iterable[str]) -> None:
        """Undo of ``state``; items ``admitted`` since are not drawn again."""
        gone = set(admitted)
        self.source.load_state_dict(dict(state["source"]))
        self.drawn = deque(item for fields in state["drawn"] if (item := SourceItem(**fields)).id not in gone)
        self.exhausted = bool(state["exhausted"])
        self.recorded = set(state["recorded"])


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
