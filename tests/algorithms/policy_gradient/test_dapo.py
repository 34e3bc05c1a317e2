"""The parts of DAPO beside its loss: the penalty for length, what counts as signal, and when a
preset has them."""

from __future__ import annotations

import math
from itertools import combinations, combinations_with_replacement
from typing import Any

import pytest
import torch

from experiments.policy_gradient import actor_gen, config_class, policy_options, rew_inf
from realhf.algorithms.advantages import pass_at_k
from realhf.algorithms.inference import OutcomeRewardInterface
from realhf.algorithms.options import PolicyGradientOptions
from realhf.algorithms.policy_gradient import PolicyGradientInterface
from realhf.algorithms.resolution import resolve
from realhf.algorithms.train_step import PredictedTokens
from realhf.api.source import GroupSignal, SampleResult
from tests.algorithms.policy_gradient.test_rollouts_count_once import CUT, REWARDS, WHOLE, batch


def penalty(tokens: int, length: int, cache: float) -> float:
    """Equation 13 of the paper."""
    if tokens <= length - cache:
        return 0.0
    return (length - cache - tokens) / cache if tokens <= length else -1.0


@pytest.mark.parametrize(("length", "buffer"), [(20, 0.5), (16, 0.25), (7, 1.0), (100, 0.2)])
def test_a_long_rollout_loses_up_to_one(length: int, buffer: float) -> None:
    """By the tokens of all its rows; a failed one has no reward still, and the others that of the
    environment."""
    interface = OutcomeRewardInterface(
        reward_scaling=2.0, overlong_length=length, overlong_buffer=buffer
    )
    for rows in (WHOLE, CUT):
        sample = batch(rows, REWARDS, failed=(3,)).remap_keys({"rewards": "env_rewards"})
        rewards = interface.inference(None, sample, None)[0]["rewards"].tolist()  # type: ignore[arg-type]
        found = iter(rewards)
        for group, scores in zip(rows, REWARDS, strict=True):
            for number, (rollout, score) in enumerate(zip(group, scores, strict=True)):
                expected = 2 * score + penalty(sum(rollout), length, buffer * length)
                for reward in (next(found) for _ in rollout):
                    if group is rows[0] and number == 3:
                        assert math.isnan(reward)
                    else:
                        assert reward == pytest.approx(expected, abs=1e-6)


def test_the_train_step_says_how_many_rollouts_were_too_long() -> None:
    options = {"algo": "dapo", "overlong_length": 20, "overlong_buffer": 0.25}
    stats = PolicyGradientInterface(options).prepare(batch(CUT, REWARDS))[1]
    lengths = [sum(rollout) for group in CUT for rollout in group]
    assert (
        stats["overlong_fraction"]
        == pytest.approx(sum(n > 15 for n in lengths) / len(lengths))
        != 0
    )
    assert "overlong_fraction" not in PolicyGradientInterface({}).prepare(batch(CUT, REWARDS))[1]


@pytest.mark.parametrize("rows", [WHOLE, CUT], ids=["whole", "cut"])
def test_what_is_left_out_of_the_loss_is_in_the_statistics(rows: Any) -> None:
    """Rollouts that a limit of tokens ended used to be ones of 0 tokens, with ``mask_too_long``:
    the longest of all. Their group is compared with them still, and they train nothing."""
    options = {"algo": "dapo", "overlong_length": 20, "overlong_buffer": 0.25}
    sample = batch(rows, REWARDS, failed=(3,))
    made = (
        PolicyGradientInterface({**options, "mask_too_long": on}).prepare(sample)
        for on in (False, True)
    )
    plain, left_out = made
    of_loss = {"n_trainable", "n_trainable_rollouts", "n_tokens"}
    assert {name for name, value in plain[1].items() if left_out[1][name] != value} == of_loss
    too_long = sample["seq_no_eos_mask"][PredictedTokens.from_sample(sample).sequence]
    assert plain[0]["advantages"][too_long].any() and not left_out[0]["advantages"][too_long].any()
    assert torch.equal(left_out[0]["advantages"][~too_long], plain[0]["advantages"][~too_long])


@pytest.mark.parametrize(
    ("rewards", "least", "signal"),
    [
        ([1.0, 0.0], 2, True),
        ([1.0, 1.0, 1.0], 2, False),
        ([None, 1.0, 0.0], 2, True),
        ([None, 1.0, 0.0], 3, False),
        ([None, 1.0], 2, False),
        ([None, None], 2, False),
        ([], 2, False),
    ],
)
def test_a_group_has_signal_where_rewards_differ(
    rewards: list[float | None], least: int, signal: bool
) -> None:
    assert GroupSignal(least).has_signal(SampleResult("a", rewards=rewards)) == signal


