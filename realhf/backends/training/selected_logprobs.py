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
from realhf.base.hf_config import chunk_bytes

logger = logging.getLogger(__name__)

_KEPT_BYTES = 1 << 24
"""Maximum bytes of a call's logits that are kept for the backward pass; larger ones are
recomputed."""


def chunk_rows(vocabulary: int, gpu_bytes: int = 0) -> int:
    """Return the number of rows of fp32 logits in a chunk. ``gpu_bytes`` is the memory of the GPU
    that computes them, 0 on a CPU."""
    return max(1, chunk_bytes(gpu_bytes) // (4 * vocabulary))


_ALL_COLUMNS = slice(None)
"""The whole vocabulary."""
_ALIGNED_COLUMNS = 64
"""Where the columns of the logits are computed in parts, each part but the last is a multiple of
this number: with an odd width, the rows of the bf16 gradient are not aligned, which makes products
on tensor cores slower."""


class _Products:
    """Matrix products with a head's weight (vocabulary, width), with fp32 sums and results.

    bf16 factors are multiplied as bf16 on the tensor cores of a GPU. The product of two bf16
    numbers is exact in fp32, so these logits equal those of fp32 factors up to the order of the
    sums. Gradients of logits are rounded to bf16 before they are multiplied, as in every other
    layer of the model. All other factors are converted to fp32.
    """

    def __init__(self, hidden: Tensor, weight: Tensor) -> None:
        self.narrow = hidden.dtype == weight.dtype == torch.bfloat16 and supports_bf16_products(
            weight.device
        )
        self._head = weight if self.narrow else weight.float()

    @property
    def by_columns(self) -> bool:
        """Whether the backward pass computes columns of the logits for all rows, instead of rows
        for the whole vocabulary. A part of the head's gradient is then the result of one product,
        so that no second one in fp32 is needed to add parts up."""
        return self.narrow

    def logits(self, hidden: Tensor, bias: Tensor | None, columns: slice = _ALL_COLUMNS) -> Tensor:
        """Return ``hidden`` (n, width) times the transposed head, plus ``bias``: fp32 (n,
        vocabulary), or some of its columns."""
        head = self._head[columns]
        if self.narrow:
            logits = torch.mm(hidden, head.t(), out_dtype=torch.float32)
        else:
            logits = _multiply_transposed(hidden.float(), head)
        return logits if bias is None else logits.add_(bias[columns])

    def add_grad_hidden(self, accumulated: Tensor, slope: Tensor, columns: slice) -> None:
        """Add the gradient with respect to ``hidden`` to ``accumulated``, fp32, given the gradient
        of some columns of the logits."""
        if self.narrow:
            torch.addmm(
                accumulated, slope, self._head[columns], out_dtype=torch.float32, out=accumulated
            )
        else:
            accumulated.addmm_(slope, self._head[columns])

    def round_slope(self, slope: Tensor) -> Tensor:
        """Return the gradient of logits in the dtype that ``grad_hidden`` and ``grad_head``
        expect."""
        return slope.to(torch.bfloat16) if self.narrow else slope

    def grad_hidden(self, slope: Tensor) -> Tensor:
        """Return the gradient with respect to ``hidden``, given the gradient of the logits."""
        return (
            torch.mm(slope, self._head)
            if self.narrow
            else _multiply_transposed(slope, self._head.t())
        )

    def grad_head(self, slope: Tensor, hidden: Tensor, accumulated: Tensor | None) -> Tensor:
        """Return ``accumulated`` (None: zeros) plus the gradient with respect to the head; may
        overwrite ``accumulated``."""
        if self.narrow:
            if accumulated is None:
                return torch.mm(slope.t(), hidden, out_dtype=torch.float32)
            # Accumulate in place instead of allocating a second gradient of this size per chunk.
            return torch.addmm(
                accumulated, slope.t(), hidden, out_dtype=torch.float32, out=accumulated
            )
        if accumulated is not None and accumulated.is_cuda:
            return accumulated.addmm_(slope.t(), hidden.float())
        part = _multiply_transposed(slope.t(), hidden.float().t())
        return part if accumulated is None else accumulated.add_(part)


@functools.cache
def supports_bf16_products(device: torch.device) -> bool:
    """Return whether torch multiplies bf16 matrices with fp32 sums and results on this device.

    This is tested, since not every release supports it on every GPU. Without it the head is several
    times slower, and a warning is logged.
    """
    return device.type == "cuda" and _test_bf16_products(device)


def _test_bf16_products(device: torch.device) -> bool:
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
    adapter: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of ``ids``, fp32 of the same shape, and entropies, fp32 (m,).

    Everything is computed in fp32, whatever the dtype of the factors (for bf16 on a GPU see
    ``_Products``). Gradients reach ``hidden``, ``head_weight``, ``adapter`` and ``bias``; there are
    no second derivatives. The backward pass recomputes the logits, except those of small calls, and
    except if only ``hidden`` needs a gradient and there is one id per row, no entropy and no cap.

    Args:
        hidden: (m, width).
        head_weight: (vocabulary, width). Logits are ``hidden`` times its transpose.
        ids: int64 (m,) or (m, K).
        temperature: Divides the logits. Raises ValueError if it is not positive.
        chunk: Number of rows of logits that exist at once; None chooses it by the device.
        with_entropy: Without it, entropies are 0.
        bias: (vocabulary,), added to the logits.
        factor, cap: Applied to the logits by ``scale_and_cap``, before the temperature.
        adapter: Factors fp32 (m, rank) and (vocabulary, rank) of a product that is added to the
            logits: the first times the transpose of the second.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    if chunk is None:
        chunk = _choose_chunk(head_weight)
    head_options = (factor, cap, float(temperature))
    index = ids if ids.ndim == 2 else ids[:, None]
    low_and_up = (None, None) if adapter is None else adapter
    arguments = (
        hidden,
        head_weight,
        *low_and_up,
        bias,
        index,
        head_options,
        max(1, chunk),
        with_entropy,
    )
    logprobs, entropy = _SelectedLogprobs.apply(*arguments)  # type: ignore[misc]
    return logprobs if ids.ndim == 2 else logprobs[:, 0], entropy


def _choose_chunk(head_weight: Tensor) -> int:
    """Return the number of rows of logits that exist at once, by the device of the head."""
    device = head_weight.device
    gpu = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    return chunk_rows(len(head_weight), gpu)


@torch.no_grad()
def most_likely_ids(
    hidden: Tensor,
    head_weight: Tensor,
    *,
    bias: Tensor | None = None,
    factor: float = 1.0,
    cap: float | None = None,
    adapter: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return the token with the highest logit for each hidden state, int64 (m,). The arguments are
    those of ``selected_logprobs``."""
    products = _Products(hidden, head_weight)
    low, up = (None, None) if adapter is None else adapter
    chunk = _choose_chunk(head_weight)
    best = torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device)
    for start in range(0, len(hidden), chunk):
        rows = slice(start, start + chunk)
        logits = _add_adapter_logits(products.logits(hidden[rows], bias), low, up, rows)
        best[rows] = scale_and_cap(logits, factor, cap).argmax(-1)
    return best


def scale_and_cap(logits: Tensor, factor: float, cap: float | None) -> Tensor:
    """Multiply logits by ``factor`` and, with ``cap``, bound them to +-cap by tanh; in place."""
    logits = logits.mul_(factor) if factor != 1.0 else logits
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


class _SelectedLogprobs(torch.autograd.Function):
    """Autograd function of ``selected_logprobs``."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        low: Tensor | None,
        up: Tensor | None,
        bias: Tensor | None,
        ids: Tensor,
        head_options: tuple[float, float | None, float],
        chunk: int,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        products = _Products(hidden, weight)
        (factor, cap, temperature) = head_options
        logprobs = hidden.new_zeros(ids.shape, dtype=torch.float32)
        entropy = logprobs.new_zeros(len(ids))
        normaliser = logprobs.new_empty(len(ids))
        keep = (
            any(ctx.needs_input_grad)
            and 4 * len(ids) * len(weight) <= _KEPT_BYTES
            and len(ids) <= chunk
            and not products.by_columns
        )
        kept_logits = None
        # With a frozen head only the gradient of ``hidden`` is needed. It is the gradient of the
        # log-probability, which is known here, times the incoming gradient, so the backward pass
        # recomputes nothing.
        computes_slopes = (
            ids.shape[1] == 1 and not with_entropy and cap is None and ctx.needs_input_grad[0]
        )
        computes_slopes = computes_slopes and not any(ctx.needs_input_grad[1:])
        slopes = torch.empty_like(hidden) if computes_slopes else None
        for start in range(0, len(ids), chunk):
            rows = slice(start, start + chunk)
            logits = _add_adapter_logits(products.logits(hidden[rows], bias), low, up, rows)
            logits = _apply_temperature(scale_and_cap(logits, factor, cap), temperature)
            if slopes is not None:
                logprobs[rows], slope = _logprobs_with_slope(
                    logits, ids[rows], factor / temperature
                )
                slopes[rows] = products.grad_hidden(products.round_slope(slope)).to(hidden.dtype)
                del logits, slope  # before the next chunk is allocated
                continue
            normaliser[rows] = logits.logsumexp(-1)
            logprobs[rows] = logits.gather(-1, ids[rows]) - normaliser[rows, None]
            kept_logits = logits if keep and cap is None else None
            if with_entropy:
                scaled = functional.softmax(logits, -1).mul_(logits).sum(-1)
                entropy[rows] = normaliser[rows] - scaled
            del logits
        ctx.computes_slopes = computes_slopes
        if slopes is not None:
            ctx.save_for_backward(slopes)
            return logprobs, entropy
        ctx.save_for_backward(hidden, weight, low, up, bias, ids, normaliser, entropy, kept_logits)
        ctx.shape = head_options
        ctx.chunk = chunk
        ctx.with_entropy = with_entropy
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.computes_slopes:
            (slopes,) = ctx.saved_tensors
            return ((slopes * grads[0]).to(slopes.dtype), *[None] * 8)
        hidden, weight, low, up, bias, ids, normaliser, entropy, kept_logits = ctx.saved_tensors
        grad_logprobs, grad_entropy = grads
        grad_rows = grad_logprobs.sum(-1, keepdim=True) if ids.shape[1] > 1 else grad_logprobs
        products = _Products(hidden, weight)
        (factor, cap, temperature) = ctx.shape
        if products.by_columns:
            return (
                *_differentiate_by_columns(ctx, products, grad_rows, *grads),
                None,
                None,
                None,
                None,
            )
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] and not len(ids) else None
        grad_low = None if low is None else torch.empty_like(low)
        grad_up = None if up is None else torch.zeros_like(up)
        grad_bias = (
            torch.zeros(len(weight), device=hidden.device) if ctx.needs_input_grad[4] else None
        )
        for start in range(0, len(ids), ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            cap_slope = None
            logits = kept_logits
            if logits is None:
                logits = scale_and_cap(
                    _add_adapter_logits(products.logits(hidden[rows], bias), low, up, rows),
                    factor,
                    cap,
                )
                # the slope of the tanh
                cap_slope = None if cap is None else 1 - (logits / cap).square_()
                log_p = _apply_temperature(logits, temperature).sub_(normaliser[rows, None])
            else:
                log_p = logits - normaliser[rows, None]
            slope = log_p.exp() if ctx.with_entropy else log_p.exp_()
            if ctx.with_entropy:  # d entropy / d logit = -p (log p + entropy)
                log_p.add_(entropy[rows, None]).mul_(grad_entropy[rows, None]).add_(grad_rows[rows])
                slope.mul_(log_p).neg_()
            else:
                slope.mul_(grad_rows[rows]).neg_()
            slope.scatter_add_(-1, ids[rows], grad_logprobs[rows])
            slope = _apply_temperature(slope, temperature)
            slope = slope if cap_slope is None else slope.mul_(cap_slope)
            slope = slope if factor == 1.0 else slope.mul_(factor)
            if grad_bias is not None:
                grad_bias += slope.sum(0)
            if low is not None and up is not None and grad_low is not None and grad_up is not None:
                grad_low[rows] = slope @ up
                grad_up.addmm_(slope.t(), low[rows])
            slope = products.round_slope(slope)
            if grad_hidden is not None:
                grad_hidden[rows] = products.grad_hidden(slope).to(hidden.dtype)
            if ctx.needs_input_grad[1]:
                grad_weight = products.grad_head(slope, hidden[rows], grad_weight)
            del logits, log_p, slope, cap_slope  # before the next chunk is allocated
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        grad_bias = None if grad_bias is None else grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight, grad_low, grad_up, grad_bias, None, None, None, None


def _differentiate_by_columns(
    ctx: Any, products: _Products, grad_rows: Tensor, grad_logprobs: Tensor, grad_entropy: Tensor
) -> tuple[Tensor | None, ...]:
    """Return the gradients of ``hidden``, ``weight``, ``low``, ``up`` and ``bias``, computed for
    some columns of the logits at a time (see ``_Products.by_columns``)."""
    hidden, weight, low, up, bias, ids, normaliser, entropy, _ = ctx.saved_tensors
    (factor, cap, temperature) = ctx.shape
    needs_hidden, needs_weight, _, _, needs_bias = ctx.needs_input_grad[:5]
    grad_hidden = torch.zeros_like(hidden, dtype=torch.float32) if needs_hidden else None
    grad_weight = torch.zeros_like(weight) if needs_weight else None
    grad_low = None if low is None else torch.zeros_like(low)
    grad_up = None if up is None else torch.zeros_like(up)
    grad_bias = torch.zeros_like(bias) if needs_bias else None
    width = ctx.chunk * len(weight) // max(1, len(ids))
    if width < len(weight):
        width = max(_ALIGNED_COLUMNS, width - width % _ALIGNED_COLUMNS)
    for start in range(0, len(weight) if len(ids) else 0, width):
        columns = slice(start, start + width)
        logits = products.logits(hidden, bias, columns)
        if low is not None and up is not None:
            logits.addmm_(low, up[columns].t())
        logits = scale_and_cap(logits, factor, cap)
        cap_slope = None if cap is None else 1 - (logits / cap).square_()
        log_p = _apply_temperature(logits, temperature).sub_(normaliser[:, None])
        slope = log_p.exp() if ctx.with_entropy else log_p.exp_()
        if ctx.with_entropy:  # d entropy / d logit = -p (log p + entropy)
            log_p.add_(entropy[:, None]).mul_(grad_entropy[:, None]).add_(grad_rows)
            slope.mul_(log_p).neg_()
        else:
            slope.mul_(grad_rows).neg_()
        place = ids - start
        is_here = (place >= 0) & (place < slope.shape[1])
        slope.scatter_add_(
            -1, place.clamp_(0, slope.shape[1] - 1), torch.where(is_here, grad_logprobs, 0.0)
        )
        slope = _apply_temperature(slope, temperature)
        slope = slope if cap_slope is None else slope.mul_(cap_slope)
        slope = slope if factor == 1.0 else slope.mul_(factor)
        if grad_bias is not None:
            grad_bias[columns] = slope.sum(0).to(grad_bias.dtype)
        if low is not None and up is not None and grad_low is not None and grad_up is not None:
            grad_low.addmm_(slope, up[columns])
            torch.mm(slope.t(), low, out=grad_up[columns])
        slope = products.round_slope(slope)
        if grad_hidden is not None:
            products.add_grad_hidden(grad_hidden, slope, columns)
        if grad_weight is not None:
            torch.mm(slope.t(), hidden, out=grad_weight[columns])
        del logits, log_p, slope, cap_slope  # before the next columns are allocated
    grad_hidden = None if grad_hidden is None else grad_hidden.to(hidden.dtype)
    return grad_hidden, grad_weight, grad_low, grad_up, grad_bias


def _logprobs_with_slope(logits: Tensor, ids: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities (n, 1) of ``ids`` (n, 1), and ``factor`` times their gradients
    with respect to ``logits`` (n, vocabulary). The gradients overwrite ``logits``."""
    chosen = logits.gather(-1, ids)
    peak = logits.amax(-1, keepdim=True)
    total = logits.sub_(peak).exp_().sum(-1, keepdim=True)
    slope = logits.mul_(-factor / total).scatter_add_(-1, ids, torch.full_like(chosen, factor))
    return chosen - peak - total.log(), slope


def _add_adapter_logits(
    logits: Tensor, low: Tensor | None, up: Tensor | None, rows: slice
) -> Tensor:
    """Add the product of the adapter's factors to the logits of these rows, in place."""
    return logits if low is None or up is None else logits.addmm_(low[rows], up.t())


def _apply_temperature(logits: Tensor, temperature: float) -> Tensor:
    """Divide logits by the temperature, in place."""
    return logits if temperature == 1.0 else logits.div_(temperature)


def _multiply_transposed(x: Tensor, weight: Tensor) -> Tensor:
    """Return ``x`` (n, in) times the transpose of ``weight`` (out, in), both fp32."""
    return onednn_linear(x, weight) if trains_faster(weight) else functional.linear(x, weight)
