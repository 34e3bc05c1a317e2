"""Computes log-probabilities of chosen tokens from hidden states, without ever holding the logits of a batch: under a
head that is a projection, or one and a bit more (a bias, a factor, a bound, as in Phi, Granite, Cohere, Gemma 2)."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from realhf.backends.embedded.kernels import product, trains_faster

logger = logging.getLogger(__name__)

CHUNK_BYTES = 3 << 24
"""Bytes of logits (fp32) held at once: 256 rows of a vocabulary of 49,152 tokens. Smaller chunks read the weight of the
head too often."""
GPU_CHUNK_BYTES, _LEAST_GPU_SHARE = 1 << 30, 64
"""The same on a GPU: 1,766 rows of a vocabulary of 151,936 tokens, if that is at most one part in 64 of its memory. The
backward pass holds two and a half times as much. A product of fewer rows is bound by reading the weight of the head and
by writing its gradient."""
_KEPT_BYTES = 1 << 24
"""Logits of a call up to this size are kept for the backward pass; more of them are computed again."""
_WIDE = 100.0
"""Size of the logits that a head is tried out with: bounds of usual size show."""


def chunk_rows(vocabulary: int, gpu_bytes: int = 0) -> int:
    """Return how many rows of logits, fp32, make a chunk; ``gpu_bytes`` is the memory of the GPU that computes them."""
    nbytes = max(CHUNK_BYTES, min(GPU_CHUNK_BYTES, gpu_bytes // _LEAST_GPU_SHARE))
    return max(1, nbytes // (4 * vocabulary))


def _rows_on(device: torch.device, vocabulary: int) -> int:
    gpu = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    return chunk_rows(vocabulary, gpu)


class _InFp32:
    """Multiplies by the weight of a head (vocabulary, width), in fp32 whatever the type of the factors. ``rounded`` is
    the gradient of logits as the next two take it; ``of_head`` adds to the gradient of the head so far, which it may
    overwrite."""

    def of(self, weight: Tensor) -> Tensor:
        return weight.float()

    def logits(self, hidden: Tensor, head: Tensor) -> Tensor:
        return _product(hidden.float(), head)

    def rounded(self, slope: Tensor) -> Tensor:
        return slope

    def of_hidden(self, slope: Tensor, head: Tensor) -> Tensor:
        return _product(slope, head.t())

    def of_head(self, slope: Tensor, hidden: Tensor, so_far: Tensor | None) -> Tensor:
        if so_far is not None and so_far.is_cuda:
            return so_far.addmm_(slope.t(), hidden.float())
        part = _product(slope.t(), hidden.float().t())
        return part if so_far is None else so_far.add_(part)


class _InBf16:
    """Multiplies bf16 factors with fp32 sums, on the tensor cores of a GPU. A product of two bf16 numbers is exact in
    fp32, so that logits are those of ``_InFp32`` but for the order of their sums; gradients of logits are rounded to
    bf16 before they are multiplied, as those of every other layer of the model are."""

    def of(self, weight: Tensor) -> Tensor:
        return weight

    def logits(self, hidden: Tensor, head: Tensor) -> Tensor:
        return torch.mm(hidden, head.t(), out_dtype=torch.float32)

    def rounded(self, slope: Tensor) -> Tensor:
        return slope.to(torch.bfloat16)

    def of_hidden(self, slope: Tensor, head: Tensor) -> Tensor:
        return torch.mm(slope, head)

    def of_head(self, slope: Tensor, hidden: Tensor, so_far: Tensor | None) -> Tensor:
        if so_far is None:
            return torch.mm(slope.t(), hidden, out_dtype=torch.float32)
        # The product adds to what is there, instead of writing a second gradient of that size for every chunk.
        return torch.addmm(so_far, slope.t(), hidden, out_dtype=torch.float32, out=so_far)


def _products_of(hidden: Tensor, weight: Tensor) -> _InFp32 | _InBf16:
    narrow = hidden.dtype == weight.dtype == torch.bfloat16
    return _InBf16() if narrow and multiplies_bf16(weight.device) else _InFp32()


@functools.cache
def multiplies_bf16(device: torch.device) -> bool:
    """Return whether torch multiplies bf16 with fp32 sums and results on this device. It is tried, since not every
    release does on every GPU; without it the head is several times as slow, and a warning says so."""
    return device.type == "cuda" and _tried(device)


def _tried(device: torch.device) -> bool:
    ones = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
    try:
        once = _InBf16().of_head(ones, ones, None)
        twice = _InBf16().of_head(ones, ones, once.clone())
        works = once.dtype == torch.float32 and bool((once == 16).all() and (twice == 32).all())
        reason = "its numbers are wrong"
    except (RuntimeError, TypeError) as error:
        works, reason = False, str(error).partition("\n")[0]
    if not works:
        logger.warning("log-probabilities on %s are computed in fp32: torch cannot sum bf16 there (%s)", device, reason)
    return works


def selected_logprobs(
    hidden: Tensor,
    head_weight: Tensor,
    ids: Tensor,
    temperature: float = 1.0,
    chunk: int | None = None,
    *,
    with_entropy: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of ``ids`` int64 (m,) and entropies, both fp32 (m,).

    Logits are ``hidden`` (m, width) times the transpose of ``head_weight`` (vocabulary, width), divided by
    ``temperature``; all of that in fp32, whatever the type of the factors (of bf16 ones on a GPU see ``_InBf16``).
    ``chunk`` rows of logits exist at once, the backward pass computes them again. Without ``with_entropy`` entropies
    are 0. Gradients reach ``hidden`` and ``head_weight``; there are no second derivatives. Raises ValueError on a
    temperature that is not positive.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    rows = _rows_on(head_weight.device, head_weight.shape[0]) if chunk is None else max(1, chunk)
    return _Selected.apply(hidden, head_weight, ids, float(temperature), rows, with_entropy)  # type: ignore[return-value]


class _Selected(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, ids: Tensor, temperature: float, chunk: int, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        products = _products_of(hidden, weight)
        head = products.of(weight)
        logprobs = hidden.new_zeros(len(ids), dtype=torch.float32)
        entropy, normaliser = torch.zeros_like(logprobs), torch.empty_like(logprobs)
        keep = any(ctx.needs_input_grad) and 4 * len(ids) * len(weight) <= _KEPT_BYTES and len(ids) <= chunk
        kept = None
        for start in range(0, len(ids), chunk):
            rows = slice(start, start + chunk)
            logits = _scaled(products.logits(hidden[rows], head), temperature)
            normaliser[rows] = logits.logsumexp(-1)
            logprobs[rows] = logits.gather(-1, ids[rows, None])[:, 0] - normaliser[rows]
            kept = logits if keep else None
            if with_entropy:
                scaled = functional.softmax(logits, -1).mul_(logits).sum(-1)
                entropy[rows] = normaliser[rows] - scaled
        ctx.save_for_backward(hidden, weight, ids, normaliser, entropy, kept)
        ctx.temperature, ctx.chunk, ctx.with_entropy = temperature, chunk, with_entropy
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, ids, normaliser, entropy, kept = ctx.saved_tensors
        of_logprobs, of_entropy = grads
        products = _products_of(hidden, weight)
        head = products.of(weight)
        of_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        of_weight: Tensor | None = None
        for start in range(0, len(ids), ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            if kept is None:
                log_p = _scaled(products.logits(hidden[rows], head), ctx.temperature).sub_(normaliser[rows, None])
            else:
                log_p = kept - normaliser[rows, None]
            slope = log_p.exp() if ctx.with_entropy else log_p.exp_()
            if ctx.with_entropy:  # d entropy / d logit = -p (log p + entropy)
                log_p.add_(entropy[rows, None]).mul_(of_entropy[rows, None]).add_(of_logprobs[rows, None])
                slope.mul_(log_p).neg_()
            else:
                slope.mul_(of_logprobs[rows, None]).neg_()
            slope.scatter_add_(-1, ids[rows, None], of_logprobs[rows, None])
            if ctx.temperature != 1.0:
                slope.div_(ctx.temperature)
            slope = products.rounded(slope)
            if of_hidden is not None:
                of_hidden[rows] = products.of_hidden(slope, head).to(hidden.dtype)
            if ctx.needs_input_grad[1]:
                of_weight = products.of_head(slope, hidden[rows], of_weight)
        if of_weight is None and ctx.needs_input_grad[1]:
            of_weight = torch.zeros_like(head)
        return of_hidden, None if of_weight is None else of_weight.to(weight.dtype), None, None, None, None


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    return logits if temperature == 1.0 else logits.div_(temperature)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply ``x`` (n, in) by the transpose of ``weight`` (out, in), both fp32."""
    return product(x, weight) if trains_faster(weight) else functional.linear(x, weight)