@pytest.mark.parametrize(
    ("options", "rewards", "signal"),
    [
        ({}, [0.1 + 0.2, 0.3], False),
        ({"max_reward_clip": 1.0}, [1.0, 5.0], False),
        ({"max_reward_clip": 1.0, "reward_bias": -4.0}, [4.5, 5.0], True),
        ({"max_reward_clip": 1.0, "reward_bias": -4.0}, [5.0, 9.0], False),
        ({"max_reward_clip": 1.0, "reward_scaling": -0.5, "reward_bias": 1.0}, [-3.0, -7.0], False),
        ({"max_reward_clip": 1.0, "reward_scaling": -0.5, "reward_bias": 1.0}, [0.0, -7.0], True),
    ],
)
def test_signal_is_judged_where_rewards_are_cut(
    options: dict[str, Any], rewards: list[float], signal: bool
) -> None:
    """Two rewards that the call ``rew_inf`` makes one of are no signal, nor are two that fp32 does
    not tell apart: such a group used to train, and its step with it, without any advantage."""
    config = config_class("countdown")(
        experiment="grpo", ppo=PolicyGradientOptions(algo="dapo", **options)
    )
    ppo = policy_options(config)
    sample = SampleResult("a", rewards=rewards)
    assert actor_gen(config, ppo).signal.has_signal(sample) == signal
    scored = rew_inf(config, replace_args(ppo))
    interface = OutcomeRewardInterface(**scored.interface_args)
    rows = batch([[[3], [3]]] * 2, [rewards] * 2).remap_keys({"rewards": "env_rewards"})
    made = interface.inference(None, rows, None)[0]["rewards"]  # type: ignore[arg-type]
    assert (made.unique().numel() > 1) == signal


def replace_args(ppo: Any) -> Any:
    """The options without the penalty for length, which is no part of the signal."""
    ppo.overlong_length = None
    ppo.overlong_buffer = 0.0
    return ppo


def test_signal_is_what_the_estimators_see(rollout_batch: Any) -> None:
    """A group has an advantage other than 0 exactly where it has signal."""
    rewards = [[1.0, 1.0, 0.5], [0.0, 0.0, 0.0], [2.0, 2.0, 1.0], [0.3, 0.1, 0.2], [0.0, 1.0, 0.0]]
    outcome = [0, 0, 0, 0, 0, 0, 0, 0, 3, 0, 3, 3, 0, 0, 0]
    sample = rollout_batch([[9, 9, 9]] * 5, [r for group in rewards for r in group], outcome)
    told = [
        [None if outcome[3 * i + k] else r for k, r in enumerate(group)]
        for i, group in enumerate(rewards)
    ]
    for estimator, k in (
        ("grpo", 1),
        ("grpo_nostd", 1),
        ("rloo", 1),
        ("maxrl", 1),
        ("pass_at_k", 2),
    ):
        expected = [GroupSignal(k=k).has_signal(SampleResult("", rewards=group)) for group in told]
        assert expected == [k == 1, False, False, False, True]
        options = {"adv_estimator": estimator} | ({"pass_at_k": k} if k > 1 else {})
        prepared = PolicyGradientInterface(options).prepare(sample)[0]
        tokens = PredictedTokens.from_sample(sample)
        groups = tokens.group[tokens.sequence[prepared["advantages"] != 0]]
        assert [i in groups for i in range(5)] == expected


@pytest.mark.parametrize("k", [2, 3, 4])
def test_sets_of_k_have_signal_where_their_best_differ(k: int) -> None:
    """Every set holds a success where more than n - k rollouts succeed: such a group used to stay,
    and taught nothing."""
    ppo = PolicyGradientOptions(algo="dapo", adv_estimator="pass_at_k", pass_at_k=k)
    config = config_class("countdown")(experiment="grpo", ppo=ppo)
    judge = actor_gen(config, policy_options(config)).signal
    seen = set[bool]()
    for n in range(2, 7):
        for rewards in combinations_with_replacement((0.0, 0.5, 1.0), n):
            expected = (
                len({max(subset) for subset in combinations(rewards, k)}) > 1 if n > k else False
            )
            scores = torch.tensor(rewards)
            one = torch.zeros(n, dtype=torch.int64)
            assert (
                bool(pass_at_k(scores, torch.ones(n, dtype=torch.bool), one, k=k).any()) == expected
            )
            assert judge.has_signal(SampleResult("", rewards=rewards)) == expected, rewards
            seen.add(expected)
    assert seen == {True, False}


def test_the_preset_has_them_where_it_can() -> None:
    got = resolve({"algo": "dapo"}, loss_scale_len=200)
    assert (got.dynamic_sampling, got.overlong_length, got.overlong_buffer) == (1.0, 200, 0.2)
    again = resolve(got.to_plain_values(PolicyGradientOptions(algo="dapo")))
    assert (again.overlong_length, again.overlong_buffer) == (200, 0.2), (
        "whoever trains knows the same number"
    )
    unknown = resolve({"algo": "dapo"})
    assert (unknown.dynamic_sampling, unknown.overlong_length, unknown.overlong_buffer) == (
        1.0,
        None,
        0.0,
    )
    later = resolve(unknown.to_plain_values(PolicyGradientOptions(algo="dapo")), loss_scale_len=200)
    assert later.overlong_length is None
    plain = resolve({}, loss_scale_len=200)
    assert (plain.dynamic_sampling, plain.overlong_length, plain.overlong_buffer) == (
        0.0,
        None,
        0.0,
    )
    for given in (
        {"credit": "turn"},
        {"credit": "state"},
        {"distill_weight": 0.5},
        {"adv_estimator": "reinforce"},
    ):
        assert resolve({"algo": "dapo", **given}, loss_scale_len=200).dynamic_sampling == 0
    assert (
        resolve({"algo": "dapo", "adv_estimator": "maxrl"}, loss_scale_len=200).overlong_length
        is None
    )


