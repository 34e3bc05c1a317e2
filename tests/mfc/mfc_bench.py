"""One model function call at a time on a real model worker: the master, two owners of its inputs
and, in a thread, the worker are in this process, and speak over their sockets as in a run.

A worker of its own process would import torch once more; what kills one has it
(``MfcBench.doomed_worker``).
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from realhf.api.calls import CLEAR, EXPORT, HELD, INITIALIZE, PROGRESS, RESTORE, SAVE
from realhf.api.config import CheckpointConfig, MonitorConfig, RecoverMode, RpcConfig
from realhf.api.experiment import ExperimentSpec, RunPlan, SourceSpec
from realhf.api.graph import build_graph
from realhf.api.sample import SequenceSample
from realhf.dataflow.buffer import AsyncIOSequenceBuffer
from realhf.dataflow.model_function_call import MFCFailed, ModelFunctionCall
from realhf.dataflow.storage_map import StorageMap
from realhf.scheduler.process import describe_failure
from realhf.transport.data_plane import DataPlane
from realhf.transport.rpc_master import RpcMaster
from realhf.transport.rpc_worker import RpcWorker
from realhf.transport.tensor_store import TensorStore
from workers.model_worker import ModelWorker

RUN_ID = "mfc"
WORKER = "model_worker/0"
DOOMED = "model_worker/1"
ENV = "env/0"
TIMEOUT_S = 200.0
PRELOADED = ["workers.model_worker", "realhf.backends.training.torch_backend"]
"""What the server of processes imports once for all workers that are killed."""


class Reply(NamedTuple):
    """What a call answered: its outputs, fetched from the worker (None of a train call), and its
    statistics."""

    outputs: SequenceSample | None
    stats: dict[str, Any]


class HeldStore(TensorStore):
    """A store whose values can be held back: ``asked`` is set when a fetch waits for one until
    ``open`` is set."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.asked = threading.Event()
        self.open = threading.Event()
        self.open.set()

    def get(self, ids, keys):
        self.asked.set()
        assert self.open.wait(TIMEOUT_S)
        return super().get(ids, keys)


class Owner:
    """A registered worker that computes nothing and owns tensors, which others fetch from it."""

    def __init__(self, name, index, master):
        self.name = name
        self.store = HeldStore(name)
        self.plane = DataPlane(name, RUN_ID, self.store)
        self.plane.start()
        self._rpc = RpcWorker(
            name, "owner", index, RUN_ID, master, ordered={}, data_endpoint=self.plane.endpoint
        )
        self._thread = threading.Thread(target=self._rpc.run, name=name, daemon=True)
        self._thread.start()

    def close(self):
        self.store.open.set()
        self._thread.join(TIMEOUT_S)
        self.plane.close()
        assert not self._thread.is_alive()


