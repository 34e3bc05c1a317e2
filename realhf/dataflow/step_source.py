"""Delivers the samples of the training steps: one base class for synchronous and asynchronous runs, and the loader that
draws them.

The samples of step k + 1 are drawn only after the results of step k were recorded. So the source sees the results of
every earlier step before each draw, always in the same order, and a run is a function of its seed.

The master's step loop is the same for both: train step, publish, report, checkpoint, evaluate.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from realhf.api.calls import LOAD, LoadAnswer, LoadRequest
from realhf.api.evaluation import Report
from realhf.api.experiment import EvaluationSpec
from realhf.api.sample import SequenceSample
from realhf.api.source import DataSource, ResultSink, SourceItem
from realhf.dataflow.buffer import AsyncIOSequenceBuffer
from realhf.dataflow.model_function_call import StepReport
from realhf.dataflow.storage_map import StorageMap
from realhf.dataflow.worker_group import ask
from realhf.transport.codec import decode_sample
from realhf.transport.roster import WorkerInfo
from realhf.transport.rpc_master import RpcMaster


class StepLoader:
    """Fills the buffer step after step, one step at a time."""

    def __init__(self) -> None:
        self._free = asyncio.Semaphore()

    @property
    def activity(self) -> str:
        """In words what it does or waits for, for the report about a run that stands still."""
        raise NotImplementedError

    @property
    def busy(self) -> bool:
        """Whether it waits for what has a deadline of its own and will therefore end."""
        raise NotImplementedError

    async def run(self, first_step: int) -> None:
        """For the whole run; closes the buffer's input when there is no more."""
        raise NotImplementedError

    async def more(self, step: int, n: int) -> SequenceSample | None:
        """Return up to ``n`` further samples of a step that is loaded, which take the place of others; None where there
        are none. They are in no step batch yet."""
        return None

    def finished(self, step: int) -> None:
        """The results of ``step`` are recorded: one more step may be loaded."""
        self._free.release()

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint has to hold."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what a checkpoint held."""


