"""Attention over packed rows by a variable-length kernel, which is tested before it is used.

The kernel is that of ``torch.nn.attention.varlen`` (torch 2.10 and later), for bf16 and fp16 on
CUDA devices of compute capability 8.0 and higher. Its options differ between versions, and are read
from its signature.

All sequences of a pass are concatenated in one row, without padding. The queries of a sequence are
its own new tokens. Its keys may begin with tokens that an earlier sequence of the row computes, so
that common prefixes are computed once. The last query of a sequence attends to all of its keys, the
query before it to all but the last, and so on.

A pass without a layout is computed by ``sdpa``, with the same masks, so the model can keep this
attention implementation permanently.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from realhf.backends.embedded.attention import IGNORED_ARGUMENTS
from realhf.base.text import first_line

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, int, "int | None", float], Tensor]
"""Function (query (q, heads, dim), key (k, kv heads, dim), value, cumulative ends of queries int32
(n + 1,), cumulative ends of keys, maximum number of queries of a sequence, maximum number of keys,
window, scale) -> (q, heads, dim).

Attention is causal: the last query of a sequence attends to all of its keys or, with a window, to
the last ``window`` of them, including its own.
"""
_CAPABILITY = (8, 0)
"""Minimum compute capability of the device."""
_TYPES = (torch.bfloat16, torch.float16)
_MAX_ERROR = 0.03
"""Maximum error of a kernel, relative to the largest number in the reference result; one bf16
rounding is 0.008."""
_UNSUPPORTED_ERRORS = (
    AttributeError,
    IndexError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Errors of a kernel that indicate that it does not support the case."""


def find_kernel(
    device: torch.device, dtype: torch.dtype, head_sizes: Sequence[int] = (64,)
) -> tuple[Kernel | None, str]:
    """Return a kernel that passed a test on ``device`` for heads of all these sizes, and ""; or
    None and the reason why there is none. Without a GPU the reason is "" as well."""
    if device.type != "cuda":
        return None, ""
    if dtype not in _TYPES:
        return (
            None,
            f"variable-length attention needs bfloat16 or float16, the model has "
            f"{_dtype_name(dtype)}",
        )
    if torch.cuda.get_device_capability(device) < _CAPABILITY:
        return (
            None,
            f"variable-length attention needs a device of capability "
            f"{_CAPABILITY[0]}.{_CAPABILITY[1]}",
        )
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return (
            None,
            f"torch {torch.__version__} has no variable-length attention; 2.10 and later have",
        )
    reason = ""
    for kernel in adapt_kernels(varlen_attn):
        reason = _find_first_fault(kernel, device, dtype, head_sizes)
        if not reason:
            return kernel, ""
    return None, f"variable-length attention of torch {torch.__version__}, {reason}"


def _find_first_fault(
    kernel: Kernel, device: torch.device, dtype: torch.dtype, head_sizes: Sequence[int]
) -> str:
    """Return an error text for the first head size that a kernel does not support, or ""."""
    for size in head_sizes:
        if reason := find_kernel_fault(kernel, device, dtype, size):
            return f"for heads of {size}, {reason}"
    return ""


def adapt_kernels(function: Callable[..., Any]) -> Iterator[Kernel]:
    """Yield the possible kernels that call a ``varlen_attn`` with the options in its signature. The
    first one uses grouped-query attention, if the signature has it; the last one repeats keys and
    values for each query head."""
    known = inspect.signature(function).parameters
    for grouped in (True, False) if "enable_gqa" in known else (False,):
        yield _adapt_kernel(function, frozenset(known), grouped)


def _adapt_kernel(function: Callable[..., Any], known: frozenset[str], grouped: bool) -> Kernel:
    """Return a kernel that calls a ``varlen_attn`` with the options in ``known``.

    grouped: Whether to use grouped-query attention instead of repeating keys and values.
    """

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
            key = key.repeat_interleave(times, 1)
            value = value.repeat_interleave(times, 1)
        if "window_size" in known:  # number of tokens before the query's own
            options["window_size"] = (-1 if window is None else window - 1, 0)
        elif window is None:
            options["is_causal"] = True
        else:
            raise NotImplementedError(
                "this version of torch has no windows in variable-length attention"
            )
        own = query.shape[-1] ** -0.5
        if "scale" in known:
            options["scale"] = scale
        elif not math.isclose(scale, own):
            query = query * (scale / own)
        return function(query, key, value, ends_q, ends_k, longest_q, longest_k, **options)

    return run