class MfcBench:
    """Starts the worker with ``models`` and ``mfcs``, and two owners of tensors; runs calls by
    their names."""

    def __init__(self, folder, models, mfcs):
        self._folder = folder
        self._models = dict(models)
        self._mfcs = {mfc.name: mfc for mfc in mfcs}
        self._runner = asyncio.Runner()
        self._master = RpcMaster(RUN_ID)
        self.owners: list[Owner] = []
        self._environment: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._sound = True
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self):
        self._runner.run(self._master.start())
        self.owners += [Owner(f"owner/{index}", index, self._master.endpoint) for index in range(2)]
        worker = ModelWorker(self._plan(self._folder, 0), 0, RUN_ID, self._master.endpoint)
        self._thread = threading.Thread(target=worker.run, name=WORKER, daemon=True)
        self._thread.start()
        self._wait_for([WORKER, *(owner.name for owner in self.owners)])
        self.ask(INITIALIZE.name, {})
        assert self.ask(HELD.name, {})["roles"] == sorted(self._models)
        self.ask(SAVE.name, self._first_state())

    def _plan(self, folder, index):
        spec = ExperimentSpec(
            name="mfc",
            models={role: replace(model, workers=(index,)) for role, model in self._models.items()},
            mfcs=tuple(self._mfcs.values()),
            source=SourceSpec("tasks", {"environment": "aws"}),
            n_seqs=1,
            total_train_steps=10,
            seed=1,
            run_dir=folder,
        )
        return RunPlan(
            spec,
            RpcConfig(),
            MonitorConfig(),
            CheckpointConfig(),
            RecoverMode.disabled,
            torch_threads=1,
            started_at=time.time(),
        )

    def _wait_for(self, names):
        self._runner.run(self._master.wait_for(names, TIMEOUT_S))

    def ask(self, handler, payload, worker=WORKER):
        """One request to the worker."""

        async def request():
            return await self._master.call(worker, handler, payload, timeout_s=TIMEOUT_S)

        return self._runner.run(request())

    # ---- calls

    def run(self, name, sample, *, step=0, seed=1, worker=WORKER, n_owners=2, lost=""):
        """Share the inputs out among the owners, run the call as the master of a run does, and
        fetch its outputs as another worker would. ``lost`` is a key that no owner has, though the
        master believes so. Raises MFCFailed."""
        return self._runner.run(self._run(name, sample, step, seed, worker, n_owners, lost))

    async def _run(self, name, sample, step, seed, worker, n_owners, lost):
        mfc = replace(self._mfcs[name], n_seqs=len(sample))
        graph = build_graph([mfc], mfc.input_keys, mfc.output_keys)
        storage = StorageMap()
        held = sample.select(mfc.input_keys)
        try:
            self._share_out(held, storage, n_owners, lost)
            buffer = AsyncIOSequenceBuffer(graph, max_size=len(sample))
            await buffer.put_batch(held.meta(), step_batch=step)
            service = self._master.roster.get(ENV)
            endpoints = {"env": [service.endpoints["env"]]} if service is not None else {}
            call = ModelFunctionCall(
                mfc, graph, buffer, storage, self._master, [worker], seed=seed, endpoints=endpoints
            )
            report = await asyncio.wait_for(call.run(step, 0), TIMEOUT_S)
            outputs = (
                self._fetched(sample.ids, mfc.output_keys, storage) if mfc.output_keys else None
            )
            # Speed and memory differ from call to call.
            stats = {n: value for n, value in report.stats.items() if not n.startswith("device_")}
            return Reply(outputs, stats)
        finally:
            await self._clear(sample.ids)

    def _share_out(self, held, storage, n_owners, lost):
        """Put the inputs into the stores of the owners, and who has what into the map of the
        master: samples by turns, and the keys of each sample by turns."""
        keys = sorted(held.keys)
        for number in range(n_owners):
            for turn in range(n_owners):
                rows = list(range(turn, len(held), n_owners))
                chosen = [
                    key for place, key in enumerate(keys) if (place + turn) % n_owners == number
                ]
                if not rows or not chosen:
                    continue
                part = held.select_ids(rows).select(chosen)
                storage.record(part.ids, part.keys, self.owners[number].name)
                if kept := part.keys - {lost}:
                    self.owners[number].store.put(part.select(kept))

    def _fetched(self, ids, keys, storage):
        """What the worker stored, and only there."""
        assert all(storage.owners(sample_id, key) == (WORKER,) for sample_id in ids for key in keys)
        endpoint = self._master.roster[WORKER].data_endpoint
        found = self.owners[0].plane.fetch(endpoint, ids, keys, TIMEOUT_S)
        tensors = {key: found[key].clone() for key in found.keys}
        return SequenceSample.from_tensors(found.ids, tensors, found.seqlens, found.metadata)

    async def _clear(self, ids):
        """Leave nothing of these samples anywhere."""
        for owner in self.owners:
            owner.store.clear()
        await self._master.call(WORKER, CLEAR.name, {"ids": list(ids)}, timeout_s=TIMEOUT_S)
        held = await self._master.call(WORKER, HELD.name, {}, timeout_s=TIMEOUT_S)
        assert held["nbytes"] == 0

    def error_of(self, name, sample, **more):
        """The line that a person sees of a call that fails. The worker has then nothing of its
        samples, and lives."""
        with pytest.raises(MFCFailed) as caught:
            self.run(name, sample, **more)
        return self._line(caught.value, name, WORKER, sample)

    @staticmethod
    def _line(error, name, worker, sample):
        line = describe_failure(error)
        assert (
            line.startswith(f"{name} failed at step ")
            and f" on {worker} (samples {sample.ids[0]}" in line
        )
        return line

    # ---- models

    def _first_state(self):
        folder = self._folder / "first"
        roles = {
            role: str(folder / role) for role, model in self._models.items() if model.trainable
        }
        return {"roles": roles, "folder": str(folder / "worker")}

    def restore(self):
        """Put back the weights, the optimizers and what interfaces know, as they were before the
        first call."""
        self.ask(RESTORE.name, self._first_state())

    def export(self, role, name):
        """The worker's weights as a Hugging Face folder."""
        folder = self._folder / name
        self.ask(EXPORT.name, {"role": role, "folder": str(folder)})
        return folder

    # ---- processes

    def serve_environment(self, sessions):
        """Start an environment server in a process of its own."""
        join = ("--run-id", RUN_ID, "--master", self._master.endpoint)
        argv = (
            f"-m workers.env_worker --name {ENV} --port 0 --ministack-base-port 0 --pool-size "
            f"{sessions}".split()
        )
        with (self._folder / "env_worker.log").open("wb") as log:
            self._environment = subprocess.Popen(
                [sys.executable, *argv, *join], stdout=log, stderr=log
            )
        self._wait_for([ENV])

    @contextlib.contextmanager
    def doomed_worker(self):
        """A second worker with the same models, in a process of its own; yields its pid."""
        folder = self._folder / f"doomed{time.monotonic_ns()}"
        folder.mkdir()
        self._plan(folder, 1).write()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._master.expect(DOOMED)
        process = context.Process(
            target=_serve_plan, args=(str(folder), self._master.endpoint), daemon=True
        )
        process.start()
        try:
            self._wait_for([DOOMED])
            self.ask(INITIALIZE.name, {}, DOOMED)
            yield process.pid
        finally:
            process.kill()
            process.join(TIMEOUT_S)

    def error_of_kill(self, name, sample):
        """The line that a person sees of a call whose worker is killed in it: while it waits for
        its inputs, or in its first episodes where it has none."""
        store = self.owners[0].store
        waits = bool(self._mfcs[name].input_keys)
        with self.doomed_worker() as pid:
            store.asked.clear()
            if waits:
                store.open.clear()

            def kill():
                if waits:
                    assert store.asked.wait(TIMEOUT_S)
                os.kill(pid, signal.SIGKILL)
                store.open.set()

            async def call():
                running = asyncio.create_task(self._run(name, sample, 0, 1, DOOMED, 2, ""))
                if not waits:
                    await self._until_it_plays()
                await asyncio.to_thread(kill)
                await running

            with pytest.raises(MFCFailed) as caught:
                self._runner.run(call())
        return self._line(caught.value, name, DOOMED, sample)

    async def _until_it_plays(self):
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            answer = await self._master.call(DOOMED, PROGRESS.name, {}, timeout_s=TIMEOUT_S)
            if answer["wanted"]:
                return
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)

    def close(self):
        """Say bye; the worker, the owners and every process must end by themselves."""
        self._runner.run(self._master.close())
        if self._thread is not None:
            self._thread.join(TIMEOUT_S)
        for owner in self.owners:
            owner.close()
        self._runner.close()
        assert self._thread is None or not self._thread.is_alive()
        if self._environment is not None:
            try:
                assert self._environment.wait(60) == 0
            finally:
                self._environment.kill()


