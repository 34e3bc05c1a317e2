"""How an episode takes turns and ends, without a server."""

from __future__ import annotations

from typing import Any

import pytest

from realhf.api.env import StepResult
from realhf.api.model import GenOutput
from realhf.rollout.episode.rollout_state import Limits, RolloutRequest, RolloutState
from tests.rollout.scripted import CUE, END, FOLLOW, LossyChat

LIMITS = Limits(max_turns=3, max_total_tokens=120, turn_tokens=20, observation_chars=500)


def observed(output: str, *, done: bool = False, reward: float | None = 0.25, **more: Any) -> StepResult:
    task = {"task_id": 7, "difficulty": "beginner", "description": "do it"}
    observation = {
        "command_success": True,
        "command_output": output,
        "error": "",
        "task": task,
        "hint_text": "",
        "task_achieved": False,
        "partial_progress": 0.5,
        **more,
    }
    return StepResult(observation, reward, done)


def said(words: str, finish: str = "stop") -> GenOutput:
    ids = [ord(c) + 1000 for c in words] + ([END] if finish == "stop" else [])
    return GenOutput(ids, [-1.0] * len(ids), [0] * len(ids), finish)


def begun(limits: Limits = LIMITS) -> RolloutState:
    rollout = RolloutState(RolloutRequest(0, {}, 11), LossyChat(), limits)
    rollout.start(observed("", reward=None))
    return rollout


def test_a_long_observation_is_cut_until_a_turn_fits() -> None:
    rollout = begun()
    rollout.take_turn(said("aws s3 ls"))
    assert rollout.command == "aws s3 ls"
    rollout.take_reply(observed("x" * 60 + "y" * 60))
    assert not rollout.status and len(rollout.request(0).token_ids) <= 100
    text = rollout.request(0).token_ids[6 + 10 + 1 : -1]
    assert text[0] == ord("x") and text[-1] == ord("y") and len(text) > 40


def test_the_end_of_a_truncated_turn_is_added_without_loss() -> None:
    rollout = begun()
    rollout.take_turn(said("aws s3 ls", finish="length"))
    rollout.take_reply(observed("o"))
    assert rollout.request(0).token_ids[-4:] == [END, FOLLOW, ord("o"), CUE]
    assert rollout.tokens is not None and rollout.tokens.loss_mask[-4:] == [False] * 4


def test_no_room_for_another_turn_ends_with_token_budget() -> None:
    rollout = begun(Limits(3, 36, 20, 500))
    rollout.take_turn(said("aws s3 ls"))
    rollout.take_reply(observed("long output"))
    outcome = rollout.outcome()
    assert (outcome.status, outcome.reward, outcome.valid) == ("token_budget", 0.25, True)
    assert outcome.loss_mask[-1]


@pytest.mark.parametrize(
    ("last", "status"),
    [
        ({"done": True, "task_achieved": True}, "achieved"),
        ({"done": True}, "finished"),
        ({}, "max_turns"),
    ],
)
def test_rewards_are_summed_and_the_status_tells_the_end(last: dict[str, Any], status: str) -> None:
    rollout = begun()
    for extra in ({}, {}, last):
        assert not rollout.status
        rollout.take_turn(said("aws s3 ls"))
        rollout.take_reply(observed("", **extra))
    outcome = rollout.outcome()
    assert (outcome.status, outcome.reward, outcome.seed) == (status, 0.75, 11)
    assert outcome.achieved is (status == "achieved")
    assert outcome.completion_ids[-1] == END and len(outcome.turns) == 3


@pytest.mark.parametrize("reward", [None, float("nan")])
def test_a_step_without_a_reward_is_a_failure_not_a_zero(reward: float | None) -> None:
    rollout = begun()
    rollout.take_turn(said("aws s3 ls"))
    rollout.take_reply(observed("", reward=reward))
    outcome = rollout.outcome()
    assert (outcome.status, outcome.reward, outcome.valid, outcome.achieved) == ("env_error", None, False, False)


def test_an_empty_turn_is_a_policy_error() -> None:
    rollout = begun()
    rollout.take_turn(GenOutput([], [], [], "interrupted"))
    assert rollout.outcome().status == "policy_error" and rollout.outcome().reward is None


def test_a_full_context_ends_the_episode_as_a_spent_budget_does() -> None:
    rollout = begun()
    rollout.take_turn(said("aws s3 ls"))
    rollout.take_reply(observed("o"))
    rollout.take_turn(GenOutput([], [], [], "length"))
    outcome = rollout.outcome()
    assert (outcome.status, outcome.reward, outcome.valid, outcome.truncated) == ("token_budget", 0.25, True, True)
    assert outcome.loss_mask == [True] * 10, "the observation that nobody answered is gone"


def test_a_turn_that_fills_the_context_is_complete() -> None:
    rollout = begun()
    rollout.take_turn(said("aws s3 ", finish="interrupted"))
    rollout.take_turn(said("ls", finish="interrupted"))
    rollout.take_turn(GenOutput([], [], [], "length"))
    assert rollout.command == "aws s3 ls" and not rollout.status


def test_a_prompt_that_fills_the_context_names_the_option() -> None:
    rollout = begun()
    rollout.take_turn(GenOutput([], [], [], "length"))
    assert rollout.outcome().status == "policy_error" and "rollout.max_total_tokens" in rollout.outcome().message


def test_turns_that_run_out_are_no_truncation_unless_the_last_was_cut() -> None:
    for finish, truncated in (("stop", False), ("length", True)):
        rollout = begun(Limits(1, 120, 20, 500))
        rollout.take_turn(said("aws s3 ls", finish=finish))
        rollout.take_reply(observed(""))
        outcome = rollout.outcome()
        assert (outcome.status, outcome.truncated) == ("max_turns", truncated)
