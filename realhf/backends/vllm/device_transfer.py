"""Transfer of weights to a vLLM server on the same GPUs over CUDA IPC, with handles as plain JSON
instead of pickles.

vLLM's client pickles the handles, and a server that accepts pickles executes code from anyone who
can reach its port. This module runs on both sides: in a trainer, and inside the server, whose
environment has torch and realhf, but not the other dependencies of realhf.

The tensors are copied in chunks into a buffer on each GPU of the server. The workers open the
buffer by its handle, and read a chunk before the next one is written. Tensors on a GPU do not pass
through host memory. NCCL does not support a trainer and a server on one GPU; for different GPUs see
``realhf.backends.vllm.broadcast``.
"""

from __future__ import annotations

import base64
import contextlib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MAX_PARTS = 32
"""Maximum number of parts of a handle; real ones have about 15."""
MAX_PART_BYTES = 4096
"""Maximum size of a part in bytes; real ones have a few dozen."""
_CLASSES: dict[str, Any] = {
    "Tensor": torch.Tensor,
    "Parameter": torch.nn.Parameter,
    "TypedStorage": torch.storage.TypedStorage,
    "UntypedStorage": torch.storage.UntypedStorage,
}
"""Classes that a handle may contain."""


def to_json(handle: Sequence[Any]) -> list[Any]:
    """Return a handle (the arguments from which ``torch.multiprocessing`` rebuilds a CUDA tensor)
    as JSON values. Raises TypeError for a part of an unexpected type."""
    return [_encode_part(part) for part in handle]


def from_json(parts: Any) -> tuple[Any, ...]:
    """Return the handle that ``to_json`` encoded. Raises ValueError for anything else, because the
    input is untrusted."""
    if not isinstance(parts, list) or len(parts) > MAX_PARTS:
        raise ValueError("a handle of device memory is a list of at most 32 parts")
    return tuple(_decode_part(part) for part in parts)


def _encode_part(part: Any) -> Any:
    """Return the JSON form of one part of a handle."""
    if part is None or isinstance(part, (bool, int)):
        return part
    if isinstance(part, bytes):
        return {"bytes": base64.b64encode(part).decode()}
    if isinstance(part, torch.dtype):
        return {"dtype": str(part).removeprefix("torch.")}
    if isinstance(part, torch.device):
        return {"device": part.index or 0}
    # torch.Size is one, too
    if isinstance(part, tuple) and all(isinstance(size, int) for size in part):
        return {"sizes": list(part)}
    for name, kind in _CLASSES.items():
        if part is kind:
            return {"class": name}
    raise TypeError(f"a handle of device memory with a {type(part).__name__} cannot be encoded")


def _decode_part(part: Any) -> Any:
    """Return one part of a handle from its JSON form."""
    if part is None or isinstance(part, (bool, int)):
        return part
    if isinstance(part, dict) and len(part) == 1:
        kind, value = next(iter(part.items()))
        if kind == "class" and isinstance(value, str) and value in _CLASSES:
            return _CLASSES[value]
        if (
            kind == "dtype"
            and isinstance(value, str)
            and isinstance(getattr(torch, value, None), torch.dtype)
        ):
            return getattr(torch, value)
        if kind == "device" and isinstance(value, int):
            return value
        if kind == "sizes" and isinstance(value, list) and len(value) <= MAX_PARTS:
            if all(isinstance(size, int) for size in value):
                return tuple(value)
        elif kind == "bytes" and isinstance(value, str) and len(value) <= MAX_PART_BYTES:
            return base64.b64decode(value, validate=True)
    raise ValueError(f"a handle of device memory has no such part: {str(part)[:80]}")


BUFFER_BYTES = 256 << 20
"""Size in bytes of the buffer on each GPU; a larger tensor gets a buffer of its size."""
NO_COMMON_GPU = (
    "it computes on a GPU that this process does not see, or was started without "
    "--weight-transfer-config for ipc"
)
"""Reason given in warnings for a transfer through host memory."""
WorkerCall = tuple[str, dict[str, Any]]
"""Name of a method of the server's workers, and its arguments."""


@dataclass(frozen=True)
class ServerGpu:
    """GPU that the server uses."""

    device: torch.device
    """Device in this process."""
    uuid: str
    """UUID of the GPU, which is the same in all processes."""


