"""Packed keys of rollouts: shapes, alignment of shifted keys, and failures that are not rewards."""

import json
from dataclasses import replace

import pytest
import torch

from realhf.api.environment import RolloutOutcome
from realhf.rollout.rollout_sample import outcomes_to_sample


def outcome(status: str = "achieved", *, prompt: int = 3, sampled: int = 2, env: int = 2, reward: float = 1.0):
    """prompt ids 1.., then `sampled` policy tokens, `env` environment tokens, `sampled` policy tokens."""
    mask = [True] * sampled + [False] * env + [True] * sampled
    failed = status == "internal"
    return RolloutOutcome(
        status=status,
        prompt_ids=list(range(1, prompt + 1)),
        completion_ids=list(range(100, 100 + len(mask))),
        logprobs=[-0.5 if m else 0.0 for m in mask],
        versions=[7 if m else -1 for m in mask],
        loss_mask=mask,
        reward=None if failed else reward,
        achieved=status == "achieved",
        progress=1.0,
        turns=(),
        task_id="1",
        group="warmup",
        seed=0,
    )


def test_shifted_keys_sit_before_the_token_they_predict() -> None:
    sample = outcomes_to_sample(["a"], [[outcome(), outcome(prompt=1, sampled=1, env=0)]])
    assert sample.seqlens["packed_input_ids"] == [[9, 3]]
    assert sample.seqlens["packed_logprobs"] == [[8, 2]]
    mask, logprobs, versions = sample["loss_mask"], sample["packed_logprobs"], sample["packed_versions"]
    shifted_mask = torch.cat([mask[1:9], mask[10:12]])
    assert torch.equal(logprobs != 0, shifted_mask)
    assert torch.equal(versions == 7, shifted_mask)
    assert sample["packed_input_ids"].tolist() == [1, 2, 3, 100, 101, 102, 103, 104, 105, 1, 100, 101]
    assert not bool((sample["prompt_mask"] & mask).any())
    assert sample["prompt_mask"].sum() == 4


def test_a_failed_rollout_trains_nothing_and_has_no_reward() -> None:
    sample = outcomes_to_sample(["a"], [[outcome(), outcome("internal")]])
    assert sample["outcome"].tolist() == [0, 3]
    assert not bool(sample["loss_mask"][9:].any())
    assert json.loads(sample.metadata["rewards"][0]) == [1.0, None]
    assert json.loads(sample.metadata["achieved"][0]) == [True, None]


def test_a_group_with_too_few_valid_rollouts_trains_nothing() -> None:
    groups = [[outcome(), outcome("internal")], [outcome(), outcome()]]
    sample = outcomes_to_sample(["a", "b"], groups, min_group_size=2)
    assert sample["outcome"].tolist() == [2, 3, 0, 0]
    assert sample["loss_mask"].reshape(4, 9).any(dim=1).tolist() == [False, False, True, True]


def test_a_rollout_that_failed_before_its_prompt_keeps_its_place() -> None:
    broken = outcome("internal", prompt=0, sampled=0, env=0)
    sample = outcomes_to_sample(["a", "b"], [[broken, outcome()], [outcome(), broken]])
    assert sample.seqlens["packed_input_ids"] == [[1, 9], [9, 1]]
    assert sample.seqlens["packed_logprobs"] == [[0, 8], [8, 0]]


@pytest.mark.parametrize(
    ("status", "last_turn_cut", "cut"),
    [
        ("achieved", False, False),
        ("achieved", True, False),
        ("finished", True, False),
        ("max_turns", False, False),
        ("max_turns", True, True),
        ("token_budget", False, True),
    ],
)
def test_episodes_ended_by_a_limit_of_tokens_are_valid_and_marked(status: str, last_turn_cut: bool, cut: bool) -> None:
    sample = outcomes_to_sample(["a"], [[replace(outcome(status), last_turn_cut=last_turn_cut)]])
    assert sample["outcome"].tolist() == [0]
    assert sample["seq_no_eos_mask"].tolist() == [cut]


def played(status: str = "achieved", **more: object) -> RolloutOutcome:
    """Two turns of two tokens, with two of the environment between, and a reward of each."""
    return replace(outcome(status), turn_starts=[0, 4], turn_rewards=[0.25, 0.75], **more)


def test_turns_are_numbered_where_the_policy_spoke() -> None:
    """-1 on the prompt and the environment's tokens; what does not train has no turn, and one reward of 0."""
    branch = replace(outcome(sampled=1, env=0), turn_starts=[0], turn_rewards=[0.5, 0.0, 1.0], first_turn=2)
    groups = [[played(), played("internal")], [played(branches=(replace(branch, completion_ids=[1, 2]),))]]
    sample = outcomes_to_sample(["a", "b"], groups, turns=True)
    none = [-1] * 9
    one = [-1, -1, -1, 0, 0, -1, -1, 1, 1]
    assert sample["turn_ids"].tolist() == [*one, *none, *one, -1, -1, -1, 2, 2]
    assert sample["rollout_index"].tolist() == [0, 1, 0, 0], "a branch has the number of its rollout"
    assert sample.seqlens["turn_rewards"] == [[2, 1], [2, 3]]
    assert sample["turn_rewards"].tolist() == [0.25, 0.75, 0.0, 0.25, 0.75, 0.5, 0.0, 1.0]
    assert torch.equal(sample["turn_ids"] >= 0, sample["loss_mask"])
    assert (sample["turn_ids"].dtype, sample["turn_rewards"].dtype) == (torch.int32, torch.float32)


def test_turns_are_made_only_where_they_are_asked_for_and_change_nothing_else() -> None:
    plain, more = (outcomes_to_sample(["a"], [[played(), played()]], turns=turns) for turns in (False, True))
    assert more.keys - plain.keys == {"turn_ids", "turn_rewards"}
    assert all(torch.equal(plain[key], more[key]) for key in plain.keys)


def test_two_turns_without_a_token_between_them_stay_two() -> None:
    row = replace(outcome(sampled=2, env=0), turn_starts=[0, 1, 3], turn_rewards=[1.0, 2.0, 3.0])
    sample = outcomes_to_sample(["a"], [[row]], turns=True)
    assert sample["turn_ids"].tolist() == [-1, -1, -1, 0, 1, 1, 2]
