"""Handles a want of memory: how much a cache may take, how passes stay small, and what to lower where it runs out."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psutil
import torch
from torch import Tensor

from realhf.backends.embedded.attention import layer_configs
from realhf.base.text import first_line

_SAID = ("can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""What errors of other types say: those of the CPU's memory, and of what a GPU keeps outside of torch's own pool."""


def shortage(error: BaseException) -> str | None:
    """Return the first line of an error that says that there was no memory, or None for any other error."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and any(said in str(error) for said in _SAID)
    ):
        return first_line(error)
    return None


@contextlib.contextmanager
def naming_shortage(said: Callable[[], str]) -> Iterator[None]:
    """Raise RuntimeError ``out of memory ...`` where something inside finds no memory. ``said``, asked then, goes on
    from these words: what wanted it, and which option to change."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if (first := shortage(error)) is None:
            raise
        raise RuntimeError(f"out of memory {said()} ({first})") from error


SHARED, ALONE = 0.5, 0.8
"""Share of what is free on a GPU: beside a trainer, whose activations need the rest, or only beside what passes of
generation hold."""


def cache_bytes(gib: float | None, device: torch.device, *, shared: bool, taken: int = 0) -> int | None:
    """Return the most bytes of a cache; None: as many as it needs. ``gib`` is what the options say. Without it an
    engine on a GPU gets a share of what is free there now, by whether the GPU is ``shared`` with training: what other
    processes have is not free, and what this process has freed is. ``taken``: bytes that weights, gradients and moments
    come to take there, some of them perhaps later."""
    if gib is not None:
        return int(gib * 2**30)
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(max(0, min(free, total - taken)) * (SHARED if shared else ALONE))


def head_sizes(config: Any) -> list[int]:
    """Return the widths that attention heads have in a model with this configuration, ascending, each once."""
    return sorted({_head_size(layer) for layer in layer_configs(config)})


def _head_size(layer: Any) -> int:
    return int(getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads)


def token_bytes(config: Any, dtype: torch.dtype) -> int:
    """Return the bytes of the keys and values of one token, in all layers of a model with this configuration."""
    return sum(2 * _kv_heads(layer) * _head_size(layer) * dtype.itemsize for layer in layer_configs(config))


def _kv_heads(layer: Any) -> int:
    return int(getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads)


FREE_HEAP_BYTES = 1 << 26
"""The C library may always keep this much freed memory."""
_GROWTH, _GROWTH_BYTES = 1.01, 1 << 23
"""Between passes the C library keeps freed memory, as long as the process has at most so many times what the largest of
them left it with, and so many bytes: to get it anew from the system takes a sixth of the time of a pass."""


class _HeapUse(ctypes.Structure):
    """What ``mallinfo2`` returns."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names.split())


class Heap:
    """Gives freed memory back to the system. Tensors whose size changes from pass to pass leave holes in the heap of
    the C library, which would grow with the number of passes. Does nothing where that is not glibc (from 2.33 on)."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None)
        self._use, self._trim = getattr(library, "mallinfo2", None), getattr(library, "malloc_trim", None)
        if self._use is not None:
            self._use.restype = _HeapUse
        self._largest = self._held = 0

    def passed(self, positions: int) -> None:
        """After a pass over so many positions: keep its memory for the next one, unless holes have grown."""
        if self._trim is None or not positions:
            return
        held = psutil.Process().memory_info().rss
        if positions > self._largest:
            self._largest, self._held = positions, held
        elif held > _GROWTH * self._held + _GROWTH_BYTES:
            self.give_back()

    def give_back(self) -> None:
        """Give what is free back, if it is more than ``FREE_HEAP_BYTES``."""
        self._largest = self._held = 0
        if self._trim is not None and self._use is not None and self._use().fordblks > FREE_HEAP_BYTES:
            self._trim(0)


def _of_an_engine() -> str:
    if not torch.cuda.is_available():
        return ""
    return "; generation on the same GPU takes less with engine.gpu_memory_utilization (vllm), engine.kv_cache_gib"


def named_shortage(positions: int, rows: int, budget: int | None) -> contextlib.AbstractContextManager[None]:
    """Raise RuntimeError that says what to lower when a pass over so many positions finds no memory. ``budget`` is
    ``mb_spec.max_tokens_per_mb``."""
    return naming_shortage(
        lambda: (
            f"in a micro-batch of {positions} positions in {rows} rows: lower mb_spec.max_tokens_per_mb "
            f"(it is {'not set, which means 4096' if budget is None else budget}), or set gradient_checkpointing=true "
            f"of its role{_of_an_engine()}"
        )
    )


def named_update_shortage(
    weights: Sequence[Tensor], role: str, *, adapters: bool, offload: bool
) -> contextlib.AbstractContextManager[None]:
    """The same for the update of ``weights``: in the first one an optimizer makes its moments. The role could still
    have ``adapters``, or ``offload`` its moments."""

    def said() -> str:
        moments = 8 * sum(weight.numel() for weight in weights) / 2**30
        ways = [f"set {role}.backend=fsdp2 and more {role}.workers, which cuts it over them"]
        if adapters:
            ways.insert(0, f"set {role}.lora.rank, which trains few weights")
        if offload:
            ways.insert(0, f"set {role}.optimizer.offload=true")
        return f"in the update of {role}, whose moments take {moments:.3g} GiB: {', or '.join(ways)}{_of_an_engine()}"

    return naming_shortage(said)
