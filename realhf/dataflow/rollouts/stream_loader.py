"""Fills the buffer from the stream: the step batch of each step, as soon as the straggler gate lets it through."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from realhf.api.sample import SequenceSample
from realhf.dataflow.buffer.sequence_buffer import AsyncIOSequenceBuffer
from realhf.dataflow.storage_map import StorageMap


class StepBatchSource(Protocol):
    """Hands out the samples of a step, in the order of their admission; the part of ``RolloutControl`` used here."""

    async def step_batch(self, step: int) -> list[SequenceSample]:
        """Metadata of every sample of the step, [] when no more will come."""
        ...

    def waiting_for(self, step: int) -> str:
        """Say in words what a step still waits for."""
        ...


class StreamLoader:
    """A ``StepLoader``. ``held_by(ids)`` says which worker holds the tensors of which samples; ``keys`` enter the
    buffer."""

    def __init__(
        self,
        source: StepBatchSource,
        buffer: AsyncIOSequenceBuffer,
        storage: StorageMap,
        *,
        held_by: Callable[[Sequence[str]], Mapping[str, Sequence[str]]],
        keys: Sequence[str],
        busy: Callable[[], bool] = lambda: False,
    ) -> None:
        self._source, self._buffer, self._storage = source, buffer, storage
        self._held_by, self._keys = held_by, tuple(keys)
        self._free = asyncio.Semaphore()
        self._waits_for: int | None = None
        self._busy = busy

    @property
    def busy(self) -> bool:
        """Whether samples are in play, or what they wait for is on its way."""
        return self._busy()

    @property
    def activity(self) -> str:
        """What it waits for."""
        if self._waits_for is None:
            return "waits until a step is finished"
        return f"step {self._waits_for}: {self._source.waiting_for(self._waits_for)}"

    async def run(self, first_step: int) -> None:
        """Put step batch after step batch."""
        step = first_step
        while True:
            await self._free.acquire()
            self._waits_for = step
            metas = await self._source.step_batch(step)
            self._waits_for = None
            if not metas:
                self._buffer.close_input("the run has all its samples")
                return
            meta = SequenceSample.gather([meta.select(self._keys) for meta in metas], allow_metadata_loss=True)
            for worker, ids in self._held_by(meta.ids).items():
                self._storage.record(ids, meta.keys, worker)
            await self._buffer.put_batch(meta, step_batch=step)
            step += 1

    def finished(self, step: int) -> None:
        """Make room for the next step after ``step`` was trained."""
        del step
        self._free.release()

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the journal knows what has arrived."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore nothing: the journal knows what has arrived."""
        del state
