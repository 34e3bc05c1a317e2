"""Says what a training engine needs to continue, as named tensors, and reads it from files of any number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from realhf.backends.training.optimizer import PolicyOptimizer
from realhf.backends.training.sharded_files import load_shards, names_in, save_shards

_VERSION = "version"


def save_state(
    folder: Path, model: nn.Module, optimizer: PolicyOptimizer, version: int, *, group: Any, rank: int
) -> list[Path]:
    """Write weights, optimizer and version with the other ranks of ``group``; return the files of this one."""
    tensors = _tensors(model, optimizer)
    tensors[_VERSION] = torch.tensor(version)
    return save_shards(folder, tensors, group, rank)


def load_state(folder: Path, model: nn.Module, optimizer: PolicyOptimizer, *, group: Any = None) -> int:
    """Read what ``save_state`` wrote, whatever the number of ranks was, into model and optimizer; return the version.
    Raises ValueError that names a tensor which is missing or of another shape; then nothing has changed but, perhaps,
    the moments of the optimizer."""
    held = names_in(folder)
    optimizer.begin_moments({p for p, name in parameter_names(model).items() if f"exp_avg/{name}" in held})
    version = torch.tensor(0)
    load_shards(folder, {**_tensors(model, optimizer), _VERSION: version}, group)
    optimizer.publish()
    return int(version)


def parameter_names(model: nn.Module) -> dict[nn.Parameter, str]:
    """Return the parameters of a model and their names; a tied one has its first name only."""
    return {parameter: name for name, parameter in model.named_parameters()}


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that belong to the state of a model."""
    names = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in names}


def _tensors(model: nn.Module, optimizer: PolicyOptimizer) -> dict[str, Tensor]:
    names = parameter_names(model)
    weights: Mapping[str, Tensor] = {name: parameter.detach() for parameter, name in names.items()}
    return {
        **{f"weights/{name}": tensor for name, tensor in {**weights, **persistent_buffers(model)}.items()},
        **optimizer.tensors(names),
    }
