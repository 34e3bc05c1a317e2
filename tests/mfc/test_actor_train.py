"""``actor_train`` alone on a worker: one policy-gradient step."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from experiments.policy_gradient import actor_model, actor_train, config_class, policy_options
from realhf.algorithms.options import PolicyGradientOptions
from realhf.api.config import ModelConfig, OptimizerConfig
from realhf.api.sample import SequenceSample
from tests.mfc.mfc_bench import USELESS, sequences

pytestmark = pytest.mark.slow

GROUPS = [[12, 20, 15, 9], [10, 18, 14, 11]]
REWARDS = [1.0, 0.0, 0.25, 0.0, 0.5, 0.5, 0.5, 0.5]
LR = 1e-4
OUTCOME = [0, 0, 0, 3, 0, 0, 0, 0]
"""The fourth rollout failed; the second group agrees, so it says nothing."""


@pytest.fixture(scope="module")
def bench(make_bench, policy):
    actor = ModelConfig(optimizer=OptimizerConfig(lr=LR, weight_decay=0.0, gradient_clipping=0.0))
    config = config_class("aws")(
        experiment="grpo_aws",
        actor=actor,
        ppo=PolicyGradientOptions(group_size=4, kl_loss_coef=0.0, loss_agg="token_mean"),
    )
    return make_bench(actor_train(config, policy_options(config)), actor_model(config, str(policy)))


def rollouts(logprobs, folder, rewards, seed=0, outcome=OUTCOME):
    """Random tokens, the second half of each sequence sampled by the policy in ``folder``."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [n for group in GROUPS for n in group]
    ids = torch.randint(4, 400, (sum(lengths),), generator=generator)
    mask = torch.tensor([t >= n // 2 for n in lengths for t in range(n)])
    names = [f"g{i}@{seed}" for i in range(2)]
    tokens = SequenceSample.from_tensors(names, {"packed_input_ids": ids}, {"packed_input_ids": GROUPS})
    return complete(tokens, mask, logprobs(tokens, folder=folder), rewards, outcome)


def complete(tokens, mask, logprobs, rewards, outcome):
    """All inputs of the call. A failed rollout has no reward."""
    lengths = tokens.seqlens["packed_input_ids"]
    keep = torch.cat([part[1:] for part in mask.split([n for group in lengths for n in group])])
    score = torch.tensor([math.nan if code else reward for reward, code in zip(rewards, outcome, strict=True)])
    tensors = {
        "loss_mask": mask,
        "packed_logprobs": torch.cat(logprobs) * keep,
        "packed_versions": torch.where(keep, 0, -1).int(),
        "rewards": score,
        "seq_no_eos_mask": torch.zeros(len(score), dtype=torch.bool),
        "outcome": torch.tensor(outcome, dtype=torch.uint8),
        "rollout_index": torch.tensor([i for group in lengths for i in range(len(group))], dtype=torch.int32),
    }
    shifted, ones = [[n - 1 for n in group] for group in lengths], [[1] * len(group) for group in lengths]
    seqlens = {
        "loss_mask": lengths,
        "packed_logprobs": shifted,
        "packed_versions": shifted,
        "rewards": ones,
        "seq_no_eos_mask": ones,
        "outcome": ones,
        "rollout_index": ones,
    }
    return tokens.update(SequenceSample.from_tensors(tokens.ids, tensors, seqlens))


def weights(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def sampled_sums(sample, logprobs):
    """Log-probability of the sampled tokens of every rollout."""
    masks = sequences(sample, "loss_mask")
    return [float(lp[mask[1:]].sum()) for lp, mask in zip(logprobs, masks, strict=True)]


def gradient_norm(folder, sample, advantages):
    """Of -(1/T) sum of advantage * log-probability over sampled tokens; T counts those of valid rollouts."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    total, count = torch.zeros((), dtype=torch.float64), 0
    parts = zip(sequences(sample, "packed_input_ids"), sequences(sample, "loss_mask"), advantages, OUTCOME, strict=True)
    for ids, mask, advantage, code in parts:
        logprobs = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        total = total - advantage * logprobs[mask[1:]].sum()
        count += int(mask[1:].sum()) * (code == 0)
    (total / count).backward()
    return math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None))


def test_one_step_follows_the_policy_gradient(bench, expected_logprobs):
    before = bench.export("before")
    sample = rollouts(expected_logprobs, before, REWARDS)
    outputs, stats = bench.call(sample, step=0)
    assert outputs is None
    # Group of 1, 0 and 1/4: mean 5/12, unbiased variance ((7/12)^2 + (5/12)^2 + (2/12)^2) / 2 = 78/288.
    advantages = [(reward - 5 / 12) / math.sqrt(78 / 288) for reward in (1.0, 0.0, 0.25)] + [0.0] * 5
    assert stats["grad_norm"] == pytest.approx(gradient_norm(before, sample, advantages), rel=1e-3)
    tokens = [int(mask[1:].sum()) for mask in sequences(sample, "loss_mask")]
    valid = sum(n for n, code in zip(tokens, OUTCOME, strict=True) if code == 0)
    loss = -sum(n * advantage for n, advantage in zip(tokens, advantages, strict=True)) / valid
    assert stats["loss"] == pytest.approx(loss, rel=1e-3)
    assert stats["lr"] == pytest.approx(LR)

    after = bench.export("after")
    assert float((weights(after) - weights(before)).abs().max()) == pytest.approx(LR, rel=0.05), "Adam's first step"
    old, new = (sampled_sums(sample, expected_logprobs(sample, folder=folder)) for folder in (before, after))
    rise = [after - before for before, after in zip(old, new, strict=True)]
    assert sum(advantage * each for advantage, each in zip(advantages, rise, strict=True)) > 0.01
    assert rise[0] > rise[1], "the better rollout gained on the worse one"


def test_the_better_of_two_answers_becomes_likelier_and_the_other_less(
    bench, expected_logprobs, policy, tokenizer, task
):
    question = f"<|user|>{task.description}<|assistant|>"
    texts = [f"{question}{answer}<|end|>" for answer in (task.solution[0], USELESS)]
    ids = [torch.tensor(tokenizer.encode(text, add_special_tokens=False)) for text in texts]
    asked = len(tokenizer.encode(question, add_special_tokens=False))
    mask = torch.cat([torch.arange(len(each)) >= asked for each in ids])
    lengths = [[len(each) for each in ids]]
    tokens = SequenceSample.from_tensors(["pair"], {"packed_input_ids": torch.cat(ids)}, {"packed_input_ids": lengths})
    before = bench.export("undecided")
    sample = complete(tokens, mask, expected_logprobs(tokens, folder=before), [1.0, 0.0], [0, 0])
    bench.call(sample, step=0)
    after = bench.export("decided")
    old, new = (sampled_sums(sample, expected_logprobs(sample, folder=folder)) for folder in (before, after))
    assert new[0] > old[0] + 1e-3 and new[1] < old[1] - 1e-3


def test_statistics_of_a_step(bench, expected_logprobs):
    sample = rollouts(expected_logprobs, bench.export("now"), REWARDS, seed=1)
    stats = bench.call(sample, step=1).stats
    assert {
        name: stats[name]
        for name in (
            "n_groups",
            "groups_with_signal",
            "n_sequences",
            "n_invalid",
            "n_updates",
            "skipped",
            "clip_fraction",
        )
    } == {
        "n_groups": 2,
        "groups_with_signal": 1,
        "n_sequences": 8,
        "n_invalid": 1,
        "n_updates": 1,
        "skipped": 0,
        "clip_fraction": 0,
    }
    assert stats["reward_mean"] == pytest.approx((1.0 + 0.25 + 4 * 0.5) / 7)
    assert stats["ratio_mean"] == pytest.approx(1.0, abs=1e-4)
    assert 0 <= stats["mismatch_kl"] < 1e-7 and stats["mismatch_abs"] < 1e-4


def test_a_stale_policy_shows_in_ratio_and_mismatch(bench, expected_logprobs, policy):
    now = bench.export("moved")
    sample = rollouts(expected_logprobs, policy, REWARDS, seed=2)
    old, new = (expected_logprobs(sample, folder=folder) for folder in (policy, now))
    trained = [mask[1:] for mask in sequences(sample, "loss_mask")][:3]
    ratio = torch.cat([(b - a)[mask].exp() for a, b, mask in zip(old, new, trained, strict=False)])
    stats = bench.call(sample, step=2).stats
    assert stats["ratio_mean"] == pytest.approx(float(ratio.mean()), rel=1e-3)
    assert stats["ratio_max"] == pytest.approx(float(ratio.max()), rel=1e-3)
    assert stats["mismatch_abs"] == pytest.approx(float(ratio.log().abs().mean()), rel=1e-3)
    assert stats["n_trained_tokens"] == len(ratio), "rollouts without an advantage are left out"


@pytest.mark.parametrize(("rewards", "outcome"), [([0.5] * 8, [0] * 8), (REWARDS, [3] * 8)], ids=["equal", "failed"])
def test_without_a_signal_and_without_kl_nothing_changes(bench, expected_logprobs, rewards, outcome):
    before = bench.export("unchanged")
    sample = rollouts(expected_logprobs, before, rewards, seed=3, outcome=outcome)
    stats = bench.call(sample, step=3).stats
    assert torch.equal(weights(bench.export("still")), weights(before))
    assert (stats["n_updates"], stats["grad_norm"], stats["groups_with_signal"]) == (0, 0, 0)
