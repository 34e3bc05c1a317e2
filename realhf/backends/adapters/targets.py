"""Finds the linear layers of a model that may have adapters, and those that are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the linear layers of the blocks by their names: a block has a number, which embeddings and the head have
    not."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and any(part.isdigit() for part in name.split("."))
    }


def chosen_layers(model: nn.Module, targets: Sequence[str], role: str) -> list[str]:
    """Return the names of the layers that ``targets`` name, or end the names of; all without targets. Raises ValueError
    that names a target without a layer, and what there is."""
    layers = linear_layers(model)
    if not layers:
        raise ValueError(f"{role}.lora.rank: {type(model).__name__} has no linear layers in its blocks")
    if not targets:
        return list(layers)
    for target in targets:
        if not any(is_named(name, target) for name in layers):
            there = sorted({name.rpartition(".")[2] for name in layers})
            raise ValueError(
                f"{role}.lora.targets: no linear layer of the blocks is called {target!r} (there are "
                f"{', '.join(there)})"
            )
    return [name for name in layers if any(is_named(name, target) for target in targets)]


def is_named(name: str, target: str) -> bool:
    """Whether ``target`` is the dotted name of a layer, or its end."""
    return name == target or name.endswith(f".{target}")


def short_names(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Return last parts of ``names`` where these, as ends of names, mean the same layers among all modules of the
    model; else ``names``. It is what a file says that others read."""
    ends = sorted({name.rpartition(".")[2] for name in names})
    meant = {name for name, _ in model.named_modules() if any(is_named(name, end) for end in ends)}
    return ends if meant == {*names} else list(names)


def weight_of(model: Any, name: str) -> nn.Parameter:
    """Return the weight of the layer of this name."""
    return model.get_submodule(name).weight
