"""Estimates advantages: per response from its group, per turn, and by GAE with the values of a critic
(docs/reference/dataflow.md 10).

Every estimator takes ``scores`` f32 (n,), ``valid`` bool (n,) and ``group`` i64 (n,), the sample number of each
sequence, and returns f32 (n,). Invalid sequences enter no statistic and get exactly 0, whatever their score (NaN
included). Statistics are fp64 and per response, never weighted by tokens.

Source: Schulman et al. 2016, High-Dimensional Continuous Control Using Generalized Advantage Estimation; the formulas
stand in docs/reference/ppo.md 2. Sums are fp64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

_EPS = 1e-6


def grpo(scores: Tensor, valid: Tensor, group: Tensor) -> Tensor:
    """Return (R - mean) / (unbiased std + 1e-6) within the group; exactly 0 when all valid scores are equal or fewer
    than two are valid. Source: Shao et al. 2024, DeepSeekMath."""
    score, stats = _group_statistics(scores, valid, group)
    centred = score - stats.mean[group]
    squares = torch.zeros_like(stats.mean).index_add(0, group, torch.where(valid, centred, 0.0).square())
    std = (squares / (stats.count - 1).clamp(min=1)).sqrt()
    return _finish(centred / (std[group] + _EPS), valid & stats.varied[group])


def grpo_nostd(scores: Tensor, valid: Tensor, group: Tensor) -> Tensor:
    """Return R - mean within the group. Source: Liu et al. 2025, Dr. GRPO."""
    score, stats = _group_statistics(scores, valid, group)
    return _finish(score - stats.mean[group], valid & stats.varied[group])


def rloo(scores: Tensor, valid: Tensor, group: Tensor) -> Tensor:
    """Return R minus the mean of the other valid responses of the group. Source: Ahmadian et al. 2024."""
    score, stats = _group_statistics(scores, valid, group)
    count = stats.count[group]
    others = (stats.mean[group] * count - score) / (count - 1).clamp(min=1)
    return _finish(score - others, valid & stats.varied[group])


def maxrl(scores: Tensor, valid: Tensor, group: Tensor) -> Tensor:
    """Return (R - mean) / mean within the group, the gradient of the log-likelihood of success for rewards of 0 and 1;
    exactly 0 when all valid scores are equal, or none is above 0. Source: Tajwar et al. 2026, Maximum Likelihood
    Reinforcement Learning. Raises ValueError on a valid score below 0, which is no likelihood."""
    score, stats = _group_statistics(scores, valid, group)
    if bool((score < 0).any()):
        raise ValueError(f"ppo.adv_estimator=maxrl: a reward is {float(score.min()):g}; it takes rewards from 0 on")
    mean = stats.mean[group]
    return _finish((score - mean) / torch.where(mean > 0, mean, 1.0), valid & stats.varied[group])


def pass_at_k(scores: Tensor, valid: Tensor, group: Tensor, *, k: int) -> Tensor:
    """Return (mean of the best over the subsets of k that hold the response - mean over all subsets of k) / (their
    biased std + 1e-6), subsets being those of the group's valid responses.

    Exactly 0 in a group of at most k valid responses, and where every subset has the same best. With rewards of 0 and 1
    this is the analytic advantage of Chen et al. 2025, Pass@k Training; the best of a subset in the place of its
    success extends it to all rewards, as Walder and Karkhanis 2025, Pass@K Policy Optimization, do. ``k`` is at least
    2.
    """
    score, stats = _group_statistics(scores, valid, group)
    found = torch.zeros_like(score)
    for number in torch.nonzero(stats.count > k).flatten().tolist():
        members = torch.nonzero(valid & (group == number)).flatten()
        found[members] = _of_subsets(score[members], k)
    return _finish(found, valid)


def _of_subsets(score: Tensor, k: int) -> Tensor:
    """Return the advantage of each of n > k responses with ``score`` f64 (n,). In ascending order of score, response j
    (from 0) is the best of comb(j, k - 1) subsets; beside one of lower rank, of comb(j - 1, k - 2)."""
    n = len(score)
    best, order = score.sort()
    if best[k - 1] == best[-1]:
        return torch.zeros_like(score)
    share = _tensor([math.comb(j, k - 1) / math.comb(n, k) for j in range(n)], score)
    lowest = _tensor([math.comb(j, k - 1) / math.comb(n - 1, k - 1) for j in range(n)], score)
    beside = _tensor([math.comb(j - 1, k - 2) / math.comb(n - 1, k - 1) if j else 0.0 for j in range(n)], score)
    mean = (share * best).sum()
    std = (share * (best - mean).square()).sum().sqrt()
    above = (beside * best).flip(0).cumsum(0).flip(0) - beside * best
    return torch.zeros_like(score).scatter(0, order, (lowest * best + above - mean) / (std + _EPS))


def _tensor(values: list[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)


def reinforce(scores: Tensor, valid: Tensor, group: Tensor) -> Tensor:
    """Return R minus the mean over all valid responses of the batch; exactly 0 when all are equal."""
    return grpo_nostd(scores, valid, torch.zeros_like(group))


def reinforce_pp(scores: Tensor, valid: Tensor, group: Tensor) -> Tensor:
    """Return R itself. ``return_to_go`` then gives the earlier tokens their share, and all are whitened over the batch
    (Hu 2025, REINFORCE++); or, for ``gae``, ``generalised`` compares what follows each token with a critic's values."""
    score, _ = _group_statistics(scores, valid, group)
    return _finish(score, valid)


