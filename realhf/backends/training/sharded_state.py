"""Says what a training engine needs to continue, as named tensors, and reads it from files of any number of ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
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
    A weight in fp32 is read from its master weight where there is one. Raises ValueError that names a tensor which is
    missing, of another shape, or of another model; then nothing has changed but, perhaps, the moments of the
    optimizer."""
    held, names = names_in(folder), parameter_names(model)
    refuse_unknown(folder, held, {f"weights/{name}" for name in (*names.values(), *persistent_buffers(model))})
    optimizer.begin_moments({p for p, name in names.items() if f"exp_avg/{name}" in held})
    version = torch.tensor(0)
    tensors = {**_tensors(model, optimizer), _VERSION: version}
    for name in unmastered(optimizer, names).values():
        if f"master/{name}" in held:
            tensors[f"master/{name}"] = tensors.pop(f"weights/{name}")
    load_shards(folder, tensors, group)
    optimizer.publish()
    return int(version)


def refuse_unknown(folder: Path, held: Collection[str], weights: Collection[str]) -> None:
    """Raise ValueError where a checkpoint holds weights, or master weights, of another model than the one whose
    ``weights/NAME`` are given: a deeper one, for example."""
    more = {name for name in held if name.startswith("weights/")} - {*weights}
    more |= {name for name in held if name.startswith("master/") and f"weights/{name[7:]}" not in weights}
    if more:
        first = sorted(more)[:3]
        raise ValueError(
            f"checkpoint {folder} is of another model: it has {', '.join(first)}"
            f"{f' and {len(more) - 3} more' if len(more) > 3 else ''}, which this one has not"
        )


def unmastered(optimizer: PolicyOptimizer, names: Mapping[nn.Parameter, str]) -> dict[nn.Parameter, str]:
    """Return the trained parameters that are their own master weights, and their names."""
    pairs = zip(optimizer.parameters, optimizer.masters, strict=True)
    return {parameter: names[parameter] for parameter, master in pairs if master is parameter}


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
