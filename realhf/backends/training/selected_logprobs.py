"""Computes log-probabilities of chosen tokens from hidden states, without ever holding the logits of a batch: under a
head that is a projection, or one and a bit more (a bias, a factor, a bound, as in Phi, Granite, Cohere, Gemma 2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from realhf.backends.embedded.onednn_linear import product, trains_faster

CHUNK_BYTES = 3 << 24
"""Bytes of logits (fp32) held at once: 256 rows of a vocabulary of 49,152 tokens. Smaller chunks read the weight of the
head too often."""
_KEPT_BYTES = 1 << 24
"""Logits of a call up to this size are kept for the backward pass; more of them are computed again."""
_WIDE = 100.0
"""Size of the logits that a head is tried out with: bounds of usual size show."""


def chunk_rows(vocabulary: int) -> int:
    """Return how many rows of logits, fp32, make a chunk."""
    return max(1, CHUNK_BYTES // (4 * vocabulary))


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
    ``temperature``; all of that in fp32, whatever the type of the factors. ``chunk`` rows of logits exist at once, the
    backward pass computes them again. Without ``with_entropy`` entropies are 0. Gradients reach ``hidden`` and
    ``head_weight``; there are no second derivatives. Raises ValueError on a temperature that is not positive.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    rows = chunk_rows(head_weight.shape[0]) if chunk is None else max(1, chunk)
    return _Selected.apply(hidden, head_weight, ids, float(temperature), rows, with_entropy)  # type: ignore[return-value]


class _Selected(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, ids: Tensor, temperature: float, chunk: int, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        head = weight.float()
        logprobs = hidden.new_zeros(len(ids), dtype=torch.float32)
        entropy, normaliser = torch.zeros_like(logprobs), torch.empty_like(logprobs)
        keep = any(ctx.needs_input_grad) and 4 * len(ids) * len(weight) <= _KEPT_BYTES and len(ids) <= chunk
        kept = None
        for start in range(0, len(ids), chunk):
            rows = slice(start, start + chunk)
            logits = _logits(hidden[rows], head, temperature)
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
        head = weight.float()
        of_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        of_weight: Tensor | None = None
        for start in range(0, len(ids), ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            if kept is None:
                log_p = _logits(hidden[rows], head, ctx.temperature).sub_(normaliser[rows, None])
            else:
                log_p = kept - normaliser[rows, None]
            slope = log_p.exp()
            if ctx.with_entropy:  # d entropy / d logit = -p (log p + entropy)
                log_p.add_(entropy[rows, None]).mul_(of_entropy[rows, None]).add_(of_logprobs[rows, None])
                slope.mul_(log_p).neg_()
            else:
                slope.mul_(of_logprobs[rows, None]).neg_()
            slope.scatter_add_(-1, ids[rows, None], of_logprobs[rows, None])
            if ctx.temperature != 1.0:
                slope.div_(ctx.temperature)
            if of_hidden is not None:
                of_hidden[rows] = _product(slope, head.t()).to(hidden.dtype)
            if ctx.needs_input_grad[1]:
                part = _product(slope.t(), hidden[rows].float().t())
                of_weight = part if of_weight is None else of_weight.add_(part)
        if of_weight is None and ctx.needs_input_grad[1]:
            of_weight = torch.zeros_like(head)
        return of_hidden, None if of_weight is None else of_weight.to(weight.dtype), None, None, None, None


def _logits(hidden: Tensor, head: Tensor, temperature: float) -> Tensor:
    logits = _product(hidden.float(), head)
    return logits if temperature == 1.0 else logits.div_(temperature)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply ``x`` (n, in) by the transpose of ``weight`` (out, in), both fp32."""
    return product(x, weight) if trains_faster(weight) else functional.linear(x, weight)


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

        def scores(hidden: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
            logits = self.bend(functional.linear(hidden.float(), weight, bias))
            log_p = functional.log_softmax(logits / temperature, -1)
            logprobs = log_p.gather(-1, ids[:, None])[:, 0]
            return logprobs, -(log_p.exp() * log_p).sum(-1) if with_entropy else torch.zeros_like(logprobs)

        size = chunk_rows(len(weight)) if chunk is None else chunk
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
