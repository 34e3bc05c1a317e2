"""Keeps the memory of passes small, and says what to lower where there is not enough of it."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from realhf.backends.embedded.shortage import naming_shortage

FREE_HEAP_BYTES = 1 << 26
"""The C library keeps this much freed memory for the next pass. Tensors of a size that changes from pass to pass leave
holes in its heap, which would grow with the number of passes."""


def _of_an_engine() -> str:
    if not torch.cuda.is_available():
        return ""
    return "; generation on the same GPU takes less with engine.gpu_memory_utilization (vllm), engine.kv_cache_gib"


class _HeapUse(ctypes.Structure):
    """What ``mallinfo2`` returns."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    )  # fmt: skip


class Heap:
    """Watches the C library's heap of this process; does nothing where the library is not glibc (from 2.33 on)."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None)
        self._use, self._trim = getattr(library, "mallinfo2", None), getattr(library, "malloc_trim", None)
        if self._use is not None:
            self._use.restype = _HeapUse

    def free_bytes(self) -> int:
        """Return the bytes that were freed and are kept; 0 where that cannot be known."""
        return 0 if self._use is None else int(self._use().fordblks)

    def give_back(self) -> None:
        """Give freed memory back to the system if there is more of it than ``FREE_HEAP_BYTES``."""
        if self._trim is not None and self.free_bytes() > FREE_HEAP_BYTES:
            self._trim(0)


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
