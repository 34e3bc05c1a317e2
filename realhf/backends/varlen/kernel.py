"""Finds a kernel for attention over sequences of different lengths, and proves it before it is used.

The kernel is that of ``torch.nn.attention.varlen`` (from torch 2.10 on), whose options have changed from version to
version: which it has is read from its signature. It runs on CUDA devices of capability 8.0 and more, in bf16 and fp16.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, int, "int | None", float], Tensor]
"""(query (q, heads, dim), key (k, kv heads, dim), value, ends of queries int32 (n + 1,), ends of keys, most queries of
a sequence, most keys, window, scale) -> (q, heads, dim). Causal: the last query of a sequence sees all of its keys, or
the last ``window`` of them, the query's own included."""

_CAPABILITY = (8, 0)
_TYPES = (torch.bfloat16, torch.float16)
_CLOSE = 0.03
"""Largest difference from the plain computation, relative to the largest number; one rounding of bf16 is 0.008."""
_UNFIT = (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError)


def kernel_for(device: torch.device, dtype: torch.dtype, head_size: int = 64) -> tuple[Kernel | None, str]:
    """Return a kernel that was proven on ``device`` for heads of this size, or None and why there is none. Without a
    GPU there is none and nothing to say."""
    if device.type != "cuda":
        return None, ""
    if dtype not in _TYPES:
        return None, f"variable-length attention needs bfloat16 or float16, the model has {_name(dtype)}"
    if torch.cuda.get_device_capability(device) < _CAPABILITY:
        return None, f"variable-length attention needs a device of capability {_CAPABILITY[0]}.{_CAPABILITY[1]}"
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None, f"torch {torch.__version__} has no variable-length attention; 2.10 and later have"
    reason = ""
    for kernel in adapted(varlen_attn):
        reason = fault(kernel, device, dtype, head_size)
        if not reason:
            return kernel, ""
    return None, f"variable-length attention of torch {torch.__version__}, for heads of {head_size}, {reason}"


def adapted(function: Callable[..., Any]) -> Iterator[Kernel]:
    """Make kernels of a ``varlen_attn`` by the options that its signature has: first one that hands it fewer heads of
    keys than of queries, where it says that it takes them, then one that repeats them."""
    known = inspect.signature(function).parameters
    for grouped in (True, False) if "enable_gqa" in known else (False,):
        yield _adapted(function, frozenset(known), grouped)


def _adapted(function: Callable[..., Any], known: frozenset[str], grouped: bool) -> Kernel:
    def run(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        ends_q: Tensor,
        ends_k: Tensor,
        longest_q: int,
        longest_k: int,
        window: int | None,
        scale: float,
    ) -> Tensor:
        options: dict[str, Any] = {}
        times = query.shape[1] // key.shape[1]
        if times > 1 and grouped:
            options["enable_gqa"] = True
        elif times > 1:
            key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
        if "window_size" in known:  # It counts the tokens before the query's own.
            options["window_size"] = (-1 if window is None else window - 1, 0)
        elif window is None:
            options["is_causal"] = True
        else:
            raise NotImplementedError("this version of torch has no windows in variable-length attention")
        own = query.shape[-1] ** -0.5
        if "scale" in known:
            options["scale"] = scale
        elif not math.isclose(scale, own):
            query = query * (scale / own)
        return function(query, key, value, ends_q, ends_k, longest_q, longest_k, **options)

    return run


def noting_windows(kernel: Kernel, windows: list[int | None]) -> Kernel:
    """Return the kernel, which then adds the window of each call to ``windows``."""

    def run(*given: Any) -> Tensor:
        windows.append(given[-2])
        return kernel(*given)

    return run


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends_q: Tensor,
    ends_k: Tensor,
    longest_q: int,
    longest_k: int,
    window: int | None,
    scale: float,
) -> Tensor:
    """Is a ``Kernel`` for any device, one sequence after another in fp32: what others are compared with."""
    del longest_q, longest_k
    times = query.shape[1] // key.shape[1]
    outputs = []
    for i in range(len(ends_q) - 1):
        q = query[int(ends_q[i]) : int(ends_q[i + 1])].float().transpose(0, 1)
        own = slice(int(ends_k[i]), int(ends_k[i + 1]))
        k, v = (t[own].float().repeat_interleave(times, 1).transpose(0, 1) for t in (key, value))
        at = torch.arange(k.shape[1] - q.shape[1], k.shape[1], device=q.device)[:, None]
        column = torch.arange(k.shape[1], device=q.device)
        hidden = column > at if window is None else (column > at) | (column <= at - window)
        scores = (scale * q @ k.transpose(1, 2)).masked_fill(hidden, float("-inf"))
        outputs.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outputs).to(query.dtype)


def fault(kernel: Kernel, device: torch.device, dtype: torch.dtype, head_size: int = 64) -> str:
    """Return what is wrong with a kernel, or "": it is compared with the plain computation, gradients included, on
    sequences that have more keys than queries, and fewer heads of keys, of the size that the model has: kernels have
    backward passes of their own for wide heads, and not on every device. A window that it does not know is no fault: a
    model that has one is tried out by itself."""
    for window in (None, 16):
        try:
            found = _trial(kernel, device, dtype, window, head_size)
        except NotImplementedError:
            continue
        except _UNFIT as error:
            return f"fails: {(str(error).strip().splitlines() or [type(error).__name__])[0][:200]}"
        expected = _trial(plain_attention, device, dtype, window, head_size)
        for what, one, other in zip(("outputs", "queries", "keys", "values"), found, expected, strict=True):
            off = float((one - other).abs().max() / other.abs().max())
            if not off <= _CLOSE:
                kind = what if what == "outputs" else f"gradients of {what}"
                return f"is off: {kind} by {off:.1e} of the largest{'' if window is None else ', with a window'}"
    return ""


def _trial(kernel: Kernel, device: torch.device, dtype: torch.dtype, window: int | None, dim: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    queries, keys, heads, kv_heads = (5, 130, 1), (9, 130, 70), 4, 2
    shapes = ((sum(queries), heads, dim), (sum(keys), kv_heads, dim), (sum(keys), kv_heads, dim))
    given = [torch.randn(*shape, generator=draw).to(device, dtype).requires_grad_() for shape in shapes]
    weights = torch.randn(*shapes[0], generator=draw).to(device)
    ends = [torch.tensor([0, *sizes]).cumsum(0).to(device, torch.int32) for sizes in (queries, keys)]
    output = kernel(given[0], given[1], given[2], ends[0], ends[1], max(queries), max(keys), window, dim**-0.5)
    (output.float() * weights).sum().backward()
    gradients = [torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in given]
    return [output.detach().float(), *(gradient.float() for gradient in gradients)]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
