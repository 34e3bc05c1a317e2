"""Train steps on tokens of other policies, on a real tiny engine: where the proximal policy comes
from, and what a step reports about staleness and mismatch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from realhf.algorithms.inference import LogprobInterface
from realhf.algorithms.policy_gradient import (
    PolicyGradientInterface,
    mismatch_statistics,
    staleness_statistics,
)
from realhf.algorithms.train_step import PredictedTokens, replace_keys
from realhf.api.sample import MicroBatchSpec
from tests.algorithms.tiny_policy import GROUPS, OUTCOME, REWARDS, context, tiny_actor, weights


def off_policy(rollout_batch):
    """A batch whose behaviour policy is near the tiny actor, but another."""
    sample = rollout_batch(GROUPS, REWARDS, OUTCOME)
    own = scored(tiny_actor(), sample)["proximal_logprobs"]
    g = torch.Generator().manual_seed(1)
    versions = torch.randint(0, 4, (len(own),), generator=g, dtype=torch.int32)
    return replace_keys(
        sample,
        shifted={
            "packed_logprobs": own + 0.3 * torch.randn(len(own), generator=g),
            "packed_versions": versions,
        },
    )


def scored(model, sample):
    """With the output of the call ``actor_inf``."""
    out = LogprobInterface("proximal_logprobs").inference(model, sample, context(Path(".")))[0]
    return sample.select(sample.keys - {"proximal_logprobs"}).update(out)


def step(options, sample, *, version=3, **spec):
    """Statistics of a step of a new actor, and its weights afterwards."""
    model = tiny_actor()
    stats = PolicyGradientInterface(options).train_step(
        model, sample, context(Path("."), version, **spec)
    )
    return stats, weights(model)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    [
        {"use_decoupled_loss": True},
        {"recompute_logprob": True},
        {"recompute_logprob": True, "kl_ctl": 0.1},
        {"use_decoupled_loss": True, "kl_loss_coef": 0.1},
    ],
    ids=str,
)
@pytest.mark.parametrize("n_minibatches", [1, 3])
def test_recomputed_in_the_train_call_is_what_actor_inf_says(
    rollout_batch: Any, given: dict[str, Any], n_minibatches: int
) -> None:
    sample = off_policy(rollout_batch)
    options = {"ppo_n_minibatches": n_minibatches, **given}
    called, after_call = step(options, scored(tiny_actor(), sample))
    stale = replace_keys(
        sample, shifted={"proximal_logprobs": torch.full_like(sample["packed_logprobs"], -9.0)}
    )
    for unprepared in (sample, stale):
        recomputed, after = step({"prox_logp_method": "recompute", **options}, unprepared)
        torch.testing.assert_close(after, after_call, atol=1e-5, rtol=1e-4)
        assert recomputed == pytest.approx(called, rel=1e-3, abs=1e-5)
    assert called["n_updates"] == n_minibatches
    assert (abs(called["ratio_max"] - 1) < 1e-4) == (n_minibatches == 1), (
        "the ratio is to the start of the step"
    )


@pytest.mark.slow
def test_recomputed_logprobs_replace_the_old_ones_in_the_kl_reward_too(rollout_batch):
    sample = scored(tiny_actor(), off_policy(rollout_batch))
    got = PolicyGradientInterface({"recompute_logprob": True, "kl_ctl": 0.1}).prepare(sample)[0][
        "advantages"
    ]
    replaced = replace_keys(sample, shifted={"packed_logprobs": sample["proximal_logprobs"]})
    plain = PolicyGradientInterface({"kl_ctl": 0.1})
    assert torch.equal(got, plain.prepare(replaced)[0]["advantages"])
    assert not torch.allclose(got, plain.prepare(sample)[0]["advantages"], atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    [
        {"recompute_logprob": True},
        {"use_decoupled_loss": True},
        {
            "use_decoupled_loss": True,
            "behav_imp_weight_mode": "truncate",
            "behav_imp_weight_cap": 1.1,
        },
    ],
    ids=str,
)
def test_recompute_and_one_minibatch_is_the_plain_policy_gradient(
    rollout_batch: Any, given: dict[str, Any]
) -> None:
    sample = off_policy(rollout_batch)
    model = tiny_actor()
    interface = PolicyGradientInterface(
        {"loss_agg": "token_mean", "prox_logp_method": "recompute", **given}
    )
    prepared = interface.prepare(sample)[0]
    tokens = PredictedTokens.from_sample(prepared)
    own = scored(model, sample)["proximal_logprobs"]
    w = (own - sample["packed_logprobs"]).exp()
    w = {
        "recompute_logprob": torch.ones_like(w),
        "use_decoupled_loss": torch.where(w <= 5, w, 0.0),
    }[next(iter(given))]
    if "behav_imp_weight_cap" in given:
        w = (own - sample["packed_logprobs"]).exp().clamp(max=1.1)

    def surrogate(outputs, part):
        gain = part["advantages"] * part["w"] * outputs.logprobs()[0]
        return -torch.where(PredictedTokens.from_sample(part).mask, gain, 0.0).sum() / int(
            tokens.mask.sum()
        ), {}

    batch = replace_keys(prepared, shifted={"w": w, "advantages": prepared["advantages"]})
    expected = model.engine.train_batch(batch, surrogate, mb_spec=MicroBatchSpec())
    stats = interface.train_step(other := tiny_actor(), sample, context(Path("."), 3))
    assert (
        stats["grad_norm"] == pytest.approx(expected.grad_norm, rel=1e-4)
        and stats["clip_fraction"] == 0
    )
    # Adam's first step is a sign: it compares the direction of every gradient that is not next to
    # nothing.
    torch.testing.assert_close(weights(other), weights(model), atol=1e-4, rtol=1e-3)


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"behav_imp_weight_level": "sequence"},
        {"prox_logp_method": "loglinear"},
        {"prox_logp_method": "recompute"},
    ],
    ids=str,
)
def test_microbatches_and_leaving_out_change_nothing(
    rollout_batch: Any, given: dict[str, Any]
) -> None:
    sample = scored(tiny_actor(), off_policy(rollout_batch))
    options = {"use_decoupled_loss": True, **given}
    whole, after = step(options, sample)
    for spec in ({"n_mbs": 3}, {"max_tokens_per_mb": 10}):
        stats, weights_after = step(options, sample, **spec)
        torch.testing.assert_close(weights_after, after, atol=1e-4, rtol=1e-3)
        # The one number that tells of padding.
        stats["positions_per_token"] = whole["positions_per_token"]
        assert stats == pytest.approx(whole, rel=1e-3, abs=1e-5)


@pytest.mark.slow
def test_decoupled_step_on_its_own_samples_is_an_ordinary_one(rollout_batch):
    sample = scored(tiny_actor(), rollout_batch(GROUPS, REWARDS, OUTCOME))
    sample = replace_keys(sample, shifted={"packed_logprobs": sample["proximal_logprobs"]})
    plain, after_plain = step({}, sample)
    stats, after = step({"use_decoupled_loss": True}, sample)
    assert torch.equal(after, after_plain) and stats["loss"] == plain["loss"]
    assert (
        stats["behav_weight_mean"] == stats["behav_weight_max"] == 1.0
        and stats["rejected_fraction"] == 0
    )


@pytest.mark.slow
def test_the_step_reports_weights_and_mismatch(rollout_batch):
    sample = scored(tiny_actor(), off_policy(rollout_batch))
    options = {"use_decoupled_loss": True, "behav_imp_weight_cap": 1.2, "entropy_coef": 0.01}
    stats, _ = step(options, sample)
    valid = torch.tensor(OUTCOME) == 0
    tokens = PredictedTokens.from_sample(sample)
    mask = tokens.mask & valid[tokens.sequence]
    distance = (sample["proximal_logprobs"] - sample["packed_logprobs"])[mask]
    w = distance.exp()
    ordered = distance.abs().sort().values.tolist()
    assert stats["n_trained_tokens"] == len(ordered), "with entropy every token counts"
    assert stats["rejected_fraction"] == pytest.approx(float((w > 1.2).float().mean()))
    assert 0 < stats["rejected_fraction"] < 1
    assert stats["behav_weight_max"] == pytest.approx(float(w.max()), rel=1e-4)
    assert stats["behav_weight_mean"] == pytest.approx(
        float(torch.where(w > 1.2, 0.0, w).mean()), rel=1e-4
    )
    assert stats["mismatch_abs"] == pytest.approx(sum(ordered) / len(ordered), rel=1e-4)
    assert stats["mismatch/abs_max"] == pytest.approx(ordered[-1], rel=1e-4)
    assert stats["mismatch/abs_p50"] == pytest.approx(ordered[len(ordered) // 2], rel=1e-3)


@pytest.mark.slow
def test_mismatch_is_of_the_first_minibatch_only(rollout_batch):
    sample = scored(tiny_actor(), rollout_batch(GROUPS, REWARDS, OUTCOME))
    sample = replace_keys(sample, shifted={"packed_logprobs": sample["proximal_logprobs"]})
    stats, _ = step({"ppo_n_minibatches": 3, "kl_loss_coef": 0.1}, sample)
    assert stats["mismatch/abs_max"] < 1e-5 < abs(stats["ratio_max"] - 1)


def test_quantiles():
    values = torch.cat([torch.arange(60.0, 100.0), torch.arange(0.0, 60.0).flip(0)])
    assert mismatch_statistics(values) == {
        "mismatch/abs_p50": 50.0,
        "mismatch/abs_p99": 99.0,
        "mismatch/abs_max": 99.0,
    }
    assert mismatch_statistics(torch.ones(1))["mismatch/abs_p99"] == 1.0
    assert mismatch_statistics(torch.zeros(0)) == {}


def test_staleness_equals_loop():
    g = torch.Generator().manual_seed(0)
    for u in (0, 3, 12):
        lengths = torch.randint(1, 7, (20,), generator=g)
        sequence = torch.repeat_interleave(torch.arange(20), lengths)
        mask = torch.rand(len(sequence), generator=g) < 0.7
        versions = torch.randint(-1, u + 1, (len(sequence),), generator=g, dtype=torch.int32)
        got = staleness_statistics(
            versions,
            PredictedTokens(mask, sequence, torch.zeros(20, dtype=torch.int64), torch.arange(20)),
            u,
        )
        rows = [
            [
                int(v)
                for v, s, m in zip(versions, sequence, mask, strict=True)
                if s == i and m and v >= 0
            ]
            for i in range(20)
        ]
        head = [u - min(row) for row in rows if row]
        tail = [u - max(row) for row in rows if row]
        assert got["staleness/head_mean"] == pytest.approx(sum(head) / len(head))
        assert got["staleness/head_max"] == max(head)
        assert got["staleness/tail_mean"] == pytest.approx(sum(tail) / len(tail))
        bins = [got[f"staleness/hist_{name}"] for name in (0, 1, 2, 3, 4, 5, 6, "7plus")]
        assert bins == pytest.approx(
            [sum(min(h, 7) == i for h in head) / len(head) for i in range(8)]
        )


@pytest.mark.slow
def test_the_step_reports_the_staleness_of_valid_sequences(rollout_batch):
    sample = rollout_batch(GROUPS, REWARDS, OUTCOME)
    tokens = PredictedTokens.from_sample(sample)
    # the failed one is the oldest and does not count
    born = torch.tensor([2, 3, 3, 3, 3, 3, 3, 3, 0, 3, 3, 3])
    versions = torch.where(tokens.mask, born[tokens.sequence], -1).int()
    sample = replace_keys(sample, shifted={"packed_versions": versions})
    stats, _ = step({}, sample, version=4)
    assert (stats["staleness/head_mean"], stats["staleness/head_max"]) == (
        pytest.approx(12 / 11),
        2,
    )
    assert (stats["staleness/hist_1"], stats["staleness/hist_2"]) == (
        pytest.approx(10 / 11),
        pytest.approx(1 / 11),
    )
    unknown = replace_keys(sample, shifted={"packed_versions": torch.full_like(versions, -1)})
    assert not [name for name in step({}, unknown)[0] if name.startswith("staleness")]


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"use_decoupled_loss": True}, "proximal_logprobs"),
        ({"recompute_logprob": True}, "proximal_logprobs"),
        ({"use_decoupled_loss": True, "prox_logp_method": "loglinear"}, "packed_versions"),
    ],
    ids=str,
)
def test_missing_keys_are_named(rollout_batch: Any, given: dict[str, Any], key: str) -> None:
    model = tiny_actor()
    sample = rollout_batch(GROUPS, REWARDS, OUTCOME)
    before = weights(model)
    with pytest.raises(ValueError, match=key):
        PolicyGradientInterface(given).train_step(model, sample, context(Path(".")))
    assert torch.equal(weights(model), before)


@pytest.mark.slow
def test_inputs_are_not_changed(rollout_batch):
    sample = scored(tiny_actor(), off_policy(rollout_batch))
    before = {key: sample[key].numpy().tobytes() for key in sample.keys}
    step(
        {"use_decoupled_loss": True, "ppo_n_minibatches": 2, "prox_logp_method": "recompute"},
        sample,
    )
    assert {key: sample[key].numpy().tobytes() for key in sample.keys} == before


@pytest.mark.parametrize("discount", [1.0, 0.9])
@pytest.mark.parametrize("estimator", ["reinforce_pp", "reinforce_pp_baseline"])
def test_reinforce_pp_advantages_equal_a_loop(rollout_batch, estimator, discount):
    sample = rollout_batch(GROUPS, REWARDS, OUTCOME)
    options = {"algo": "reinforce_pp", "adv_estimator": estimator, "discount": discount}
    got = PolicyGradientInterface(options).prepare(sample)[0]["advantages"]
    tokens = PredictedTokens.from_sample(sample)
    kl = sample["packed_logprobs"] - sample["packed_ref_logprobs"]
    expected = [0.0] * len(kl)
    for i in range(12):
        positions = [
            t
            for t in range(len(kl))
            if tokens.sequence[t] == i and tokens.mask[t] and OUTCOME[i] == 0
        ]
        group = [REWARDS[j] for j in range(3 * (i // 3), 3 * (i // 3) + 3) if OUTCOME[j] == 0]
        score = REWARDS[i] - (
            sum(group) / len(group) if estimator == "reinforce_pp_baseline" else 0.0
        )
        to_go = 0.0
        for t in reversed(positions):
            reward = -0.01 * float(kl[t]) + (score if t == positions[-1] else 0.0)
            to_go = reward + discount * to_go
            expected[t] = to_go
    inside = [t for t in range(len(kl)) if tokens.mask[t] and OUTCOME[int(tokens.sequence[t])] == 0]
    mean = sum(expected[t] for t in inside) / len(inside)
    std = math.sqrt(sum((expected[t] - mean) ** 2 for t in inside) / len(inside))
    white = torch.zeros(len(kl))
    for t in inside:
        white[t] = (expected[t] - mean) / (std + 1e-5)
    torch.testing.assert_close(got, white, atol=1e-4, rtol=1e-4)
