"""Where the samples of the training steps come from: one protocol for synchronous and asynchronous runs.

The master's step loop is the same for both: train step, publish, report, checkpoint, evaluate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from realhf.api.evaluation import Report
from realhf.api.experiment import EvaluationSpec
from realhf.api.source import DataSource, ResultSink
from realhf.dataflow.buffer.sequence_buffer import AsyncIOSequenceBuffer
from realhf.dataflow.caller import Caller
from realhf.dataflow.loader import Loader, StepLoader
from realhf.dataflow.step_report import StepReport
from realhf.dataflow.storage_map import StorageMap
from realhf.transport.rpc.roster import WorkerInfo


class StepSource(Protocol):
    """Delivers the samples of every step. ``results`` hears what became of them."""

    @property
    def results(self) -> ResultSink:
        """Where the results of trained samples go."""
        ...

    def loader(self, buffer: AsyncIOSequenceBuffer, storage: StorageMap) -> StepLoader:
        """Return what fills the executor's buffer."""
        ...

    def joined(self, info: WorkerInfo) -> None:
        """Take note of a worker that has registered."""
        ...

    def left(self, name: str, reason: str) -> None:
        """Take note of a worker that is gone."""
        ...

    async def start(self) -> None:
        """Begin to make samples, before the first step."""
        ...

    async def publish(self, completed_steps: int) -> None:
        """Hand the policy of this version to whoever samples with it."""
        ...

    async def evaluate(self, step: int, evaluation: EvaluationSpec, deliver: Callable[[Report], None]) -> bool:
        """Begin a held-out evaluation with the weights of now, after ``step`` steps, and go on; ``deliver`` is called
        with its report. Returns False when the trainer has to make it itself."""
        ...

    @property
    def evaluating(self) -> bool:
        """Whether an evaluation is in play beside training."""
        ...

    async def evaluated(self) -> None:
        """Wait for the evaluation in play, if there is one."""
        ...

    async def pause(self) -> None:
        """Let what is being made come to its end; the end of the run follows."""
        ...

    async def step_metrics(self, report: StepReport) -> dict[str, float]:
        """Return what is to be logged about the making of a step's samples."""
        ...

    def episodes(self, report: StepReport) -> list[str]:
        """Return transcripts that travelled with the samples of a step."""
        ...

    async def live(self) -> Mapping[str, Mapping[str, float]]:
        """Return what the display shows between steps: {section: {name: value}}, {} for nothing."""
        ...

    async def before_checkpoint(self) -> None:
        """Write down what the checkpoint will cover."""
        ...

    async def checkpointed(self, completed_steps: int, folder: str) -> None:
        """Take note that a checkpoint is valid."""
        ...

    def end(self) -> None:
        """Take note that the run has come to its end."""
        ...

    async def close(self) -> None:
        """Release everything, in whatever state it is."""
        ...


class SynchronousSteps:
    """A ``StepSource`` whose samples are drawn from a data source, step by step; the calls of the graph do the rest, so
    there is nothing to publish, to pause or to report. ``worker`` stores the values of ``keys``."""

    evaluating = False

    def __init__(
        self,
        source: DataSource,
        caller: Caller,
        *,
        worker: str,
        keys: Sequence[str],
        n_seqs: int,
        timeout_s: float,
    ) -> None:
        self._source, self._caller = source, caller
        self._loading: dict[str, Any] = {
            "worker": worker,
            "keys": keys,
            "n_seqs": n_seqs,
            "timeout_s": timeout_s,
        }

    @property
    def results(self) -> ResultSink:
        """Return the data source, which learns from the results."""
        return self._source

    def loader(self, buffer: AsyncIOSequenceBuffer, storage: StorageMap) -> StepLoader:
        """Return a loader that draws from the source."""
        return Loader(self._source, buffer, storage, self._caller, **self._loading)

    def joined(self, info: WorkerInfo) -> None:
        """See ``StepSource``."""

    def left(self, name: str, reason: str) -> None:
        """See ``StepSource``."""

    async def start(self) -> None:
        """See ``StepSource``."""

    async def publish(self, completed_steps: int) -> None:
        """See ``StepSource``."""

    async def evaluate(self, step: int, evaluation: EvaluationSpec, deliver: Callable[[Report], None]) -> bool:
        """See ``StepSource``: the trainer has the only engine."""
        del step, evaluation, deliver
        return False

    async def evaluated(self) -> None:
        """See ``StepSource``."""

    async def pause(self) -> None:
        """See ``StepSource``."""

    async def step_metrics(self, report: StepReport) -> dict[str, float]:
        """See ``StepSource``."""
        del report
        return {}

    def episodes(self, report: StepReport) -> list[str]:
        """See ``StepSource``."""
        del report
        return []

    async def live(self) -> Mapping[str, Mapping[str, float]]:
        """See ``StepSource``."""
        return {}

    async def before_checkpoint(self) -> None:
        """See ``StepSource``."""

    async def checkpointed(self, completed_steps: int, folder: str) -> None:
        """See ``StepSource``."""

    def end(self) -> None:
        """See ``StepSource``."""

    async def close(self) -> None:
        """See ``StepSource``."""
