"""What the sequence buffer hands out, what it raises, and its state per model function call."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from realhf.api.mfc import MFCDef
from realhf.api.sample import SequenceSample
from realhf.dataflow.buffer.ready_queue import Order, ReadyQueue
from realhf.dataflow.buffer.sample_table import MetaView, SampleTable

NO_STEP_BATCH = -1


class BatchTooLarge(ValueError):
    """A put can never fit."""


class DuplicateSampleError(ValueError):
    """A sample was put twice."""


class BufferClosed(RuntimeError):
    """A put after ``close_input``."""


class EndOfData(Exception):
    """The input is closed and this call has nothing left to do."""


@dataclass(eq=False)
class BatchLease:
    """One call's claim on a batch. ``meta`` (its input keys and all metadata so far) is a snapshot, put
    together when first read."""

    lease_id: int
    mfc: str
    view: MetaView = field(repr=False)
    slots: np.ndarray = field(repr=False)

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of the samples, in the order of the view."""
        return self.view.ids

    @property
    def meta(self) -> SequenceSample:
        """The metadata of the samples; it holds no tensor."""
        return self.view.sample


@dataclass(eq=False)
class Retired:
    """Samples that left the buffer after their last call."""

    view: MetaView = field(repr=False)
    births: list[int]
    step_batches: list[int]

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of the samples, in the order of the view."""
        return self.view.ids


@dataclass(eq=False)
class Waiter:
    """A getter that waits for a batch of its step batch (None: of any)."""

    step_batch: int | None
    future: asyncio.Future[BatchLease]


@dataclass(eq=False)
class Station:
    """The buffer's state for one model function call; ``queues`` by step batch."""

    name: str
    n_seqs: int
    bit: int
    inputs: tuple[str, ...]
    required: int
    queues: dict[int, ReadyQueue] = field(default_factory=dict)
    waiters: deque[Waiter] = field(default_factory=deque)
    leased: int = 0

    @classmethod
    def of(cls, mfc: MFCDef, index: int, inputs: Sequence[str], table: SampleTable) -> Station:
        """Return the station of a call that reads ``inputs`` and has the bit ``index``."""
        return cls(mfc.name, mfc.n_seqs, 1 << index, tuple(inputs), table.key_mask(inputs))

    @property
    def ready(self) -> int:
        """Samples that could be leased now."""
        return sum(queue.live for queue in self.queues.values())

    def queue(self, step_batch: int) -> ReadyQueue:
        """Return the queue of a step batch, a new one the first time."""
        found = self.queues.get(step_batch)
        if found is None:
            found = self.queues[step_batch] = ReadyQueue()
        return found

    def eligible(self, step_batch: int | None) -> list[ReadyQueue]:
        """Return the queues that a batch of this step batch (None: of any) may be taken from."""
        if step_batch is None:
            return list(self.queues.values())
        return [self.queues[step_batch]] if step_batch in self.queues else []

    def take(self, queues: Sequence[ReadyQueue], count: int) -> np.ndarray:
        """Slots of the ``count`` oldest samples over these queues, oldest first."""
        if len(queues) == 1:
            return queues[0].take(count)
        parts: list[np.ndarray] = []
        while count > 0:
            heads: list[tuple[Order, int]] = []
            for index, queue in enumerate(queues):
                head = queue.head()
                if head is not None:
                    heads.append((head, index))
            heads.sort()
            limit = heads[1][0] if len(heads) > 1 else None
            parts.append(queues[heads[0][1]].take(count, limit))
            count -= len(parts[-1])
        return np.concatenate(parts)