def find_common_gpus(answers: Sequence[Any]) -> list[ServerGpu]:
    """Return the server's GPUs; empty if this process does not see all of them, or a worker does
    not support the transfer.

    ``answers`` are the results of ``WeightExtension.place`` on the workers.
    """
    if not answers or not torch.cuda.is_available():
        return []
    own = {
        str(torch.cuda.get_device_properties(index).uuid): torch.device("cuda", index)
        for index in range(torch.cuda.device_count())
    }
    uuids = [
        answer.get("uuid") if isinstance(answer, dict) and answer.get("backend") == "ipc" else None
        for answer in answers
    ]
    if any(uuid not in own for uuid in uuids):
        return []
    return [ServerGpu(own[uuid], uuid) for uuid in dict.fromkeys(uuid for uuid in uuids if uuid)]


def split_chunks(tensors: Mapping[str, Tensor], max_bytes: int = BUFFER_BYTES) -> list[list[str]]:
    """Split tensors into chunks of at most ``max_bytes`` bytes; return the names in each chunk. A
    larger tensor is a chunk by itself. Wide dtypes come first, so that each tensor starts at a
    multiple of its element size."""
    named_chunks: list[list[str]] = []
    room_bytes = 0
    for name in sorted(tensors, key=lambda name: -tensors[name].element_size()):
        size = tensors[name].nbytes
        if not named_chunks or size > room_bytes:
            named_chunks.append([])
            room_bytes = max_bytes
        named_chunks[-1].append(name)
        room_bytes -= size
    return named_chunks


def describe_chunk(names: Sequence[str], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the metadata of a chunk that the server needs besides the handles."""
    return {
        "names": list(names),
        "dtype_names": [str(tensors[name].dtype).removeprefix("torch.") for name in names],
        "shapes": [list(tensors[name].shape) for name in names],
        "tensor_sizes": [tensors[name].nbytes for name in names],
    }


def fill_buffer(buffer: Tensor, names: Sequence[str], tensors: Mapping[str, Tensor]) -> None:
    """Copy the tensors of a chunk one after another into ``buffer``, uint8 (bytes,)."""
    at = 0
    for name in names:
        flat = tensors[name].detach().contiguous().reshape(-1).view(torch.uint8)
        buffer[at : at + flat.numel()].copy_(flat)
        at += flat.numel()


@contextlib.contextmanager
def transfer_calls(
    version: int,
    tensors: Mapping[str, Tensor],
    gpus: Sequence[ServerGpu],
    *,
    max_bytes: int = BUFFER_BYTES,
    export: Callable[[Tensor], Sequence[Any]] | None = None,
) -> Iterator[Iterator[WorkerCall]]:
    """Context manager that yields an iterator over the calls to the server's workers that transfer
    ``tensors``. Each call must have been answered before the next one is taken.

    The buffers are allocated before the first call, so that a shortage of memory is found while the
    server still has its old weights. They are freed at the end of the block, also after an error.
    ``export`` makes the handle of a buffer, by default for CUDA IPC.
    """
    parts = split_chunks(tensors, max_bytes)
    size = max((sum(tensors[name].nbytes for name in part) for part in parts), default=1)
    buffers = [torch.empty(max(1, size), dtype=torch.uint8, device=gpu.device) for gpu in gpus]

    def generate_calls() -> Iterator[WorkerCall]:
        # Keep no local variable of a buffer: if a transfer fails, this generator stays suspended,
        # and would keep the buffer alive.
        yield "begin_transfer", {}
        # Export only after ``begin_transfer``: exported memory is freed only when the other
        # process releases it.
        handles = {
            gpu.uuid: to_json((export or _export)(buffers[index]))
            for index, gpu in enumerate(gpus)
            if parts
        }
        for names in parts:
            for index, gpu in enumerate(gpus):
                fill_buffer(buffers[index], names, tensors)
                if gpu.device.type == "cuda":
                    torch.cuda.synchronize(gpu.device)
            yield "take_chunk", {**describe_chunk(names, tensors), "handles": handles}
        yield "end_transfer", {"version": str(version), "names": list(tensors)}

    try:
        yield generate_calls()
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # these refer to the buffer being filled
        raise
    finally:
        buffers.clear()
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()


def _export(buffer: Tensor) -> Sequence[Any]:
    """Return the CUDA IPC handle of a buffer."""
    from torch.multiprocessing.reductions import reduce_tensor

    return reduce_tensor(buffer)[1]
