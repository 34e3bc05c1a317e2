"""FunctionExecutor, which runs the dataflow graph step by step (docs/reference/dataflow.md 5).

It runs in the master's event loop.

``execute_step``
  produces: a trained step and its ``StepReport``;
  waits for: all calls of the graph on the samples of the step;
  unblocked by: the loader, the workers' answers, the first failure of a call, or the stall limit.
``load_data``
  produces: step batches in the buffer;
  waits for: the results of the previous step;
  unblocked by: the end of ``execute_step``.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from realhf.api.calls import CLEAR, ClearRequest
from realhf.api.experiment import InterfaceType
from realhf.api.graph import DataFlowGraph
from realhf.api.parallel import Parallel
from realhf.api.source import ResultSink, SampleResult
from realhf.base import process_clock
from realhf.dataflow.buffer import AsyncIOSequenceBuffer, BufferedSample, EndOfData
from realhf.dataflow.model_function_call import (
    WAITS,
    CallReport,
    ModelFunctionCall,
    StepReport,
    build_step_report,
)
from realhf.dataflow.step_source import StepLoader
from realhf.dataflow.storage_map import StorageMap
from realhf.dataflow.worker_group import ask
from realhf.transport.rpc_master import RpcMaster

_log = logging.getLogger(__name__)


class StallError(RuntimeError):
    """Error: for ``stall_fail_s`` no call has made progress and none was running. The message
    explains what each call waits for."""


class FunctionExecutor:
    """Executor of the dataflow graph; owns the buffer, the storage map, the calls and the loader.

    ``workers`` maps a model role to the names of its workers, ``parallel`` to how these workers
    train together; ``numbers`` provides the numbers of their group calls. ``make_loader`` and
    ``results`` are those of a ``StepSource``. ``endpoints`` (kind -> addresses) is passed to every
    call. Timeouts are in seconds; ``stall_fail_s=0`` disables the stall limit.

    Loading continues for the whole run, one step at a time: the samples of step k + 1 are drawn
    after the results of step k were recorded, so that a curriculum always sees the same results in
    the same order.

    Use it as ``async with``, or call ``start`` and ``close``.
    """

    def __init__(
        self,
        graph: DataFlowGraph,
        caller: RpcMaster,
        results: ResultSink,
        *,
        workers: Mapping[str, Sequence[str]],
        seed: int,
        make_loader: Callable[[AsyncIOSequenceBuffer, StorageMap], StepLoader],
        endpoints: Mapping[str, Sequence[str]] | None = None,
        parallel: Mapping[str, Parallel] | None = None,
        numbers: Iterator[int] | None = None,
        control_timeout_s: float = 30.0,
        stall_warn_s: float = 60.0,
        stall_fail_s: float = 1800.0,
    ) -> None:
        self.graph = graph
        self.storage = StorageMap()
        self.buffer = AsyncIOSequenceBuffer(graph, max_size=graph.n_seqs, on_retire=self._on_retire)
        self.loader = make_loader(self.buffer, self.storage)
        make_call = partial(
            ModelFunctionCall,
            seed=seed,
            endpoints=endpoints or {},
            numbers=numbers or itertools.count(1),
            load_more=self.loader.load_more,
            on_dropped=self._on_dropped,
        )
        self.calls = {
            mfc.name: make_call(
                mfc,
                graph,
                self.buffer,
                self.storage,
                caller,
                workers.get(mfc.model_role, ()),
                parallel=(parallel or {}).get(mfc.model_role),
            )
            for mfc in graph.mfcs
        }
        self.next_step = 0
        self._caller = caller
        self._results = results
        self._control_timeout_s = control_timeout_s
        self._stall_warn_s = stall_warn_s
        self._stall_fail_s = stall_fail_s
        # (birth, result) by step, of samples that left the buffer trained, or dropped because
        # others replaced them.
        self._retired: dict[int, list[tuple[int, SampleResult]]] = {}
        self._dropped: dict[int, list[tuple[int, SampleResult]]] = {}
        self._to_clear: list[str] = []
        """Ids of samples that have left the buffer while the workers still store their tensors."""
        self._peak_resident = 0
        """Largest number of samples in the buffer during the step."""
        self._progressed_at = process_clock.now()
        """Time of the last finished call, in seconds of ``process_clock``."""
        self._loading: asyncio.Task[None] | None = None
        self._tasks: Mapping[str, asyncio.Task[list[CallReport]]] = {}
        self._settling = False

    # ---- life cycle

    async def __aenter__(self) -> FunctionExecutor:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def start(self) -> None:
        """Start loading samples, from step ``next_step`` on."""
        self._loading = asyncio.create_task(self.load_data(), name="load_data")

    async def load_data(self) -> None:
        """Load one step after another, for the whole run. An error is raised in everything that
        waits for the buffer."""
        try:
            await self.loader.run(self.next_step)
        except Exception as error:
            self.buffer.abort(error)
            raise

    async def close(self) -> None:
        """Stop loading, and have the workers free the remaining tensors. Never raises."""
        if self._loading is not None:
            self._loading.cancel()
            await asyncio.gather(self._loading, return_exceptions=True)
        self._to_clear += self.storage.ids()
        try:
            await self._clear()
        except Exception as error:
            _log.warning("tensors were not cleared: %s", error)

    # ---- a step

    async def execute_step(self, step: int) -> StepReport:
        """Run every call of the graph on the samples of one step, as concurrently as the graph
        allows.

        A training call starts when all other calls of its role have finished the step, so that they
        all see the same version of the weights. Raises EndOfData when the source has no samples for
        this step, MFCFailed (the other calls are cancelled), StallError, or the error of the
        source.
        """
        started_at = time.monotonic()
        self._progressed_at = process_clock.now()
        self._peak_resident = len(self.buffer)
        tasks: dict[str, asyncio.Task[list[CallReport]]] = {}
        self._tasks = tasks
        for name in self.calls:
            tasks[name] = asyncio.create_task(
                self._run_mfc(name, step, tasks), name=f"{name}@{step}"
            )
        await self._run_all(list(tasks.values()), step)
        results = self._record(step)
        if not results:
            raise EndOfData(f"the data source has nothing for step {step}")
        await self._clear()
        self.next_step = step + 1
        occupancy = {**self.buffer.stats(), "peak_resident": self._peak_resident}
        calls = [report for task in tasks.values() for report in task.result()]
        wall_s = time.monotonic() - started_at
        report = build_step_report(step, wall_s, calls, results, occupancy, self._results.stats())
        self.loader.step_finished(step)
        return report

    async def _run_mfc(
        self, name: str, step: int, tasks: Mapping[str, asyncio.Task[list[CallReport]]]
    ) -> list[CallReport]:
        mfc = self.graph[name]
        if mfc.interface_type is InterfaceType.TRAIN_STEP:
            readers = [tasks[other] for other in self._find_weight_readers(mfc.model_role)]
            if readers:
                await asyncio.wait(readers)
        reports: list[CallReport] = []
        for call in range(self.graph.n_seqs // mfc.n_seqs):
            try:
                reports.append(await self.calls[name].run(step, call))
            except EndOfData:
                break
            if self._settling:
                raise asyncio.CancelledError
            self._note_progress()
        return reports

    def _find_weight_readers(self, role: str) -> list[str]:
        """Return the calls of a role that use its weights without training them."""
        train_step = InterfaceType.TRAIN_STEP
        return [
            m.name
            for m in self.graph.mfcs
            if m.model_role == role and m.interface_type is not train_step
        ]

    def _note_progress(self) -> None:
        self._progressed_at = process_clock.now()
        self._peak_resident = max(self._peak_resident, len(self.buffer))

    async def _run_all(self, tasks: Sequence[asyncio.Task[Any]], step: int) -> None:
        """Wait for all tasks of a step. At the first failure or a stall, cancel them and raise the
        error."""
        watcher = asyncio.create_task(self._watch_for_stall(step), name=f"watch@{step}")
        calls = asyncio.create_task(_raise_first_failure(tasks), name=f"step@{step}")
        all_tasks = [*tasks, watcher, calls]
        try:
            await asyncio.wait([calls, watcher], return_when=asyncio.FIRST_COMPLETED)
            (calls if calls.done() else watcher).result()
        finally:
            for task in all_tasks:
                task.cancel()
            await asyncio.gather(*all_tasks, return_exceptions=True)

    async def _watch_for_stall(self, step: int) -> None:
        """Log a warning after ``stall_warn_s`` without progress, and raise StallError after
        ``stall_fail_s`` (0: never).

        A running call does not count as a stall, however long it takes, because it has its own
        deadline.
        """
        warned_at = 0.0
        busy_at = 0.0
        while True:
            await asyncio.sleep(
                min(self._stall_warn_s, self._stall_fail_s or self._stall_warn_s) / 4
            )
            now = process_clock.now()
            busy_at = now if self._is_busy() else busy_at
            idle_s = now - self._progressed_at
            if idle_s >= self._stall_warn_s and self._progressed_at > warned_at:
                warned_at = process_clock.now()
                _log.warning(self.explain(step, idle_s))
            if self._stall_fail_s and now - max(self._progressed_at, busy_at) >= self._stall_fail_s:
                raise StallError(self.explain(step, idle_s))

    def _is_busy(self) -> bool:
        return self.loader.busy or any(call.activity != WAITS for call in self.calls.values())

    def explain(self, step: int, idle_s: float) -> str:
        """Return a report on a stall: one line per call that explains what it waits for, and the
        calls to look at first."""
        lines = [f"no progress for {idle_s:.0f} s at step {step}:"]
        activity = self.activity()
        for name, state in activity.items():
            lines.append(
                f"  {name}: {self.buffer.explain_wait(name, step) if state == WAITS else state}"
            )
        lines.append(f"  loader: {self.loader.activity}")
        unfinished = {name for name, state in activity.items() if state != "done"}
        first = sorted(name for name in unfinished if not unfinished & self.graph.ancestors(name))
        if len(first) < len(unfinished):
            their = "its" if len(first) == 1 else "their"
            lines.append(f"  look first at {', '.join(first)}: all other calls need {their} output")
        return "\n".join(lines)

    def activity(self) -> dict[str, str]:
        """Return a description of every call's state, for displays: whether it waits, runs on a
        worker, or is done."""
        done = {name for name, task in self._tasks.items() if task.done()}
        return {
            name: "done" if name in done else call.activity for name, call in self.calls.items()
        }

    def has_begun_training(self, step: int) -> bool:
        """Return whether a training call of ``step`` has been sent, so that the weights may have
        changed."""
        train_calls = (
            mfc.name for mfc in self.graph.mfcs if mfc.interface_type is InterfaceType.TRAIN_STEP
        )
        return any(self.calls[name].last_step_started == step for name in train_calls)

    async def settle(self) -> None:
        """Prevent further calls of the step from starting, and wait until the running calls have
        ended.

        Must be called before ``execute_step`` is cancelled, because a group call must not be
        interrupted on only some of its workers.
        """
        self._settling = True
        for name, task in self._tasks.items():
            if self.calls[name].activity == WAITS:
                task.cancel()
        await asyncio.wait(list(self._tasks.values()))

    # ---- results

    def _on_retire(self, samples: Sequence[BufferedSample]) -> None:
        for sample in samples:
            result = SampleResult.from_metadata(sample.id, sample.metadata)
            self._retired.setdefault(sample.step_batch, []).append((sample.birth, result))
            self._to_clear.append(sample.id)

    def _on_dropped(self, step: int, results: Sequence[tuple[int, SampleResult]]) -> None:
        self._dropped.setdefault(step, []).extend(results)
        self._to_clear += [result.id for _, result in results]

    def _record(self, step: int) -> list[SampleResult]:
        """Pass the results of all samples drawn for the step to the result sink, in the order of
        drawing.

        Returns the results of the samples that were trained in the step, in the same order.
        """
        retired = sorted(self._retired.pop(step, ()), key=lambda item: item[0])
        if retired:
            drawn = sorted((*retired, *self._dropped.pop(step, ())), key=lambda item: item[0])
            self._results.record([result for _, result in drawn])
        return [result for _, result in retired]

    async def _clear(self) -> None:
        """Have the workers free the tensors of the samples that left the buffer."""
        ids = self._to_clear
        self._to_clear = []
        await asyncio.gather(
            *(
                ask(
                    self._caller,
                    worker,
                    CLEAR,
                    ClearRequest(stored),
                    timeout_s=self._control_timeout_s,
                )
                for worker, stored in self.storage.forget(ids).items()
            )
        )

    # ---- recovery

    def state_dict(self) -> dict[str, Any]:
        """Return the master's state that determines the next steps, as JSON types.

        Must be called between steps, or in a step whose training has not begun. That step is then
        repeated from its beginning.
        """
        return {"next_step": self.next_step, **self.loader.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` returned. Must be called before ``start``."""
        self.next_step = int(state["next_step"])
        self.loader.load_state_dict(state)


async def _raise_first_failure(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Wait for all tasks; raise the error of the first one that fails."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    for task in tasks:
        if task in done:
            task.result()
