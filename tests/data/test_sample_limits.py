"""What a finished group must look like, with a rollout that failed among the others."""

import math

import pytest
import torch

from realhf.algorithms.inference import OutcomeRewardInterface
from realhf.api.environment import RolloutOutcome
from realhf.api.keys import key_spec
from realhf.api.sample import SequenceSample
from realhf.data.stream_dataset import SampleLimits
from realhf.rollout.rollout_sample import outcomes_to_sample
from realhf.transport.codec import encode_sample
from realhf.transport.errors import CodecError

NAMES = "packed_input_ids prompt_mask loss_mask packed_logprobs packed_versions env_rewards seq_no_eos_mask outcome"
KEYS = tuple(map(key_spec, (NAMES + " rewards rollout_index").split()))


def rollout(status, reward):
    return RolloutOutcome(
        status=status,
        prompt_ids=[1, 2],
        completion_ids=[3, 4],
        logprobs=[-0.1, -0.2],
        versions=[0, 0],
        loss_mask=[True, True],
        reward=reward,
        achieved=status == "achieved",
        progress=0.0,
        turns=(),
        task_id=1,
        group="warmup",
        seed=1,
    )


def finished(statuses):
    """A group as a rollout worker streams it, its rewards computed."""
    sample = outcomes_to_sample(["s"], [[rollout(status, reward) for status, reward in statuses.items()]])
    rewards, _ = OutcomeRewardInterface().inference(None, sample, None)
    return sample.update(rewards)


def test_a_failed_rollout_has_no_reward_and_its_group_is_taken():
    sample = finished({"achieved": 1.0, "internal": None, "max_turns": 0.25})
    rewards = SampleLimits(KEYS).read("s", encode_sample(sample))["rewards"]
    assert rewards[0] == 1.0 and math.isnan(rewards[1]) and rewards[2] == 0.25


@pytest.mark.parametrize("key", ["rewards", "packed_logprobs", "env_rewards"])
def test_what_is_not_finite_without_a_failure_is_refused(key):
    sample = finished({"achieved": 1.0, "internal": None})
    broken = sample[key].clone()
    broken[0] = math.inf
    tensors = {**{name: sample[name] for name in sample.keys}, key: broken}
    whole = SequenceSample.from_tensors(["s"], tensors, sample.seqlens)
    with pytest.raises(CodecError, match=f"{key}.*not finite"):
        SampleLimits(KEYS).read("s", encode_sample(whole))


def test_an_outcome_of_another_length_is_refused():
    sample = finished({"achieved": 1.0, "internal": None})
    tensors = {name: sample[name] for name in sample.keys} | {"outcome": torch.zeros(1, dtype=torch.uint8)}
    whole = SequenceSample.from_tensors(["s"], tensors, {**sample.seqlens, "outcome": [[1]]})
    with pytest.raises(CodecError):
        SampleLimits(KEYS).read("s", encode_sample(whole))