def test_an_experiment_asks_for_them_where_they_are_done() -> None:
    """The call that plays knows the bound, and the call that scores the numbers, with the keys that
    it needs."""
    kind = config_class("countdown")
    config = kind(experiment="grpo", ppo=PolicyGradientOptions(algo="dapo"))
    most = config.gen.max_new_tokens * config.rollout.max_turns
    ppo = policy_options(config)
    scoring = rew_inf(config, ppo)
    assert actor_gen(config, ppo).resample == 1.0
    assert scoring.interface_args["overlong_length"] == most and "loss_mask" in scoring.input_keys
    plain = kind(experiment="grpo")
    ppo = policy_options(plain)
    assert actor_gen(plain, ppo).resample == 0 and rew_inf(plain, ppo).input_keys == (
        "env_rewards",
        "outcome",
    )


def test_beside_a_reward_model_equal_rewards_of_the_environment_teach_too() -> None:
    """They used to give way, although the reward model tells their rollouts apart."""
    assert resolve({"algo": "dapo"}, loss_scale_len=200, scored_by_model=True).dynamic_sampling == 0
    with pytest.raises(
        ValueError,
        match=r"ppo.dynamic_sampling=1: with a reward model a group of equal rewards teaches",
    ):
        resolve({"dynamic_sampling": 1.0}, scored_by_model=True)
    with_model = config_class("countdown")(
        experiment="grpo", ppo=PolicyGradientOptions(algo="dapo")
    )
    with_model.reward_model.path = "somewhere"
    ppo = policy_options(with_model)
    assert (
        actor_gen(with_model, ppo).resample == 0
        and resolve(ppo.to_plain_values(with_model.ppo)).dynamic_sampling == 0
    )


def test_the_penalty_ends_where_an_episode_can_get_to() -> None:
    """The limit of a sequence ends an episode as well: with a larger default nobody was ever
    punished."""
    config = config_class("countdown")(experiment="grpo", ppo=PolicyGradientOptions(algo="dapo"))
    config.gen.max_new_tokens = 400
    config.rollout.max_turns = 10
    config.rollout.max_total_tokens = 1000
    assert policy_options(config).overlong_length == 1000
    config.rollout.keep_reasoning = False
    assert policy_options(config).overlong_length == 4000, (
        "each of several sequences may be as long"
    )


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"dynamic_sampling": -1.0}, r"ppo.dynamic_sampling=-1.0: must be between 0 and 100"),
        ({"dynamic_sampling": 1.0, "adv_estimator": "reinforce"}, r"ppo.dynamic_sampling=1: with adv_estimator 'rein"),
        ({"dynamic_sampling": 1.0, "credit": "turn"}, r"ppo.dynamic_sampling=1: with credit=turn"),
        ({"overlong_buffer": 1.5}, r"ppo.overlong_buffer=1.5: must be between 0 and 1"),
        ({"overlong_buffer": 0.5}, r"ppo.overlong_buffer=0.5: needs ppo.overlong_length"),
        ({"overlong_length": 50}, r"ppo.overlong_length has no effect without ppo.overlong_buffer"),
        ({"overlong_buffer": 0.5, "overlong_length": 50, "credit": "turn"}, r"ppo.overlong_buffer=0.5: credit=turn"),
        ({"overlong_buffer": 0.5, "overlong_length": 9, "adv_estimator": "maxrl"}, r"ppo.overlong_buffer=0.5: adv_e"),
    ],
)  # fmt: skip
def test_what_would_do_nothing_or_harm_is_refused(options: dict[str, Any], names: str) -> None:
    with pytest.raises(ValueError, match=names):
        resolve(options)


def test_the_penalty_begins_and_ends_where_the_paper_says() -> None:
    """Exactly 0 where the zone begins, -1 where it ends and beyond."""
    interface = OutcomeRewardInterface(overlong_length=6, overlong_buffer=0.5)
    rows = [[[3], [4], [6], [9]], [[1], [5], [7], [2]]]
    sample = batch(rows, [[0.0] * 4, [1.0] * 4]).remap_keys({"rewards": "env_rewards"})
    rewards = interface.inference(None, sample, None)[0]["rewards"]  # type: ignore[arg-type]
    torch.testing.assert_close(
        rewards, torch.tensor([0.0, -1 / 3, -1.0, -1.0, 1.0, 1 / 3, 0.0, 1.0])
    )
