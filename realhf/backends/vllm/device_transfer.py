"""Brings weights to a vLLM server on the same GPUs by vLLM's own transfer over CUDA IPC.

The tensors are copied, some at a time, into a buffer on each GPU of the server, which its workers open by a handle and
read before the next ones come. Nothing goes through the host's memory that is on a GPU already. The other transfer that
vLLM has, NCCL, cannot have a trainer and a server on one GPU.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from realhf.backends.vllm.device_handles import to_json

BUFFER_BYTES = 256 << 20
"""Size of the buffer on each GPU; a larger tensor gets a buffer of its size."""
NO_COMMON_PLACE = (
    "it computes on a GPU that this process does not see, or was started without --weight-transfer-config for ipc"
)
Step = tuple[str, dict[str, Any]]
"""A method of the server's workers, and its arguments."""


@dataclass(frozen=True)
class Place:
    """Is a GPU that the server computes on, as this process names it, and by its ``uuid``."""

    device: torch.device
    uuid: str


def common_places(asked: Sequence[Any]) -> list[Place]:
    """Return the server's GPUs. ``asked``: what each of its workers said of itself (``WeightExtension.place``). Empty
    where one of them has another GPU than this process sees, or no transfer."""
    if not asked or not torch.cuda.is_available():
        return []
    own = {
        str(torch.cuda.get_device_properties(index).uuid): torch.device("cuda", index)
        for index in range(torch.cuda.device_count())
    }
    uuids = [answer.get("uuid") if isinstance(answer, dict) and answer.get("transfer") else None for answer in asked]
    if any(uuid not in own for uuid in uuids):
        return []
    return [Place(own[uuid], uuid) for uuid in dict.fromkeys(uuid for uuid in uuids if uuid)]


def chunks(tensors: Mapping[str, Tensor], most: int = BUFFER_BYTES) -> list[list[str]]:
    """Return the names of tensors that travel together, at most ``most`` bytes, or one tensor alone. Wide element types
    come first, so that each tensor begins at a multiple of its element's size."""
    found: list[list[str]] = []
    room = 0
    for name in sorted(tensors, key=lambda name: -tensors[name].element_size()):
        size = tensors[name].nbytes
        if not found or size > room:
            found.append([])
            room = most
        found[-1].append(name)
        room -= size
    return found


def described(names: Sequence[str], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return what the server has to know of a chunk beside its handles."""
    return {
        "names": list(names),
        "dtype_names": [str(tensors[name].dtype).removeprefix("torch.") for name in names],
        "shapes": [list(tensors[name].shape) for name in names],
        "tensor_sizes": [tensors[name].nbytes for name in names],
    }


def fill(buffer: Tensor, names: Sequence[str], tensors: Mapping[str, Tensor]) -> None:
    """Copy a chunk's tensors behind each other into ``buffer`` uint8 (bytes,)."""
    at = 0
    for name in names:
        flat = tensors[name].detach().contiguous().reshape(-1).view(torch.uint8)
        buffer[at : at + flat.numel()].copy_(flat)
        at += flat.numel()


@contextlib.contextmanager
def steps(
    version: int,
    tensors: Mapping[str, Tensor],
    places: Sequence[Place],
    *,
    most: int = BUFFER_BYTES,
    export: Callable[[Tensor], Sequence[Any]] | None = None,
) -> Iterator[Iterator[Step]]:
    """Yield the calls by which the server takes ``tensors``, each to be made when the one before has been answered. The
    buffers are allocated before the first: a shortage is found while the server has its old weights. They are given
    back when the block is left, however it is left. ``export`` makes the handle of a buffer, by default that of CUDA
    IPC."""
    parts = chunks(tensors, most)
    size = max((sum(tensors[name].nbytes for name in part) for part in parts), default=1)
    buffers = [torch.empty(max(1, size), dtype=torch.uint8, device=place.device) for place in places]

    def made() -> Iterator[Step]:
        # No name here means a buffer: this generator stays where it is when a transfer breaks off.
        yield "begin_transfer", {}
        # Handed out only now: memory that another process may open is freed when that process says so.
        handles = {
            place.uuid: to_json((export or _exported)(buffers[index])) for index, place in enumerate(places) if parts
        }
        for names in parts:
            for index, place in enumerate(places):
                fill(buffers[index], names, tensors)
                if place.device.type == "cuda":
                    torch.cuda.synchronize(place.device)
            yield "take_chunk", {**described(names, tensors), "handles": handles}
        yield "end_transfer", {"version": str(version), "names": list(tensors)}

    try:
        yield made()
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # They hold the buffer that was being filled.
        raise
    finally:
        buffers.clear()
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()


def _exported(buffer: Tensor) -> Sequence[Any]:
    from torch.multiprocessing.reductions import reduce_tensor

    return reduce_tensor(buffer)[1]
