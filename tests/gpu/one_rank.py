"""What the process of ``test_ranks.py`` does: trains with an engine for several ranks, on one."""

from __future__ import annotations

import traceback
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
from realhf.backends.parallel.process_groups import GroupRanks, RendezvousStore, TorchWorld
from realhf.backends.training.torch_engine import TorchEngine
from realhf.base.tensor_digest import digest_tensors
from tests.gpu.conftest import CONFIGS, VOCABULARY

JOIN_S = 60.0
OPTIONS: dict[str, Any] = {"optimizer": OptimizerConfig(lr=1e-3), "total_train_steps": 10}


def outcome(out: Connection, kind: str, backend: str, folder: str) -> None:
    """Send what ``_run`` returns, or how it failed."""
    try:
        out.send(_run(torch.device("cuda:0" if kind == "cuda" else "cpu"), backend, Path(folder)))
    except BaseException:
        out.send({"error": traceback.format_exc()})


def _run(device: torch.device, backend: str, folder: Path) -> dict[str, Any]:
    expected = _train(TorchEngine(_model(device), None, **OPTIONS), range(4))
    meeting = RendezvousStore(1, JOIN_S)
    world = TorchWorld(meeting.address, 0, [0], join_s=JOIN_S, timeout_s=JOIN_S)
    world.create_groups([[0], [0]])
    engine = _engine(world, device, backend)
    found: dict[str, Any] = {"expected": expected, "losses": _train(engine, range(3))}
    found["backends"] = dist.get_backend_config(engine.ranks.group)
    engine.save_checkpoint(folder / "state")
    found["digests"] = _digests(engine)
    found["losses"] += _train(engine, range(3, 4))
    again = _engine(world, device, backend)
    again.load_checkpoint(folder / "state")
    found["held"] = _digests(again)
    found["resumed"] = _train(again, range(3, 4))
    world.close()
    return found


def _model(device: torch.device) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS["qwen3"]).eval().to(device)


def _engine(world: TorchWorld, device: torch.device, backend: str) -> Any:
    ranks = GroupRanks(world, [0], sharded=backend == "fsdp2", device=device)
    if backend == "ddp":
        return DdpEngine(_model(device), None, ranks=ranks, role="actor", **OPTIONS)
    mesh = DeviceMesh.from_group(ranks.group, device.type, mesh_dim_names=("fsdp",))
    return FsdpEngine(_model(device), None, ranks=ranks, mesh=mesh, role="actor", **OPTIONS)


def _digests(engine: Any) -> dict[str, str]:
    if isinstance(engine, FsdpEngine):
        with engine.ranks.together("the whole weights"):
            engine.gather()
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
        if isinstance(engine, (DdpEngine, FsdpEngine)):
            with engine.ranks.together(f"step {step}"):  # pyright: ignore[reportAttributeAccessIssue]
                result = SFTInterface().train_step(Model("actor", engine, None), batch, context)
        else:
            result = SFTInterface().train_step(Model("actor", engine, None), batch, context)
        losses.append(result["loss"])
        engine.version = step + 1
    return losses
