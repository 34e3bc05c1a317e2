"""Reads a checkpoint of one worker into a model that is cut over ranks: each rank takes its parts out of the whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from realhf.backends.training.optimizer import PolicyOptimizer
from realhf.backends.training.sharded_state import parameter_names, persistent_buffers, refuse_unknown, unmastered
from realhf.backends.training.torch_engine import STATE_FILE, WEIGHTS_FILE


@torch.no_grad()
def load_whole_state(folder: Path, model: nn.Module, optimizer: PolicyOptimizer) -> int:
    """Read what ``TorchEngine.save_checkpoint`` wrote; return the version. Raises FileNotFoundError, or ValueError that
    names a tensor which is missing, of another shape, or of another model."""
    if not (folder / STATE_FILE).is_file():
        raise FileNotFoundError(f"no engine checkpoint in {folder}")
    _load_weights(folder, model)
    state = torch.load(folder / STATE_FILE, map_location="cpu", weights_only=True, mmap=True)
    if "optimizer" not in state:
        raise ValueError(f"checkpoint {folder}: trainable and frozen model roles do not match")
    _load_optimizer(state["optimizer"], model, optimizer, folder)
    return int(state["version"])


def _load_weights(folder: Path, model: nn.Module) -> None:
    aliases: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    with safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
        held = {*file.keys()}
        known = {*persistent_buffers(model), *(alias for alike in aliases.values() for alias in alike)}
        refuse_unknown(folder, {f"weights/{name}" for name in held}, {f"weights/{name}" for name in known})
        for parameter, name in parameter_names(model).items():
            found = next((alias for alias in aliases[id(parameter)] if alias in held), None)
            if found is None:
                raise ValueError(f"checkpoint {folder} has no tensor {name}")
            _take(parameter, file.get_tensor(found), f"checkpoint {folder}: {name}")
        for name, buffer in persistent_buffers(model).items():
            if name in held:
                buffer.copy_(file.get_tensor(name))


def _load_optimizer(saved: dict[str, Any], model: nn.Module, optimizer: PolicyOptimizer, folder: Path) -> None:
    names = parameter_names(model)
    parameters = optimizer.parameters
    # Moments are numbered in the order of the parameter groups: those with weight decay first.
    ordered = [p for p in parameters if p.ndim > 1] + [p for p in parameters if p.ndim <= 1]
    moments = saved["adamw"]["state"]
    if len(saved["masters"]) != len(parameters) or any(number >= len(ordered) for number in moments):
        raise ValueError(f"checkpoint {folder}: optimizer of {len(saved['masters'])} parameters, not {len(parameters)}")
    optimizer.begin_moments({ordered[number] for number in moments})
    values = {
        f"{kind}/{names[ordered[number]]}": value for number, kinds in moments.items() for kind, value in kinds.items()
    }
    values |= {
        f"master/{names[p]}": master
        for p, master in zip(parameters, saved["masters"], strict=True)
        if master is not None
    }
    own = {
        f"master/{name}": p.detach() for p, name in unmastered(optimizer, names).items() if f"master/{name}" in values
    }
    for name, held in {**optimizer.tensors(names), **own}.items():
        if name not in values:
            raise ValueError(f"checkpoint {folder} has no tensor {name} of the optimizer")
        _take(held, values[name], f"checkpoint {folder}: {name}")
    optimizer.publish()


def _take(held: Tensor, whole: Tensor, what: str) -> None:
    """Copy the own part of a whole tensor. Raises ValueError on another shape."""
    if held.shape != whole.shape:
        raise ValueError(f"{what} has shape {tuple(whole.shape)}, here {tuple(held.shape)}")
    local = held.detach()
    if isinstance(local, DTensor):
        whole = distribute_tensor(whole.to(local.device), local.device_mesh, local.placements, src_data_rank=None)
    local.copy_(whole)
