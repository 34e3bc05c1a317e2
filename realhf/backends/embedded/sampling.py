"""Sampling of next tokens from logits, with one uniform number per row."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from realhf.api.config import GenConfig
from realhf.api.model import GenRequest

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""Increment of splitmix64: 2**64 divided by the golden ratio."""


def _mix(z: np.ndarray) -> np.ndarray:
    """Apply splitmix64's finaliser (Steele, Lea, Flood 2014) to uint64."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def seed_stream(seed: int) -> int:
    """Return the 64-bit start of a sequence's random number stream. Similar seeds give starts that
    are far apart."""
    start = np.array([seed & 0xFFFF_FFFF_FFFF_FFFF], dtype=np.uint64)
    return int(_mix(start + _GOLDEN)[0])


def uniform_at(streams: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return uniform random numbers in [0, 1) with 53 random bits, fp64, one per stream.

    A number depends only on its stream (``streams``, uint64, from ``seed_stream``) and its position
    (``positions``, int64, index of the token in the whole sequence). There is no state, so the
    number does not depend on batch, chunk or round.
    """
    z = _mix(streams + positions.astype(np.uint64) * _GOLDEN)
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53


def check_request(request: GenRequest, config: GenConfig) -> None:
    """Raise ValueError for a request without tokens or with an option out of range, naming the
    option."""
    if len(request.token_ids) == 0:
        raise ValueError(f"generate: the request for slot {request.slot} has no tokens")
    if config.max_new_tokens < 1:
        raise ValueError(f"gen.max_new_tokens must be at least 1, got {config.max_new_tokens}")
    if config.min_new_tokens < 0 or config.min_new_tokens > config.max_new_tokens:
        raise ValueError(
            f"gen.min_new_tokens must be in [0, max_new_tokens], got {config.min_new_tokens}"
        )
    if not config.temperature >= 0:
        raise ValueError(f"gen.temperature must be >= 0 (0 is greedy), got {config.temperature}")
    if not 0 < config.top_p <= 1:
        raise ValueError(f"gen.top_p must be in (0, 1], got {config.top_p}")
    if config.new_tokens_per_chunk is not None and config.new_tokens_per_chunk < 1:
        raise ValueError(
            f"gen.new_tokens_per_chunk must be at least 1, got {config.new_tokens_per_chunk}"
        )
    if config.top_k < 0:
        raise ValueError(f"gen.top_k must be >= 0 (0 keeps all), got {config.top_k}")


def sample_tokens(
    logits: Tensor, uniform: Tensor, config: GenConfig, banned: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return sampled next tokens, int64 (n,), with their log-probabilities, fp32 (n,).

    The log-probability is that of the temperature-scaled softmax over the whole vocabulary (with
    greedy sampling, of the plain softmax), as a trainer recomputes it. Truncation by top_p and
    top_k changes the sampled tokens, but not their log-probabilities.

    Args:
        logits: (n, vocabulary).
        uniform: Random numbers in [0, 1), fp64 (n,).
        banned: bool (n, vocabulary), true for tokens that may not be sampled now.
    """
    logits = logits.float()
    scaled = logits if config.temperature in (0.0, 1.0) else logits / config.temperature
    allowed = scaled if banned is None else scaled.masked_fill(banned, float("-inf"))
    if config.temperature == 0:
        return _with_logprobs(scaled, allowed.argmax(-1))
    if config.top_k or config.top_p < 1:
        allowed = truncate(allowed, config.top_k, config.top_p)
    # The inverse of the cumulative distribution needs one random number per row, not one per
    # vocabulary entry. The first index whose cumulative mass exceeds the draw has positive mass by
    # construction.
    probabilities = torch.softmax(allowed, -1)
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    draw = (uniform[:, None] * cumulative[:, -1:]).contiguous()
    tokens = torch.searchsorted(cumulative, draw, right=True).clamp_(max=logits.shape[-1] - 1)
    if allowed is scaled:
        return tokens[:, 0], probabilities.gather(-1, tokens).log()[:, 0]
    return _with_logprobs(scaled, tokens[:, 0])


def token_logprobs(logits: Tensor, tokens: Tensor, config: GenConfig) -> Tensor:
    """Return the log-probabilities of ``tokens``, int64 (n,), that ``sample_tokens`` returns for
    the same logits, fp32 (n,)."""
    logits = logits.float()
    scaled = logits if config.temperature in (0.0, 1.0) else logits / config.temperature
    return _with_logprobs(scaled, tokens)[1]


def _with_logprobs(scaled: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tokens and their log-probabilities under the scaled logits."""
    return tokens, scaled.gather(-1, tokens[:, None])[:, 0] - scaled.logsumexp(-1)


def truncate(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Return logits (n, vocabulary) that are -inf for tokens excluded by ``top_k`` or ``top_p``.

    ``top_k`` keeps the k largest logits, ``top_p`` the smallest set of most probable tokens whose
    total probability reaches it. The most probable token always remains.
    """
    if 0 < top_k < logits.shape[-1]:
        smallest_kept = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest_kept, float("-inf"))
    if top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        mass_before = torch.softmax(ordered, -1).cumsum(-1) - torch.softmax(ordered, -1)
        drop = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, mass_before >= top_p)
        logits = logits.masked_fill(drop, float("-inf"))
    return logits
