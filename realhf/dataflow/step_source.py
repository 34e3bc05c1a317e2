"""Sources of the samples of training steps: the common interface of synchronous and asynchronous
runs, and the loaders.

The samples of step k + 1 are drawn only after the results of step k were recorded. So the source
sees the results of every earlier step before each draw, always in the same order, and a run depends
only on its seed.

The master's step loop is the same for both kinds of run: train step, publish, report, checkpoint,
evaluate.
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
    """Base class of the loaders, which fill the buffer one step at a time.

    ``run``
      produces: step batches in the buffer;
      waits for: the results of the previous step, then the samples;
      unblocked by: ``step_finished``, and the source of the samples.
    """

    def __init__(self) -> None:
        self._free = asyncio.Semaphore()
        """Semaphore that permits loading one step; ``step_finished`` releases it."""

    @property
    def activity(self) -> str:
        """A phrase that describes what the loader does or waits for, for stall reports."""
        raise NotImplementedError

    @property
    def busy(self) -> bool:
        """Whether the loader waits for something that has its own deadline. Such a wait does not
        count as a stall."""
        raise NotImplementedError

    async def run(self, first_step: int) -> None:
        """Load steps until there are no more samples, then close the buffer's input."""
        raise NotImplementedError

    async def load_more(self, step: int, n: int) -> SequenceSample | None:
        """Return up to ``n`` further samples for an already loaded step, as replacements; None if
        there are none.

        They do not belong to a step batch yet.
        """
        return None

    def step_finished(self, step: int) -> None:
        """Allow one more step to be loaded, because the results of ``step`` are recorded."""
        self._free.release()

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state for a checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from a checkpoint."""


class SourceLoader(StepLoader):
    """Loader that draws ``n_seqs`` samples per step from a data source and stores the values of
    ``keys`` on ``worker``."""

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
        self._source = source
        self._buffer = buffer
        self._storage = storage
        self._caller = caller
        self._worker = worker
        self._keys = tuple(keys)
        self._n_seqs = n_seqs
        self._timeout_s = timeout_s
        self._drawn: dict[int, list[SourceItem]] = {}
        """Drawn items of the unfinished steps, by step."""
        self._restored: dict[int, list[SourceItem]] = {}
        """Drawn items of unfinished steps from a checkpoint, to be loaded again, by step."""
        self._state_before_more: dict[str, Any] | None = None
        """State of the source before the first ``load_more`` of the open step; None if
        ``load_more`` was not called."""
        self._activity = "idle"
        self._busy = False

    @property
    def activity(self) -> str:
        """A phrase that describes what the loader does or waits for."""
        return self._activity

    @property
    def busy(self) -> bool:
        """Whether the worker is storing a step's samples."""
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
                await self._buffer.put_batch(await self._store(items, step), step_batch=step)
            if len(items) < self._n_seqs:
                self._activity = "source exhausted"
                self._buffer.close_input("the data source is exhausted")
                return
            step += 1

    def step_finished(self, step: int) -> None:
        """Allow one more step to be drawn, because the results of ``step`` are recorded."""
        self._drawn.pop(step, None)
        self._state_before_more = None
        super().step_finished(step)

    async def load_more(self, step: int, n: int) -> SequenceSample | None:
        """Draw up to ``n`` further samples of a step and store them; None if the source has none.

        A checkpoint made before the end of the step holds the source's state from before these
        draws, because the resumed run plays the step from its beginning and draws them again.
        """
        if self._state_before_more is None:
            self._state_before_more = self._source.state_dict()
        items = self._source.next_batch(n)
        return await self._store(items, step) if items else None

    async def _store(self, items: Sequence[SourceItem], step: int) -> SequenceSample:
        """Store the items' values on the worker and return their metadata. Raises ValueError for a
        missing key."""
        source_keys = [key for key in self._keys if key in items[0].values]
        incomplete = next(
            (item for item in items if not item.values.keys() >= set(source_keys)), None
        )
        if incomplete is not None:
            key = min(set(source_keys) - incomplete.values.keys())
            raise ValueError(f"the source gave sample {incomplete.id!r} without key {key!r}")
        values = {
            key: [[int(value) for value in item.values[key]] for item in items]
            for key in source_keys
        }
        metadata = {
            name: [item.metadata[name] for item in items]
            for name in items[0].metadata
            if all(name in item.metadata for item in items)
        }
        ids = [item.id for item in items]
        meta = SequenceSample(
            ids,
            {key: [[len(value)] for value in column] for key, column in values.items()},
            dict.fromkeys(source_keys, "i64"),
            dict.fromkeys(source_keys, ()),
            None,
            metadata,
        )
        if self._keys:
            # Recorded before the call, so that tensors of an interrupted call are cleared as well.
            self._storage.record(ids, self._keys, self._worker)
            request = LoadRequest(ids, values, metadata)
            self._busy = True
            try:
                answer = await ask(
                    self._caller, self._worker, LOAD, request, timeout_s=self._timeout_s, step=step
                )
            finally:
                self._busy = False
            if len(source_keys) < len(self._keys):
                from_dataset = self._dataset_meta(answer, items[0])
                meta = meta.update(from_dataset.select(set(self._keys) - set(source_keys)))
        return meta

    def _dataset_meta(self, answer: LoadAnswer, item: SourceItem) -> SequenceSample:
        """Return the metadata of the keys that the source does not provide, whose values the worker
        stored from its dataset.

        Raises ValueError for a key that neither of them provides.
        """
        meta = decode_sample(answer.meta) if answer.meta else None
        missing = set(self._keys) - set(item.values) - (meta.keys if meta else frozenset())
        if meta is None or missing:
            key = ", ".join(sorted(missing))
            raise ValueError(
                f"the source gave sample {item.id!r} without key {key!r}, and the dataset of "
                f"{self._worker} does not provide it either"
            )
        return meta

    def state_dict(self) -> dict[str, Any]:
        """Return the source's state, and the drawn items of unfinished steps, which are loaded
        again after a resumption."""
        pending = {
            str(step): [item.to_map() for item in items]
            for step, items in sorted({**self._restored, **self._drawn}.items())
        }
        source = (
            self._source.state_dict()
            if self._state_before_more is None
            else self._state_before_more
        )
        return {"source": source, "pending": pending}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` returned. Must be called before ``run``."""
        self._source.load_state_dict(state["source"])
        self._restored = {
            int(step): [SourceItem(**item) for item in items]
            for step, items in state["pending"].items()
        }


class StepSource:
    """The master's interface to the producer of the steps' samples.

    The defaults are those of a synchronous run: the trainer has the only engine, so there is
    nothing to publish, pause or report.
    """

    @property
    def results(self) -> ResultSink:
        """Sink for the results of trained samples."""
        raise NotImplementedError

    def loader(self, buffer: AsyncIOSequenceBuffer, storage: StorageMap) -> StepLoader:
        """Return the loader that fills the executor's buffer."""
        raise NotImplementedError

    def worker_joined(self, info: WorkerInfo) -> None:
        """Handle the registration of a worker."""

    def worker_left(self, name: str, reason: str) -> None:
        """Handle the death or departure of a worker."""

    async def start(self) -> None:
        """Start producing samples, before the first step."""

    async def publish(self, completed_steps: int) -> None:
        """Publish the policy after ``completed_steps`` steps to the workers that sample with it."""

    async def evaluate(
        self, step: int, evaluation: EvaluationSpec, deliver: Callable[[Report], None]
    ) -> bool:
        """Start a held-out evaluation of the current weights, after ``step`` steps, in parallel
        with training.

        ``deliver(report)`` is called when it has finished. Returns False if the trainer has to run
        the evaluation itself.
        """
        return False

    @property
    def is_evaluating(self) -> bool:
        """Whether an evaluation is being played in parallel with training."""
        return False

    async def wait_for_evaluation(self) -> None:
        """Wait until no evaluation is being played."""

    async def drain(self) -> None:
        """Finish the samples in progress and start no new ones."""

    async def step_metrics(self, report: StepReport) -> dict[str, float]:
        """Return metrics about how a step's samples were produced."""
        return {}

    def list_transcripts(self, report: StepReport) -> list[str]:
        """Return the transcripts in the metadata of a step's samples."""
        return []

    async def collect_live_metrics(self) -> Mapping[str, Mapping[str, float]]:
        """Return the metrics that the display shows between steps, {section: {name: value}}; {} for
        none."""
        return {}

    async def prepare_checkpoint(self) -> None:
        """Make everything durable that the checkpoint will refer to."""

    async def save(self, completed_steps: int, folder: Path) -> None:
        """Write the state that a resumed run needs into the folder of a checkpoint. Raises
        OSError."""

    async def checkpoint_committed(self, completed_steps: int, folder: str) -> None:
        """Handle a checkpoint that has become valid."""

    def record_end(self) -> None:
        """Record that the run has ended."""

    async def close(self) -> None:
        """Release all resources. May be called in any state."""


class SynchronousSteps(StepSource):
    """Step source of a synchronous run, which only draws samples from a data source; the calls of
    the graph do the rest.

    ``worker`` stores the values of ``keys``; a step has ``n_seqs`` samples.
    """

    def __init__(
        self,
        source: DataSource,
        caller: RpcMaster,
        *,
        worker: str,
        keys: Sequence[str],
        n_seqs: int,
        timeout_s: float,
    ) -> None:
        self._source = source
        self._caller = caller
        self._loader_args: dict[str, Any] = {
            "worker": worker,
            "keys": keys,
            "n_seqs": n_seqs,
            "timeout_s": timeout_s,
        }

    @property
    def results(self) -> ResultSink:
        """The data source itself, which may choose further samples according to the results."""
        return self._source

    def loader(self, buffer: AsyncIOSequenceBuffer, storage: StorageMap) -> StepLoader:
        """Return a loader that draws from the source."""
        return SourceLoader(self._source, buffer, storage, self._caller, **self._loader_args)
