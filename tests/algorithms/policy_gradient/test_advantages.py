"""Estimators against loops over plain Python numbers."""

import math
import random
import statistics

import pytest
import torch

from realhf.algorithms.advantages import (
    at_last_token,
    grpo,
    grpo_nostd,
    normalise,
    reinforce,
    reinforce_pp,
    return_to_go,
    rloo,
)


def loop(kind, scores, valid, group):
    out = []
    for i, score in enumerate(scores):
        same = [j for j in range(len(scores)) if valid[j] and (kind == "reinforce" or group[j] == group[i])]
        values = [scores[j] for j in same]
        if not valid[i] or len(values) < 2 or len(set(values)) == 1:
            out.append(0.0)
        elif kind == "grpo":
            out.append((score - statistics.fmean(values)) / (statistics.stdev(values) + 1e-6))
        elif kind == "rloo":
            out.append(score - statistics.fmean([scores[j] for j in same if j != i]))
        else:
            out.append(score - statistics.fmean(values))
    return out


@pytest.mark.parametrize("estimator", [grpo, grpo_nostd, rloo, reinforce])
def test_equals_loop(estimator):
    rng = random.Random(0)
    for _ in range(40):
        sizes = [rng.randrange(1, 6) for _ in range(4)]
        group = [i for i, size in enumerate(sizes) for _ in range(size)]
        scores = [rng.choice([0.0, 0.1, 1.0, rng.uniform(-20, 20)]) for _ in group]
        valid = [rng.random() < 0.8 for _ in group]
        given = [s if ok else float("nan") for s, ok in zip(scores, valid, strict=True)]
        scores = torch.tensor(scores).tolist()
        got = estimator(torch.tensor(given), torch.tensor(valid), torch.tensor(group))
        expected = torch.tensor(loop(estimator.__name__, scores, valid, group))
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
        assert torch.equal(got == 0, expected.abs() < 1e-12)


@pytest.mark.parametrize("estimator", [grpo, grpo_nostd, rloo, reinforce])
def test_equal_scores_give_exact_zeros(estimator):
    scores = torch.full((7,), 0.1)
    got = estimator(scores, torch.ones(7, dtype=torch.bool), torch.zeros(7, dtype=torch.int64))
    assert got.tolist() == [0.0] * 7


def test_valid_score_that_is_no_number_is_an_error():
    with pytest.raises(ValueError, match="not finite"):
        grpo(torch.tensor([1.0, float("nan")]), torch.tensor([True, True]), torch.tensor([0, 0]))


def test_normalise_whitens_the_masked_part():
    values, mask = torch.tensor([1.0, 2.0, float("nan"), 6.0]), torch.tensor([True, True, False, True])
    got = normalise(values, mask)
    mean, std = 3.0, statistics.pstdev([1.0, 2.0, 6.0])
    expected = [(1 - mean) / (std + 1e-5), (2 - mean) / (std + 1e-5), 0.0, (6 - mean) / (std + 1e-5)]
    torch.testing.assert_close(got, torch.tensor(expected))


@pytest.mark.parametrize("discount", [1.0, 0.8])
def test_return_to_go_skips_what_is_masked(discount):
    rng = random.Random(1)
    for _ in range(20):
        lengths = [rng.randrange(0, 7) for _ in range(5)]
        sequence = [i for i, length in enumerate(lengths) for _ in range(length)]
        mask = [rng.random() < 0.6 for _ in sequence]
        rewards = [rng.uniform(-1, 1) if inside else math.nan for inside in mask]
        expected, last = [0.0] * len(mask), [0.0] * len(mask)
        for i in range(5):
            to_go = 0.0
            positions = [t for t in range(len(mask)) if sequence[t] == i and mask[t]]
            for t in reversed(positions):
                to_go = expected[t] = rewards[t] + discount * to_go
            if positions:
                last[positions[-1]] = 10.0 + i
        inside, of = torch.tensor(mask, dtype=torch.bool), torch.tensor(sequence, dtype=torch.int64)
        got = return_to_go(torch.tensor(rewards), inside, of, 5, discount)
        torch.testing.assert_close(got, torch.tensor(expected))
        assert at_last_token(torch.arange(10.0, 15.0), inside, of).tolist() == last


def test_reinforce_pp_scores():
    scores, valid = torch.tensor([1.0, math.nan, 0.5, 0.25]), torch.tensor([True, False, True, True])
    group = torch.tensor([0, 0, 1, 1])
    assert reinforce_pp(scores, valid, group).tolist() == [1.0, 0.0, 0.5, 0.25]
    assert grpo_nostd(scores, valid, group).tolist() == [0.0, 0.0, 0.125, -0.125]
    with pytest.raises(ValueError, match="not finite"):
        reinforce_pp(scores, torch.ones(4, dtype=torch.bool), group)