def record_windows(kernel: Kernel, windows: list[int | None]) -> Kernel:
    """Return a kernel that calls ``kernel`` and appends the window of each call to ``windows``."""

    def record(*arguments: Any) -> Tensor:
        windows.append(arguments[-2])
        return kernel(*arguments)

    return record


def reference_attention(
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
    """Reference ``Kernel`` for any device: computes attention in fp32, one sequence after
    another."""
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


def find_kernel_fault(
    kernel: Kernel, device: torch.device, dtype: torch.dtype, head_size: int = 64
) -> str:
    """Return an error text if a kernel fails or is inaccurate, otherwise "".

    Outputs and gradients are compared with the reference, on sequences with more keys than queries
    and fewer key heads than query heads. Heads have the model's size, because kernels have separate
    backward passes for wide heads, and not on every device. Missing support for windows is not an
    error here, because models with a window are tested separately.
    """
    for window in (None, 16):
        try:
            results = _run_trial(kernel, device, dtype, window, head_size)
        except NotImplementedError:
            continue
        except _UNSUPPORTED_ERRORS as error:
            return f"fails: {first_line(error)}"
        expected = _run_trial(reference_attention, device, dtype, window, head_size)
        for name, result, reference in zip(
            ("outputs", "queries", "keys", "values"), results, expected, strict=True
        ):
            largest_error = float((result - reference).abs().max() / reference.abs().max())
            if not largest_error <= _MAX_ERROR:
                kind = name if name == "outputs" else f"gradients of {name}"
                return (
                    f"is off: {kind} by {largest_error:.1e} of the "
                    f"largest{'' if window is None else ', with a window'}"
                )
    return ""


def _run_trial(
    kernel: Kernel, device: torch.device, dtype: torch.dtype, window: int | None, dim: int
) -> list[Tensor]:
    """Return the output and the gradients of query, key and value, fp32, for fixed random
    inputs."""
    generator = torch.Generator().manual_seed(0)
    queries = (5, 130, 1)
    keys = (9, 130, 70)
    heads = 4
    kv_heads = 2
    shapes = ((sum(queries), heads, dim), (sum(keys), kv_heads, dim), (sum(keys), kv_heads, dim))
    inputs = [
        torch.randn(*shape, generator=generator).to(device, dtype).requires_grad_()
        for shape in shapes
    ]
    weights = torch.randn(*shapes[0], generator=generator).to(device)
    ends = [
        torch.tensor([0, *sizes]).cumsum(0).to(device, torch.int32) for sizes in (queries, keys)
    ]
    output = kernel(
        inputs[0],
        inputs[1],
        inputs[2],
        ends[0],
        ends[1],
        max(queries),
        max(keys),
        window,
        dim**-0.5,
    )
    (output.float() * weights).sum().backward()
    gradients = [
        torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in inputs
    ]
    return [output.detach().float(), *(gradient.float() for gradient in gradients)]


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class PackedLayout:
    """Layout of the n sequences in a packed row."""

    ends_q: Tensor
    """Cumulative ends of the sequences' queries, beginning with 0, int32 (n + 1,)."""
    ends_k: Tensor
    """Cumulative ends of the sequences' keys, beginning with 0, int32 (n + 1,)."""
    longest_q: int
    """Maximum number of queries of a sequence."""
    longest_k: int
    """Maximum number of keys of a sequence."""
    keys: Tensor | None
    """Column of each key, int64 (number of keys,); None if no sequence uses another one's
    columns."""
    kernel: Kernel
    """Kernel that computes the attention."""

    def to(self, device: torch.device) -> PackedLayout:
        """Return the layout with its tensors on ``device``."""
        keys = None if self.keys is None else self.keys.to(device)
        return replace(
            self, ends_q=self.ends_q.to(device), ends_k=self.ends_k.to(device), keys=keys
        )

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, window: int | None, scale: float
    ) -> Tensor:
        """Compute causal attention within each sequence; return (columns, heads, dim).

        Args:
            query: (columns, heads, dim).
            key, value: (columns, kv heads, dim).
            window: Number of tokens that a token attends to, including itself; None for all.
        """
        if self.keys is not None:
            key = _SelectRows.apply(key, self.keys)
            value = _SelectRows.apply(value, self.keys)
        return self.kernel(
            query,
            key,
            value,
            self.ends_q,
            self.ends_k,
            self.longest_q,
            self.longest_k,
            window,
            scale,
        )


