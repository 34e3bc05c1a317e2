"""On-policy distillation: advantages against a loop, their gradient against that of the divergence
itself, and a student that comes nearer to its teacher."""

from __future__ import annotations

import math

import pytest
import torch

from realhf.algorithms.inference import LogprobInterface
from realhf.algorithms.policy_gradient import PolicyGradientInterface
from realhf.algorithms.policy_loss import LossTerms, reinforce_loss
from realhf.algorithms.resolution import resolve
from realhf.algorithms.token_advantages import distillation
from realhf.algorithms.train_step import PredictedTokens, replace_keys
from realhf.api.config import OptimizerConfig
from realhf.api.model import Model
from realhf.api.sample import SequenceSample
from realhf.backends.training.torch_engine import TorchEngine
from tests.algorithms.tiny_policy import (
    GROUPS,
    OUTCOME,
    REWARDS,
    _language_model,
    context,
    tiny_actor,
)


def taught(sample, seed=0):
    """The sample with what a teacher says of the tokens that train, and NaN of the others."""
    tokens = PredictedTokens.from_sample(sample)
    said = -4 * torch.rand(len(tokens.mask), generator=torch.Generator().manual_seed(seed))
    said[5::7] = -40.0  # so unlikely that the bound counts
    return replace_keys(
        sample, shifted={"teacher_logprobs": torch.where(tokens.mask, said, math.nan)}
    )


@pytest.mark.parametrize(("rl", "distill"), [(0.0, 1.0), (1.0, 0.25), (0.5, 2.0)])
@pytest.mark.parametrize("options", [{}, {"adv_estimator": "rloo", "adv_norm": True}], ids=str)
def test_an_advantage_is_the_share_of_the_reward_and_that_of_the_teacher(
    rollout_batch, rl, distill, options
):
    """Token by token; a failed rollout, and what nobody sampled, has none, whatever stands
    there."""
    options = options if rl else {}
    sample = taught(rollout_batch(GROUPS, REWARDS, OUTCOME))
    of_rewards = PolicyGradientInterface(options).prepare(sample)[0]["advantages"].tolist()
    made, stats = PolicyGradientInterface(
        {**options, "rl_weight": rl, "distill_weight": distill}
    ).prepare(sample)
    tokens = PredictedTokens.from_sample(sample)
    found = made["advantages"].tolist()
    apart = []
    for t, sequence in enumerate(tokens.sequence.tolist()):
        if not tokens.mask[t] or OUTCOME[sequence]:
            assert found[t] == 0
            continue
        gap = float(sample["teacher_logprobs"][t]) - float(sample["packed_logprobs"][t])
        expected = rl * of_rewards[t] + distill * max(-10.0, min(10.0, gap))
        assert found[t] == pytest.approx(expected, abs=1e-5)
        apart.append(max(-10.0, min(10.0, math.exp(min(gap, 20.0)) - 1 - gap)))
    assert stats["kl_teacher"] == pytest.approx(sum(apart) / len(apart), rel=1e-4)


def test_beside_behaviour_weights_the_gap_is_to_the_proximal_policy(rollout_batch):
    """The gap to the sampler is that to the proximal policy plus what the weights make up for
    already."""
    sample = taught(rollout_batch(GROUPS, REWARDS, OUTCOME))
    proximal = sample["packed_logprobs"] - 0.5
    sample = replace_keys(sample, shifted={"proximal_logprobs": proximal})
    plain = PolicyGradientInterface({"algo": "opd"}).prepare(sample)[0]["advantages"]
    made = PolicyGradientInterface({"algo": "opd", "use_decoupled_loss": True}).prepare(sample)[0][
        "advantages"
    ]
    moved = (plain != 0) & (plain > -9.5)
    torch.testing.assert_close(made[moved], (plain[moved] + 0.5).clamp(max=10.0))
    assert bool(moved.any())


