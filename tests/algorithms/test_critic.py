"""The two calls of a critic on a real tiny engine, beside the actor's train step."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from realhf.algorithms.critic import CriticInterface, ReturnMoments, value_loss
from realhf.algorithms.policy_gradient import PolicyGradientInterface
from realhf.algorithms.train_step import PredictedTokens, drop_first_tokens
from realhf.api.experiment import InterfaceType, MFCDef
from realhf.api.sample import MicroBatchSpec, SequenceSample
from realhf.dataflow.model_host import call_interfaces
from tests.algorithms.tiny_policy import (
    GROUPS,
    OUTCOME,
    REWARDS,
    context,
    tiny_actor,
    tiny_critic,
    weights,
)

PPO: dict[str, Any] = {
    "algo": "ppo",
    "discount": 0.9,
    "gae_lambda": 0.8,
    "kl_ctl": 0.05,
    "adv_norm": False,
}


def valued(interface, critic, sample, step=0):
    """The batch with the values of the critic, and these alone."""
    values, stats = interface.inference(critic, sample, context(Path("."), step))
    assert stats == {"n_tokens": float(sum(n for group in GROUPS for n in group))}
    return sample.select(sample.keys - {"values"}).update(values), values


def with_turns(sample, rewards):
    """Two turns a sequence, the second from its middle on; a third of the reward comes after the
    first."""
    lengths = [n for group in sample.seqlens["packed_input_ids"] for n in group]
    ids = torch.cat([(torch.arange(n) >= n // 2).int() for n in lengths])
    ids = torch.where(sample["loss_mask"], ids, -1).int()
    parts = torch.tensor([(reward / 3, 2 * reward / 3) for reward in rewards]).flatten()
    counts = [[2] * len(group) for group in sample.seqlens["packed_input_ids"]]
    seqlens = {"turn_ids": sample.seqlens["packed_input_ids"], "turn_rewards": counts}
    return sample.update(
        SequenceSample.from_tensors(sample.ids, {"turn_ids": ids, "turn_rewards": parts}, seqlens)
    )


def gae_of(sample, i):
    """Position -> (advantage, return) of one sequence, by the definition, in float64."""
    tokens = PredictedTokens.from_sample(sample)
    places = [t for t in range(len(tokens.mask)) if tokens.sequence[t] == i and tokens.mask[t]]
    kl = sample["packed_logprobs"].double() - sample["packed_ref_logprobs"].double()
    value = [float(sample["values"][t]) for t in places] + [0.0]
    found = {}
    advantage = 0.0
    for n in range(len(places) - 1, -1, -1):
        reward = -0.05 * max(-10.0, min(10.0, float(kl[places[n]])))
        reward += float(sample["rewards"][i]) if n == len(places) - 1 else 0.0
        advantage = reward + 0.9 * value[n + 1] - value[n] + 0.9 * 0.8 * advantage
        found[places[n]] = (advantage, advantage + value[n])
    return found


@pytest.mark.slow
def test_both_train_calls_make_the_same_advantages_of_the_same_inputs(rollout_batch, tmp_path):
    """And they are those of the definition; failed rollouts have none. The critic's loss is that of
    its formula."""
    critic = tiny_critic()
    interface = CriticInterface(PPO, {"value_norm": True, "value_clip": 0.2})
    sample = rollout_batch(GROUPS, REWARDS, OUTCOME)
    sample, _ = valued(interface, critic, sample)
    interface.train_step(critic, sample, context(tmp_path))
    sample, _ = valued(interface, critic, sample, 1)
    actor = PolicyGradientInterface(PPO).prepare(sample)[0]
    now = critic.engine.forward(
        sample, lambda outputs, _: outputs.values(), mb_spec=MicroBatchSpec()
    ).double()
    before = interface.state_dict()["moments"]
    assert bool(now.any()) and not torch.allclose(now.float(), sample["values"]), (
        "values are in units of rewards"
    )
    trains = PredictedTokens.from_sample(sample).mask
    assert bool(sample["values"][trains].all()) and not bool(sample["values"][~trains].any())
    stats = interface.train_step(critic, sample, context(tmp_path, 1))
    expected: dict[int, tuple[float, float]] = {}
    for i in range(len(REWARDS)):
        expected |= gae_of(sample, i) if OUTCOME[i] == 0 else {}
    for t, advantage in enumerate(actor["advantages"].tolist()):
        assert advantage == pytest.approx(expected.get(t, (0.0, 0.0))[0], abs=1e-5)
    returns = [returned for _, returned in expected.values()]
    mean = sum(returns) / len(returns)
    assert stats["n_values"] == len(returns) and stats["return_mean"] == pytest.approx(
        mean, rel=1e-4
    )
    running = {"sum": mean, "squares": sum(r * r for r in returns) / len(returns), "weight": 1.0}
    moments = {name: 0.99 * before[name] + 0.01 * running[name] for name in running}
    centre = moments["sum"] / moments["weight"]
    std = math.sqrt(moments["squares"] / moments["weight"] - centre**2)
    assert (stats["return_running_mean"], stats["return_running_std"]) == pytest.approx(
        (centre, std), rel=1e-4
    )
    # The loss was taken before the update, so nothing had moved away from the old prediction and no
    # clip bites.
    loss = sum(
        ((float(now[t]) - (returned - centre) / std) ** 2) / 2
        for t, (_, returned) in expected.items()
    )
    assert stats["loss"] == pytest.approx(loss / len(returns), rel=1e-3)
    assert stats["value_clip_fraction"] == 0


@pytest.mark.slow
def test_an_untrained_critic_says_nothing_and_a_trained_one_explains_the_returns(
    rollout_batch, tmp_path
):
    critic = tiny_critic(lr=3e-2)
    interface = CriticInterface({**PPO, "gae_lambda": 1.0, "discount": 1.0})
    sample = rollout_batch(GROUPS, REWARDS, OUTCOME)
    history = []
    for step in range(25):
        critic.engine.version = step
        batch, values = valued(interface, critic, sample, step)
        if step == 0:
            assert not bool(values["values"].any())
        history.append(interface.train_step(critic, batch, context(tmp_path, step)))
    assert history[0]["explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert (
        history[-1]["explained_variance"] > 0.8
        and history[-1]["value_error"] < history[0]["value_error"] / 2
    )


@pytest.mark.slow
@pytest.mark.parametrize("spec", [{"n_mbs": 3}, {"max_tokens_per_mb": 16}], ids=str)
def test_micro_batches_change_nothing(rollout_batch, tmp_path, spec):
    results = []
    for given in ({}, spec):
        critic = tiny_critic()
        interface = CriticInterface(PPO)
        sample, _ = valued(interface, critic, rollout_batch(GROUPS, REWARDS, OUTCOME))
        results.append(
            (interface.train_step(critic, sample, context(tmp_path, **given)), weights(critic))
        )
    (one, after_one), (other, after_other) = results
    assert other == pytest.approx(one, rel=1e-3, abs=1e-6)
    torch.testing.assert_close(after_other, after_one, atol=1e-4, rtol=1e-3)


@pytest.mark.slow
def test_minibatches_update_several_times_and_the_clip_holds_predictions_back(
    rollout_batch, tmp_path
):
    """As many updates as the actor makes, unless the critic has numbers of its own."""
    for given, updates in (({}, 4), ({"n_minibatches": 3, "sample_reuse": 1}, 3)):
        critic = tiny_critic(lr=0.1)
        interface = CriticInterface(
            {**PPO, "ppo_n_minibatches": 2, "sample_reuse": 2}, {"value_clip": 0.05, **given}
        )
        sample, _ = valued(interface, critic, rollout_batch(GROUPS, REWARDS, OUTCOME))
        stats = interface.train_step(critic, sample, context(tmp_path))
        assert stats["n_updates"] == updates and 0 < stats["value_clip_fraction"] < 1


def test_by_turns_the_critic_learns_the_states_in_which_turns_begin(rollout_batch, tmp_path):
    options = {**PPO, "credit": "turn"}
    critic = tiny_critic()
    interface = CriticInterface(options)
    sample, _ = valued(
        interface, critic, with_turns(rollout_batch(GROUPS, REWARDS, OUTCOME), REWARDS)
    )
    stats = interface.train_step(critic, sample, context(tmp_path))
    tokens = PredictedTokens.from_sample(sample)
    turn = drop_first_tokens(sample, "turn_ids")
    begun = {(int(tokens.sequence[t]), int(turn[t])) for t in range(len(turn)) if tokens.mask[t]}
    assert stats["n_values"] == len([pair for pair in begun if OUTCOME[pair[0]] == 0])
    advantages = PolicyGradientInterface(options).prepare(sample)[0]["advantages"]
    for i, k in begun:
        mine = advantages[(tokens.sequence == i) & (turn == k) & tokens.mask]
        assert bool((mine == mine[0]).all()) and (bool(mine[0]) == (OUTCOME[i] == 0))


@pytest.mark.slow
def test_a_resumed_critic_goes_on_to_the_bit(rollout_batch, tmp_path):
    """The weights with the value head, the optimizer, and the units of the returns."""
    sample = rollout_batch(GROUPS, REWARDS, OUTCOME)

    def step(interface, critic, number):
        critic.engine.version = number
        batch, _ = valued(interface, critic, sample, number)
        return interface.train_step(critic, batch, context(tmp_path, number))

    critic, interface = tiny_critic(), CriticInterface(PPO)
    step(interface, critic, 0)
    critic.engine.save_checkpoint(tmp_path / "checkpoint")
    state = interface.state_dict()
    expected = step(interface, critic, 1)
    resumed = tiny_critic()
    resumed_interface = CriticInterface(PPO)
    resumed.engine.load_checkpoint(tmp_path / "checkpoint")
    resumed_interface.load_state_dict(state)
    assert step(resumed_interface, resumed, 1) == expected
    assert torch.equal(weights(resumed), weights(critic))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("outcome", "rewards", "updates"),
    [([1] * 12, REWARDS, 0), ([1] * 4 + [0] + [1] * 7, REWARDS, 1), ([0] * 12, [0.5] * 12, 1)],
    ids=["nothing valid", "one sequence", "equal rewards"],
)
def test_batches_with_little_in_them_train_what_there_is(
    rollout_batch, tmp_path, outcome, rewards, updates
):
    critic = tiny_critic()
    interface = CriticInterface(PPO)
    sample, _ = valued(interface, critic, rollout_batch(GROUPS, rewards, outcome))
    before = weights(critic)
    stats = interface.train_step(critic, sample, context(tmp_path))
    assert stats["n_updates"] == updates and all(math.isfinite(value) for value in stats.values())
    assert torch.equal(weights(critic), before) == (updates == 0)
    assert (
        PolicyGradientInterface(PPO).train_step(tiny_actor(), sample, context(tmp_path))[
            "n_updates"
        ]
        == updates
    )


def test_a_model_without_a_value_head_is_refused(rollout_batch):
    with pytest.raises(ValueError, match="no value head"):
        valued(CriticInterface(PPO), tiny_actor(), rollout_batch(GROUPS, REWARDS, OUTCOME))


@pytest.mark.slow
def test_a_critic_that_has_diverged_is_named(rollout_batch, tmp_path):
    critic, interface = tiny_critic(), CriticInterface(PPO)
    with torch.no_grad():
        critic.engine.model.value_head.weight.fill_(math.nan)  # type: ignore[attr-defined]
    sample, _ = valued(interface, critic, rollout_batch(GROUPS, REWARDS, OUTCOME))
    for call in (
        lambda: interface.train_step(critic, sample, context(tmp_path)),
        lambda: PolicyGradientInterface(PPO).train_step(tiny_actor(), sample, context(tmp_path)),
    ):
        with pytest.raises(
            ValueError, match=r"critic_inf: a value is not finite.*critic.optimizer.lr"
        ):
            call()


def test_missing_values_and_estimators_without_them_are_named(rollout_batch, tmp_path):
    sample = rollout_batch(GROUPS, REWARDS, OUTCOME)
    with pytest.raises(ValueError, match=r"adv_estimator=gae .* needs the key values"):
        PolicyGradientInterface(PPO).train_step(tiny_actor(), sample, context(tmp_path))
    with pytest.raises(ValueError, match=r"ppo.adv_estimator=grpo: takes no values"):
        CriticInterface({"algo": "grpo"})


@pytest.mark.slow
def test_the_actor_waits_while_the_critic_warms_up(rollout_batch, tmp_path):
    critic = tiny_critic()
    interface = CriticInterface(PPO)
    sample, _ = valued(interface, critic, rollout_batch(GROUPS, REWARDS, OUTCOME))
    actor = tiny_actor()
    policy = PolicyGradientInterface(PPO, first_step=1)
    before = weights(actor)
    waits = policy.train_step(actor, sample, context(tmp_path, 0))
    assert torch.equal(weights(actor), before) and waits["n_updates"] == 0 and waits["n_tokens"] > 0
    assert policy.train_step(actor, sample, context(tmp_path, 1))["n_updates"] == 1
    assert not torch.equal(weights(actor), before)


def test_calls_with_the_same_arguments_share_their_interface():
    """What critic_train measures of the returns, critic_inf predicts in."""
    args = {"ppo": PPO, "critic": {"value_clip": None}}
    kinds = (("critic_inf", InterfaceType.INFERENCE), ("critic_train", InterfaceType.TRAIN_STEP))
    calls = [MFCDef(name, "critic", kind, "critic", args) for name, kind in kinds]
    other = MFCDef("other", "second", InterfaceType.INFERENCE, "critic", args)
    third = MFCDef("third", "critic", InterfaceType.INFERENCE, "critic", {"ppo": PPO})
    found = call_interfaces([*calls, other, third])
    assert found["critic_inf"][1] is found["critic_train"][1] and found["critic_inf"][0] is calls[0]
    assert len({id(interface) for _, interface in found.values()}) == 3


def test_before_anything_was_seen_the_units_are_those_of_rewards():
    moments = ReturnMoments(0.9)
    moments.observe(torch.zeros(0))
    values = torch.tensor([0.5, -2.0])
    assert (moments.mean, moments.std) == (0.0, 1.0)
    assert torch.equal(moments.normalise(values), values) and torch.equal(
        moments.denormalise(values), values
    )


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.99])
def test_moments_are_weighted_means_of_the_batches_seen(decay):
    """Batch k of n has the weight decay^(n-1-k), and the weights sum to one from the first batch
    on."""
    generator = torch.Generator().manual_seed(1)
    batches = [
        2 + k + torch.randn(5 + k, generator=generator, dtype=torch.float64) for k in range(4)
    ]
    moments = ReturnMoments(decay)
    for n, batch in enumerate(batches, 1):
        moments.observe(batch)
        weights = [decay ** (n - 1 - k) for k in range(n)]
        mean, square = (
            sum(w * float(power.mean()) for w, power in zip(weights, powers, strict=True))
            / sum(weights)
            for powers in (batches[:n], [b * b for b in batches[:n]])
        )
        assert moments.mean == pytest.approx(mean)
        assert moments.std == pytest.approx(math.sqrt(square - mean**2))
    values = torch.tensor([0.1, 5.0])
    torch.testing.assert_close(moments.denormalise(moments.normalise(values)), values)


def test_equal_returns_do_not_blow_up_the_units():
    moments = ReturnMoments(0.9)
    moments.observe(torch.full((7,), 0.3))
    assert moments.mean == pytest.approx(0.3) and moments.std == 0.01


def test_moments_go_on_where_they_were_saved():
    first = ReturnMoments(0.9)
    second = ReturnMoments(0.9)
    first.observe(torch.tensor([1.0, 2.0]))
    second.load_state_dict(first.state_dict())
    for moments in (first, second):
        moments.observe(torch.tensor([5.0]))
    assert (first.mean, first.std) == (second.mean, second.std)


def test_a_return_that_is_no_number_is_refused():
    moments = ReturnMoments(0.9)
    with pytest.raises(ValueError, match="not finite"):
        moments.observe(torch.tensor([math.nan]))
    with pytest.raises(ValueError, match="value_norm_decay=1"):
        ReturnMoments(1.0)


def test_the_value_loss_is_its_formula():
    """In float64, with and without the clip; the gradient vanishes where the clip decides."""
    predicted = torch.tensor([0.0, 0.5, 1.0, -1.0, 0.35], requires_grad=True)
    before = torch.tensor([0.1, 0.1, 0.1, 0.1, 0.1])
    target = torch.tensor([1.0, 1.0, 1.0, 1.0, -1.0])
    losses, clipped = value_loss(predicted, before, target, 0.2)
    for v, old, r, loss, cut in zip(
        predicted.tolist(),
        before.tolist(),
        target.tolist(),
        losses.tolist(),
        clipped.tolist(),
        strict=True,
    ):
        held = min(max(v, old - 0.2), old + 0.2)
        assert loss == pytest.approx(max((v - r) ** 2, (held - r) ** 2) / 2)
        assert cut == ((held - r) ** 2 > (v - r) ** 2)
    losses.sum().backward()
    assert predicted.grad is not None
    assert (
        [bool(g) for g in predicted.grad]
        == [not cut for cut in clipped.tolist()]
        == [True, False, False, True, True]
    )
    plain, nowhere = value_loss(predicted, before, target, None)
    torch.testing.assert_close(plain, (predicted - target).square() / 2)
    assert not bool(nowhere.any())
