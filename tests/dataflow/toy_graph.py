"""A small graph with real tensors: generate -> score twice -> train. Used by the dataflow tests."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from realhf.api.graph import DataFlowGraph
from realhf.api.model import CallContext, Model
from realhf.api.sample import SequenceSample
from realhf.dataflow.model_host import ModelHost
from realhf.transport.errors import RemoteError, WorkerDied
from realhf.transport.roster import WorkerInfo
from realhf.transport.tensor_store import TensorStore

torch.set_num_threads(1)
GROUP = 2


class ToyEngine:
    """A weight that training adds to; saved as text."""

    def __init__(self) -> None:
        self.version = 0
        self.weight = 1.0

    def weights(self) -> dict[str, torch.Tensor]:
        return {"weight": torch.tensor(self.weight)}

    def save_checkpoint(self, folder: Path) -> None:
        (folder / "weight.txt").write_text(f"{self.weight!r} {self.version}")

    def load_checkpoint(self, folder: Path) -> None:
        weight, version = (folder / "weight.txt").read_text().split()
        self.weight = float(weight)
        self.version = int(version)

    def export_hf(self, folder: Path) -> None:
        (folder / "model.txt").write_text(repr(self.weight))


class ToyInterface:
    """Every method of the toy graph; ``change`` may spoil an answer, ``trace`` sees (method, ids,
    version)."""

    def __init__(self, change: Callable[[SequenceSample], SequenceSample] | None = None) -> None:
        self.change = change or (lambda sample: sample)
        self.trace: list[tuple[str, tuple[str, ...], int]] = []
        self.calls = 0

    def _note(self, method: str, sample: SequenceSample, model: Model) -> None:
        self.calls += 1
        self.trace.append((method, sample.ids, model.engine.version))

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = state.get("calls", 0)


class ToyGen(ToyInterface):
    """GROUP sequences per task, of 2 + task % 3 tokens that are the task and a random number."""

    scale = 1

    def generate(self, model: Model, sample: SequenceSample, context: CallContext) -> Any:
        self._note("generate", sample, model)
        tasks = sample["packed_prompts"].tolist()
        noise = torch.rand(1).item()
        lens = [[(2 + task % 3) * self.scale] * GROUP for task in tasks]
        ids = torch.cat([torch.full((sum(n),), task) for task, n in zip(tasks, lens, strict=True)])
        short = [[length - 1 for length in n] for n in lens]
        logprobs = torch.full((sum(map(sum, short)),), noise * model.engine.weight)
        metadata = {
            "rewards": [json.dumps([float(task), None]) for task in tasks],
            "achieved": [json.dumps([task % 2 == 0, False]) for task in tasks],
        }
        out = SequenceSample.from_tensors(
            sample.ids,
            {"ids": ids, "logprobs": logprobs},
            {"ids": lens, "logprobs": short},
            metadata,
        )
        return self.change(out), {
            "noise": noise,
            "n_tokens": len(ids),
            "task": sample.metadata["task"][0],
        }


class ToyRef(ToyInterface):
    def inference(self, model: Model, sample: SequenceSample, context: CallContext) -> Any:
        self._note("inference", sample, model)
        lens = [[n - 1 for n in group] for group in sample.seqlens["ids"]]
        values = torch.zeros(sum(map(sum, lens)))
        return self.change(
            SequenceSample.from_tensors(
                sample.ids, {"ref_logprobs": values}, {"ref_logprobs": lens}
            )
        )


class ToyRew(ToyInterface):
    def inference(self, model: Model, sample: SequenceSample, context: CallContext) -> Any:
        self._note("inference", sample, model)
        firsts = sample["ids"][sample.lengths("ids").row_offsets()[:-1]].float()
        lens = [[1] * GROUP for _ in sample.ids]
        return self.change(
            SequenceSample.from_tensors(sample.ids, {"rewards": firsts}, {"rewards": lens})
        )


class ToyTrain(ToyInterface):
    def train_step(
        self, model: Model, sample: SequenceSample, context: CallContext
    ) -> dict[str, float]:
        self._note("train_step", sample, model)
        model.engine.weight += float(sample["rewards"].sum() * sample["logprobs"].sum())
        return {"weight": model.engine.weight, "n_rows": float(len(sample["ids"]))}

    def evaluate(
        self, model: Model, args: Mapping[str, Any], context: CallContext
    ) -> dict[str, Any]:
        return {"weight": model.engine.weight, "args": dict(args)}


TOY_INTERFACES = {"gen": ToyGen, "ref": ToyRef, "rew": ToyRew, "train": ToyTrain}


def toy_host(
    roles: Sequence[str], graph: DataFlowGraph, run_dir: Path, store: TensorStore, fetch: Any
) -> ModelHost:
    """A host with the given roles and the interfaces of their calls."""
    models = {role: Model(role, ToyEngine(), None) for role in roles}  # pyright: ignore
    interfaces = {
        m.name: (m, TOY_INTERFACES[m.name]()) for m in graph.mfcs if m.model_role in roles
    }
    return ModelHost(models, interfaces, store, fetch, run_dir=run_dir)


class FakeCaller:
    """Stands for RpcMaster: runs the handlers of real ModelHosts in this process, one ordered call
    at a time per worker, in the order of the calls. ``before(worker, handler, payload)`` may wait
    or raise."""

    def __init__(self, hosts: Mapping[str, str] | None = None) -> None:
        self.roster: dict[str, WorkerInfo] = {}
        self.stores: dict[str, TensorStore] = {}
        self.hosts: dict[str, ModelHost] = {}
        self.sent: list[tuple[str, str, Any]] = []
        self.before: Callable[[str, str, Any], Any] | None = None
        self._locks: dict[str, asyncio.Lock] = {}

    def add(
        self, name: str, roles: Sequence[str], graph: DataFlowGraph, run_dir: Path
    ) -> ModelHost:
        self.stores[name] = TensorStore(name)
        self.roster[name] = WorkerInfo(
            name, "model_worker", len(self.roster), "here", 1, f"data:{name}"
        )
        self._locks[name] = asyncio.Lock()
        self.hosts[name] = toy_host(roles, graph, run_dir, self.stores[name], self._fetch)
        return self.hosts[name]

    def interface(self, worker: str, mfc: str) -> Any:
        return self.hosts[worker]._interfaces[mfc][1]

    def _fetch(self, endpoint: str, ids: Any, keys: Any, timeout_s: float) -> SequenceSample:
        return self.stores[endpoint.removeprefix("data:")].get(ids, keys)

    def call(
        self,
        worker: str,
        handler: str,
        payload: Any = None,
        *,
        timeout_s: float,
        step: int = -1,
        mfc: str = "",
    ) -> asyncio.Future[Any]:
        self.sent.append((worker, handler, payload))
        return asyncio.ensure_future(self._serve(worker, handler, payload, step, mfc))

    async def _serve(self, worker: str, handler: str, payload: Any, step: int, mfc: str) -> Any:
        if worker not in self.roster:
            raise WorkerDied(worker, "not registered")
        immediate = self.hosts[worker].immediate_handlers()
        async with contextlib.nullcontext() if handler in immediate else self._locks[worker]:
            if self.before is not None:
                waiting = self.before(worker, handler, payload)
                if waiting is not None:
                    await waiting
            try:
                return {**self.hosts[worker].handlers(), **immediate}[handler](payload)
            except Exception as error:
                raise RemoteError(
                    worker=worker,
                    handler=handler,
                    mfc=mfc,
                    step=step,
                    kind=type(error).__name__,
                    message=str(error),
                    remote_traceback="",
                ) from error