class _SelectRows(torch.autograd.Function):
    """Autograd function that selects rows of (rows, heads, dim), with repetition. Gradients are
    summed in fp32 and rounded once, because a sum in a narrow dtype would lose precision where many
    branches share a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.shape = x.shape
        return x.index_select(0, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,), (rows,) = grads, ctx.saved_tensors
        wide = torch.promote_types(grad.dtype, torch.float32)
        out = torch.zeros(ctx.shape, dtype=wide, device=grad.device)
        return out.index_add_(0, rows, grad.to(wide)).to(grad.dtype), None


def build_packed_layout(
    paths: Sequence[np.ndarray], shared: Sequence[int], kernel: Kernel
) -> PackedLayout:
    """Return the attention layout of packed sequences (at least one) that may share prefixes.

    A prefix is computed once, for the first sequence that has it. For example, sequences of 5 and 4
    tokens with 3 shared ones are packed into 6 columns: ``paths`` is [0 1 2 3 4] and [0 1 2 5],
    ``shared`` is [0, 3], and the second sequence has one query. A sequence whose tokens are all
    shared has none.

    Args:
        paths: For each sequence, the columns of its tokens in the packed row, int64.
        shared: For each sequence, the length of the prefix computed for an earlier one.

    Raises ValueError if the columns of new tokens are not consecutive.
    """
    sizes_k = [len(path) for path in paths]
    sizes_q = [size - common for size, common in zip(sizes_k, shared, strict=True)]
    new = np.concatenate([path[common:] for path, common in zip(paths, shared, strict=True)])
    if not np.array_equal(new, np.arange(len(new))):
        raise ValueError("the new tokens of a packed row must lie behind each other")
    # Omit sequences without queries, so that kernels need not support them.
    with_queries = [i for i, size in enumerate(sizes_q) if size]
    keys = (
        None
        if not any(shared)
        else torch.from_numpy(np.concatenate([paths[i] for i in with_queries]).astype(np.int64))
    )
    return PackedLayout(
        _cumulative_ends([sizes_q[i] for i in with_queries]),
        _cumulative_ends([sizes_k[i] for i in with_queries]),
        max(sizes_q[i] for i in with_queries),
        max(sizes_k[i] for i in with_queries),
        keys,
        kernel,
    )


def _cumulative_ends(sizes: Sequence[int]) -> Tensor:
    """Return 0 and the cumulative sums of sizes, int32 (n + 1,)."""
    return torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32))


PACKED_ROWS = "packed_rows"
"""Name of the attention implementation."""
LAYOUT = "packed_layout"
"""Keyword argument that passes the ``PackedLayout`` to a forward pass."""


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packed_layout: PackedLayout | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    """Attention implementation ``packed_rows`` for transformers.

    Attends with ``query`` (1, heads, columns, dim) over ``key``/``value`` (1, kv heads, columns,
    dim) within each sequence of the layout. Returns ((1, columns, heads, dim), None). The mask is
    ignored. Raises ValueError for kinds of attention that a layout cannot describe.
    """
    if packed_layout is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    unsupported = sorted(
        name
        for name, argument in kwargs.items()
        if name not in IGNORED_ARGUMENTS and argument is not None and argument is not False
    )
    if unsupported or dropout or query.shape[0] != 1 or key.shape[2] != query.shape[2]:
        raise ValueError(
            f"attention with {unsupported[0] if unsupported else 'dropout or cached keys'} "
            "cannot run over packed "
            f"rows"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    parts = [t[0].transpose(0, 1) for t in (query, key, value)]
    return packed_layout.attend(parts[0], parts[1], parts[2], sliding_window, scale)[None], None


AttentionInterface.register(PACKED_ROWS, packed_attention)
AttentionMaskInterface.register(PACKED_ROWS, sdpa_mask)


def can_pack(model: Any) -> bool:
    """Return whether ``packed_rows`` can be the model's attention implementation: the current one
    is ``sdpa``, or ``packed_rows`` already because models may share their configuration."""
    return getattr(model.get_decoder().config, "_attn_implementation", None) in (
        "sdpa",
        PACKED_ROWS,
    )


def use_packed_attention(model: Any) -> None:
    """Switch the model to ``packed_rows`` permanently: with activation checkpointing, the backward
    pass must use the same implementation as the forward pass."""
    model.get_decoder().config._attn_implementation = PACKED_ROWS
