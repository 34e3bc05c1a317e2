"""What the servers of a group are told about it and about the weights, and how tensors are cut into
packs. Used on both sides; see the package for the protocol."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

PACK_BYTES = 256 << 20
"""Size in bytes at which a pack is full; it may exceed this by one tensor."""
UNIQUE_ID_BYTES = 128
"""Size of NCCL's unique id of a group."""
TensorInfo = tuple[str, str, tuple[int, ...]]
"""Name, dtype (such as "bfloat16") and shape of a tensor."""


class BroadcastError(RuntimeError):
    """Error: the weights did not reach all servers of a group, which is not usable any more."""


def build_init_info(
    unique_id: bytes, rank_offset: int, world_size: int, pack_bytes: int
) -> dict[str, Any]:
    """Return INIT for a server whose first worker has rank ``rank_offset``."""
    if len(unique_id) != UNIQUE_ID_BYTES:
        raise ValueError(f"a unique id of NCCL has {UNIQUE_ID_BYTES} bytes, not {len(unique_id)}")
    if not 0 < rank_offset < world_size:
        raise ValueError(f"there is no server at rank {rank_offset} of {world_size}")
    return {
        "nccl_unique_id_b64": base64.b64encode(unique_id).decode(),
        "rank_offset": rank_offset,
        "world_size": world_size,
        "packed": True,
        "packed_buffer_size_bytes": pack_bytes,
        "packed_num_buffers": 1,
    }


def build_update_info(tensors: Sequence[TensorInfo]) -> dict[str, Any]:
    """Return UPDATE for tensors in the order in which they are sent."""
    return {
        "names": [name for name, _, _ in tensors],
        "dtype_names": [dtype for _, dtype, _ in tensors],
        "shapes": [list(shape) for _, _, shape in tensors],
    }


def sort_for_sending(tensors: Iterable[TensorInfo]) -> list[TensorInfo]:
    """Return tensors in the order in which they are sent: wide elements first, otherwise as
    given."""
    return sorted(tensors, key=lambda info: -getattr(torch, info[1]).itemsize)


def describe_tensors(tensors: Mapping[str, Tensor]) -> list[TensorInfo]:
    """Return what a server is told about tensors, in the order in which they are sent."""
    return sort_for_sending(
        (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in tensors.items()
    )


def cut_packs(sizes: Iterable[int], pack_bytes: int) -> Iterator[list[int]]:
    """Yield the indices of the tensors of each pack, given the sizes of all tensors in bytes."""
    pack: list[int] = []
    total = 0
    for index, size in enumerate(sizes):
        pack.append(index)
        total += size
        if total > pack_bytes:
            yield pack
            pack = []
            total = 0
    if pack:
        yield pack


def fill_pack(tensors: Sequence[Tensor]) -> Tensor:
    """Return the bytes of tensors one after another, uint8, on their device."""
    return torch.cat(
        [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
    )
