"""``rew_inf`` alone on a worker: what the environment says of rollouts, as rewards."""

import math

import pytest
import torch

from realhf.api.sample import SequenceSample
from tests.mfc.graph_calls import BIAS, CLIP, OVERLONG_BUFFER, OVERLONG_LENGTH, SCALING
from tests.mfc.mfc_bench import as_lists, replaced, shortened

FILTERED = 2
ENV_ERROR = 3
SCORES = [[0.0, 0.25, 1.0], [0.5, -1.0, 0.75]]
VALID = [[0, 0, 0], [0, 0, 0]]


def scored(scores=SCORES, outcome=VALID, name="g"):
    tensors = {
        "env_rewards": torch.tensor([x for group in scores for x in group]),
        "outcome": torch.tensor([x for group in outcome for x in group], dtype=torch.uint8),
    }
    lengths = [[1] * len(group) for group in scores]
    ids = [f"{name}{number}" for number in range(len(scores))]
    return SequenceSample.from_tensors(ids, tensors, dict.fromkeys(tensors, lengths))


def test_bias_then_scale_then_clip(bench):
    assert (BIAS, SCALING, CLIP) == (-0.25, 2.0, 1.25)
    outputs, stats = bench.run("rew_inf", scored())
    assert outputs["rewards"].tolist() == [-0.5, 0.0, 1.25, 0.5, -1.25, 1.0]
    assert outputs["rewards"].dtype == torch.float32
    assert as_lists(outputs.seqlens) == {"rewards": [[1, 1, 1], [1, 1, 1]]}
    assert stats == {"reward_mean": pytest.approx(1 / 6), "n_scored": 6.0}


def test_a_failed_rollout_has_no_reward_rather_than_one_of_zero(bench):
    sample = scored([[0.75, 0.0], [0.0, math.nan]], [[0, ENV_ERROR], [0, FILTERED]])
    outputs, stats = bench.run("rew_inf", sample)
    first, failed, zero, filtered = outputs["rewards"].tolist()
    assert (first, zero) == (1.0, -0.5) and math.isnan(failed) and math.isnan(filtered)
    assert stats == {"reward_mean": 0.25, "n_scored": 2.0}


def test_a_batch_in_which_everything_failed_has_no_mean(bench):
    outputs, stats = bench.run("rew_inf", scored([[0.0, 0.0]], [[ENV_ERROR, ENV_ERROR]]))
    assert bool(outputs["rewards"].isnan().all()) and stats == {"reward_mean": 0.0, "n_scored": 0.0}


def test_a_rollout_that_is_too_long_loses_up_to_one(bench):
    """Between 10 and 20 sampled tokens the reward falls in a line (DAPO); tokens of both rows of a
    rollout count."""
    assert (OVERLONG_LENGTH, OVERLONG_BUFFER) == (20, 0.5)
    sampled = [10, 15, 40, 8, 7]
    groups = [[length + 2 for length in sampled[:3]], [length + 2 for length in sampled[3:]]]
    masks = torch.cat([torch.arange(length + 2) >= 2 for length in sampled])
    tensors = {
        "packed_input_ids": torch.full((len(masks),), 5),
        "loss_mask": masks,
        "env_rewards": torch.full((5,), 0.25),
        "outcome": torch.zeros(5, dtype=torch.uint8),
        "rollout_index": torch.tensor([0, 1, 2, 0, 0], dtype=torch.int32),
    }
    ones = [[1] * 3, [1] * 2]
    lengths = {
        key: groups if len(tensor) == len(masks) else ones for key, tensor in tensors.items()
    }
    outputs, _ = bench.run(
        "rew_inf_overlong", SequenceSample.from_tensors(["a", "b"], tensors, lengths)
    )
    assert outputs["rewards"].tolist() == [0.0, -0.5, -1.0, -0.5, -0.5]


def test_samples_of_several_owners_are_joined(bench):
    sample = scored([[float(number), 0.5] for number in range(5)], [[0, 0]] * 5)
    rewards = bench.run("rew_inf", sample).outputs["rewards"]
    assert rewards.tolist() == [
        x for n in range(5) for x in (max(-1.25, min(1.25, (n - 0.25) * 2)), 0.5)
    ]
    assert torch.equal(bench.run("rew_inf", sample, n_owners=1).outputs["rewards"], rewards)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (
            lambda s: replaced(s, "env_rewards", s["env_rewards"] * torch.nan),
            "env_rewards of sample 'g0' is nan",
        ),
        (
            lambda s: replaced(s, "env_rewards", s["env_rewards"] / 0),
            "env_rewards of sample 'g0' is inf",
        ),
        (
            lambda s: replaced(s, "outcome", s["outcome"].float()),
            "outcome of sample 'g0' is f32, not u8",
        ),
        (
            lambda s: shortened(s, "outcome"),
            "outcome of sample 'g1' has 0 entries for a sequence, not 1",
        ),
    ],
    ids=["NaN", "infinite", "another type", "one too few"],
)
def test_a_bad_input_is_one_error_and_the_next_call_is_served(bench, spoil, words):
    """A score that is no number used to count as a failure that nobody had marked; an infinite one
    was clipped."""
    assert words in bench.error_of("rew_inf", spoil(scored([[0.5, 0.5], [1.0, 1.0]], [[0, 0]] * 2)))
    assert bench.run("rew_inf", scored()).stats["n_scored"] == 6


def test_a_key_that_its_owner_does_not_have_is_named(bench):
    assert "does not hold outcome of g" in bench.error_of("rew_inf", scored(), lost="outcome")


@pytest.mark.slow
def test_a_worker_that_is_killed_in_the_call_is_named(bench):
    assert "'model_worker/1' died" in bench.error_of_kill("rew_inf", scored())
    assert bench.run("rew_inf", scored()).stats["n_scored"] == 6
