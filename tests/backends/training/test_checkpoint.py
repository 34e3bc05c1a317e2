"""What a checkpoint is read into: the same model only, of any number of ranks, and never code."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from realhf.api.config import OptimizerConfig
from realhf.backends.training.checkpoint import INDEX, load_shards, load_state, save_shards, save_state
from realhf.backends.training.optimizer import PolicyOptimizer


def layers(depth: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[nn.Module, PolicyOptimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(depth))).to(dtype)
    return model, PolicyOptimizer(model, OptimizerConfig(lr=1e-2), 10)


def test_a_deeper_model_is_not_read_into_a_shallower_one(tmp_path: Path) -> None:
    save_state(tmp_path, *layers(3), 2)
    with pytest.raises(ValueError, match=r"is of another model: it has weights/2\.bias, weights/2\.weight, which"):
        load_state(tmp_path, *layers(2))
    with pytest.raises(ValueError, match=r"has no tensor weights/3\."):
        load_state(tmp_path, *layers(4))
    model, optimizer = layers(3, seed=1)
    assert load_state(tmp_path, model, optimizer) == 2


def test_a_weight_in_fp32_is_read_from_the_master_weight(tmp_path: Path) -> None:
    model, optimizer = layers(1, torch.bfloat16)
    with torch.no_grad():
        optimizer.masters[0].add_(1e-5)  # lost in bf16
    save_state(tmp_path, model, optimizer, 1)
    wide, own = layers(1, seed=1)
    load_state(tmp_path, wide, own)
    for master, parameter in zip(optimizer.masters, wide.parameters(), strict=True):
        assert torch.equal(master, parameter)


class Opens:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_an_index_that_would_run_code_is_refused(tmp_path: Path) -> None:
    save_shards(tmp_path, {"x": torch.ones(2)})
    (tmp_path / INDEX).write_bytes(pickle.dumps(Opens(str(tmp_path / "made"))))
    with pytest.raises(ValueError, match=r"\.metadata is not the index of a checkpoint: it names posix\.mkdir"):
        load_shards(tmp_path, {"x": torch.zeros(2)})
    assert not (tmp_path / "made").exists()
    (tmp_path / INDEX).write_bytes(pickle.dumps({"x": 1}))
    with pytest.raises(ValueError, match="it holds a dict"):
        load_shards(tmp_path, {"x": torch.zeros(2)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_every_type_is_read_as_it_was_written(tmp_path: Path, dtype: torch.dtype) -> None:
    save_shards(tmp_path, {"x": torch.ones(2, dtype=dtype)})
    read = torch.zeros(2, dtype=dtype)
    load_shards(tmp_path, {"x": read})
    assert bool((read == 1).all())
