"""Advantage estimators: per response from its group, per turn, and GAE with the values of a critic.

Every estimator takes ``scores`` f32 (n,), ``valid`` bool (n,) and ``group`` i64 (n,), the sample
index of each sequence, and returns advantages f32 (n,). Invalid sequences are excluded from all
statistics and get exactly 0, whatever their score (NaN included). Statistics are fp64 and per
response, not weighted by tokens (docs/reference/dataflow.md 10).

Source of GAE: Schulman et al. 2016, High-Dimensional Continuous Control Using Generalized Advantage
Estimation; the formulas are in docs/reference/ppo.md 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

_EPS = 1e-6
"""Added to a standard deviation before dividing by it."""

Estimator = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Advantage estimator: (scores, valid, group) -> advantages."""


def grpo(scores: Tensor, valid: Tensor, group: Tensor) -> Tensor:
    """Return (R - mean) / (unbiased std + 1e-6) within the group.

    It is exactly 0 if all valid scores are equal or fewer than two are valid. Source: Shao et al.
    2024, DeepSeekMath.
    """
    score, stats = _group_statistics(scores, valid, group)
    centred = score - stats.mean[group]
    squares = torch.zeros_like(stats.mean).index_add(
        0, group, torch.where(valid, centred, 0.0).square()
    )
    std = (squares / (stats.count - 1).clamp(min=1)).sqrt()
    return _finish(centred / (std[group] + _EPS), valid & stats.varied[group])


def grpo_nostd(scores: Tensor, valid: Tensor, group: Tensor) -> Tensor:
    """Return R - mean within the group. Source: Liu et al. 2025, Dr. GRPO."""
    score, stats = _group_statistics(scores, valid, group)
    return _finish(score - stats.mean[group], valid & stats.varied[group])


def rloo(scores: Tensor, valid: Tensor, group: Tensor) -> Tensor:
    """Return R minus the mean of the other valid responses of the group. Source: Ahmadian et al.
    2024."""
    score, stats = _group_statistics(scores, valid, group)
    count = stats.count[group]
    others = (stats.mean[group] * count - score) / (count - 1).clamp(min=1)
    return _finish(score - others, valid & stats.varied[group])


def maxrl(scores: Tensor, valid: Tensor, group: Tensor) -> Tensor:
    """Return (R - mean) / mean within the group.

    For rewards of 0 and 1 this gives the gradient of the log-likelihood of success. It is exactly 0
    if all valid scores are equal or none is above 0. Source: Tajwar et al. 2026, Maximum Likelihood
    Reinforcement Learning. Raises ValueError on a negative valid score.
    """
    score, stats = _group_statistics(scores, valid, group)
    if bool((score < 0).any()):
        raise ValueError(
            f"ppo.adv_estimator=maxrl: a reward is {float(score.min()):g}; it takes rewards from 0 "
            f"on"
        )
    mean = stats.mean[group]
    return _finish((score - mean) / torch.where(mean > 0, mean, 1.0), valid & stats.varied[group])


def pass_at_k(scores: Tensor, valid: Tensor, group: Tensor, *, k: int) -> Tensor:
    """Return the pass@k advantage: how much a response raises the best score among k responses.

    It is (mean of the best score over the size-k subsets that contain the response - mean over all
    size-k subsets) / (biased std over all subsets + 1e-6). Subsets are drawn from the valid
    responses of the group; ``k`` is at least 2. It is exactly 0 in a group of at most k valid
    responses, and if every subset has the same best score.

    With rewards of 0 and 1 this is the analytic advantage of Chen et al. 2025, Pass@k Training. The
    best score of a subset generalises its success to all rewards, as in Walder and Karkhanis 2025,
    Pass@K Policy Optimization.
    """
    score, stats = _group_statistics(scores, valid, group)
    advantages = torch.zeros_like(score)
    for number in torch.nonzero(stats.count > k).flatten().tolist():
        members = torch.nonzero(valid & (group == number)).flatten()
        advantages[members] = _subset_advantages(score[members], k)
    return _finish(advantages, valid)