def test_its_expected_gradient_is_minus_that_of_the_reverse_divergence():
    """Over all tokens of a vocabulary, in float64: what a step descends is KL(policy, teacher)
    itself."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(7, dtype=torch.float64, generator=generator, requires_grad=True)
    teacher = torch.randn(7, dtype=torch.float64, generator=generator).log_softmax(0)
    policy = logits.log_softmax(0)
    every = torch.ones(7, dtype=torch.bool)
    sample = SequenceSample.from_tensors(
        ["a"],
        {
            "packed_input_ids": torch.arange(14),
            "teacher_logprobs": teacher,
            "packed_logprobs": policy.detach(),
        },
        {
            "packed_input_ids": [[2] * 7],
            "teacher_logprobs": [[1] * 7],
            "packed_logprobs": [[1] * 7],
        },
    )
    options = resolve({"algo": "opd"})
    advantages = distillation(sample, options, every)[0]
    loss = reinforce_loss(
        LossTerms(policy, policy.detach(), advantages, every, torch.arange(7), 7), options
    ).loss
    (found,) = torch.autograd.grad((policy.detach().exp() * loss).sum(), logits, retain_graph=True)
    (expected,) = torch.autograd.grad((policy.exp() * (policy - teacher)).sum(), logits)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-10)


@pytest.mark.slow
def test_a_student_comes_nearer_to_its_teacher(tmp_path):
    """On its own samples, drawn anew before each step; the divergence is that over the whole
    vocabulary."""
    student = tiny_actor(lr=2e-2)
    generator = torch.Generator().manual_seed(3)
    torch.manual_seed(7)
    network = _language_model()
    with torch.no_grad():
        for weight in network.parameters():
            weight.add_(0.3 * torch.randn(weight.shape, generator=generator))
    teacher = Model(
        "teacher",
        TorchEngine(network, None, optimizer=OptimizerConfig(), total_train_steps=1),
        None,
    )
    score = LogprobInterface("teacher_logprobs")
    interface = PolicyGradientInterface({"algo": "opd"})
    apart = []
    for _ in range(10):
        sample, divergence = rollouts(student.engine.model, network, generator)
        apart.append(divergence)
        said, _ = score.inference(teacher, sample, context(tmp_path))
        stats = interface.train_step(student, sample.update(said), context(tmp_path))
        assert stats["kl_teacher"] > 0 and stats["ratio_mean"] == pytest.approx(1, abs=1e-3)
    assert apart[-1] < 0.7 * apart[0], apart


@torch.no_grad()
def rollouts(student, teacher, generator, n=512):
    """A group of ``n`` sequences of two tokens, of which the student draws the second, without a
    reward that differs; and the mean divergence of student from teacher where it drew."""
    ids = torch.randint(0, 2, (n, 1), generator=generator)
    mine, theirs = (
        each(input_ids=ids).logits[:, -1].log_softmax(-1) for each in (student, teacher)
    )
    drawn = torch.multinomial(mine.exp(), 1, generator=generator)
    tensors = {
        "packed_input_ids": torch.cat((ids, drawn), 1).flatten(),
        "loss_mask": torch.tensor([False, True]).repeat(n),
        "packed_logprobs": mine.gather(1, drawn).flatten(),
        "rewards": torch.zeros(n),
    }
    lengths = {"packed_input_ids": [[2] * n], "loss_mask": [[2] * n], "packed_logprobs": [[1] * n]}
    sample = SequenceSample.from_tensors(["a"], tensors, lengths | {"rewards": [[1] * n]})
    return sample, float((mine.exp() * (mine - theirs)).sum(-1).mean())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"algo": "opd", "distill_weight": 0.0},
            "ppo.rl_weight=0, distill_weight=0: nothing would be learned",
        ),
        ({"rl_weight": 0.5}, "ppo.rl_weight=0.5: it is relative to ppo.distill_weight"),
        ({"algo": "opd", "kl_ctl": 0.1}, r"ppo.rl_weight=0: .*kl_ctl=0.1.* use kl_loss_coef"),
        (
            {"algo": "ppo", "rl_weight": 0.0, "distill_weight": 1.0},
            "ppo.rl_weight=0: .*adv_estimator 'gae'",
        ),
        ({"algo": "opd", "adv_norm": True}, "ppo.adv_norm has no effect with rl_weight 0"),
        ({"algo": "opd", "credit": "turn"}, "ppo.credit has no effect with rl_weight 0"),
        (
            {"algo": "opd", "reward_scaling": 2.0},
            "ppo.reward_scaling has no effect with rl_weight 0",
        ),
        ({"algo": "opd", "reward_bias": 2.0}, "ppo.reward_bias has no effect with rl_weight 0"),
        (
            {"algo": "opd", "max_reward_clip": 2.0},
            "ppo.max_reward_clip has no effect with rl_weight 0",
        ),
        (
            {"algo": "opd", "overlong_buffer": 0.5},
            r"ppo.overlong_buffer=0.5: it is a part of the reward",
        ),
        ({"distill_weight": -1.0}, "ppo.distill_weight"),
    ],
)
def test_options_that_do_nothing_or_contradict_are_refused(options, told):
    with pytest.raises(ValueError, match=told):
        resolve(options)


def test_what_is_missing_or_no_number_is_told(rollout_batch, tmp_path):
    sample = rollout_batch(GROUPS, REWARDS, OUTCOME)
    interface = PolicyGradientInterface({"algo": "opd", "group_size": 1})
    with pytest.raises(ValueError, match=r"ppo.distill_weight .* needs the key teacher_logprobs"):
        interface.train_step(tiny_actor(), sample, context(tmp_path))
    broken = replace_keys(
        sample,
        shifted={"teacher_logprobs": torch.full((sample.n_tokens("packed_logprobs"),), math.nan)},
    )
    with pytest.raises(
        ValueError, match="teacher_inf: a log-probability of the teacher is not a number"
    ):
        interface.train_step(tiny_actor(), broken, context(tmp_path))