class _Projection(torch.autograd.Function):
    """Is ``_InBf16`` for autograd: the gradient of the head adds up in ``wide``, the same weight in fp32."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, wide: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return _InBf16().logits(hidden, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        hidden, weight = ctx.saved_tensors
        products, slope = _InBf16(), grads[0].to(torch.bfloat16)
        of_hidden = products.of_hidden(slope, weight) if ctx.needs_input_grad[0] else None
        return of_hidden, products.of_head(slope, hidden, None) if ctx.needs_input_grad[1] else None, None


@dataclass(frozen=True)
class BentHead:
    """Is a head whose logits are ``factor`` times those of the linear layer that ``layer`` returns, with ``cap``
    bounded to that by tanh."""

    layer: Callable[[], nn.Linear]
    factor: float = 1.0
    cap: float | None = None

    def bend(self, logits: Tensor) -> Tensor:
        """Make the model's logits of those of the linear layer."""
        logits = logits * self.factor if self.factor != 1.0 else logits
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)

    def score(
        self, hidden: Tensor, ids: Tensor, temperature: float, *, with_entropy: bool, chunk: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities of ``ids`` int64 (m,) after ``hidden`` (m, width), and entropies, 0 if not wanted;
        both fp32 (m,), computed in fp32, ``chunk`` positions at once."""
        layer = self.layer()
        # In fp32 before it is cut in chunks: their gradients add up in its type.
        weight, bias = layer.weight.float(), None if layer.bias is None else layer.bias.float()
        narrow = isinstance(_products_of(hidden, layer.weight), _InBf16)

        def linear(hidden: Tensor) -> Tensor:
            if not narrow:
                return functional.linear(hidden.float(), weight, bias)
            logits: Tensor = _Projection.apply(hidden, weight, layer.weight.detach())  # type: ignore[assignment]
            return logits if bias is None else logits + bias

        def scores(hidden: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
            logits = self.bend(linear(hidden))
            log_p = functional.log_softmax(logits / temperature, -1)
            logprobs = log_p.gather(-1, ids[:, None])[:, 0]
            return logprobs, -(log_p.exp() * log_p).sum(-1) if with_entropy else torch.zeros_like(logprobs)

        size = _rows_on(weight.device, len(weight)) if chunk is None else chunk
        parts: list[tuple[Tensor, Tensor]] = [
            checkpoint(scores, h, i, use_reentrant=False, preserve_rng_state=False)  # type: ignore[misc]
            for h, i in zip(hidden.split(size), ids.split(size), strict=True)
        ]
        return torch.cat([logprobs for logprobs, _ in parts]), torch.cat([entropy for _, entropy in parts])


@torch.no_grad()
def bent_head(model: Any) -> BentHead | None:
    """Return what the head of ``model`` is, by its configuration, if the model then gives the same logits, for small
    ones and for large ones; None if it does something else."""
    layer = model.get_output_embeddings()
    if not isinstance(layer, nn.Linear):
        return None
    config = model.config.get_text_config()
    cap = getattr(config, "final_logit_softcapping", None)
    factor = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    head = BentHead(model.get_output_embeddings, factor, float(cap) if cap else None)
    given: list[Tensor] = []

    def widen(_module: Any, _args: Any, output: Any) -> Any:
        hidden = output.last_hidden_state
        wide = hidden * (_WIDE / layer(hidden).float().abs().max().clamp(min=1e-6)).to(hidden.dtype)
        given.extend((hidden, wide))
        output.last_hidden_state = torch.cat(given)
        return output

    tokens = torch.tensor([[0, 1]], device=model.device)
    handle = model.get_decoder().register_forward_hook(widen)
    try:
        found = model(input_ids=tokens, use_cache=False).logits.float()
        expected = head.bend(layer(torch.cat(given)).float())
    except (AttributeError, TypeError, RuntimeError):
        return None
    finally:
        handle.remove()
    off = (found - expected).abs().amax((1, 2)) / expected.abs().amax((1, 2)).clamp(min=1e-6)
    return head if float(off.max()) <= max(1e-4, 2 * torch.finfo(model.dtype).eps) else None