def _subset_advantages(score: Tensor, k: int) -> Tensor:
    """Return the pass@k advantage of each of n > k responses with ``score`` f64 (n,), f64 (n,).

    In ascending order of score, response j (from 0) is the best of comb(j, k - 1) subsets. Of the
    subsets that contain a given response of lower rank, it is the best of comb(j - 1, k - 2).
    """
    n = len(score)
    best, order = score.sort()
    if best[k - 1] == best[-1]:
        return torch.zeros_like(score)
    # Probability that response j is the best of a random subset; of one that contains j; of one
    # that contains a given response of lower rank.
    is_best = _tensor([math.comb(j, k - 1) / math.comb(n, k) for j in range(n)], score)
    is_best_of_own = _tensor(
        [math.comb(j, k - 1) / math.comb(n - 1, k - 1) for j in range(n)], score
    )
    is_best_of_lower = _tensor(
        [math.comb(j - 1, k - 2) / math.comb(n - 1, k - 1) if j else 0.0 for j in range(n)], score
    )
    mean = (is_best * best).sum()
    std = (is_best * (best - mean).square()).sum().sqrt()
    # Sum over all responses of higher rank: the suffix sum without the response itself.
    higher = (is_best_of_lower * best).flip(0).cumsum(0).flip(0) - is_best_of_lower * best
    return torch.zeros_like(score).scatter(
        0, order, (is_best_of_own * best + higher - mean) / (std + _EPS)
    )


