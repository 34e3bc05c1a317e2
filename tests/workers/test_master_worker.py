"""What the master does before the first step, when it writes checkpoints, and what it refuses to
resume."""

import asyncio
import contextlib
import errno
import io
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from realhf.dataflow.checkpoint import CheckpointStore
from realhf.dataflow.step_source import StepSource
from realhf.launch.build import build_experiment
from realhf.launch.compose import compose_config
from realhf.monitor.events import EventStream
from realhf.monitor.run_log import RunLog
from realhf.transport.errors import WorkerDied
from realhf.transport.rpc_worker import RpcWorker
from tests.dataflow.rollouts.test_async_rollouts import Scene
from tests.dataflow.rollouts.test_held_out import WANTED, shares_of
from workers.master_worker import MasterWorker, RunStopped, check_same_models


class Start:
    """The start of an asynchronous run up to the first weights; its workers are threads that do
    nothing, but the model worker loads until ``loaded`` is set."""

    def __init__(self, folder):
        built = build_experiment(
            compose_config(
                ["experiment=grpo_aws_async", f"fileroot={folder}", "rpc.connect_timeout_s=30"]
            )
        )
        built.spec.run_dir.mkdir(parents=True)
        self.master = MasterWorker(built.plan(built.spec, 0.0), "run", EventStream(io.StringIO()))
        self.loading = threading.Event()
        self.loaded = threading.Event()
        self.threads: list[threading.Thread] = []

    def join(self, name):
        kind, _, index = name.partition("/")
        worker = RpcWorker(
            name,
            kind,
            int(index),
            "run",
            self.master._rpc.endpoint,
            ordered={"initialize": self._load} if kind == "model_worker" else {},
            connect_timeout_s=20,
        )
        self.threads.append(threading.Thread(target=worker.run))
        self.threads[-1].start()
        return worker

    def _load(self, payload):
        self.loading.set()
        self.loaded.wait(60)
        return {}


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("name", ["generation/0", "rollout_worker/0", "env/0"])
async def test_a_worker_that_dies_while_models_load_and_is_started_again_does_not_end_the_start(
    tmp_path, name
):
    start = Start(tmp_path)
    rpc = start.master._rpc
    await rpc.start()
    workers = {
        each: start.join(each)
        for each in ("model_worker/0", "generation/0", "rollout_worker/0", "env/0")
    }
    await rpc.wait_for(workers, 60)
    ready = asyncio.create_task(start.master._wait_for_workers())
    assert await asyncio.to_thread(start.loading.wait, 60)
    rpc.fail_worker(name, "killed by SIGKILL")
    workers[name].stop()
    start.loaded.set()
    await asyncio.sleep(0.1)
    assert not ready.done()
    start.join(name)
    await asyncio.wait_for(ready, 60)
    await rpc.close()
    for thread in start.threads:
        await asyncio.to_thread(thread.join, 60)


@pytest.mark.nightly
async def test_a_model_worker_that_dies_while_models_load_ends_the_start(tmp_path):
    start = Start(tmp_path)
    rpc = start.master._rpc
    await rpc.start()
    worker = start.join("model_worker/0")
    ready = asyncio.create_task(start.master._wait_for_workers())
    assert await asyncio.to_thread(start.loading.wait, 60)
    rpc.fail_worker("model_worker/0", "killed by SIGKILL")
    with pytest.raises(WorkerDied, match=r"model_worker/0.*killed by SIGKILL"):
        await asyncio.wait_for(ready, 60)
    worker.stop()
    start.loaded.set()
    await rpc.close()
    await asyncio.to_thread(start.threads[0].join, 60)


class SlowEvaluations(MasterWorker):
    """Trains on nothing beside evaluations that real rollouts play, but only while the step loop
    waits for something after its report. ``saved``: the steps of the checkpoints, which it does not
    write."""

    def __init__(self, plan, rollouts):
        super().__init__(plan, "run", EventStream(io.StringIO()))
        self._steps = self.rollouts = rollouts
        self._executor: Any = self
        self.saved: list[int] = []

    async def execute_step(self, step):
        """Stands for the executor's."""

    async def _report(self, report):
        self.playing = asyncio.create_task(shares_of(self.rollouts))

    async def _save_checkpoint(self, step):
        assert not self._steps.is_evaluating
        self.saved.append(step)


