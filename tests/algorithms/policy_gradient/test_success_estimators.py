"""Estimators about success, maxrl and pass_at_k, against loops over plain Python numbers."""

import itertools
import math
import random
import statistics

import pytest
import torch

from realhf.algorithms.advantages import maxrl, pass_at_k
from realhf.algorithms.policy_gradient import PolicyGradientInterface
from realhf.algorithms.resolution import resolve
from tests.algorithms.tiny_policy import GROUPS, OUTCOME


def drawn(seed, rewards):
    """Ragged groups with failed rollouts, whose score is NaN."""
    choice = random.Random(seed)
    group = sorted(choice.randrange(5) for _ in range(choice.randrange(1, 30)))
    valid = [choice.random() < 0.8 for _ in group]
    scores = [choice.choice(rewards) if ok else math.nan for ok in valid]
    return scores, valid, group


def in_groups(scores, valid, group):
    for number in set(group):
        members = [i for i, own in enumerate(group) if own == number and valid[i]]
        yield members, [scores[i] for i in members]


def estimated(estimator, scores, valid, group):
    """The estimate in f32 against NaN at invalid places."""
    return estimator(
        torch.tensor(scores), torch.tensor(valid, dtype=torch.bool), torch.tensor(group)
    ).tolist()


@pytest.mark.parametrize("rewards", [(0.0, 1.0), (0.0, 0.25, 0.5, 1.0)], ids=["binary", "graded"])
def test_maxrl_is_the_mean_score_function_of_successes_without_that_of_all(rewards):
    """Tajwar et al. 2026: sum of A_i S_i is, for binary rewards, n times (the mean S of successes -
    the mean S of all); the gradient of log p is the first of the two, the second has expectation
    0."""
    for seed in range(60):
        scores, valid, group = drawn(seed, rewards)
        found = estimated(maxrl, scores, valid, group)
        expected = [0.0] * len(scores)
        for members, own in in_groups(scores, valid, group):
            if len(set(own)) > 1:
                for i in members:
                    expected[i] = (scores[i] - statistics.fmean(own)) / statistics.fmean(own)
            if len(set(own)) > 1 and rewards == (0.0, 1.0):
                s = [math.sin(i) for i in members]
                won = statistics.fmean(
                    [each for each, reward in zip(s, own, strict=True) if reward]
                )
                total = sum(found[i] * each for i, each in zip(members, s, strict=True))
                assert total == pytest.approx(len(own) * (won - statistics.fmean(s)), abs=1e-5)
        assert found == pytest.approx(expected, abs=1e-6)


def test_maxrl_refuses_a_reward_below_zero():
    with pytest.raises(ValueError, match=r"ppo.adv_estimator=maxrl: a reward is -0.5"):
        estimated(maxrl, [1.0, -0.5], [True, True], [0, 0])
    assert estimated(maxrl, [1.0, 0.0, -0.5], [True, True, False], [0, 0, 0]) == [1.0, -1.0, 0.0]


@pytest.mark.parametrize("k", [2, 3, 4])
def test_pass_at_k_is_what_a_walk_over_all_subsets_finds(k):
    """Rewards of any kind, also below 0 and equal ones; groups of at most k, and those without a
    difference, get 0."""
    for seed in range(60):
        scores, valid, group = drawn(seed, (0.0, 1.0) if seed % 2 else (-1.0, 0.0, 0.25, 0.5, 1.0))
        found = estimated(lambda *a: pass_at_k(*a, k=k), scores, valid, group)
        expected = [0.0] * len(scores)
        for members, own in in_groups(scores, valid, group):
            subsets = list(itertools.combinations(range(len(own)), k))
            best = [max(own[i] for i in subset) for subset in subsets]
            if len(own) <= k or len(set(best)) == 1:
                assert not any(found[i] for i in members), "exactly 0"
                continue
            for place, i in enumerate(members):
                mine = statistics.fmean(
                    [top for top, subset in zip(best, subsets, strict=True) if place in subset]
                )
                expected[i] = (mine - statistics.fmean(best)) / (statistics.pstdev(best) + 1e-6)
        assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(("n", "c", "k"), [(8, 1, 4), (8, 3, 4), (8, 4, 4), (16, 2, 8), (5, 2, 2)])
def test_pass_at_k_with_binary_rewards_is_the_analytic_advantage(n, c, k):
    """Chen et al. 2025, equations of the section on analytical derivation."""
    mean = 1 - math.comb(n - c, k) / math.comb(n, k)
    std = math.sqrt(mean * (1 - mean))
    won = (1 - mean) / std
    lost = (1 - mean - math.comb(n - c - 1, k - 1) / math.comb(n - 1, k - 1)) / std
    found = estimated(
        lambda *a: pass_at_k(*a, k=k), [1.0] * c + [0.0] * (n - c), [True] * n, [0] * n
    )
    assert found == pytest.approx([won] * c + [lost] * (n - c), abs=1e-4)


def test_an_option_reaches_the_train_step(rollout_batch):
    """And tells other sets apart: what is rare counts more the larger the set."""
    sample = rollout_batch(GROUPS, [float(n % 3 == 0) for n in range(len(OUTCOME))], OUTCOME)
    first, second = (
        PolicyGradientInterface(
            {"adv_estimator": "pass_at_k", "pass_at_k": k, "group_size": 4}
        ).prepare(sample)[0]
        for k in (2, 3)
    )
    assert bool(first["advantages"].any()) and not torch.equal(
        first["advantages"], second["advantages"]
    )


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"adv_estimator": "pass_at_k"}, "ppo.pass_at_k=None: .*set it from 2 to 7"),
        ({"adv_estimator": "pass_at_k", "pass_at_k": 8}, "ppo.pass_at_k=8: .*group_size=8"),
        ({"adv_estimator": "pass_at_k", "pass_at_k": 1}, "ppo.pass_at_k"),
        ({"pass_at_k": 4}, "ppo.pass_at_k has no effect with adv_estimator 'grpo'"),
        (
            {"adv_estimator": "maxrl", "credit": "turn"},
            "ppo.credit=turn: adv_estimator 'maxrl' is about whole episodes",
        ),
        ({"adv_estimator": "maxrl", "group_size": 1}, "ppo.group_size"),
    ],
)
def test_options_that_contradict_are_refused(options, told):
    with pytest.raises(ValueError, match=told):
        resolve(options)
