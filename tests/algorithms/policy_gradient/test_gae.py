"""Advantages by the values of a critic, against loops over single sequences in float64."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.algorithms.advantages import first_of_turn, generalised, of_sampled_tokens, of_turns

SEEDS = st.integers(0, 10_000)
DISCOUNTS = st.sampled_from([1.0, 0.9, 0.5])
LAMBDAS = st.sampled_from([1.0, 0.95, 0.3, 0.0])


def by_definition(rewards, values, discount, lam):
    """A_t is the sum over l of (discount lam)^l delta_(t+l), with delta_t = r_t + discount V_(t+1) - V_t."""
    after = [*values, 0.0][1:]
    deltas = [r + discount * n - v for r, n, v in zip(rewards, after, values, strict=True)]
    return [sum((discount * lam) ** (s - t) * deltas[s] for s in range(t, len(deltas))) for t in range(len(deltas))]


def drawn(seed, most=7):
    """Sequences of random lengths, some without any sampled token, with NaN where nobody may look."""
    choice = random.Random(seed)
    masks = [[choice.random() < 0.6 for _ in range(choice.randrange(most))] for _ in range(choice.randrange(1, 5))]
    flat = [m for mask in masks for m in mask]
    rewards = torch.tensor([choice.uniform(-1, 1) if m else float("nan") for m in flat])
    values = torch.tensor([choice.uniform(-1, 1) if m else float("nan") for m in flat])
    sequence = torch.tensor([i for i, mask in enumerate(masks) for _ in mask], dtype=torch.int64)
    return masks, rewards, values, torch.tensor(flat, dtype=torch.bool), sequence


@settings(max_examples=60, deadline=None)
@given(SEEDS, DISCOUNTS, LAMBDAS)
def test_tokens_of_the_environment_are_skipped_and_not_discounted(seed, discount, lam):
    """The loop knows the policy's tokens alone."""
    masks, rewards, values, mask, sequence = drawn(seed)
    found = of_sampled_tokens(rewards, values, mask, sequence, len(masks), discount, lam)
    assert not bool(found.advantages[~mask].any()) and not bool(found.returns[~mask].any())
    assert torch.equal(found.valued, mask)
    for i in range(len(masks)):
        mine = torch.nonzero(mask & (sequence == i)).flatten()
        expected = by_definition(rewards[mine].tolist(), values[mine].tolist(), discount, lam)
        assert found.advantages[mine].tolist() == pytest.approx(expected, abs=1e-5)
        returned = [a + v for a, v in zip(expected, values[mine].tolist(), strict=True)]
        assert found.returns[mine].tolist() == pytest.approx(returned, abs=1e-5)


@settings(max_examples=30, deadline=None)
@given(SEEDS)
def test_with_lambda_and_discount_of_one_the_critic_is_only_a_baseline(seed):
    """Advantages are returns minus values, and the returns are those of the rewards, whatever the values say."""
    masks, rewards, values, mask, sequence = drawn(seed)
    found = of_sampled_tokens(rewards, values, mask, sequence, len(masks), 1.0, 1.0)
    other = of_sampled_tokens(rewards, 3 * values, mask, sequence, len(masks), 1.0, 1.0)
    torch.testing.assert_close(found.returns, other.returns, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.advantages[mask], (found.returns - values)[mask], atol=1e-5, rtol=1e-5)


def test_numbers_worked_out_by_hand():
    """One episode of two turns of two tokens with text of the environment between them, and one of a single token."""
    mask = torch.tensor([0, 1, 1, 0, 0, 1, 1, 1], dtype=torch.bool)
    sequence = torch.tensor([0, 0, 0, 0, 0, 0, 0, 1])
    rewards = torch.tensor([9.0, 0.0, 0.0, 9.0, 9.0, 0.0, 1.0, 2.0])
    values = torch.tensor([9.0, 0.2, 0.4, 9.0, 9.0, 0.6, 0.8, 0.5])
    found = of_sampled_tokens(rewards, values, mask, sequence, 2, 1.0, 0.5)
    # deltas .2, .2, .2, .2; the last token: 1 - .8
    assert found.advantages.tolist() == pytest.approx([0, 0.375, 0.35, 0, 0, 0.3, 0.2, 1.5])
    assert found.returns.tolist() == pytest.approx([0, 0.575, 0.75, 0, 0, 0.9, 1.0, 2.0])


