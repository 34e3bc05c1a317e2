"""Checks that the copies of a model are equal on all ranks: what they train together is one model, or nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from realhf.backends.parallel.group_ranks import GroupRanks


class CopiesDiffer(RuntimeError):
    """Two ranks hold different weights."""


def check_copies(model: nn.Module, ranks: GroupRanks, role: str) -> None:
    """Raise CopiesDiffer, naming a tensor and a rank, unless all ranks hold the same weights to the bit. To be called
    inside ``together``."""
    names, own = zip(*[(name, digest(tensor)) for name, tensor in model.state_dict().items()], strict=True)
    for rank, other in enumerate(ranks.exchange(b"".join(own))):
        if other != b"".join(own):
            raise CopiesDiffer(f"{role}: {_first(names, own, other)} differs between rank {ranks.rank} and rank {rank}")


def digest(tensor: Tensor) -> bytes:
    """Return 16 bytes that depend on every byte of a tensor, on its type and its shape."""
    values = tensor.detach().cpu().contiguous()
    found = hashlib.blake2b(f"{values.dtype} {tuple(values.shape)}".encode(), digest_size=16)
    found.update(values.reshape(-1).view(torch.uint8).numpy().data)
    return found.digest()


def _first(names: Sequence[str], own: Sequence[bytes], other: bytes) -> str:
    """The name of the first tensor whose digest is not in its place in ``other``."""
    for number, (name, mine) in enumerate(zip(names, own, strict=True)):
        if other[16 * number : 16 * (number + 1)] != mine:
            return name
    return "the number of tensors"
