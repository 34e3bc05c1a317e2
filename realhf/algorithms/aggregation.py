"""Sums losses per token into the loss of a minibatch, also of one cut into microbatches.

Source: docs/reference/dataflow.md 10.
"""

from __future__ import annotations

import torch
from torch import Tensor


def token_weights(
    mask: Tensor, sequence: Tensor, n_sequences: int, aggregation: str, loss_scale_len: int = 1
) -> Tensor:
    """Return the weight of every token such that the sum of weight * loss is the aggregated loss: f32 (n,), 0 outside
    the mask. ``sequence`` i64 (n,) numbers what counts once in a mean over sequences: the rollout of each token, which
    may have several rows.

    The weights are computed over a whole minibatch, so that it can be cut into microbatches afterwards, and before any
    sequence is left out for having no advantage: normalisers count those too.

    With T tokens and S sequences that have at least one token: ``token_mean`` 1/T; ``seq_mean_token_mean`` 1/(S |o|);
    ``seq_mean_token_sum`` 1/S; ``constant`` 1/(S loss_scale_len).
    """
    count = torch.zeros(n_sequences, dtype=torch.float64, device=mask.device)
    count = count.index_add(0, sequence, mask.double())
    n_trained = (count > 0).sum().clamp(min=1)
    if aggregation == "token_mean":
        weight = torch.full_like(count, 1.0) / count.sum().clamp(min=1)
    elif aggregation == "seq_mean_token_mean":
        weight = 1 / (n_trained * count.clamp(min=1))
    elif aggregation == "seq_mean_token_sum":
        weight = torch.full_like(count, 1.0) / n_trained
    elif aggregation == "constant":
        weight = torch.full_like(count, 1.0) / (n_trained * loss_scale_len)
    else:
        raise ValueError(f"unknown loss aggregation {aggregation!r}")
    return torch.where(mask, weight[sequence], 0.0).float()


def weighted_sum(values: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of weights * values over the mask, a scalar with the graph of ``values`` attached."""
    return torch.where(mask, values * weights, 0.0).sum()
