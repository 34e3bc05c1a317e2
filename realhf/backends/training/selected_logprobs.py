"""Log-probabilities of selected tokens from hidden states, computed in chunks so that the logits of
a whole batch never exist at once.

The head is a linear projection, optionally with a bias, a factor, and a soft cap, as in Phi,
Granite, Cohere and Gemma 2.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from realhf.backends.embedded.kernels import onednn_linear, trains_faster

logger = logging.getLogger(__name__)

CHUNK_BYTES = 3 << 24
"""Bytes of fp32 logits that exist at once: 256 rows for a vocabulary of 49,152 tokens. Smaller
chunks read the weight of the head too often."""
GPU_CHUNK_BYTES = 1 << 30
"""``CHUNK_BYTES`` on a GPU: 1,766 rows for a vocabulary of 151,936 tokens. The backward pass needs
two and a half times as much. A product of fewer rows is bound by reading the weight of the head and
writing its gradient."""
_LEAST_GPU_SHARE = 64
"""A chunk on a GPU uses at most one part in this many of the GPU's memory."""
_KEPT_BYTES = 1 << 24
"""Logits of a call are kept for the backward pass up to this size in bytes; larger ones are
recomputed."""


def chunk_rows(vocabulary: int, gpu_bytes: int = 0) -> int:
    """Return the number of rows of fp32 logits in a chunk. ``gpu_bytes`` is the memory of the GPU
    that computes them, 0 on a CPU."""
    nbytes = max(CHUNK_BYTES, min(GPU_CHUNK_BYTES, gpu_bytes // _LEAST_GPU_SHARE))
    return max(1, nbytes // (4 * vocabulary))


class _Products:
    """Products with the weight of a head (vocabulary, width), with fp32 sums and results.

    bf16 factors are multiplied as bf16 on the tensor cores of a GPU. The product of two bf16
    numbers is exact in fp32, so these logits equal those of fp32 factors up to the order of the
    sums. Gradients of logits are rounded to bf16 before they are multiplied, as in every other
    layer of the model. All other factors are converted to fp32.
    """

    def __init__(self, hidden: Tensor, weight: Tensor) -> None:
        self.narrow = hidden.dtype == weight.dtype == torch.bfloat16 and multiplies_bf16(
            weight.device
        )
        self._head = weight if self.narrow else weight.float()

    def logits(self, hidden: Tensor, bias: Tensor | None) -> Tensor:
        """Return ``hidden`` (n, width) times the transposed head, plus ``bias``: fp32 (n,
        vocabulary)."""
        if self.narrow:
            logits = torch.mm(hidden, self._head.t(), out_dtype=torch.float32)
        else:
            logits = _product(hidden.float(), self._head)
        return logits if bias is None else logits.add_(bias)

    def rounded(self, slope: Tensor) -> Tensor:
        """Return the gradient of logits in the dtype that ``of_hidden`` and ``of_head`` expect."""
        return slope.to(torch.bfloat16) if self.narrow else slope

    def of_hidden(self, slope: Tensor) -> Tensor:
        """Return the gradient of ``hidden`` for a gradient of logits."""
        return torch.mm(slope, self._head) if self.narrow else _product(slope, self._head.t())

    def of_head(self, slope: Tensor, hidden: Tensor, so_far: Tensor | None) -> Tensor:
        """Return ``so_far`` (None: zeros) plus the gradient of the head; ``so_far`` may be
        overwritten."""
        if self.narrow:
            if so_far is None:
                return torch.mm(slope.t(), hidden, out_dtype=torch.float32)
            # Accumulate in place instead of allocating a second gradient of this size per chunk.
            return torch.addmm(so_far, slope.t(), hidden, out_dtype=torch.float32, out=so_far)
        if so_far is not None and so_far.is_cuda:
            return so_far.addmm_(slope.t(), hidden.float())
        part = _product(slope.t(), hidden.float().t())
        return part if so_far is None else so_far.add_(part)


@functools.cache
def multiplies_bf16(device: torch.device) -> bool:
    """Return whether torch multiplies bf16 matrices with fp32 sums and results on this device.

    This is tested, since not every release supports it on every GPU. Without it the head is several
    times slower, and a warning is logged.
    """
    return device.type == "cuda" and _tried(device)


def _tried(device: torch.device) -> bool:
    """Test bf16 products on a device; log a warning if they fail or are wrong."""
    ones = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
    try:
        once = torch.mm(ones.t(), ones, out_dtype=torch.float32)
        total = once.clone()
        twice = torch.addmm(total, ones.t(), ones, out_dtype=torch.float32, out=total)
        works = once.dtype == torch.float32 and bool((once == 16).all() and (twice == 32).all())
        reason = "its numbers are wrong"
    except (RuntimeError, TypeError) as error:
        works = False
        reason = str(error).partition("\n")[0]
    if not works:
        logger.warning(
            "log-probabilities on %s are computed in fp32: torch cannot sum bf16 there (%s)",
            device,
            reason,
        )
    return works


def selected_logprobs(
    hidden: Tensor,
    head_weight: Tensor,
    ids: Tensor,
    temperature: float = 1.0,
    chunk: int | None = None,
    *,
    with_entropy: bool = True,
    bias: Tensor | None = None,
    factor: float = 1.0,
    cap: float | None = None,
    side: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of ``ids``, fp32 of the same shape, and entropies, fp32 (m,).

    Everything is computed in fp32, whatever the dtype of the factors (for bf16 on a GPU see
    ``_Products``). Gradients reach ``hidden``, ``head_weight``, ``side`` and ``bias``; there are no
    second derivatives. The backward pass recomputes the logits, except those of small calls, and
    except if only ``hidden`` needs a gradient and there is one id per row, no entropy and no cap.

    Args:
        hidden: (m, width).
        head_weight: (vocabulary, width). Logits are ``hidden`` times its transpose.
        ids: int64 (m,) or (m, K).
        temperature: Divides the logits. Raises ValueError if it is not positive.
        chunk: Number of rows of logits that exist at once; None chooses it by the device.
        with_entropy: Without it, entropies are 0.
        bias: (vocabulary,), added to the logits.
        factor, cap: Applied to the logits by ``bent``, before the temperature.
        side: Factors fp32 (m, rank) and (vocabulary, rank) of a product that is added to the
            logits: the first times the transpose of the second.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    if chunk is None:
        device = head_weight.device
        gpu = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
        chunk = chunk_rows(len(head_weight), gpu)
    shape = (factor, cap, float(temperature))
    index = ids if ids.ndim == 2 else ids[:, None]
    beside = (None, None) if side is None else side
    given = (hidden, head_weight, *beside, bias, index, shape, max(1, chunk), with_entropy)
    logprobs, entropy = _Selected.apply(*given)  # type: ignore[misc]
    return logprobs if ids.ndim == 2 else logprobs[:, 0], entropy


def bent(logits: Tensor, factor: float, cap: float | None) -> Tensor:
    """Multiply logits by ``factor`` and, with ``cap``, bound them to it by tanh; in place."""
    logits = logits.mul_(factor) if factor != 1.0 else logits
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


class _Selected(torch.autograd.Function):
    """Autograd function of ``selected_logprobs``."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        beside: Tensor | None,
        up: Tensor | None,
        bias: Tensor | None,
        ids: Tensor,
        shape: tuple[float, float | None, float],
        chunk: int,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        products = _Products(hidden, weight)
        (factor, cap, temperature) = shape
        logprobs = hidden.new_zeros(ids.shape, dtype=torch.float32)
        entropy = logprobs.new_zeros(len(ids))
        normaliser = logprobs.new_empty(len(ids))
        keep = (
            any(ctx.needs_input_grad)
            and 4 * len(ids) * len(weight) <= _KEPT_BYTES
            and len(ids) <= chunk
        )
        kept = None
        # With a frozen head only the gradient of ``hidden`` is needed. It is the gradient of the
        # log-probability, which is known here, times the incoming gradient, so the backward pass
        # recomputes nothing.
        early = ids.shape[1] == 1 and not with_entropy and cap is None and ctx.needs_input_grad[0]
        early = early and not any(ctx.needs_input_grad[1:])
        slopes = torch.empty_like(hidden) if early else None
        for start in range(0, len(ids), chunk):
            rows = slice(start, start + chunk)
            logits = _with_side(products.logits(hidden[rows], bias), beside, up, rows)
            logits = _scaled(bent(logits, factor, cap), temperature)
            if slopes is not None:
                logprobs[rows], slope = _with_slope(logits, ids[rows], factor / temperature)
                slopes[rows] = products.of_hidden(products.rounded(slope)).to(hidden.dtype)
                continue
            normaliser[rows] = logits.logsumexp(-1)
            logprobs[rows] = logits.gather(-1, ids[rows]) - normaliser[rows, None]
            kept = logits if keep and cap is None else None
            if with_entropy:
                scaled = functional.softmax(logits, -1).mul_(logits).sum(-1)
                entropy[rows] = normaliser[rows] - scaled
        ctx.early = early
        if slopes is not None:
            ctx.save_for_backward(slopes)
            return logprobs, entropy
        ctx.save_for_backward(hidden, weight, beside, up, bias, ids, normaliser, entropy, kept)
        ctx.shape = shape
        ctx.chunk = chunk
        ctx.with_entropy = with_entropy
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.early:
            (slopes,) = ctx.saved_tensors
            return ((slopes * grads[0]).to(slopes.dtype), *[None] * 8)
        hidden, weight, beside, up, bias, ids, normaliser, entropy, kept = ctx.saved_tensors
        of_logprobs, of_entropy = grads
        of_row = of_logprobs.sum(-1, keepdim=True) if ids.shape[1] > 1 else of_logprobs
        products = _Products(hidden, weight)
        (factor, cap, temperature) = ctx.shape
        of_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        of_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] and not len(ids) else None
        of_beside = None if beside is None else torch.empty_like(beside)
        of_up = None if up is None else torch.zeros_like(up)
        of_bias = (
            torch.zeros(len(weight), device=hidden.device) if ctx.needs_input_grad[4] else None
        )
        for start in range(0, len(ids), ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            bound = None
            if kept is None:
                logits = bent(
                    _with_side(products.logits(hidden[rows], bias), beside, up, rows), factor, cap
                )
                # the slope of the tanh
                bound = None if cap is None else 1 - (logits / cap).square_()
                log_p = _scaled(logits, temperature).sub_(normaliser[rows, None])
            else:
                log_p = kept - normaliser[rows, None]
            slope = log_p.exp() if ctx.with_entropy else log_p.exp_()
            if ctx.with_entropy:  # d entropy / d logit = -p (log p + entropy)
                log_p.add_(entropy[rows, None]).mul_(of_entropy[rows, None]).add_(of_row[rows])
                slope.mul_(log_p).neg_()
            else:
                slope.mul_(of_row[rows]).neg_()
            slope.scatter_add_(-1, ids[rows], of_logprobs[rows])
            slope = _scaled(slope, temperature)
            slope = slope if bound is None else slope.mul_(bound)
            slope = slope if factor == 1.0 else slope.mul_(factor)
            if of_bias is not None:
                of_bias += slope.sum(0)
            if (
                beside is not None
                and up is not None
                and of_beside is not None
                and of_up is not None
            ):
                of_beside[rows] = slope @ up
                of_up.addmm_(slope.t(), beside[rows])
            slope = products.rounded(slope)
            if of_hidden is not None:
                of_hidden[rows] = products.of_hidden(slope).to(hidden.dtype)
            if ctx.needs_input_grad[1]:
                of_weight = products.of_head(slope, hidden[rows], of_weight)
        of_weight = None if of_weight is None else of_weight.to(weight.dtype)
        of_bias = None if of_bias is None else of_bias.to(bias.dtype)
        return of_hidden, of_weight, of_beside, of_up, of_bias, None, None, None, None


def _with_slope(logits: Tensor, ids: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """Return log-probabilities (n, 1) of ``ids`` (n, 1), and ``factor`` times their gradients with
    respect to ``logits`` (n, vocabulary), which overwrite ``logits``."""
    chosen = logits.gather(-1, ids)
    most = logits.amax(-1, keepdim=True)
    total = logits.sub_(most).exp_().sum(-1, keepdim=True)
    slope = logits.mul_(-factor / total).scatter_add_(-1, ids, torch.full_like(chosen, factor))
    return chosen - most - total.log(), slope


def _with_side(logits: Tensor, beside: Tensor | None, up: Tensor | None, rows: slice) -> Tensor:
    """Add the product of the side factors to the logits of these rows, in place."""
    return logits if beside is None or up is None else logits.addmm_(beside[rows], up.t())


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """Divide logits by the temperature, in place."""
    return logits if temperature == 1.0 else logits.div_(temperature)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """Return ``x`` (n, in) times the transpose of ``weight`` (out, in), both fp32."""
    return onednn_linear(x, weight) if trains_faster(weight) else functional.linear(x, weight)