def turns_of(seed):
    """Rows of episodes: each turn has rewards, and tokens in this row or not."""
    choice = random.Random(seed)
    rows = []
    for _ in range(choice.randrange(1, 4)):
        tokens = [[choice.uniform(-1, 1) for _ in range(choice.randrange(3))] for _ in range(choice.randrange(1, 5))]
        rows.append((tokens, [choice.uniform(-1, 1) for _ in tokens], [choice.uniform(-1, 1) for _ in tokens]))
    mask, turn, sequence, rewards, values = [], [], [], [], []
    for i, (tokens, _, value) in enumerate(rows):
        for k, of_turn in enumerate(tokens):
            for n, reward in enumerate([None, *of_turn]):  # Each turn begins with a token of the environment.
                mask.append(reward is not None)
                turn.append(-1 if reward is None else k)
                sequence.append(i)
                rewards.append(float("nan") if reward is None else reward)
                values.append(value[k] if n == 1 else float("nan"))
    return {
        "rows": rows,
        "mask": torch.tensor(mask, dtype=torch.bool),
        "turn": torch.tensor(turn, dtype=torch.int32),
        "sequence": torch.tensor(sequence, dtype=torch.int64),
        "rewards": torch.tensor(rewards),
        "values": torch.tensor(values),
        "turn_rewards": torch.tensor([reward for _, earned, _ in rows for reward in earned]),
        "counts": torch.tensor([len(earned) for _, earned, _ in rows]),
    }


@settings(max_examples=60, deadline=None)
@given(SEEDS, DISCOUNTS, LAMBDAS)
def test_a_turn_is_one_decision(seed, discount, lam):
    """Its tokens have one advantage, and what turns without tokens earn belongs to the turn before, discounted."""
    drawn_turns = turns_of(seed)
    rows = drawn_turns.pop("rows")
    found = of_turns(discount=discount, lam=lam, **drawn_turns)
    mask, sequence, turn = (drawn_turns[name] for name in ("mask", "sequence", "turn"))
    for i, (tokens, earned, value) in enumerate(rows):
        played = [k for k in range(len(tokens)) if tokens[k]]
        ends = [*played, len(tokens)][1:]
        gained = [
            sum(discount ** (j - k) * (earned[j] + sum(tokens[j])) for j in range(k, end))
            for k, end in zip(played, ends, strict=True)
        ]
        advantage, after, later = 0.0, 0.0, {}
        for n in range(len(played) - 1, -1, -1):
            gap = discount ** (ends[n] - played[n])
            advantage = gained[n] + gap * after - value[played[n]] + gap * lam * advantage
            after = value[played[n]]
            later[played[n]] = advantage
        for k in played:
            mine = torch.nonzero(mask & (sequence == i) & (turn == k)).flatten()
            assert found.advantages[mine].tolist() == pytest.approx([later[k]] * len(mine), abs=1e-5)
            assert found.valued[mine].tolist() == [True] + [False] * (len(mine) - 1)
            assert float(found.returns[mine[0]]) == pytest.approx(later[k] + value[k], abs=1e-5)
    assert not bool(found.advantages[~mask].any()) and not bool(found.valued[~mask].any())
    assert not bool(found.returns[~found.valued].any())


def test_a_turn_of_one_token_each_is_the_advantage_by_token():
    mask, sequence = torch.ones(4, dtype=torch.bool), torch.tensor([0, 0, 0, 1])
    rewards, values = torch.tensor([0.0, 0.5, 1.0, -1.0]), torch.tensor([0.1, 0.2, 0.3, 0.4])
    by_token = of_sampled_tokens(rewards, values, mask, sequence, 2, 0.9, 0.8)
    turn, counts = torch.tensor([0, 1, 2, 0]), torch.tensor([3, 1])
    by_turn = of_turns(torch.zeros(4), rewards, counts, values, turn, mask, sequence, 0.9, 0.8)
    assert all(torch.equal(a, b) for a, b in zip(by_token, by_turn, strict=True))


def test_nothing_sampled_has_no_advantage_and_no_return():
    mask, nothing = torch.zeros(3, dtype=torch.bool), torch.full((3,), float("nan"))
    sequence = torch.tensor([0, 0, 2])
    for found in (
        of_sampled_tokens(nothing, nothing, mask, sequence, 3, 1.0, 0.9),
        of_turns(nothing, torch.ones(3), torch.ones(3).long(), nothing, torch.full((3,), -1), mask, sequence, 1.0, 0.9),
    ):
        assert not bool(found.advantages.any()) and not bool(found.returns.any()) and not bool(found.valued.any())
    assert generalised(torch.zeros(0, 0), torch.zeros(0, 0), torch.zeros(0, 0) > 0, 1.0, 1.0).shape == (0, 0)


def test_a_token_outside_of_its_turns_is_refused():
    mask, sequence = torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.int64)
    for wrong in (-1, 1):
        turn = torch.tensor([0, wrong])
        with pytest.raises(ValueError, match="turn_ids"):
            of_turns(torch.zeros(2), torch.ones(1), torch.tensor([1]), torch.zeros(2), turn, mask, sequence, 1.0, 1.0)


def test_the_first_token_of_a_turn_is_that_of_its_own_sequence():
    """Two sequences whose turns have the same number stand beside each other."""
    turn, sequence = torch.tensor([0, 0, -1, 1, 1, 1]), torch.tensor([0, 0, 0, 0, 1, 1])
    mask = turn >= 0
    assert first_of_turn(turn, mask, sequence).tolist() == [True, False, False, True, True, False]