def _serve_plan(folder, master):
    """Run in a process of its own: the worker with index 1 of the plan in ``folder``."""
    from pathlib import Path

    ModelWorker(RunPlan.read(Path(folder)), 1, RUN_ID, master).run()


def replaced(sample, key, values):
    """The sample with other values of a key, as many as there were."""
    others = sample.select(sample.keys - {key})
    return others.update(
        SequenceSample.from_tensors(sample.ids, {key: values}, {key: sample.seqlens[key]})
    )


def shortened(sample, key):
    """The sample without the last entry of a key, that of its last sequence."""
    lengths = as_lists(sample.seqlens)[key]
    lengths[-1][-1] -= 1
    others = sample.select(sample.keys - {key})
    return others.update(
        SequenceSample.from_tensors(sample.ids, {key: sample[key][:-1]}, {key: lengths})
    )


def random_tokens(groups, seed=0, share=0.6):
    """Random ids with these sequence lengths per sample, of which about ``share`` were sampled."""
    generator = torch.Generator().manual_seed(seed)
    n = sum(map(sum, groups))
    tensors = {
        "packed_input_ids": torch.randint(4, 400, (n,), generator=generator),
        "loss_mask": torch.rand(n, generator=generator) < share,
    }
    ids = [f"s{number}@{seed}" for number in range(len(groups))]
    return SequenceSample.from_tensors(ids, tensors, dict.fromkeys(tensors, groups))


def as_lists(seqlens):
    """Lengths by key, as plain lists."""
    return {key: [list(inner) for inner in groups] for key, groups in seqlens.items()}


def sequences(sample, key):
    """The inner sequences of a key, in order."""
    return list(sample[key].split([length for inner in sample.seqlens[key] for length in inner]))
