"""Keeps the buffer filled: draws samples, has a worker store their tensors, puts their metadata.

The samples of step k + 1 are drawn only after the results of step k were recorded. So the source sees the results of
every earlier step before each draw, always in the same order, and a run is a function of its seed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from realhf.api.calls import LOAD, LoadAnswer, LoadRequest
from realhf.api.sample import SequenceSample
from realhf.api.source import DataSource, SourceItem
from realhf.dataflow.buffer.sequence_buffer import AsyncIOSequenceBuffer
from realhf.dataflow.caller import Caller, ask
from realhf.dataflow.storage_map import StorageMap
from realhf.transport.codec import decode_sample


class StepLoader(Protocol):
    """Fills the buffer step after step. ``activity`` says in words what it does or waits for."""

    @property
    def activity(self) -> str:
        """What it does at the moment, for the report about a run that stands still."""
        ...

    @property
    def busy(self) -> bool:
        """Whether it waits for what has a deadline of its own and will therefore end."""
        ...

    async def run(self, first_step: int) -> None:
        """For the whole run; closes the buffer's input when there is no more."""
        ...

    def finished(self, step: int) -> None:
        """The results of ``step`` are recorded."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint has to hold."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what a checkpoint held."""
        ...


class Loader:
    """Loads ``n_seqs`` samples per step, for the whole run, into step batches numbered by step."""

    def __init__(
        self,
        source: DataSource,
        buffer: AsyncIOSequenceBuffer,
        storage: StorageMap,
        caller: Caller,
        *,
        worker: str,
        keys: Sequence[str],
        n_seqs: int,
        timeout_s: float,
    ) -> None:
        self._source, self._buffer, self._storage, self._caller = source, buffer, storage, caller
        self._worker, self._keys, self._n_seqs = worker, tuple(keys), n_seqs
        self._timeout_s = timeout_s
        self._free = asyncio.Semaphore()
        self._drawn: dict[int, list[SourceItem]] = {}
        self._restored: dict[int, list[SourceItem]] = {}
        self.activity = "idle"
        self.busy = False

    async def run(self, first_step: int) -> None:
        """Load step after step until the source is exhausted, then close the buffer's input."""
        step = first_step
        while True:
            self.activity = "waits until a step is finished"
            await self._free.acquire()
            items = self._restored.pop(step, None) or self._source.next_batch(self._n_seqs)
            if items:
                self._drawn[step] = items
                self.activity = f"loads step {step} on {self._worker}"
                await self._load(items, step)
            if len(items) < self._n_seqs:
                self.activity = "source exhausted"
                self._buffer.close_input("the data source is exhausted")
                return
            step += 1

    def finished(self, step: int) -> None:
        """The results of ``step`` are recorded: one more step may be drawn."""
        self._drawn.pop(step, None)
        self._free.release()

    async def _load(self, items: Sequence[SourceItem], step: int) -> None:
        given = [key for key in self._keys if key in items[0].values]
        values = {key: [self._value(item, key) for item in items] for key in given}
        metadata = {
            name: [item.metadata[name] for item in items]
            for name in items[0].metadata
            if all(name in item.metadata for item in items)
        }
        ids = [item.id for item in items]
        meta = SequenceSample(
            ids,
            {key: [[len(value)] for value in column] for key, column in values.items()},
            dict.fromkeys(given, "i64"),
            dict.fromkeys(given, ()),
            None,
            metadata,
        )
        if self._keys:
            # Before the call: what an interrupted call may have stored is cleared with the rest.
            self._storage.record(ids, self._keys, self._worker)
            request = LoadRequest(ids, values, metadata)
            self.busy = True
            try:
                answer = await ask(self._caller, self._worker, LOAD, request, timeout_s=self._timeout_s, step=step)
            finally:
                self.busy = False
            if len(given) < len(self._keys):
                meta = meta.update(self._of_dataset(answer, items[0]).select(set(self._keys) - set(given)))
        await self._buffer.put_batch(meta, step_batch=step)

    def _of_dataset(self, answer: LoadAnswer, item: SourceItem) -> SequenceSample:
        """What the worker's dataset stored for keys that the source left out."""
        meta = decode_sample(answer.meta) if answer.meta else None
        missing = set(self._keys) - set(item.values) - (meta.keys if meta else frozenset())
        if meta is None or missing:
            key = ", ".join(sorted(missing))
            raise ValueError(f"the source gave sample {item.id!r} without key {key!r}, nor has {self._worker} it")
        return meta

    @staticmethod
    def _value(item: SourceItem, key: str) -> list[int]:
        if key not in item.values:
            raise ValueError(f"the source gave sample {item.id!r} without key {key!r}")
        return [int(value) for value in item.values[key]]

    def state_dict(self) -> dict[str, Any]:
        """Source state, and the samples that were drawn but not finished: they are loaded again."""
        pending = {
            str(step): [
                {"id": i.id, "metadata": dict(i.metadata), "values": {k: list(v) for k, v in i.values.items()}}
                for i in items
            ]
            for step, items in sorted({**self._restored, **self._drawn}.items())
        }
        return {"source": self._source.state_dict(), "pending": pending}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Before ``run``."""
        self._source.load_state_dict(state["source"])
        self._restored = {int(step): [SourceItem(**item) for item in items] for step, items in state["pending"].items()}
