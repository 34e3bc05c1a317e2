"""``rew_inf`` alone on a worker: outcomes to rewards."""

import math

import pytest
import torch

from experiments.policy_gradient import config_class, rew_inf
from realhf.algorithms.options import PolicyGradientOptions
from realhf.api.experiment import ModelSpec
from realhf.api.sample import SequenceSample
from tests.mfc.mfc_bench import as_lists

pytestmark = pytest.mark.slow

ENV_ERROR, FILTERED = 3, 2


@pytest.fixture(scope="module")
def bench(make_bench, policy):
    ppo = PolicyGradientOptions(reward_scaling=2.0, reward_bias=-0.25, max_reward_clip=1.25)
    return make_bench(rew_inf(config_class("aws")(experiment="grpo_aws", ppo=ppo)), ModelSpec("actor", str(policy)))


def scored(scores, outcome):
    tensors = {
        "env_rewards": torch.tensor([x for group in scores for x in group]),
        "outcome": torch.tensor([x for group in outcome for x in group], dtype=torch.uint8),
    }
    lengths = [[1] * len(group) for group in scores]
    return SequenceSample.from_tensors([f"g{i}" for i in range(len(scores))], tensors, dict.fromkeys(tensors, lengths))


def test_bias_then_scale_then_clip(bench):
    outputs, stats = bench.infer(scored([[0.0, 0.25, 1.0], [0.5, -1.0]], [[0, 0, 0], [0, 0]]))
    assert outputs["rewards"].tolist() == [-0.5, 0.0, 1.25, 0.5, -1.25]
    assert outputs["rewards"].dtype == torch.float32
    assert as_lists(outputs.seqlens) == {"rewards": [[1, 1, 1], [1, 1]]}
    assert stats == {"reward_mean": 0.0, "n_scored": 5.0}


def test_a_failed_rollout_has_no_reward_rather_than_one_of_zero(bench):
    outputs, stats = bench.infer(scored([[0.75, 0.0], [0.0, 1.0]], [[0, ENV_ERROR], [0, FILTERED]]))
    first, failed, zero, filtered = outputs["rewards"].tolist()
    assert (first, zero) == (1.0, -0.5) and math.isnan(failed) and math.isnan(filtered)
    assert stats == {"reward_mean": 0.25, "n_scored": 2.0}


def test_a_batch_in_which_everything_failed_has_no_mean(bench):
    outputs, stats = bench.infer(scored([[0.0, 0.0]], [[ENV_ERROR, ENV_ERROR]]))
    assert bool(outputs["rewards"].isnan().all()) and stats == {"reward_mean": 0.0, "n_scored": 0.0}
