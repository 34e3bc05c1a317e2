"""Names and digests of a model's weights, and all-or-nothing copying of new weights into them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from realhf.api.generation import HeldTensor
from realhf.api.keys import dtype_tag
from realhf.base.tensor_digest import TensorDigester


def collect_weights(model: Any) -> dict[str, Tensor]:
    """Return a model's parameters and persistent buffers by their names in its state dict. Of
    tensors that share memory only the first is returned; ``copy_weights`` accepts that."""
    by_place: dict[tuple[int, tuple[int, ...]], tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        by_place.setdefault(_memory_key(tensor), (name, tensor.detach()))
    return dict(by_place.values())


def copy_weights(model: Any, tensors: Mapping[str, Tensor]) -> None:
    """Copy ``tensors``, keyed by their names in the model's state dict, into the model. Of names
    that share memory (tied embeddings), one is enough.

    Raises ValueError naming a tensor that is missing, unknown, or of a different shape or kind of
    dtype; the model is then unchanged.
    """
    targets: dict[str, Tensor] = dict(model.state_dict(keep_vars=True))
    unknown = sorted(set(tensors) - set(targets))
    if unknown:
        raise ValueError(f"weights: the model has no tensor {unknown[0]} ({len(unknown)} unknown)")
    covered = {_memory_key(targets[name]) for name in tensors}
    missing = sorted(name for name, target in targets.items() if _memory_key(target) not in covered)
    if missing:
        raise ValueError(f"weights: {missing[0]} is missing ({len(missing)} missing)")
    for name, new in tensors.items():
        if new.shape != targets[name].shape:
            raise ValueError(
                f"weights: {name} has shape {tuple(new.shape)}, the model "
                f"{tuple(targets[name].shape)}"
            )
        if new.is_floating_point() != targets[name].is_floating_point():
            raise ValueError(f"weights: {name} is {new.dtype}, in the model {targets[name].dtype}")
    with torch.no_grad():
        for name, new in tensors.items():
            targets[name].copy_(new)


def digest_weights(model: Any, names: Sequence[str]) -> dict[str, HeldTensor]:
    """Return digests of the model's current tensors with these state-dict names."""
    own: dict[str, Tensor] = dict(model.state_dict(keep_vars=True))
    digester = TensorDigester()
    return {
        name: HeldTensor(dtype_tag(own[name].dtype), digester.digest(own[name]))
        for name in names
        if name in own
    }


def _memory_key(tensor: Tensor) -> tuple[int, tuple[int, ...]]:
    """Return a tensor's address and shape, which are equal for tied tensors."""
    return tensor.data_ptr(), tuple(tensor.shape)
