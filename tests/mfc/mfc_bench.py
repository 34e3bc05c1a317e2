"""One model function call on a real model worker, in a thread: its master and its only peer are in this process, too.

A worker of its own process would import torch once more for every bench; whole runs have such ones.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time

from realhf.api.config import CheckpointConfig, MonitorConfig, RecoverMode, RpcConfig
from realhf.api.experiment import ExperimentSpec, RunPlan, SourceSpec
from realhf.api.sample import SequenceSample
from realhf.transport.codec import decode_sample
from realhf.transport.data_plane import DataPlane
from realhf.transport.rpc_master import RpcMaster
from realhf.transport.tensor_store import TensorStore
from workers.model_worker import ModelWorker

RUN_ID = "mfc"
WORKER, ENV, PEER = "model_worker/0", "env/0", "peer"
TIMEOUT_S = 200.0


class MfcBench:
    """Starts the worker and an environment worker with ``sessions`` slots, loads the model, sends calls."""

    def __init__(self, folder, mfc, model, *, sessions):
        self._folder, self._mfc = folder, mfc
        self._runner = asyncio.Runner()
        self._master = RpcMaster(RUN_ID)
        self._plane = DataPlane(PEER, RUN_ID, TensorStore(PEER))
        self._plane.start()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        try:
            self._start(model, sessions)
        except BaseException:
            self.close()
            raise

    def _start(self, model, sessions):
        spec = ExperimentSpec(
            name="mfc",
            models={model.role: model},
            mfcs=(self._mfc,),
            source=SourceSpec("tasks", {"environment": "aws"}),
            n_seqs=2,
            total_train_steps=10,
            seed=1,
            run_dir=self._folder,
        )
        plan = RunPlan(
            spec,
            RpcConfig(),
            MonitorConfig(),
            CheckpointConfig(),
            RecoverMode.disabled,
            torch_threads=1,
            started_at=time.time(),
        )
        self._runner.run(self._master.start())
        join = ("--run-id", RUN_ID, "--master", self._master.endpoint)
        argv = f"-m workers.env_worker --name {ENV} --port 0 --ministack-base-port 0 --pool-size {sessions}".split()
        with (self._folder / "env_worker.log").open("wb") as log:
            self._process = subprocess.Popen([sys.executable, *argv, *join], stdout=log, stderr=log)
        worker = ModelWorker(plan, 0, RUN_ID, self._master.endpoint)
        self._thread = threading.Thread(target=worker.run, name=WORKER, daemon=True)
        self._thread.start()
        self._runner.run(self._master.wait_for([WORKER, ENV], TIMEOUT_S))
        self.ask("initialize", {})
        assert self.ask("stats", {})["roles"] == [model.role]

    def ask(self, handler, payload):
        """One request to the worker."""

        async def request():
            return await self._master.call(WORKER, handler, payload, timeout_s=TIMEOUT_S)

        return self._runner.run(request())

    def infer(self, sample, *, step=0, seed=1):
        """Have the worker run the call, then fetch the outputs from its store and have them cleared there."""
        endpoint = self._master.roster[ENV].endpoints["env"]
        reply = self.ask(
            "call",
            {
                "mfc": self._mfc.name,
                "role": self._mfc.model_role,
                "ids": list(sample.ids),
                "keys": [],
                "metadata": dict(sample.metadata),
                "step": step,
                "seed": seed,
                "fetches": [],
                "endpoints": {"env": [endpoint]},
            },
        )
        meta = decode_sample(reply["meta"])
        assert meta.data is None and meta.keys == set(self._mfc.output_keys)
        endpoint = self._master.roster[WORKER].data_endpoint
        outputs = self._plane.fetch(endpoint, sample.ids, self._mfc.output_keys, TIMEOUT_S)
        self.ask("clear", {"ids": list(sample.ids)})
        assert self.ask("stats", {})["nbytes"] == 0
        assert as_lists(outputs.seqlens) == as_lists(meta.seqlens)
        return SequenceSample.from_tensors(
            outputs.ids, {key: outputs[key].clone() for key in outputs.keys}, outputs.seqlens, meta.metadata
        ), reply["stats"]

    def close(self):
        """Say bye; the worker and every process must end by themselves."""
        self._runner.run(self._master.close())
        self._plane.close()
        self._runner.close()
        if self._thread is not None:
            self._thread.join(TIMEOUT_S)
        if self._process is not None:
            try:
                assert self._process.wait(60) == 0 and not (self._thread and self._thread.is_alive())
            finally:
                self._process.kill()


def as_lists(seqlens):
    return {key: [list(inner) for inner in groups] for key, groups in seqlens.items()}


def sequences(sample, key):
    """The inner sequences of a key, in order."""
    return list(sample[key].split([length for inner in sample.seqlens[key] for length in inner]))