class Loader(StepLoader):
    """Loads ``n_seqs`` samples per step, for the whole run, into step batches numbered by step."""

    def __init__(
        self,
        source: DataSource,
        buffer: AsyncIOSequenceBuffer,
        storage: StorageMap,
        caller: RpcMaster,
        *,
        worker: str,
        keys: Sequence[str],
        n_seqs: int,
        timeout_s: float,
    ) -> None:
        super().__init__()
        self._source, self._buffer, self._storage, self._caller = source, buffer, storage, caller
        self._worker, self._keys, self._n_seqs = worker, tuple(keys), n_seqs
        self._timeout_s = timeout_s
        self._drawn: dict[int, list[SourceItem]] = {}
        self._restored: dict[int, list[SourceItem]] = {}
        self._before_more: dict[str, Any] | None = None
        """State of the source before the first draw of ``more`` in the open step; None when there was none."""
        self._activity, self._busy = "idle", False

    @property
    def activity(self) -> str:
        """In words what it does or waits for."""
        return self._activity

    @property
    def busy(self) -> bool:
        """Whether a worker stores a step's samples."""
        return self._busy

    async def run(self, first_step: int) -> None:
        """Load step after step until the source is exhausted, then close the buffer's input."""
        step = first_step
        while True:
            self._activity = "waits until a step is finished"
            await self._free.acquire()
            items = self._restored.pop(step, None) or self._source.next_batch(self._n_seqs)
            if items:
                self._drawn[step] = items
                self._activity = f"loads step {step} on {self._worker}"
                await self._buffer.put_batch(await self._stored(items, step), step_batch=step)
            if len(items) < self._n_seqs:
                self._activity = "source exhausted"
                self._buffer.close_input("the data source is exhausted")
                return
            step += 1

    def finished(self, step: int) -> None:
        """The results of ``step`` are recorded: one more step may be drawn."""
        self._drawn.pop(step, None)
        self._before_more = None
        super().finished(step)

    async def more(self, step: int, n: int) -> SequenceSample | None:
        """Draw further samples of a step. A checkpoint that falls between them and the end of the step holds the source
        as it was before them: a run that goes on plays the step from its beginning, and draws them again."""
        if self._before_more is None:
            self._before_more = self._source.state_dict()
        items = self._source.next_batch(n)
        return await self._stored(items, step) if items else None

    async def _stored(self, items: Sequence[SourceItem], step: int) -> SequenceSample:
        given = [key for key in self._keys if key in items[0].values]
        lacking = next((item for item in items if not item.values.keys() >= set(given)), None)
        if lacking is not None:
            key = min(set(given) - lacking.values.keys())
            raise ValueError(f"the source gave sample {lacking.id!r} without key {key!r}")
        values = {key: [[int(value) for value in item.values[key]] for item in items] for key in given}
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
            self._busy = True
            try:
                answer = await ask(self._caller, self._worker, LOAD, request, timeout_s=self._timeout_s, step=step)
            finally:
                self._busy = False
            if len(given) < len(self._keys):
                meta = meta.update(self._of_dataset(answer, items[0]).select(set(self._keys) - set(given)))
        return meta

    def _of_dataset(self, answer: LoadAnswer, item: SourceItem) -> SequenceSample:
        """What the worker's dataset stored for keys that the source left out."""
        meta = decode_sample(answer.meta) if answer.meta else None
        missing = set(self._keys) - set(item.values) - (meta.keys if meta else frozenset())
        if meta is None or missing:
            key = ", ".join(sorted(missing))
            raise ValueError(f"the source gave sample {item.id!r} without key {key!r}, nor has {self._worker} it")
        return meta

    def state_dict(self) -> dict[str, Any]:
        """Source state, and the samples that were drawn but not finished: they are loaded again."""
        pending = {
            str(step): [item.to_map() for item in items]
            for step, items in sorted({**self._restored, **self._drawn}.items())
        }
        source = self._source.state_dict() if self._before_more is None else self._before_more
        return {"source": source, "pending": pending}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Before ``run``."""
        self._source.load_state_dict(state["source"])
        self._restored = {int(step): [SourceItem(**item) for item in items] for step, items in state["pending"].items()}


class StepSource:
    """Delivers the samples of every step. What is not overridden does nothing: there is nothing to publish, to pause or
    to report, and the trainer has the only engine."""

    @property
    def results(self) -> ResultSink:
        """Where the results of trained samples go."""
        raise NotImplementedError

    def loader(self, buffer: AsyncIOSequenceBuffer, storage: StorageMap) -> StepLoader:
        """Return what fills the executor's buffer."""
        raise NotImplementedError

    def joined(self, info: WorkerInfo) -> None:
        """Take note of a worker that has registered."""

    def left(self, name: str, reason: str) -> None:
        """Take note of a worker that is gone."""

    async def start(self) -> None:
        """Begin to make samples, before the first step."""

    async def publish(self, completed_steps: int) -> None:
        """Hand the policy of this version to whoever samples with it."""

    async def evaluate(self, step: int, evaluation: EvaluationSpec, deliver: Callable[[Report], None]) -> bool:
        """Begin a held-out evaluation with the weights of now, after ``step`` steps, and go on; ``deliver`` is called
        with its report. Returns False when the trainer has to make it itself."""
        return False

    @property
    def evaluating(self) -> bool:
        """Whether an evaluation is in play beside training."""
        return False

    async def evaluated(self) -> None:
        """Wait for the evaluation in play, if there is one."""

    async def pause(self) -> None:
        """Let what is being made come to its end; the end of the run follows."""

    async def step_metrics(self, report: StepReport) -> dict[str, float]:
        """Return what is to be logged about the making of a step's samples."""
        return {}

    def episodes(self, report: StepReport) -> list[str]:
        """Return transcripts that travelled with the samples of a step."""
        return []

    async def live(self) -> Mapping[str, Mapping[str, float]]:
        """Return what the display shows between steps: {section: {name: value}}, {} for nothing."""
        return {}

    async def before_checkpoint(self) -> None:
        """Write down what the checkpoint will cover."""

    async def save(self, completed_steps: int, folder: Path) -> None:
        """Write into the folder of a checkpoint what a run has to know that goes on from it. Raises OSError."""

    async def checkpointed(self, completed_steps: int, folder: str) -> None:
        """Take note that a checkpoint is valid."""

    def end(self) -> None:
        """Take note that the run has come to its end."""

    async def close(self) -> None:
        """Release everything, in whatever state it is."""


class SynchronousSteps(StepSource):
    """Draws the samples from a data source, step by step; the calls of the graph do the rest. ``worker`` stores the
    values of ``keys``."""

    def __init__(
        self, source: DataSource, caller: RpcMaster, *, worker: str, keys: Sequence[str], n_seqs: int, timeout_s: float
    ) -> None:
        self._source, self._caller = source, caller
        self._loading: dict[str, Any] = {"worker": worker, "keys": keys, "n_seqs": n_seqs, "timeout_s": timeout_s}

    @property
    def results(self) -> ResultSink:
        """Return the data source, which learns from the results."""
        return self._source

    def loader(self, buffer: AsyncIOSequenceBuffer, storage: StorageMap) -> StepLoader:
        """Return a loader that draws from the source."""
        return Loader(self._source, buffer, storage, self._caller, **self._loading)
