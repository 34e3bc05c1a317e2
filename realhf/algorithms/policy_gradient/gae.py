"""Estimates advantages with the values of a critic: GAE over the tokens that the policy sampled, or over its turns.

Source: Schulman et al. 2016, High-Dimensional Continuous Control Using Generalized Advantage Estimation; the formulas
stand in docs/reference/ppo.md 2. Sums are fp64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class ValueEstimate(NamedTuple):
    """Holds ``advantages`` and ``returns`` f32 (n,), 0 outside their masks, and ``valued`` bool (n,): the positions
    whose return the critic learns."""

    advantages: Tensor
    returns: Tensor
    valued: Tensor


def generalised(rewards: Tensor, values: Tensor, present: Tensor, discount: float, lam: float) -> Tensor:
    """Return the advantage of every decision, f64 (n, k); where ``present`` is False it means nothing.

    A row holds the decisions of a sequence in their order: ``rewards`` f64 (n, k) is what follows each, ``values`` f64
    (n, k) that of the state it was made in. Behind the last decision the value is 0: the sequence is over. Where
    ``present`` (bool) is False nothing was decided and no value is known; what is earned there belongs to the decision
    before, discounted by the distance.
    """
    following, advantage = rewards.new_zeros(len(rewards)), rewards.new_zeros(len(rewards))
    found = torch.zeros_like(rewards)
    for k in range(rewards.shape[1] - 1, -1, -1):
        here, earned = present[:, k], rewards[:, k] + discount * following
        advantage = discount * torch.where(here, lam, 1.0) * advantage
        advantage = torch.where(here, earned - values[:, k] + advantage, advantage)
        following = torch.where(here, values[:, k], earned)
        found[:, k] = advantage
    return found


def of_sampled_tokens(
    rewards: Tensor, values: Tensor, mask: Tensor, sequence: Tensor, n_sequences: int, discount: float, lam: float
) -> ValueEstimate:
    """Take every token of ``mask`` as a decision: the next one is the policy's next token, however much text of the
    environment stands between them.

    ``rewards`` and ``values`` f32 (n,), ``mask`` bool (n,), ``sequence`` i64 (n,) sorted, in [0, n_sequences). The
    return of a token is its advantage plus its value. Positions outside the mask may hold anything.
    """
    chosen, rank, most = _ranked(mask, sequence, n_sequences)
    table = torch.zeros(3, n_sequences, most, dtype=torch.float64)
    table[0, chosen, rank], table[1, chosen, rank], table[2, chosen, rank] = (
        rewards[mask].double(),
        values[mask].double(),
        1.0,
    )
    found = generalised(table[0], table[1], table[2] > 0, discount, lam)
    advantages, returns = (torch.zeros(len(mask)) for _ in range(2))
    advantages[mask] = found[chosen, rank].float()
    returns[mask] = (found + table[1])[chosen, rank].float()
    return ValueEstimate(advantages, returns, mask)


def of_turns(
    rewards: Tensor,
    turn_rewards: Tensor,
    counts: Tensor,
    values: Tensor,
    turn: Tensor,
    mask: Tensor,
    sequence: Tensor,
    discount: float,
    lam: float,
) -> ValueEstimate:
    """Take every turn as one decision, made in the state before its first token; all its tokens get its advantage, and
    the critic learns the return of that state.

    ``turn_rewards`` f32 (sum of ``counts``,) follow the turns, sequence after sequence; ``rewards`` f32 (n,) are added
    to the turn of their token. ``turn`` (n,) is the turn of each predicted token; the rest is as in
    ``of_sampled_tokens``. Raises ValueError when a token of the mask is in no turn of its sequence.
    """
    inside = torch.where(mask, turn.long(), 0)
    if bool(((inside < 0) | (inside >= counts[sequence]))[mask].any()):
        raise ValueError("turn_ids: a trained token is in no turn that has a reward in turn_rewards")
    first = first_of_turn(turn, mask, sequence)
    owner = torch.repeat_interleave(torch.arange(len(counts)), counts)
    number = torch.arange(len(owner)) - (counts.cumsum(0) - counts)[owner]
    shape = len(counts), int(counts.max()) if len(counts) else 0
    earned, value = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    present = torch.zeros(shape, dtype=torch.bool)
    earned[owner, number] = turn_rewards.double()
    earned.index_put_((sequence[mask], inside[mask]), rewards[mask].double(), accumulate=True)
    value[sequence[first], inside[first]] = values[first].double()
    present[sequence[first], inside[first]] = True
    found = generalised(earned, value, present, discount, lam)
    advantages, returns = (torch.zeros(len(mask)) for _ in range(2))
    advantages[mask] = found[sequence[mask], inside[mask]].float()
    returns[first] = (found + value)[sequence[first], inside[first]].float()
    return ValueEstimate(advantages, returns, first)


def first_of_turn(turn: Tensor, mask: Tensor, sequence: Tensor) -> Tensor:
    """Return the positions of ``mask`` whose predicted token is the first of its turn there, bool (n,)."""
    places = torch.nonzero(mask).flatten()
    new = torch.ones(len(places), dtype=torch.bool)
    now, before = places[1:], places[:-1]
    new[1:] = (turn[now] != turn[before]) | (sequence[now] != sequence[before])
    return torch.zeros_like(mask).index_fill(0, places[new], True)


def _ranked(mask: Tensor, sequence: Tensor, n_sequences: int) -> tuple[Tensor, Tensor, int]:
    """Return the sequence of each masked position, its number there (i64 both), and the most that a sequence has."""
    chosen = sequence[mask]
    count = torch.bincount(chosen, minlength=n_sequences)
    rank = torch.arange(len(chosen)) - (count.cumsum(0) - count)[chosen]
    return chosen, rank, int(count.max()) if n_sequences else 0