def return_to_go(rewards: Tensor, mask: Tensor, sequence: Tensor, n_sequences: int, discount: float = 1.0) -> Tensor:
    """Sum discount^(s-t) r_s over s >= t within each sequence: f32 (n,), 0 outside ``mask``.

    Only positions in ``mask`` count, in the sum and in the distance s-t: text of the environment between two turns is
    skipped, not discounted. ``sequence`` i64 (n,) is sorted; ``rewards`` may hold anything outside the mask.
    """
    chosen, rank, most = _ranked(sequence[mask], n_sequences)
    table = torch.zeros(n_sequences, most, dtype=torch.float64)
    table[chosen, rank] = rewards[mask].double()
    out = torch.zeros(len(mask))
    out[mask] = _discounted(table, discount)[chosen, rank].float()
    return out


def _ranked(owner: Tensor, n_owners: int) -> tuple[Tensor, Tensor, int]:
    """Return ``owner`` i64 (n,), sorted, the number of each entry among those of its owner, i64 (n,), and the most that
    an owner has: where the entries lie in a table of one row per owner."""
    count = torch.bincount(owner, minlength=n_owners)
    rank = torch.arange(len(owner)) - (count.cumsum(0) - count)[owner]
    return owner, rank, int(count.max()) if n_owners else 0


def _discounted(table: Tensor, discount: float) -> Tensor:
    """Return the sum of discount^(s-t) r_s over s >= t of every row."""
    if discount == 1.0:
        return table.flip(1).cumsum(1).flip(1)
    for t in range(table.shape[1] - 2, -1, -1):
        table[:, t] += discount * table[:, t + 1]
    return table


def at_last_token(values: Tensor, mask: Tensor, sequence: Tensor) -> Tensor:
    """Put ``values`` (n sequences,) at the last position of each sequence inside ``mask``, and 0 elsewhere: (n,)."""
    positions = torch.arange(len(mask), device=mask.device)
    last = torch.full_like(values, -1, dtype=torch.int64)
    last = last.scatter_reduce(0, sequence, torch.where(mask, positions, -1), "amax")
    out = values.new_zeros(len(mask))
    has = last >= 0
    out[last[has]] = values[has]
    return out


def normalise(advantages: Tensor, mask: Tensor, eps: float = 1e-5) -> Tensor:
    """Whiten f32 (n,) over ``mask`` (bool): masked mean and biased std in fp64; 0 elsewhere."""
    if not bool(mask.any()):
        return torch.zeros_like(advantages)
    chosen = advantages[mask].double()
    std = (chosen - chosen.mean()).square().mean().sqrt()
    return _finish((advantages.double() - chosen.mean()) / (std + eps), mask)


class _GroupStatistics:
    """Holds the fp64 statistics (n groups,) of each group: ``count`` and ``mean`` of its valid scores, and ``varied``
    (bool), whether they differ."""

    def __init__(self, score: Tensor, valid: Tensor, group: Tensor) -> None:
        n_groups = int(group.max()) + 1 if len(group) else 0
        blank = torch.zeros(n_groups, dtype=torch.float64, device=score.device)
        self.count = blank.index_add(0, group, valid.double())
        self.mean = blank.index_add(0, group, score) / self.count.clamp(min=1)
        low = torch.where(valid, score, torch.inf)
        high = torch.where(valid, score, -torch.inf)
        lowest = torch.full_like(blank, torch.inf).scatter_reduce(0, group, low, "amin")
        highest = torch.full_like(blank, -torch.inf).scatter_reduce(0, group, high, "amax")
        self.varied = (self.count >= 2) & (highest > lowest)


def _group_statistics(scores: Tensor, valid: Tensor, group: Tensor) -> tuple[Tensor, _GroupStatistics]:
    """Return the scores in fp64 with 0 at invalid sequences, and the statistics. Raises ValueError when a valid score
    is not finite: a failure must be marked as one, not scored."""
    if not bool(torch.isfinite(scores[valid]).all()):
        raise ValueError("a valid sequence has a reward that is not finite")
    score = torch.where(valid, scores.double(), 0.0)
    return score, _GroupStatistics(score, valid, group)


