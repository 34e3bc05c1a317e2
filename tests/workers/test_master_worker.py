"""What the master does before the first step, and what it refuses to resume."""

import asyncio
import io
import threading
from pathlib import Path

import pytest

from realhf.launch.build import build_experiment
from realhf.launch.compose import compose_config
from realhf.monitor.events import EventStream
from realhf.transport.errors import WorkerDied
from realhf.transport.rpc_worker import RpcWorker
from workers.master_worker import MasterWorker, check_same_models


class Start:
    """The start of an asynchronous run up to the first weights; its workers are threads that do nothing, but the model
    worker loads until ``loaded`` is set."""

    def __init__(self, folder):
        built = build_experiment(
            compose_config(["experiment=grpo_aws_async", f"fileroot={folder}", "rpc.connect_timeout_s=30"])
        )
        built.spec.run_dir.mkdir(parents=True)
        self.master = MasterWorker(built.plan(built.spec, 0.0), "run", EventStream(io.StringIO()))
        self.loading, self.loaded = threading.Event(), threading.Event()
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
async def test_a_worker_that_dies_while_models_load_and_is_started_again_does_not_end_the_start(tmp_path, name):
    start = Start(tmp_path)
    rpc = start.master._rpc
    await rpc.start()
    workers = {each: start.join(each) for each in ("model_worker/0", "generation/0", "rollout_worker/0", "env/0")}
    await rpc.wait_for(workers, 60)
    ready = asyncio.create_task(start.master._workers_ready())
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
    ready = asyncio.create_task(start.master._workers_ready())
    assert await asyncio.to_thread(start.loading.wait, 60)
    rpc.fail_worker("model_worker/0", "killed by SIGKILL")
    with pytest.raises(WorkerDied, match=r"model_worker/0.*killed by SIGKILL"):
        await asyncio.wait_for(ready, 60)
    worker.stop()
    start.loaded.set()
    await rpc.close()
    await asyncio.to_thread(start.threads[0].join, 60)


def test_a_checkpoint_is_not_continued_with_another_reference():
    saved = {"actor": "/cache/policy-1", "ref": "/cache/policy-1"}
    check_same_models(saved, dict(saved))
    with pytest.raises(RuntimeError, match="made with ref from /cache/policy-1, this run has it from /cache/policy-2"):
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
    saved, current = {"actor": "/a/model"}, {"actor": "/b/model"}
    check_same_models(saved, current, restored={"actor"})
    with pytest.raises(RuntimeError, match="made with actor from None"):
        check_same_models({}, current, restored={"actor"})
