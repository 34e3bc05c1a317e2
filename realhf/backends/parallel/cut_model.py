"""Cuts a model of transformers over ranks with ``fully_shard``, block by block, and brings it together again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from realhf.backends.training.sharded_state import persistent_buffers
from realhf.backends.training.value_head import ValueModel


class Whole(nn.Module):
    """Runs a pass as its own forward: what belongs to no block (embeddings, the last norm, the head) is whole inside,
    also where a loss uses it after the decoder."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, run: Callable[[], Tensor]) -> Tensor:
        """Return what ``run`` returns."""
        return run()


def _as_it_is(_module: nn.Module) -> None:
    """Leave the parameters of a module alone."""


def cut(model: Any, mesh: DeviceMesh, fill: Callable[[nn.Module], None] = _as_it_is) -> Whole:
    """Cut the parameters of ``model`` over the last dimension of ``mesh``, in place; gradients are summed over the
    whole mesh, in fp32. ``fill`` is called with each part before it is cut: it gives parameters without memory theirs.
    Tied weights stay tied: they belong to no block. Raises ValueError on a model that does not say what its blocks
    are."""
    kinds = {*(getattr(model.get_decoder(), "_no_split_modules", None) or ())}
    blocks = [module for module in model.modules() if type(module).__name__ in kinds]
    if not blocks:
        raise ValueError(f"{type(model).__name__} does not say which of its modules are blocks: it cannot be cut")
    whole = Whole(model)
    precision = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for block in blocks:
        fill(block)
        fully_shard(block, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
    fill(whole)
    fully_shard(whole, mesh=mesh, mp_policy=precision, reshard_after_forward=False)
    for module in whole.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return whole


def empty_like(model: Any) -> Any:
    """Return an uncut model of the same kind without memory (on the device ``meta``), for ``gather_into``."""
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(model.config, dtype=model.dtype)
        whole = ValueModel(made) if isinstance(model, ValueModel) else made
    if (generation := getattr(model, "generation_config", None)) is not None:
        whole.generation_config = generation  # It is exported with the weights.
    return whole.eval()


def gather_into(copy: Any | None, model: Any) -> None:
    """Bring the weights of a cut model together, one tensor at a time, in ``copy``, which ``empty_like`` made; None:
    take part only. Every rank of the model calls this."""
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        tensor = parameter.detach()
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if copy is not None:
            _set(copy, name, nn.Parameter(full if full is not tensor else full.clone(), requires_grad=False))
    if copy is None:
        return
    for name, buffer in model.named_buffers():
        _set(copy, name, buffer.detach().clone())
    if not isinstance(copy, ValueModel):
        copy.tie_weights()
    empty = [name for name, tensor in [*copy.named_parameters(), *persistent_buffers(copy).items()] if tensor.is_meta]
    if empty:
        raise RuntimeError(f"{type(model).__name__}: {empty[0]} was not brought together ({len(empty)} were not)")


def _set(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Put a tensor in the place of a parameter or a buffer."""
    path, _, last = name.rpartition(".")
    owner = model.get_submodule(path)
    table: dict[str, Any] = owner._parameters if last in owner._parameters else owner._buffers
    table[last] = tensor
