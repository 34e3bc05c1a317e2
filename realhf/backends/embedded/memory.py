"""Memory management: cache budgets, release of freed heap memory, and helpful out-of-memory
errors."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psutil
import torch
from torch import Tensor

from realhf.backends.embedded.attention import layer_configs
from realhf.base.engine_memory import DEDICATED_FRACTION, SHARED_FRACTION
from realhf.base.text import first_line

_OOM_MESSAGES = ("can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""Texts by which a RuntimeError is recognised as an out-of-memory error of host memory, or of GPU
memory outside torch's allocator."""
FREE_HEAP_BYTES = 1 << 26
"""Amount of freed memory in bytes that the C library may always keep."""
_HEAP_GROWTH = 1.01
"""Freed memory is returned to the system when resident memory exceeds this multiple of its size
after the largest pass (plus ``_HEAP_GROWTH_BYTES``). Below that it is kept for the next pass,
because allocating it from the system again takes a sixth of the time of a pass."""
_HEAP_GROWTH_BYTES = 1 << 23
"""Growth of the resident memory in bytes that is tolerated in addition."""


def oom_message(error: BaseException) -> str | None:
    """Return the first line of an out-of-memory error, or None for any other error."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in _OOM_MESSAGES)
    ):
        return first_line(error)
    return None


@contextlib.contextmanager
def explain_oom(explanation: Callable[[], str]) -> Iterator[None]:
    """Context manager that turns an out-of-memory error in its block into the RuntimeError ``out of
    memory <explanation>``.

    ``explanation`` is called only after such an error. It returns what needed the memory and which
    option to change.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if (message := oom_message(error)) is None:
            raise
        raise RuntimeError(f"out of memory {explanation()} ({message})") from error


def cache_bytes(
    gib: float | None, device: torch.device, *, shared: bool, reserved_bytes: int = 0
) -> int | None:
    """Return the maximum size of a cache in bytes, None for no limit.

    Without ``gib``, a cache on a GPU gets a fraction of the memory that is free now. Memory that
    this process has freed counts as free.

    Args:
        gib: Size set by the options, GiB.
        device: Device of the cache.
        shared: Whether the GPU is also used for training.
        reserved_bytes: Bytes that weights, gradients and moments use on the GPU now or later.
    """
    if gib is not None:
        return int(gib * 2**30)
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(
        max(0, min(free, total - reserved_bytes))
        * (SHARED_FRACTION if shared else DEDICATED_FRACTION)
    )


def head_sizes(config: Any) -> list[int]:
    """Return the distinct widths of the attention heads of a model configuration, ascending."""
    return sorted({_head_size(layer) for layer in layer_configs(config)})


def _head_size(layer: Any) -> int:
    """Return the width of the attention heads of a layer configuration."""
    return int(getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads)


def token_bytes(config: Any, dtype: torch.dtype) -> int:
    """Return the size in bytes of one token's keys and values in all layers of a model."""
    return sum(
        2 * _kv_heads(layer) * _head_size(layer) * dtype.itemsize for layer in layer_configs(config)
    )


def _kv_heads(layer: Any) -> int:
    """Return the number of key and value heads of a layer configuration."""
    return int(getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads)


class _HeapUse(ctypes.Structure):
    """Result of glibc's ``mallinfo2``."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names.split())


class Heap:
    """Handle of this process's heap that returns freed memory to the system.

    Tensors whose size changes from pass to pass fragment the C library's heap, so that it would
    grow with the number of passes. Without glibc 2.33 or later this does nothing.
    """

    def __init__(self) -> None:
        library = ctypes.CDLL(None)
        self._use = getattr(library, "mallinfo2", None)
        self._trim = getattr(library, "malloc_trim", None)
        if self._use is not None:
            self._use.restype = _HeapUse
        # Positions of the largest pass so far, and the resident memory (bytes) after it.
        self._largest_positions = 0
        self._largest_rss = 0

    def trim_after_pass(self, positions: int) -> None:
        """Return freed memory to the system after a pass over ``positions`` if resident memory has
        grown too much.

        Otherwise the memory is kept for the next pass.
        """
        if self._trim is None or not positions:
            return
        rss = psutil.Process().memory_info().rss
        if positions > self._largest_positions:
            self._largest_positions = positions
            self._largest_rss = rss
        elif rss > _HEAP_GROWTH * self._largest_rss + _HEAP_GROWTH_BYTES:
            self.trim()

    def trim(self) -> None:
        """Return freed memory to the system if it is more than ``FREE_HEAP_BYTES``."""
        self._largest_positions = 0
        self._largest_rss = 0
        if (
            self._trim is not None
            and self._use is not None
            and self._use().fordblks > FREE_HEAP_BYTES
        ):
            self._trim(0)


def _engine_advice() -> str:
    """Return a clause for error messages that names the options to lower the memory of generation
    on the same GPU; empty without a GPU."""
    if not torch.cuda.is_available():
        return ""
    return (
        "; generation on the same GPU takes less with engine.gpu_memory_utilization (vllm), "
        "engine.kv_cache_gib"
    )


def explain_pass_oom(
    positions: int, rows: int, budget: int | None
) -> contextlib.AbstractContextManager[None]:
    """Context manager that turns an out-of-memory error in a forward or backward pass into a
    RuntimeError with advice, as ``explain_oom`` does.

    The pass computes ``positions`` (padding included) in ``rows``. ``budget`` is
    ``mb_spec.max_tokens_per_mb``.
    """
    return explain_oom(
        lambda: (
            f"in a micro-batch of {positions} positions in {rows} rows: lower "
            f"mb_spec.max_tokens_per_mb "
            f"(it is {'not set, which means 4096' if budget is None else budget}), or set "
            f"gradient_checkpointing=true "
            f"of its role{_engine_advice()}"
        )
    )


def explain_update_oom(
    weights: Sequence[Tensor], role: str, *, adapters: bool, offload: bool
) -> contextlib.AbstractContextManager[None]:
    """Context manager that turns an out-of-memory error in an optimizer update of ``weights`` into
    a RuntimeError with advice, as ``explain_oom`` does.

    The first update allocates the optimizer's moments. ``adapters`` and ``offload`` tell whether
    adapters and moment offloading are available to the role as remedies.
    """

    def build_explanation() -> str:
        moments = 8 * sum(weight.numel() for weight in weights) / 2**30
        remedies = [f"set {role}.backend=fsdp2 and more {role}.workers, which cuts it over them"]
        if adapters:
            remedies.insert(0, f"set {role}.lora.rank, which trains few weights")
        if offload:
            remedies.insert(0, f"set {role}.optimizer.offload=true")
        advice = f"{', or '.join(remedies)}{_engine_advice()}"
        return f"in the update of {role}, whose moments take {moments:.3g} GiB: {advice}"

    return explain_oom(build_explanation)