@pytest.mark.slow
async def test_a_checkpoint_is_written_between_evaluations_that_each_last_until_the_next(tmp_path):
    """None was written before the last step."""
    options = [
        f"fileroot={tmp_path}",
        "total_train_steps=4",
        "exp_ctrl.ckpt_freq_steps=1",
        "evaluation.every_steps=1",
    ]
    built = build_experiment(compose_config(["experiment=grpo_aws_async", *options]))
    spec = replace(built.spec, evaluation=replace(WANTED, every_steps=1))
    spec.run_dir.mkdir(parents=True)
    plan = built.plan(spec, 0.0)
    scene = Scene(tmp_path / "journal")
    master = SlowEvaluations(plan, await scene.open())
    events = EventStream(io.StringIO())
    total = spec.total_train_steps
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(scene.rollouts.close)
        master._log = log = RunLog(
            spec.run_dir, plan.monitor, events, completed_steps=0, total_steps=total
        )
        stack.push_async_exit(log.close_async)
        await scene.rollouts.start()
        await master._evaluate(0)
        await asyncio.wait_for(master._train_steps(0, total), 60)
        await master.playing
    assert master.saved == [1, 2, 3, 4] and [step for step, _ in log.evaluations.all()] == [
        0,
        1,
        2,
        3,
    ]


class Asked(MasterWorker):
    """Trains two steps on nothing and is asked to stop while the last checkpoint is written.
    ``evaluated``: the steps after which it evaluates."""

    def __init__(self, folder: Path) -> None:
        options = [f"fileroot={folder}", "total_train_steps=2"]
        built = build_experiment(compose_config(["experiment=grpo_aws", *options]))
        built.spec.run_dir.mkdir(parents=True)
        self.said = io.StringIO()
        plan = built.plan(built.spec, 0.0)
        events = EventStream(self.said)
        super().__init__(plan, "run", events)
        self._log = RunLog(
            built.spec.run_dir, plan.monitor, events, completed_steps=0, total_steps=2
        )
        self._steps = StepSource()
        self._executor: Any = self
        self.next_step = 0
        self.evaluated: list[int] = []

    async def __aenter__(self) -> None:
        """Stands for the executor's, as what follows does."""

    async def __aexit__(self, *_: object) -> None:
        pass

    async def execute_step(self, step):
        self.next_step = step + 1

    async def _report(self, report):
        pass

    async def _show_activity(self):
        pass

    async def _evaluate(self, step, *, last=False):
        self.evaluated.append(step)

    async def _save_checkpoint(self, step):
        self.request_stop()
        await asyncio.sleep(0)
        self._saved_step = step


@pytest.mark.slow
async def test_a_stop_while_the_last_checkpoint_is_written_ends_the_run_after_it(tmp_path):
    """The run went on with its last evaluation and the export, as if nobody had asked."""
    master = Asked(tmp_path)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_exit(master._log.close_async)
        with pytest.raises(RunStopped):
            await master._train(stack)
    assert master.evaluated == [0, 1]
    assert "a checkpoint of step 2 is saved" in master.said.getvalue()


@pytest.mark.slow
async def test_a_stop_before_a_checkpoint_is_restored_says_that_it_is_there(tmp_path):
    """The launcher said that nothing was saved."""
    master = Asked(tmp_path)
    store = CheckpointStore.for_run(master._spec.run_dir)
    store.commit(7, store.begin(7), {})
    await master._find_checkpoint()
    master.request_stop()
    assert "a checkpoint of step 7 is saved" in master.said.getvalue()
    await master._log.close_async(None, None, None)


@pytest.mark.slow
async def test_an_evaluation_beside_training_that_cannot_be_recorded_ends_the_run(tmp_path):
    """The next one took the place of its error, and no evaluation of the run was recorded without a
    word."""
    master = Asked(tmp_path)
    await master._log.close_async(None, None, None)

    def full(step, report):
        raise OSError(errno.ENOSPC, "no room")

    master._log.record_evaluation = full
    evaluation = master._spec.evaluation
    assert evaluation is not None
    master._start_recording(1, evaluation, {"sampled": {}})
    await asyncio.sleep(0.01)
    with pytest.raises(OSError, match="no room"):
        master._start_recording(2, evaluation, {"sampled": {}})


def test_a_checkpoint_is_not_continued_with_another_reference():
    saved = {"actor": "/cache/policy-1", "ref": "/cache/policy-1"}
    check_same_models(saved, dict(saved))
    with pytest.raises(
        RuntimeError,
        match="made with ref from /cache/policy-1, this run has it from /cache/policy-2",
    ):
        check_same_models(saved, {**saved, "ref": "/cache/policy-2"})
    with pytest.raises(RuntimeError, match="made with ref from None"):
        check_same_models({"actor": saved["actor"]}, saved)


def test_a_checkpoint_is_continued_with_the_same_weights_by_another_name(tmp_path: Path):
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    check_same_models({"ref": str(folder)}, {"ref": str(tmp_path / "link")})
    check_same_models({"ref": "/a/policy-0123456789abcdef"}, {"ref": "/b/policy-0123456789abcdef"})
    with pytest.raises(RuntimeError, match="made with ref from"):
        check_same_models({"ref": "/a/model"}, {"ref": "/b/model"})
    saved = {"actor": "/a/model"}
    current = {"actor": "/b/model"}
    check_same_models(saved, current, restored={"actor"})
    with pytest.raises(RuntimeError, match="made with actor from None"):
        check_same_models({}, current, restored={"actor"})
