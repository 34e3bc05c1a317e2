"""Gives each turn of an episode its own advantage: ``ppo.credit=turn`` (docs/reference/dataflow.md 10)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Estimator = Callable[[Tensor, Tensor, Tensor], Tensor]


def returns_by_turn(rewards: Tensor, counts: Tensor, discount: float) -> Tensor:
    """Return f64 (n sequences, most turns): entry (i, k) is the sum of discount^(j-k) r_ij over the turns j >= k of
    sequence i; from its last turn on, the return of that one.

    ``rewards`` f32 (sum of counts,) are the rewards of the turns, sequence after sequence; ``counts`` i64 (n
    sequences,), each at least 1.
    """
    sequence = torch.repeat_interleave(torch.arange(len(counts)), counts)
    turn = torch.arange(len(rewards)) - (counts.cumsum(0) - counts)[sequence]
    table = torch.zeros(len(counts), int(counts.max()) if len(counts) else 0, dtype=torch.float64)
    table[sequence, turn] = rewards.double()
    for k in range(table.shape[1] - 2, -1, -1):
        table[:, k] += discount * table[:, k + 1]
    places = torch.arange(table.shape[1])
    return table.gather(1, torch.minimum(places[None], counts[:, None] - 1))


def turn_advantages(scores: Tensor, valid: Tensor, group: Tensor, estimator: Estimator) -> Tensor:
    """Return f32 (n sequences, most turns): the advantage of the return from each turn on, among the returns from the
    same turn on of its group. Invalid sequences get 0.

    ``scores`` f32 (n sequences, most turns) are such returns, ``valid`` and ``group`` as for an estimator. This is the
    turn-level advantage of MT-GRPO (Zeng et al. 2025, Reinforcing Multi-Turn Reasoning in LLM Agents via Turn-Level
    Credit Assignment: rewards of one turn are normalised across the group) with the return-to-go of REINFORCE (Williams
    1992) in the place of the turn's reward plus the outcome. An episode that is over by then is compared by its last
    turn's return, so that every comparison has all of the group: with a reward in the last turn alone and without a
    discount every turn gets what ``estimator`` gives the episode.
    """
    columns = [estimator(column, valid, group) for column in scores.unbind(1)]
    return torch.stack(columns, 1) if columns else torch.zeros_like(scores)


def of_tokens(advantages: Tensor, turn: Tensor, sequence: Tensor, mask: Tensor, counts: Tensor) -> Tensor:
    """Spread ``advantages`` f32 (n sequences, most turns) over tokens: f32 (n,), 0 outside ``mask``. ``turn`` i32 (n,)
    is the turn of each predicted token. Raises ValueError when a token of the mask is in no turn of its sequence."""
    inside = torch.where(mask, turn.long(), 0)
    if bool(((inside < 0) | (inside >= counts[sequence]))[mask].any()):
        raise ValueError("turn_ids: a trained token is in no turn that has a reward in turn_rewards")
    return torch.where(mask, advantages[sequence, inside], 0.0) if advantages.numel() else torch.zeros(len(mask))
