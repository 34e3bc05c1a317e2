"""A trainer and generation workers without their processes: everything between the trainer's
tensors and an engine's log-probabilities is real."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
import torch

from realhf.api.calls import PROBE_WEIGHTS, PUBLISH_WEIGHTS, UPDATE_WEIGHTS
from realhf.api.experiment import ModelSpec
from realhf.api.trace import Tracer
from realhf.backends.training.torch_engine import TorchEngine
from realhf.dataflow.rollouts.weight_updates import SelfTest, WeightUpdates
from realhf.dataflow.weight_proof import (
    EngineWeightDigests,
    WeightProbe,
    WeightRecord,
    WeightTrial,
    WrongWeights,
)
from realhf.transport.network import Network
from realhf.transport.roster import WorkerInfo
from realhf.transport.weights import WeightPublisher
from workers.generation_worker import GenerationWorker, VersionGate
from workers.model_worker import ModelWorker


class Host:
    """The trainer's model, whatever version it is asked for."""

    def __init__(self, engine):
        self._engine = engine

    def engine(self, role, version):
        return self._engine


class Fleet:
    """A trainer and generation workers without processes; their handlers run on threads, as those
    of a worker do."""

    def __init__(self, folder, engines, model, prefix):
        torch.set_num_threads(1)
        self.prefix = list(prefix)
        self.folder = folder
        self.engines = engines
        self.warned = list[str]()
        self.wrong = list[WrongWeights]()
        self.roster: dict[str, WorkerInfo] = {}
        self.unlisted: set[str] = set()
        self.trainer = ModelWorker.__new__(ModelWorker)
        self.trainer._host = Host(TorchEngine(model, None))  # pyright: ignore
        self.trainer._trial = WeightTrial()
        self.trainer._tracer = Tracer()  # pyright: ignore
        spec = SimpleNamespace(models={"actor": ModelSpec("actor", "a folder")})
        self.trainer._plan = SimpleNamespace(spec=spec)  # pyright: ignore
        self.trainer._publisher = WeightPublisher("run", "model_worker/0", folder)
        self.trainer._sender = None
        self.workers = {name: self._worker(engine) for name, engine in engines.items()}
        self.updates = WeightUpdates(
            self,
            "model_worker/0",
            "actor",
            on_version=lambda version: None,
            on_failed=lambda worker, error: pytest.fail(f"{worker}: {error}"),
            on_wrong=self.wrong.append,
            record=WeightRecord(folder, self.warned.append),
            timeout_s=60.0,
        )

    def _worker(self, engine):
        made = GenerationWorker.__new__(GenerationWorker)
        made._engine, made._tracer, made._held_weights = (
            engine,
            Tracer(),
            EngineWeightDigests(engine),
        )  # pyright: ignore
        made._network = Network()
        made._gate = VersionGate(lambda: engine.version)
        made._plan = SimpleNamespace(rpc=SimpleNamespace(control_timeout_s=30.0))  # pyright: ignore
        made._probe = WeightProbe(engine, self.prefix, "recompute")
        return made

    def call(self, worker, handler, payload=None, *, timeout_s, step=-1, mfc=""):
        if handler == PUBLISH_WEIGHTS.name:
            name, serve = PUBLISH_WEIGHTS.with_handler(self.trainer._publish_weights)
        elif handler == UPDATE_WEIGHTS.name:
            name, serve = UPDATE_WEIGHTS.with_handler(self.workers[worker]._update_weights)
        else:
            name, serve = PROBE_WEIGHTS.with_handler(self.workers[worker]._probe.sample)
        assert name == handler
        return asyncio.ensure_future(asyncio.to_thread(serve, payload))

    def list_services(self, worker, listed):
        (self.unlisted.discard if listed else self.unlisted.add)(worker)

    def dismiss(self, worker, reason):
        raise AssertionError(reason)

    async def start(self):
        for name in self.engines:
            self.updates.worker_joined(name)
        await self.updates.publish(0)
        await self.updates.wait_for_all()

    async def prove(self):
        return await SelfTest(self, self.updates, timeout_s=60.0, warn=self.warned.append).run()

    async def publish(self, version):
        with torch.no_grad():
            for parameter in self.trainer._host._engine.model.parameters():  # pyright: ignore
                parameter.mul_(1.01)
        await self.updates.publish(version)
        await self.updates.wait_for_all()

    def close(self):
        for engine in self.engines.values():
            engine.close()
        self.trainer._publisher.close()