def _tensor(values: list[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)


def reinforce(scores: Tensor, valid: Tensor, group: Tensor) -> Tensor:
    """Return R minus the mean over all valid responses of the batch; exactly 0 if all are equal."""
    return grpo_nostd(scores, valid, torch.zeros_like(group))


def reinforce_pp(scores: Tensor, valid: Tensor, group: Tensor) -> Tensor:
    """Return R itself, the reward that later steps distribute over the tokens.

    For ``reinforce_pp``, ``return_to_go`` assigns it to earlier tokens and the result is whitened
    over the batch (Hu 2025, REINFORCE++). For ``gae``, ``generalised_advantages`` subtracts the
    critic's values.
    """
    score, _ = _group_statistics(scores, valid, group)
    return _finish(score, valid)


def return_to_go(
    rewards: Tensor, mask: Tensor, sequence: Tensor, n_sequences: int, discount: float = 1.0
) -> Tensor:
    """Return the sum of discount^(s-t) r_s over s >= t within each sequence, f32 (n,), 0 outside
    ``mask``.

    Only positions in ``mask`` count, in the sum and in the distance s-t: environment text between
    two turns is skipped, not discounted. ``sequence`` i64 (n,) is sorted. ``rewards`` may hold any
    value outside the mask.
    """
    owner, rank, longest = _rank_within_owner(sequence[mask], n_sequences)
    table = torch.zeros(n_sequences, longest, dtype=torch.float64)
    table[owner, rank] = rewards[mask].double()
    out = torch.zeros(len(mask))
    out[mask] = _discounted_sums(table, discount)[owner, rank].float()
    return out


def _rank_within_owner(owner: Tensor, n_owners: int) -> tuple[Tensor, Tensor, int]:
    """Return the position of each entry in a padded table with one row per owner.

    ``owner`` i64 (n,) is sorted. The result is the row (``owner`` itself), the column (index of the
    entry within its owner), both i64 (n,), and the number of columns, which is the largest number
    of entries of an owner.
    """
    count = torch.bincount(owner, minlength=n_owners)
    rank = torch.arange(len(owner)) - (count.cumsum(0) - count)[owner]
    return owner, rank, int(count.max()) if n_owners else 0


def _discounted_sums(table: Tensor, discount: float) -> Tensor:
    """Return the sum of discount^(s-t) r_s over s >= t of every row. May modify ``table``."""
    if discount == 1.0:
        return table.flip(1).cumsum(1).flip(1)
    for t in range(table.shape[1] - 2, -1, -1):
        table[:, t] += discount * table[:, t + 1]
    return table


def at_last_token(values: Tensor, mask: Tensor, sequence: Tensor) -> Tensor:
    """Return ``values`` (n_sequences,) at the last ``mask`` position of each sequence, 0 elsewhere,
    (n,)."""
    positions = torch.arange(len(mask), device=mask.device)
    last = torch.full_like(values, -1, dtype=torch.int64)
    last = last.scatter_reduce(0, sequence, torch.where(mask, positions, -1), "amax")
    out = values.new_zeros(len(mask))
    has_position = last >= 0
    out[last[has_position]] = values[has_position]
    return out


def normalise(advantages: Tensor, mask: Tensor, eps: float = 1e-5) -> Tensor:
    """Return ``advantages`` f32 (n,) whitened over ``mask``, 0 elsewhere.

    Mean and biased standard deviation are computed in fp64 over the mask.
    """
    if not bool(mask.any()):
        return torch.zeros_like(advantages)
    in_mask = advantages[mask].double()
    std = (in_mask - in_mask.mean()).square().mean().sqrt()
    return _finish((advantages.double() - in_mask.mean()) / (std + eps), mask)


class _GroupStatistics:
    """Statistics of the valid scores of each group, (n_groups,).

    Attributes:
        count: Number of valid scores, fp64.
        mean: Mean of the valid scores, fp64; 0 without one.
        varied: Whether at least two valid scores differ, bool.
    """

    def __init__(self, score: Tensor, valid: Tensor, group: Tensor) -> None:
        n_groups = int(group.max()) + 1 if len(group) else 0
        zeros = torch.zeros(n_groups, dtype=torch.float64, device=score.device)
        self.count = zeros.index_add(0, group, valid.double())
        self.mean = zeros.index_add(0, group, score) / self.count.clamp(min=1)
        low = torch.where(valid, score, torch.inf)
        high = torch.where(valid, score, -torch.inf)
        lowest = torch.full_like(zeros, torch.inf).scatter_reduce(0, group, low, "amin")
        highest = torch.full_like(zeros, -torch.inf).scatter_reduce(0, group, high, "amax")
        self.varied = (self.count >= 2) & (highest > lowest)


def _group_statistics(
    scores: Tensor, valid: Tensor, group: Tensor
) -> tuple[Tensor, _GroupStatistics]:
    """Return the scores in fp64 with 0 for invalid sequences, and the statistics of the groups.

    Raises ValueError if a valid score is not finite: failed episodes must be marked invalid.
    """
    if not bool(torch.isfinite(scores[valid]).all()):
        raise ValueError("a valid sequence has a reward that is not finite")
    score = torch.where(valid, scores.double(), 0.0)
    return score, _GroupStatistics(score, valid, group)


def _finish(advantages: Tensor, keep: Tensor) -> Tensor:
    """Return the advantages as f32, 0 outside ``keep``."""
    return torch.where(keep, advantages, 0.0).float()


def returns_by_turn(rewards: Tensor, counts: Tensor, discount: float) -> Tensor:
    """Return the discounted return from each turn on, f64 (n_sequences, max_turns).

    Entry (i, k) is the sum of discount^(j-k) r_ij over the turns j >= k of sequence i. Entries
    after the last turn of a sequence repeat the return of its last turn.

    Args:
        rewards: Rewards of the turns, sequence after sequence, f32 (sum of ``counts``,).
        counts: Number of turns of each sequence, i64 (n_sequences,), each at least 1.
        discount: Discount factor per turn.
    """
    sequence, turn, max_turns = _rank_within_owner(
        torch.repeat_interleave(torch.arange(len(counts)), counts), len(counts)
    )
    table = torch.zeros(len(counts), max_turns, dtype=torch.float64)
    table[sequence, turn] = rewards.double()
    own_turn = torch.minimum(torch.arange(max_turns)[None], counts[:, None] - 1)
    return _discounted_sums(table, discount).gather(1, own_turn)


def turn_advantages(scores: Tensor, valid: Tensor, group: Tensor, estimator: Estimator) -> Tensor:
    """Return the advantage of every turn within its group, f32 (n_sequences, max_turns).

    The return from turn k on is compared with the returns from turn k on of the other sequences of
    the group. Invalid sequences get 0. An episode that ended earlier takes part with the return of
    its last turn, so that every comparison includes the whole group. With a reward in the last turn
    only and no discount, every turn gets the advantage of its episode.

    This is the turn-level advantage of MT-GRPO (Zeng et al. 2025, Reinforcing Multi-Turn Reasoning
    in LLM Agents via Turn-Level Credit Assignment), with the return-to-go of REINFORCE (Williams
    1992) instead of the turn's reward plus the outcome.

    Args:
        scores: Return from each turn on, f32 (n_sequences, max_turns).
        valid: As for an estimator.
        group: As for an estimator.
        estimator: The estimator that compares the returns of one turn.
    """
    columns = [estimator(column, valid, group) for column in scores.unbind(1)]
    return torch.stack(columns, 1) if columns else torch.zeros_like(scores)


def step_groups(states: Tensor, present: Tensor, group: Tensor) -> Tensor:
    """Return the index of the step-level group of every present turn, i64 (number of present
    turns,).

    A step-level group contains the turns of one group that started in the same state. ``states``
    i64 and ``present`` bool are (n_sequences, max_turns), ``group`` as for an estimator.
    """
    group_and_state = torch.stack((group[:, None].expand_as(states)[present], states[present]))
    return torch.unique(group_and_state, dim=1, return_inverse=True)[1].flatten()


def step_advantages(
    returns: Tensor, states: Tensor, present: Tensor, group: Tensor, estimator: Estimator
) -> Tensor:
    """Return the advantage of every turn within its step-level group, f32 (n_sequences, max_turns).

    The return from each turn on is compared with those of the other turns of its step-level group
    (``step_groups``). It is 0 where ``present`` is False. An episode that returns to a state counts
    once per visit. Source: Feng et al. 2025, Group-in-Group Policy Optimization for LLM Agent
    Training (GiGPO), step relative advantages.

    Args:
        returns: Return from each turn on, f32 (n_sequences, max_turns).
        states: State at the start of each turn, i64 (n_sequences, max_turns).
        present: Turns whose tokens the sequence contains, bool (n_sequences, max_turns). A turn that
            several sequences of a rollout report is present in one of them only, so it counts once.
        group: As for an estimator.
        estimator: The estimator that compares the returns.
    """
    advantages = torch.zeros_like(returns)
    step_group = step_groups(states, present, group)
    advantages[present] = estimator(
        returns[present], torch.ones_like(step_group, dtype=torch.bool), step_group
    )
    return advantages


def spread_over_tokens(
    advantages: Tensor, turn: Tensor, sequence: Tensor, mask: Tensor, counts: Tensor
) -> Tensor:
    """Return the advantage of each token's turn, f32 (n,), 0 outside ``mask``.

    Args:
        advantages: Advantage of every turn, f32 (n_sequences, max_turns).
        turn: Turn of each predicted token within its sequence, i32 (n,).
        sequence: Sequence of each predicted token, i64 (n,).
        mask: Which tokens train, bool (n,).
        counts: Number of turns of each sequence, i64 (n_sequences,).

    Raises ValueError if a token of the mask is in no turn of its sequence.
    """
    checked_turn = _check_turns(turn, sequence, mask, counts)
    return (
        torch.where(mask, advantages[sequence, checked_turn], 0.0)
        if advantages.numel()
        else torch.zeros(len(mask))
    )


def _check_turns(turn: Tensor, sequence: Tensor, mask: Tensor, counts: Tensor) -> Tensor:
    """Return the turn of each token, i64 (n,), with 0 outside the mask.

    Raises ValueError if a token of the mask is in no turn of its sequence.
    """
    checked = torch.where(mask, turn.long(), 0)
    if bool(((checked < 0) | (checked >= counts[sequence]))[mask].any()):
        raise ValueError(
            "turn_ids: a trained token is in no turn that has a reward in turn_rewards"
        )
    return checked


class ValueEstimate(NamedTuple):
    """GAE advantages, and the returns on which the critic is trained."""

    advantages: Tensor
    """Advantage of every token, f32 (n,), 0 outside the mask."""
    returns: Tensor
    """Return of every position in ``valued``, f32 (n,), 0 elsewhere."""
    valued: Tensor
    """Positions on whose return the critic is trained, bool (n,)."""


def generalised_advantages(
    rewards: Tensor, values: Tensor, present: Tensor, discount: float, lam: float
) -> Tensor:
    """Return the GAE advantage of every decision, f64 (n, k); undefined where ``present`` is False.

    Each row holds the decisions of one sequence in order. The value after the last decision is 0,
    because the sequence has ended.

    Args:
        rewards: Reward after each decision, f64 (n, k).
        values: Value of the state in which each decision was made, f64 (n, k).
        present: Whether the entry is a decision with a value, bool (n, k). The reward of any other
            entry belongs to the previous decision, discounted by the distance.
        discount: Discount factor per entry.
        lam: Lambda of GAE.
    """
    next_value = rewards.new_zeros(len(rewards))
    advantage = rewards.new_zeros(len(rewards))
    advantages = torch.zeros_like(rewards)
    for k in range(rewards.shape[1] - 1, -1, -1):
        is_decision = present[:, k]
        target = rewards[:, k] + discount * next_value
        # An entry without a decision only passes advantage and reward on to the previous decision.
        advantage = discount * torch.where(is_decision, lam, 1.0) * advantage
        advantage = torch.where(is_decision, target - values[:, k] + advantage, advantage)
        next_value = torch.where(is_decision, values[:, k], target)
        advantages[:, k] = advantage
    return advantages


def token_value_estimate(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    sequence: Tensor,
    n_sequences: int,
    discount: float,
    lam: float,
) -> ValueEstimate:
    """Return the GAE estimate with every token of ``mask`` as one decision.

    The next decision is the next token of the policy, whatever environment text lies between. The
    return of a token is its advantage plus its value. Positions outside the mask may hold any
    value.

    Args:
        rewards: Reward of each predicted token, f32 (n,).
        values: Value of the state before each predicted token, f32 (n,).
        mask: Which tokens train, bool (n,).
        sequence: Sequence of each predicted token in [0, n_sequences), sorted, i64 (n,).
        n_sequences: Number of sequences.
        discount: Discount factor per token of the mask.
        lam: Lambda of GAE.
    """
    owner, rank, longest = _rank_within_owner(sequence[mask], n_sequences)
    reward_table = torch.zeros(n_sequences, longest, dtype=torch.float64)
    value_table = torch.zeros(n_sequences, longest, dtype=torch.float64)
    present = torch.zeros(n_sequences, longest, dtype=torch.bool)
    reward_table[owner, rank] = rewards[mask].double()
    value_table[owner, rank] = values[mask].double()
    present[owner, rank] = True
    decision_advantages = generalised_advantages(reward_table, value_table, present, discount, lam)
    advantages = torch.zeros(len(mask))
    returns = torch.zeros(len(mask))
    advantages[mask] = decision_advantages[owner, rank].float()
    returns[mask] = (decision_advantages + value_table)[owner, rank].float()
    return ValueEstimate(advantages, returns, mask)


def turn_value_estimate(
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
    """Return the GAE estimate with every turn as one decision, made in the state before its first
    token.

    All tokens of a turn get its advantage; the critic is trained on the return of that state.

    Args:
        rewards: Reward of each predicted token, f32 (n,), added to the reward of its turn.
        turn_rewards: Rewards of the turns, sequence after sequence, f32 (sum of ``counts``,).
        counts: Number of turns of each sequence, i64 (n_sequences,).
        values: Value of the state before each predicted token, f32 (n,).
        turn: Turn of each predicted token within its sequence, int (n,).
        mask: Which tokens train, bool (n,).
        sequence: Sequence of each predicted token, sorted, i64 (n,).
        discount: Discount factor per turn.
        lam: Lambda of GAE.

    Raises ValueError if a token of the mask is in no turn of its sequence.
    """
    checked_turn = _check_turns(turn, sequence, mask, counts)
    first = first_of_turn(turn, mask, sequence)
    owner, number, max_turns = _rank_within_owner(
        torch.repeat_interleave(torch.arange(len(counts)), counts), len(counts)
    )
    reward_table = torch.zeros(len(counts), max_turns, dtype=torch.float64)
    value_table = torch.zeros(len(counts), max_turns, dtype=torch.float64)
    present = torch.zeros(len(counts), max_turns, dtype=torch.bool)
    reward_table[owner, number] = turn_rewards.double()
    reward_table.index_put_(
        (sequence[mask], checked_turn[mask]), rewards[mask].double(), accumulate=True
    )
    value_table[sequence[first], checked_turn[first]] = values[first].double()
    present[sequence[first], checked_turn[first]] = True
    turn_advantage = generalised_advantages(reward_table, value_table, present, discount, lam)
    advantages = torch.zeros(len(mask))
    returns = torch.zeros(len(mask))
    advantages[mask] = turn_advantage[sequence[mask], checked_turn[mask]].float()
    returns[first] = (turn_advantage + value_table)[sequence[first], checked_turn[first]].float()
    return ValueEstimate(advantages, returns, first)


def first_of_turn(turn: Tensor, mask: Tensor, sequence: Tensor) -> Tensor:
    """Return bool (n,), True where a position in ``mask`` predicts the first masked token of a
    turn."""
    positions = torch.nonzero(mask).flatten()
    is_first = torch.ones(len(positions), dtype=torch.bool)
    current = positions[1:]
    previous = positions[:-1]
    is_first[1:] = (turn[current] != turn[previous]) | (sequence[current] != sequence[previous])
    return torch.zeros_like(mask).index_fill(0, positions[is_first], True)
