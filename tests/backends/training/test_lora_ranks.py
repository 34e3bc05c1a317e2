"""Adapters on copies of a model train as those of one worker, and leave a checkpoint that any
number of ranks reads."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from realhf.api.config import LoraConfig, OptimizerConfig
from realhf.api.parallel import Parallel
from realhf.backends.parallel.ddp import DdpEngine
from realhf.backends.parallel.process_groups import GroupRanks, TorchWorld, list_groups
from realhf.backends.training.torch_engine import TorchEngine
from tests.backends.parallel import training
from tests.backends.parallel.rank_processes import results, run_ranks

ABSENT = pytest.mark.skipif(
    importlib.util.find_spec("peft") is None, reason="adapters need the extra lora"
)
pytestmark = [pytest.mark.slow, ABSENT]
OPTIONS: dict[str, Any] = {
    "optimizer": OptimizerConfig(lr=1e-2),
    "total_train_steps": 10,
    "lora": LoraConfig(2, 4.0),
}


def on_ranks(world: TorchWorld, rank: int, folder: Path) -> dict[str, Any]:
    """Two steps, a checkpoint, one more step; then that step again, from the checkpoint."""
    world.create_groups(list_groups(range(2), Parallel(dp=2), cut=False))
    ranks = GroupRanks(world, range(2), sharded=False, device=training.CPU)
    torch.manual_seed(5)
    engine = DdpEngine(training.tiny_model(), None, ranks=ranks, role="actor", **OPTIONS)
    stats = training.steps(engine, "grpo", range(2))
    files = [path.name for path in engine.save_checkpoint(folder)]
    stats += training.steps(engine, "grpo", [2])
    weights = {name: tensor.tolist() for name, tensor in engine.weights().items()}
    engine.load_checkpoint(folder)
    return {
        "stats": stats,
        "files": files,
        "weights": weights,
        "again": training.steps(engine, "grpo", [2]),
    }


def test_copies_with_adapters_train_as_one_worker_does(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(5)
    one = TorchEngine(training.tiny_model(), None, **OPTIONS)
    expected = training.steps(one, "grpo", range(3), together=False)
    found = results(run_ranks(2, on_ranks, tmp_path / "saved"))
    written = [".metadata", "__0_0.distcp", "adapter_config.json", "adapter_model.safetensors"]
    assert [rank["files"] for rank in found] == [written, []]
    for rank in found:
        assert rank["stats"] == found[0]["stats"] and rank["again"] == rank["stats"][2:]
        for own, alone in zip(rank["stats"], expected, strict=True):
            for name in ("loss", "grad_norm", "n_tokens"):
                assert own[name] == pytest.approx(alone[name], rel=1e-5, abs=1e-6), name
        for name, tensor in one.weights().items():
            torch.testing.assert_close(
                torch.tensor(rank["weights"][name]), tensor, atol=1e-5, rtol=1e-4
            )
    alone = TorchEngine(training.tiny_model(), None, **OPTIONS)
    alone.load_checkpoint(tmp_path / "saved")
    again = training.steps(alone, "grpo", [2], together=False)[0]
    assert again["loss"] == pytest.approx(expected[2]["loss"], rel=1e-5, abs=1e-6)
