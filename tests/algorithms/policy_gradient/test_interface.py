"""The interfaces on a real tiny engine."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.policy_gradient import actor_inf, config_class, policy_options, ref_inf, rew_inf
from realhf.algorithms.aggregation import AGGREGATIONS
from realhf.algorithms.inference import LogprobInterface, OutcomeRewardInterface
from realhf.algorithms.options import PolicyGradientOptions
from realhf.algorithms.policy_gradient import PolicyGradientInterface
from realhf.algorithms.presets import PRESETS
from realhf.algorithms.sft import SFTInterface
from realhf.algorithms.train_step import PredictedTokens, replace_keys
from realhf.api.config import GenConfig
from realhf.api.model import Model
from realhf.api.sample import MicroBatchSpec, SequenceSample, choose_sequences
from tests.algorithms.tiny_policy import (
    GROUPS,
    OUTCOME,
    REWARDS,
    context,
    on_policy,
    tiny_actor,
    weights,
)


def fingerprint(sample):
    return {key: sample[key].numpy().tobytes() for key in sample.keys}


VARIANTS: list[dict[str, Any]] = [
    {"algo": "grpo"}, {"algo": "drgrpo", "loss_scale_len": 40}, {"algo": "gspo"}, {"algo": "rloo", "kl_ctl": 0.1},
    {"algo": "grpo", "kl_loss_coef": 0.1}, {"algo": "grpo", "entropy_coef": 0.01},
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_leaving_out_and_microbatching_change_no_gradient(rollout_batch, tmp_path, options):
    sample = rollout_batch(GROUPS, REWARDS, OUTCOME)
    before = fingerprint(sample)
    results = []
    for skip, spec in ((True, {}), (False, {}), (True, {"n_mbs": 3})):
        model = tiny_actor()
        interface = PolicyGradientInterface(options, temperature=0.9, skip_zero_advantage=skip)
        results.append(interface.train_step(model, sample, context(tmp_path, **spec)))
        assert model.engine.version == 0
    for other in results[1:]:
        assert other["loss"] == pytest.approx(results[0]["loss"], rel=1e-4, abs=1e-7)
        assert other["grad_norm"] == pytest.approx(results[0]["grad_norm"], rel=1e-4)
    assert results[0]["grad_norm"] > 0 and fingerprint(sample) == before
    pure = (
        "kl_loss_coef" not in options and "entropy_coef" not in options and "kl_ctl" not in options
    )
    assert (results[0]["n_trained_tokens"] < results[1]["n_trained_tokens"]) == pure


@pytest.mark.slow
def test_loss_equals_an_independent_computation(rollout_batch, tmp_path):
    sample = rollout_batch(GROUPS, REWARDS, OUTCOME)
    model = tiny_actor()
    current = model.engine.logprobs(sample, temperature=1.0, mb_spec=MicroBatchSpec())
    ref = sample["packed_ref_logprobs"]
    old = sample["packed_logprobs"]
    tokens = PredictedTokens.from_sample(sample)
    per_sequence = []
    for i in range(12):
        mine = [
            t
            for t in range(len(current))
            if tokens.sequence[t] == i and tokens.mask[t] and OUTCOME[i] == 0
        ]
        group = [REWARDS[j] for j in range(3 * (i // 3), 3 * (i // 3) + 3) if OUTCOME[j] == 0]
        mean = sum(group) / len(group)
        std = math.sqrt(sum((r - mean) ** 2 for r in group) / (len(group) - 1))
        advantage = (REWARDS[i] - mean) / (std + 1e-6) if OUTCOME[i] == 0 and std > 0 else 0.0
        losses = []
        for t in mine:
            rho = math.exp(float(current[t] - old[t]))
            pg = max(-advantage * rho, -advantage * min(max(rho, 0.8), 1.2))
            x = float(current[t] - ref[t])
            losses.append(pg + 0.1 * (math.exp(-x) - 1 + x))
        if losses:
            per_sequence.append(sum(losses) / len(losses))
    stats = PolicyGradientInterface({"kl_loss_coef": 0.1}).train_step(
        model, sample, context(tmp_path)
    )
    assert stats["loss"] == pytest.approx(sum(per_sequence) / len(per_sequence), rel=1e-4)


@pytest.mark.slow
def test_on_policy_step_has_unit_ratio_and_reports(rollout_batch, tmp_path):
    model = tiny_actor()
    sample = on_policy(model, rollout_batch(GROUPS, REWARDS, OUTCOME), tmp_path)
    stats = PolicyGradientInterface({"algo": "grpo"}).train_step(model, sample, context(tmp_path))
    assert stats["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert (
        stats["mismatch_kl"] < 1e-9 and stats["mismatch_abs"] < 1e-5 and stats["clip_fraction"] == 0
    )
    assert (stats["groups_with_signal"], stats["n_groups"], stats["n_invalid"]) == (3, 4, 1)
    assert stats["reward_mean"] == pytest.approx(sum(r for r in REWARDS if r == r) / 11)
    assert stats["skipped"] == 0 and stats["n_updates"] == 1


def test_no_signal_trains_nothing(rollout_batch, tmp_path):
    model = tiny_actor()
    sample = rollout_batch(GROUPS, [1.0] * 12)
    before = weights(model)
    stats = PolicyGradientInterface({}).train_step(model, sample, context(tmp_path))
    assert stats["n_updates"] == 0 and stats["groups_with_signal"] == 0
    assert torch.equal(weights(model), before) and model.engine.version == 0


LITTLE = {
    "one valid": [1] * 4 + [0] + [1] * 7,
    "nothing valid": [1] * 12,
    "nothing sampled": [0] * 12,
}


@pytest.mark.slow
@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "algo", [name for name in PRESETS if name not in ("ppo", "gigpo", "opd", "sdpo")]
)
@pytest.mark.parametrize("case", LITTLE)
def test_a_batch_with_little_in_it_trains_what_there_is(rollout_batch, tmp_path, algo, case):
    """One valid sequence has nobody to be compared with: only an estimator that compares nothing
    learns of it. Without any, and where no token was sampled, nothing changes, and every statistic
    is a number."""
    model = tiny_actor()
    sample = rollout_batch(GROUPS, [1.0] * 4 + [0.5] + [0.0] * 7, LITTLE[case])
    if case == "nothing sampled":
        sample = replace_keys(
            sample, per_token={"loss_mask": torch.zeros_like(sample["loss_mask"])}
        )
    options = {"algo": algo} | ({"loss_scale_len": 40} if algo == "drgrpo" else {})
    before = weights(model)
    stats = PolicyGradientInterface(options).train_step(model, sample, context(tmp_path))
    updates = int(case == "one valid" and algo == "reinforce_pp")
    assert stats["n_updates"] == updates and torch.equal(weights(model), before) == (updates == 0)
    assert all(math.isfinite(value) for value in stats.values())


@pytest.mark.parametrize(
    "aggregation", [name for name, row in AGGREGATIONS.items() if not row.by_turn]
)
def test_supervised_training_without_a_token_changes_nothing(rollout_batch, tmp_path, aggregation):
    model = tiny_actor()
    sample = rollout_batch(GROUPS, REWARDS)
    sample = replace_keys(sample, per_token={"loss_mask": torch.zeros_like(sample["loss_mask"])})
    before = weights(model)
    stats = SFTInterface(aggregation).train_step(model, sample, context(tmp_path))
    assert stats["nll"] == stats["n_tokens"] == stats["grad_norm"] == 0 and torch.equal(
        weights(model), before
    )


def test_token_kl_reward_to_go(rollout_batch):
    sample = rollout_batch(GROUPS, REWARDS, OUTCOME)
    got = PolicyGradientInterface({"algo": "rloo", "kl_ctl": 0.1, "kl_estimator": "k1"}).prepare(
        sample
    )[0]
    plain = PolicyGradientInterface({"algo": "rloo"}).prepare(sample)[0]["advantages"]
    tokens = PredictedTokens.from_sample(got)
    kl = sample["packed_logprobs"] - sample["packed_ref_logprobs"]
    for t in range(len(kl)):
        later = [
            s
            for s in range(t, len(kl))
            if tokens.sequence[s] == tokens.sequence[t] and tokens.mask[s]
        ]
        expected = (
            float(plain[t]) - 0.1 * sum(float(kl[s]) for s in later) if tokens.mask[t] else 0.0
        )
        assert float(got["advantages"][t]) == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
def test_missing_reference_and_truncation_keys_are_named(rollout_batch, tmp_path):
    sample = rollout_batch(GROUPS, REWARDS, OUTCOME)
    bare = sample.select(sample.keys - {"packed_ref_logprobs"})
    with pytest.raises(ValueError, match="packed_ref_logprobs"):
        PolicyGradientInterface({"kl_loss_coef": 0.1}).train_step(
            tiny_actor(), bare, context(tmp_path)
        )
    with pytest.raises(ValueError, match="seq_no_eos_mask"):
        PolicyGradientInterface({"mask_too_long": True}).train_step(
            tiny_actor(), bare, context(tmp_path)
        )


@pytest.mark.slow
def test_three_non_finite_updates_in_a_row_ask_for_the_end(rollout_batch, tmp_path):
    model = tiny_actor()
    sample = rollout_batch(GROUPS, REWARDS, OUTCOME)
    with torch.no_grad():
        next(iter(model.engine.model.parameters())).fill_(math.nan)  # type: ignore[attr-defined]
    interface = PolicyGradientInterface({})
    for step in range(2):
        stats = interface.train_step(model, sample, context(tmp_path, step))
        assert stats["skipped"] == 1 and "stop" not in stats
    resumed = PolicyGradientInterface({})
    resumed.load_state_dict(interface.state_dict())
    assert "3 updates in a row" in resumed.train_step(model, sample, context(tmp_path, 2))["stop"]


def test_no_further_minibatch_after_too_many_skipped_ones(rollout_batch, tmp_path):
    model = tiny_actor()
    sample = rollout_batch(GROUPS, REWARDS, OUTCOME)
    with torch.no_grad():
        next(iter(model.engine.model.parameters())).fill_(math.nan)  # type: ignore[attr-defined]
    interface = PolicyGradientInterface(
        {"ppo_n_minibatches": 3, "max_nonfinite_steps": 2, "kl_loss_coef": 0.1}
    )
    stats = interface.train_step(model, sample, context(tmp_path))
    assert stats["skipped"] == 2 and "2 updates in a row" in stats["stop"]


def test_supervised_training_asks_for_the_end_too(rollout_batch, tmp_path):
    model = tiny_actor()
    sample = rollout_batch(GROUPS, REWARDS)
    with torch.no_grad():
        next(iter(model.engine.model.parameters())).fill_(math.nan)  # type: ignore[attr-defined]
    interface = SFTInterface(max_nonfinite_steps=2)
    stats = [interface.train_step(model, sample, context(tmp_path)) for _ in range(2)]
    assert "stop" not in stats[0] and "2 updates in a row" in stats[1]["stop"]


def test_outcome_reward():
    """Bias, then scale, then clip; a failed rollout has no reward rather than one of 0."""
    config = config_class("aws")(
        experiment="grpo_aws",
        ppo=PolicyGradientOptions(reward_scaling=2.0, reward_bias=-0.5, max_reward_clip=30.0),
    )
    interface = OutcomeRewardInterface(**rew_inf(config, policy_options(config)).interface_args)
    for scores, failures, rewards, mean in (
        ([0.0, 1.0, 100.0, -50.0], [0, 0, 0, 0], [-1.0, 1.0, 30.0, -30.0], 0.0),
        ([0.0, 1.0, 0.0, 1.0], [0, 3, 2, 0], [-1.0, None, None, 1.0], 0.0),
        ([0.0] * 4, [3] * 4, [None] * 4, 0.0),
    ):
        tensors = {"env_rewards": torch.tensor(scores), "outcome": torch.tensor(failures)}
        sample = SequenceSample.from_tensors(
            ["a", "b"], tensors, {key: [[1, 1], [1, 1]] for key in tensors}
        )
        out, stats = interface.inference(Model("rew", None, None), sample, context(Path(".")))
        assert [
            None if reward != reward else reward for reward in out["rewards"].tolist()
        ] == rewards
        assert out["rewards"].dtype == torch.float32 and out.seqlens["rewards"] == [[1, 1], [1, 1]]
        assert stats == {"reward_mean": mean, "n_scored": failures.count(0)}


def plain_logprobs(model, sample, temperature=1.0):
    """One plain forward of transformers for each sequence, with a gradient: [f32 (L-1,)]."""
    found = []
    for ids in sample["packed_input_ids"].split(
        [n for group in sample.seqlens["packed_input_ids"] for n in group]
    ):
        logits = model.engine.model(input_ids=ids[None]).logits[0, :-1] / temperature
        found.append(logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("call", [ref_inf, actor_inf])
def test_scores_are_the_log_softmax_at_the_sampling_temperature(rollout_batch, tmp_path, call):
    mfc = call(config_class("aws")(experiment="grpo_aws", gen=GenConfig(temperature=0.7)))
    model = tiny_actor()
    sample = rollout_batch(GROUPS, REWARDS)
    interface = LogprobInterface(**mfc.interface_args)
    out, stats = interface.inference(model, sample, context(tmp_path, max_tokens_per_mb=32))
    with torch.no_grad():
        expected = torch.where(
            PredictedTokens.from_sample(sample).mask,
            torch.cat(plain_logprobs(model, sample, 0.7)),
            0.0,
        )
    torch.testing.assert_close(out[mfc.output_keys[0]], expected, atol=1e-4, rtol=1e-4)
    assert stats["n_tokens"] == sum(map(sum, GROUPS))


@pytest.mark.slow
def test_a_step_follows_the_policy_gradient(rollout_batch, tmp_path):
    """Its norm is that of -(1/T) sum of advantage * log-probability, and better rollouts become
    likelier."""
    model = tiny_actor()
    sample = on_policy(model, rollout_batch(GROUPS, REWARDS, OUTCOME), tmp_path)
    interface = PolicyGradientInterface({"loss_agg": "token_mean"})
    prepared = interface.prepare(sample)[0]
    advantages = prepared["advantages"]
    mask = PredictedTokens.from_sample(prepared).mask
    before = torch.cat(plain_logprobs(model, sample))
    loss = -(advantages * before)[mask].sum() / int(mask.sum())
    gradient = torch.autograd.grad(loss, [*model.engine.model.parameters()], allow_unused=True)
    norm = math.sqrt(sum(float(part.square().sum()) for part in gradient if part is not None))
    stats = interface.train_step(model, sample, context(tmp_path))
    assert stats["grad_norm"] == pytest.approx(norm, rel=1e-3)
    with torch.no_grad():
        rise = (torch.cat(plain_logprobs(model, sample)) - before)[mask]
    assert float((rise * advantages[mask]).sum()) > 0


@pytest.mark.slow
def test_sft_learns_the_masked_tokens(rollout_batch, tmp_path):
    model = tiny_actor(lr=2e-2)
    interface = SFTInterface()
    sample = rollout_batch(GROUPS, REWARDS).select(["packed_input_ids", "loss_mask"])
    start = interface.evaluate(model, sample, context(tmp_path))["nll"]
    stats = [interface.train_step(model, sample, context(tmp_path, n_mbs=2)) for _ in range(15)]
    assert (
        stats[0]["nll"]
        == pytest.approx(start, rel=1e-5)
        == pytest.approx(stats[0]["loss"], rel=1e-5)
    )
    assert interface.evaluate(model, sample, context(tmp_path))["nll"] < start - 1


def test_choosing_sequences_keeps_order_and_drops_empty_samples(rollout_batch):
    sample = rollout_batch(GROUPS, REWARDS)
    keep = torch.tensor([False, True, True] + [False] * 3 + [True] * 3 + [False, False, True])
    got = choose_sequences(sample, keep.numpy())
    assert got is not None and got.ids == ("t0", "t2", "t3")
    assert got.seqlens["packed_input_ids"] == [[14, 6], [8, 7, 10], [4]]
    assert torch.equal(got["packed_input_ids"][:20], sample["packed_input_ids"][9:29])
    assert torch.equal(got["rewards"].nan_to_num(9), sample["rewards"][keep].nan_to_num(9))
    assert choose_sequences(sample, torch.zeros(12, dtype=torch.bool).numpy()) is None


@pytest.mark.slow
def test_rounding_of_the_generator_clips_no_sequence(rollout_batch, tmp_path):
    """The clip range of gspo is narrower than the difference between two programs that compute the
    same policy."""
    generator = torch.Generator().manual_seed(3)
    clipped = {}
    for recompute in (None, False):
        model = tiny_actor()
        sample = on_policy(model, rollout_batch(GROUPS, REWARDS, OUTCOME), tmp_path)
        noise = 0.01 * torch.randn(len(sample["packed_logprobs"]), generator=generator)
        rounded = SequenceSample.from_tensors(
            sample.ids,
            {"packed_logprobs": sample["packed_logprobs"] + noise},
            {"packed_logprobs": sample.seqlens["packed_logprobs"]},
        )
        sample = sample.select(sample.keys - {"packed_logprobs"}).update(rounded)
        options = {"algo": "gspo", "recompute_logprob": recompute}
        stats = PolicyGradientInterface(options).train_step(model, sample, context(tmp_path))
        clipped[recompute] = stats["clip_fraction"]
        assert stats["mismatch_abs"] > 1e-3, "the mismatch is still reported"
    assert clipped[None] == 0 and clipped[False] > 0.2


def test_lengths_and_spread_of_a_batch_are_reported(rollout_batch):
    sample = rollout_batch(GROUPS, REWARDS, OUTCOME)
    cut = SequenceSample.from_tensors(
        sample.ids,
        {"seq_no_eos_mask": torch.arange(12) % 4 == 0},
        {"seq_no_eos_mask": [[1] * 3] * 4},
    )
    stats = PolicyGradientInterface({}).prepare(sample.update(cut))[1]
    masks = sample["loss_mask"].split([n for group in GROUPS for n in group])
    sampled = [
        int(mask[1:].sum()) for mask, outcome in zip(masks, OUTCOME, strict=True) if outcome == 0
    ]
    assert stats["response_tokens_mean"] == pytest.approx(sum(sampled) / 11)
    assert stats["response_tokens_max"] == max(sampled)
    assert stats["too_long_fraction"] == pytest.approx(2 / 11), (
        "the third cut sequence is not valid"
    )
    valid = [r for r in REWARDS if r == r]
    mean = sum(valid) / 11
    assert stats["reward_std"] == pytest.approx(math.sqrt(sum((r - mean) ** 2 for r in valid) / 10))
