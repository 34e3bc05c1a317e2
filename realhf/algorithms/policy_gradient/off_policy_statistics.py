"""Measures how far behind the trained weights a batch was sampled, and how far its log-probabilities lie off."""

from __future__ import annotations

import torch
from torch import Tensor

from realhf.algorithms.sequences import PredictedTokens

N_BINS = 8
"""Bins of the histogram of head staleness; the last one counts everything from 7 on."""


def staleness_statistics(versions: Tensor, tokens: PredictedTokens, step: int) -> dict[str, float]:
    """Return the staleness u - v of the rollouts of a train step, u = ``step`` being the version of the weights that
    train (docs/reference/dataflow.md 1). ``versions`` i32 (n,) is the version that sampled each predicted token, -1 if
    unknown; only tokens inside the mask count.

    The head is a rollout's oldest token, the tail its newest: ``staleness/head_mean, head_max, tail_mean``, and
    ``staleness/hist_0`` ... ``hist_6``, ``hist_7plus``: fractions of rollouts by head staleness. The result is empty
    when none has a token of known version.
    """
    known = tokens.mask & (versions >= 0)
    rollout, lag = tokens.owner[known], step - versions[known].long()
    if not len(lag):
        return {}
    blank = torch.zeros(tokens.n_rollouts, dtype=torch.int64)
    head = blank.scatter_reduce(0, rollout, lag, "amax", include_self=False)
    tail = blank.scatter_reduce(0, rollout, lag, "amin", include_self=False)
    has = torch.zeros(tokens.n_rollouts, dtype=torch.bool).index_fill(0, rollout, True)
    head, tail = head[has], tail[has]
    bins = torch.bincount(head.clamp(0, N_BINS - 1), minlength=N_BINS).double() / len(head)
    names = [f"hist_{lag}" for lag in range(N_BINS - 1)] + [f"hist_{N_BINS - 1}plus"]
    found = {
        "head_mean": float(head.double().mean()),
        "head_max": float(head.max()),
        "tail_mean": float(tail.double().mean()),
        **dict(zip(names, bins.tolist(), strict=True)),
    }
    return {f"staleness/{name}": value for name, value in found.items()}


def mismatch_statistics(distances: Tensor) -> dict[str, float]:
    """Return quantiles of ``distances`` (n,), |behaviour - proximal log-probability| of each trained token:
    ``mismatch/abs_p50, abs_p99, abs_max``; {} without a token. With equal versions they measure how far engine and
    trainer disagree; with older ones, how far the policy has moved as well."""
    if not len(distances):
        return {}
    ordered = distances.sort().values
    at = {"p50": len(ordered) // 2, "p99": (99 * len(ordered)) // 100, "max": len(ordered) - 1}
    return {f"mismatch/abs_{name}": float(ordered[index]) for name, index in at.items()}
