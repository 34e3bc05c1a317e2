"""What a process of ``test_ranks.py`` does: trains with an engine for several ranks, alone or with
another one."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM

from realhf.algorithms.sft import SFTInterface
from realhf.api.config import OptimizerConfig
from realhf.api.model import CallContext, Model
from realhf.api.sample import MicroBatchSpec, SequenceSample
from realhf.backends.parallel.ddp import DdpEngine
from realhf.backends.parallel.fsdp import FsdpEngine
from realhf.backends.parallel.process_groups import GroupRanks, TorchWorld
from realhf.backends.training.torch_engine import TorchEngine
from realhf.base.tensor_digest import digest_tensors
from tests.gpu.conftest import CONFIGS, VOCABULARY

JOIN_S = 60.0
OPTIONS: dict[str, Any] = {"optimizer": OptimizerConfig(lr=1e-3), "total_train_steps": 10}


@dataclass(frozen=True)
class RankJob:
    """What one rank does."""

    address: str
    """Address of the rendezvous store."""
    rank: int
    """Number of this rank."""
    size: int
    """Number of ranks."""
    backend: str
    """ddp or fsdp2."""
    dtypes: tuple[str, ...]
    """Dtypes of the models, float32 or bfloat16, one after the other."""
    device: str
    """cuda or cpu."""
    folder: Path
    """Empty folder, the same for all ranks."""
    dies: bool = False
    """Whether this rank kills itself after its first step."""


def outcome(pipe: Connection, job: RankJob) -> None:
    """Send what ``_run`` returns for each dtype, or how it failed."""
    torch.set_num_threads(1)
    try:
        everybody = [*range(job.size)]
        world = TorchWorld(job.address, job.rank, everybody, join_s=JOIN_S, timeout_s=JOIN_S)
        # As a model worker, whose master tells it that a peer has died.
        threading.Thread(target=lambda: world.abort(pipe.recv()), daemon=True).start()
        world.create_groups([everybody] * 2 * len(job.dtypes))
        found = {dtype: _run(job, world, dtype) for dtype in job.dtypes}
        world.close()
        pipe.send(found)
    except BaseException as error:
        pipe.send({"error": traceback.format_exc(), "kind": type(error).__name__})


def _run(job: RankJob, world: TorchWorld, dtype: str) -> dict[str, Any]:
    device = torch.device("cuda:0" if job.device == "cuda" else "cpu")
    expected = _train(TorchEngine(_model(device, dtype), None, **OPTIONS), range(4))
    engine = _engine(world, device, job, dtype)
    losses = _train(engine, range(1))
    if job.dies:
        os.kill(os.getpid(), signal.SIGKILL)
    losses += _train(engine, range(1, 3))
    engine.save_checkpoint(job.folder / dtype)
    digests = _digests(engine)
    losses += _train(engine, range(3, 4))
    again = _engine(world, device, job, dtype)
    again.load_checkpoint(job.folder / dtype)
    return {
        "expected": expected,
        "losses": losses,
        "backends": dist.get_backend_config(engine.ranks.group),
        "digests": digests,
        "held": _digests(again),
        "resumed": _train(again, range(3, 4)),
    }


def _model(device: torch.device, dtype: str) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS["qwen3"]).eval()
    return model.to(device, getattr(torch, dtype))


def _engine(world: TorchWorld, device: torch.device, job: RankJob, dtype: str) -> Any:
    ranks = GroupRanks(world, range(job.size), sharded=job.backend == "fsdp2", device=device)
    model = _model(device, dtype)
    if job.backend == "ddp":
        return DdpEngine(model, None, ranks=ranks, role="actor", **OPTIONS)
    mesh = DeviceMesh.from_group(ranks.group, device.type, mesh_dim_names=("fsdp",))
    return FsdpEngine(model, None, ranks=ranks, mesh=mesh, role="actor", **OPTIONS)


def _digests(engine: Any) -> dict[str, str]:
    """Digests of the whole weights; {} on ranks that have a part of them."""
    if isinstance(engine, FsdpEngine):
        ranks: Any = engine.ranks
        with ranks.together("the whole weights"):
            engine.gather()
        if ranks.number:
            return {}
    return digest_tensors(engine.weights())


def _train(engine: Any, steps: range) -> list[float]:
    g = torch.Generator().manual_seed(3)
    ids = torch.randint(3, VOCABULARY, (200,), generator=g)
    tensors = {"packed_input_ids": ids, "loss_mask": torch.rand(200, generator=g) < 0.7}
    batch = SequenceSample.from_tensors(
        ["a", "b"], tensors, {key: [[60, 40], [100]] for key in tensors}
    )
    losses = []
    for step in steps:
        engine.version = step
        context = CallContext(step, step, MicroBatchSpec(1, 128), Path())
        together = getattr(engine.ranks, "together", contextlib.nullcontext)
        with together(f"step {step}"):
            result = SFTInterface().train_step(Model("actor", engine, None), batch, context)
        losses.append(result["loss"])
        engine.version = step + 1
    return losses
