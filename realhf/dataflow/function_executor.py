"""FunctionExecutor: runs the graph step by step (docs/reference/dataflow.md 5). Lives in the master's event loop."""

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
from realhf.dataflow.buffer import AsyncIOSequenceBuffer, EndOfData, Sample
from realhf.dataflow.model_function_call import WAITS, CallReport, ModelFunctionCall, StepReport, step_report
from realhf.dataflow.step_source import StepLoader
from realhf.dataflow.storage_map import StorageMap
from realhf.dataflow.worker_group import ask
from realhf.transport.rpc_master import RpcMaster

_log = logging.getLogger(__name__)


class StallError(RuntimeError):
    """Nothing moved and nothing was at work for ``stall_fail_s``; the message says who waits for whom."""


class FunctionExecutor:
    """Owns buffer, storage map, calls and loader.

    ``workers`` maps a model role to the names of the workers that hold it, and ``parallel`` says of a role how these
    train together (``numbers`` counts what they do together); ``make_loader`` and ``results`` are those of a
    ``StepSource``; ``endpoints`` (kind -> addresses) is handed to every call. Loading runs for the whole run, a step at
    a time: the samples of step k + 1 are drawn after the results of step k were recorded, so that a curriculum always
    sees the same results in the same order. Use as ``async with``; or ``start`` and ``close``.
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
            dropped=self._on_dropped,
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
        self._caller, self._results = caller, results
        self._control_timeout_s = control_timeout_s
        self._stall_warn_s, self._stall_fail_s = stall_warn_s, stall_fail_s
        self._retired: dict[int, list[tuple[int, SampleResult]]] = {}
        self._gave_way: dict[int, list[tuple[int, SampleResult]]] = {}
        self._to_clear: list[str] = []
        self._peak_resident = 0
        self._progress = process_clock.now()
        self._loading: asyncio.Task[None] | None = None
        self._tasks: Mapping[str, asyncio.Task[list[CallReport]]] = {}
        self._settling = False

    # ---- life

    async def __aenter__(self) -> FunctionExecutor:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def start(self) -> None:
        """Begin to load, from step ``next_step``."""
        self._loading = asyncio.create_task(self.load_data(), name="load_data")

    async def load_data(self) -> None:
        """Load step after step, for the whole run. A failure here fails every waiter."""
        try:
            await self.loader.run(self.next_step)
        except Exception as error:
            self.buffer.abort(error)
            raise

    async def close(self) -> None:
        """Stop loading; have the workers free what is left. Never raises."""
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
        """Run every call of the graph on the samples of one step, as concurrently as the graph allows.

        A training call starts when all other calls of its role are through with the step, so that these see
        one version of the weights. Raises EndOfData when the source has nothing for this step, MFCFailed
        (siblings are cancelled), StallError, or what the source raised.
        """
        began = time.monotonic()
        self._progress = process_clock.now()
        self._peak_resident = len(self.buffer)
        tasks: dict[str, asyncio.Task[list[CallReport]]] = {}
        self._tasks = tasks
        for name in self.calls:
            tasks[name] = asyncio.create_task(self._run_mfc(name, step, tasks), name=f"{name}@{step}")
        await self._all_or_cancel(list(tasks.values()), step)
        results = self._record(step)
        if not results:
            raise EndOfData(f"the data source has nothing for step {step}")
        await self._clear()
        self.next_step = step + 1
        occupancy = {**self.buffer.stats(), "peak_resident": self._peak_resident}
        calls = [report for task in tasks.values() for report in task.result()]
        report = step_report(step, time.monotonic() - began, calls, results, occupancy, self._results.stats())
        self.loader.step_finished(step)
        return report

    async def _run_mfc(
        self, name: str, step: int, tasks: Mapping[str, asyncio.Task[list[CallReport]]]
    ) -> list[CallReport]:
        mfc = self.graph[name]
        if mfc.interface_type is InterfaceType.TRAIN_STEP:
            before = [tasks[other] for other in self._users_of_weights(mfc.model_role)]
            if before:
                await asyncio.wait(before)
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

    def _users_of_weights(self, role: str) -> list[str]:
        trains = InterfaceType.TRAIN_STEP
        return [m.name for m in self.graph.mfcs if m.model_role == role and m.interface_type is not trains]

    def _note_progress(self) -> None:
        self._progress = process_clock.now()
        self._peak_resident = max(self._peak_resident, len(self.buffer))

    async def _all_or_cancel(self, tasks: Sequence[asyncio.Task[Any]], step: int) -> None:
        """Wait for all; the first failure cancels the rest and is raised."""
        watch = asyncio.create_task(self._watch(step), name=f"watch@{step}")
        waiting = asyncio.create_task(_first_failure(tasks), name=f"step@{step}")
        everything = [*tasks, watch, waiting]
        try:
            await asyncio.wait([waiting, watch], return_when=asyncio.FIRST_COMPLETED)
            (waiting if waiting.done() else watch).result()
        finally:
            for task in everything:
                task.cancel()
            await asyncio.gather(*everything, return_exceptions=True)

    async def _watch(self, step: int) -> None:
        """Report a stall, and end it after ``stall_fail_s`` (0: never). A call that runs is no stall, however long it
        takes: it has a deadline of its own."""
        warned_at = at_work = 0.0
        while True:
            await asyncio.sleep(min(self._stall_warn_s, self._stall_fail_s or self._stall_warn_s) / 4)
            now = process_clock.now()
            at_work = now if self._at_work() else at_work
            idle = now - self._progress
            if idle >= self._stall_warn_s and self._progress > warned_at:
                warned_at = process_clock.now()
                _log.warning(self.explain(step, idle))
            if self._stall_fail_s and now - max(self._progress, at_work) >= self._stall_fail_s:
                raise StallError(self.explain(step, idle))

    def _at_work(self) -> bool:
        return self.loader.busy or any(call.activity != WAITS for call in self.calls.values())

    def explain(self, step: int, idle_s: float) -> str:
        """Who waits for what, one line per call, and which calls the others wait for."""
        lines = [f"nothing moved for {idle_s:.0f} s at step {step}:"]
        activity = self.activity()
        for name, state in activity.items():
            lines.append(f"  {name}: {self.buffer.explain_wait(name, step) if state == WAITS else state}")
        lines.append(f"  loader: {self.loader.activity}")
        unfinished = {name for name, state in activity.items() if state != "done"}
        first = sorted(name for name in unfinished if not unfinished & self.graph.ancestors(name))
        if len(first) < len(unfinished):
            lines.append(f"  look first at {', '.join(first)}: every other call needs what it makes")
        return "\n".join(lines)

    def activity(self) -> dict[str, str]:
        """What every call does at this moment, for a display: waits, runs on a worker, or is done."""
        done = {name for name, task in self._tasks.items() if task.done()}
        return {name: "done" if name in done else call.activity for name, call in self.calls.items()}

    def has_begun_training(self, step: int) -> bool:
        """Return whether a training call of ``step`` was sent, so that weights are no longer those before the step."""
        trains = (mfc.name for mfc in self.graph.mfcs if mfc.interface_type is InterfaceType.TRAIN_STEP)
        return any(self.calls[name].last_step_begun == step for name in trains)

    async def settle(self) -> None:
        """Send no further call of the open step and wait until those that run have ended. To be followed by cancelling
        ``execute_step``: a call that several workers make together must not be cut off on some of them."""
        self._settling = True
        for name, task in self._tasks.items():
            if self.calls[name].activity == WAITS:
                task.cancel()
        await asyncio.wait(list(self._tasks.values()))

    # ---- results

    def _on_retire(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            result = SampleResult.of(sample.id, sample.metadata)
            self._retired.setdefault(sample.step_batch, []).append((sample.birth, result))
            self._to_clear.append(sample.id)

    def _on_dropped(self, step: int, results: Sequence[tuple[int, SampleResult]]) -> None:
        self._gave_way.setdefault(step, []).extend(results)
        self._to_clear += [result.id for _, result in results]

    def _record(self, step: int) -> list[SampleResult]:
        """Tell the source what became of all samples that were drawn for the step, in the order of drawing; returns the
        results of those that it trained."""
        retired = sorted(self._retired.pop(step, ()), key=lambda item: item[0])
        if retired:
            drawn = sorted((*retired, *self._gave_way.pop(step, ())), key=lambda item: item[0])
            self._results.record([result for _, result in drawn])
        return [result for _, result in retired]

    async def _clear(self) -> None:
        """Have every owner free the tensors of the samples that left."""
        ids, self._to_clear = self._to_clear, []
        await asyncio.gather(
            *(
                ask(self._caller, worker, CLEAR, ClearRequest(held), timeout_s=self._control_timeout_s)
                for worker, held in self.storage.forget(ids).items()
            )
        )

    # ---- recovery

    def state_dict(self) -> dict[str, Any]:
        """Return everything of the master that decides the steps to come, JSON-able. Call it between steps, or in a
        step whose training has not begun: that step is then repeated from its beginning."""
        return {"next_step": self.next_step, **self.loader.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; before ``start``."""
        self.next_step = int(state["next_step"])
        self.loader.load_state_dict(state)


async def _first_failure(tasks: Sequence[asyncio.Task[Any]]) -> None:
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    for task in tasks:
        if task in done:
            task.result()