def _finish(advantages: Tensor, keep: Tensor) -> Tensor:
    return torch.where(keep, advantages, 0.0).float()


Estimator = Callable[[Tensor, Tensor, Tensor], Tensor]


def returns_by_turn(rewards: Tensor, counts: Tensor, discount: float) -> Tensor:
    """Return f64 (n sequences, most turns): entry (i, k) is the sum of discount^(j-k) r_ij over the turns j >= k of
    sequence i; from its last turn on, the return of that one.

    ``rewards`` f32 (sum of counts,) are the rewards of the turns, sequence after sequence; ``counts`` i64 (n
    sequences,), each at least 1.
    """
    sequence, turn, most = _ranked(torch.repeat_interleave(torch.arange(len(counts)), counts), len(counts))
    table = torch.zeros(len(counts), most, dtype=torch.float64)
    table[sequence, turn] = rewards.double()
    return _discounted(table, discount).gather(1, torch.minimum(torch.arange(most)[None], counts[:, None] - 1))


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


def step_groups(states: Tensor, present: Tensor, group: Tensor) -> Tensor:
    """Return the number of the step-level group of every turn that is ``present``, i64 (n present,): those of one group
    that began in the same state. ``states`` i64 and ``present`` bool are (n sequences, most turns), ``group`` as for an
    estimator."""
    owner = torch.stack((group[:, None].expand_as(states)[present], states[present]))
    return torch.unique(owner, dim=1, return_inverse=True)[1].flatten()


def step_advantages(returns: Tensor, states: Tensor, present: Tensor, group: Tensor, estimator: Estimator) -> Tensor:
    """Return f32 (n sequences, most turns): the advantage of the return from each turn on within its step-level group;
    0 where ``present`` is False.

    ``returns`` f32 (n sequences, most turns); the rest as of ``step_groups``. ``present`` are the turns whose tokens a
    sequence has, so that one which several rows of a rollout report counts once. An episode that comes back into a
    state counts as often as it does. Source: Feng et al. 2025, Group-in-Group Policy Optimization for LLM Agent
    Training (GiGPO), step relative advantages.
    """
    found, own = torch.zeros_like(returns), step_groups(states, present, group)
    found[present] = estimator(returns[present], torch.ones_like(own, dtype=torch.bool), own)
    return found


def of_tokens(advantages: Tensor, turn: Tensor, sequence: Tensor, mask: Tensor, counts: Tensor) -> Tensor:
    """Spread ``advantages`` f32 (n sequences, most turns) over tokens: f32 (n,), 0 outside ``mask``. ``turn`` i32 (n,)
    is the turn of each predicted token. Raises ValueError when a token of the mask is in no turn of its sequence."""
    inside = _turns_inside(turn, sequence, mask, counts)
    return torch.where(mask, advantages[sequence, inside], 0.0) if advantages.numel() else torch.zeros(len(mask))


def _turns_inside(turn: Tensor, sequence: Tensor, mask: Tensor, counts: Tensor) -> Tensor:
    inside = torch.where(mask, turn.long(), 0)
    if bool(((inside < 0) | (inside >= counts[sequence]))[mask].any()):
        raise ValueError("turn_ids: a trained token is in no turn that has a reward in turn_rewards")
    return inside


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
    chosen, rank, most = _ranked(sequence[mask], n_sequences)
    earned, value = torch.zeros(2, n_sequences, most, dtype=torch.float64)
    present = torch.zeros(n_sequences, most, dtype=torch.bool)
    earned[chosen, rank], value[chosen, rank], present[chosen, rank] = (
        rewards[mask].double(),
        values[mask].double(),
        True,
    )
    found = generalised(earned, value, present, discount, lam)
    advantages, returns = torch.zeros(2, len(mask))
    advantages[mask] = found[chosen, rank].float()
    returns[mask] = (found + value)[chosen, rank].float()
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
    inside = _turns_inside(turn, sequence, mask, counts)
    first = first_of_turn(turn, mask, sequence)
    owner, number, most = _ranked(torch.repeat_interleave(torch.arange(len(counts)), counts), len(counts))
    earned, value = torch.zeros(2, len(counts), most, dtype=torch.float64)
    present = torch.zeros(len(counts), most, dtype=torch.bool)
    earned[owner, number] = turn_rewards.double()
    earned.index_put_((sequence[mask], inside[mask]), rewards[mask].double(), accumulate=True)
    value[sequence[first], inside[first]] = values[first].double()
    present[sequence[first], inside[first]] = True
    found = generalised(earned, value, present, discount, lam)
    advantages, returns = torch.zeros(2, len(mask))
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
