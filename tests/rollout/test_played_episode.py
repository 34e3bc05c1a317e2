"""How an episode takes turns and ends: an environment and a policy without a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from realhf.api.environment import RolloutOutcome, Task, Turn
from realhf.api.model import GenOutput, GenRequest
from realhf.rollout.episode import EpisodeRequest, Limits, PolicySpeaker, play_episode
from realhf.rollout.player import SlotEnvironment
from tests.rollout.scripted_environment import World, said
from tests.rollout.word_chat import CUE, END, FOLLOW, WordChat

LIMITS = Limits(max_turns=3, max_total_tokens=120, turn_tokens=20)


class Engine:
    """Gives these outputs one after the other, the last one for ever; records what it was asked."""

    def __init__(self, *outputs: GenOutput) -> None:
        self.outputs = list(outputs)
        self.asked: list[GenRequest] = []

    async def generate(self, request: GenRequest) -> GenOutput:
        self.asked.append(request)
        return self.outputs.pop(0) if len(self.outputs) > 1 else self.outputs[0]

    def free(self, slots: Sequence[int]) -> None:
        raise AssertionError("the player frees the slots")


async def play(engine: Engine, world: World | None = None, limits: Limits = LIMITS, **task: Any) -> RolloutOutcome:
    spec = (world or World()).spec()
    env = SlotEnvironment(spec.name, lambda: spec.make(""), message_timeout_s=5.0, patience_s=0.0, deterministic=True)
    speaker = PolicySpeaker(WordChat(), limits, engine, slot=4, seed=77)
    wanted = EpisodeRequest(0, Task("t-1", "easy", {"text": "do it", **task}, seed=11))
    return await play_episode(env, wanted, speaker, limits.max_turns)


def answer(**turn: Any) -> World:
    """A world that answers the third message with this turn, and the others as usual."""
    return World(lambda env, message: Turn(**turn) if len(env.said) == 3 else None)


async def test_the_engine_continues_exactly_what_is_kept() -> None:
    engine = Engine(said("aws s3 ls"))
    outcome = await play(engine)
    ids = [*map(ord, "do it"), CUE]
    for turn, asked in enumerate(engine.asked):
        assert asked == GenRequest(4, ids, 0, 77)
        ids = [*ids, *said("aws s3 ls").token_ids]
        ids += [FOLLOW, *map(ord, "saw aws s3 ls"), CUE] if turn < 2 else []
    assert outcome.prompt_ids + outcome.completion_ids == ids
    assert [turn.text for turn in outcome.turns] == ["aws s3 ls"] * 3
    assert (outcome.task_id, outcome.group, outcome.seed, outcome.task_text) == ("t-1", "easy", 11, "do it")


async def test_a_long_answer_is_cut_until_a_turn_fits() -> None:
    engine = Engine(said("aws s3 ls"))
    long = World(lambda env, message: Turn([{"role": "user", "content": "x" * 60 + "y" * 60}], reward=0.0))
    await play(engine, long)
    assert len(engine.asked) > 1 and len(engine.asked[1].token_ids) <= 100
    text = engine.asked[1].token_ids[6 + 10 + 1 : -1]
    assert text[0] == ord("x") and text[-1] == ord("y") and len(text) > 40


async def test_the_end_of_a_truncated_turn_is_added_without_loss() -> None:
    engine = Engine(said("ab", finish="length"))
    outcome = await play(engine)
    after = engine.asked[1].token_ids[8:]
    assert after == [END, FOLLOW, *map(ord, "saw ab"), CUE]
    assert outcome.loss_mask[:2] == [True, True] and not any(outcome.loss_mask[2 : 2 + len(after)])


async def test_no_room_for_another_turn_ends_with_token_budget() -> None:
    outcome = await play(Engine(said("aws s3 ls")), limits=Limits(3, 36, 20))
    assert (outcome.status, outcome.reward, outcome.valid, outcome.truncated) == ("token_budget", 0.25, True, True)
    assert outcome.loss_mask[-1]


@pytest.mark.parametrize(
    ("last", "status", "reward"),
    [
        ({"done": True, "metrics": {"success": 1.0}, "reward": 0.25}, "achieved", 0.75),
        ({"metrics": {"success": 1.0}, "reward": 0.25}, "achieved", 0.75),
        ({"done": True, "reward": 0.25}, "finished", 0.75),
        ({"reward": 0.25}, "max_turns", 0.75),
        ({"reward": None}, "max_turns", 0.5),
        ({"reward": 0.9, "final": True, "done": True}, "finished", 0.9),
    ],
)
async def test_rewards_are_summed_and_the_status_tells_the_end(
    last: dict[str, Any], status: str, reward: float
) -> None:
    outcome = await play(Engine(said("aws s3 ls")), answer(**last))
    assert (outcome.status, outcome.reward) == (status, reward)
    assert outcome.achieved is (status == "achieved")
    assert outcome.completion_ids[-1] == END and len(outcome.turns) == 3


async def test_named_rewards_and_metrics_are_kept() -> None:
    world = World(lambda env, message: Turn(reward=0.5, rewards={"form": 0.5}, metrics={"rows": len(env.said)}))
    outcome = await play(Engine(said("go")), world)
    assert outcome.rewards == {"form": 1.5} and outcome.metrics == {"rows": 3}


@pytest.mark.parametrize("broken", [{"reward": float("nan")}, {"rewards": {"a": float("inf")}}])
async def test_a_number_that_is_none_is_a_failure_not_a_zero(broken: dict[str, Any]) -> None:
    outcome = await play(Engine(said("aws s3 ls")), answer(**broken))
    assert (outcome.status, outcome.reward, outcome.valid, outcome.achieved) == ("internal", None, False, False)
    assert "not a finite number" in outcome.message


async def test_an_engine_that_samples_nothing_is_a_failure_of_the_policy() -> None:
    outcome = await play(Engine(GenOutput([], [], [], "interrupted")))
    assert (outcome.status, outcome.reward) == ("policy", None)


async def test_a_full_context_ends_the_episode_as_a_spent_budget_does() -> None:
    outcome = await play(Engine(said("aws s3 ls"), GenOutput([], [], [], "length")))
    assert (outcome.status, outcome.reward, outcome.valid, outcome.truncated) == ("token_budget", 0.25, True, True)
    assert outcome.loss_mask == [True] * 10, "the answer that nobody read is gone"


async def test_a_prompt_that_fills_the_context_names_the_option() -> None:
    outcome = await play(Engine(GenOutput([], [], [], "length")))
    assert outcome.status == "policy" and "rollout.max_total_tokens" in outcome.message


async def test_parts_of_a_turn_join_and_a_turn_that_fills_the_context_is_complete() -> None:
    parts = [said("aws s3 ", "interrupted"), said("ls", "interrupted"), GenOutput([], [], [], "length"), said("go")]
    engine = Engine(*parts)
    outcome = await play(engine)
    assert [asked.sampled for asked in engine.asked[:4]] == [0, 7, 9, 0]
    assert [turn.text for turn in outcome.turns] == ["aws s3 ls", "go", "go"]


async def test_turns_that_run_out_are_no_truncation_unless_the_last_was_cut() -> None:
    for finish, truncated in (("stop", False), ("length", True)):
        outcome = await play(Engine(said("aws s3 ls", finish=finish)), limits=Limits(1, 120, 20))
        assert (outcome.status, outcome.truncated) == ("max_turns", truncated)


async def test_a_first_prompt_without_room_for_a_turn_is_an_error_of_the_configuration() -> None:
    with pytest.raises(ValueError, match="do not fit into max_total_tokens=120"):
        await play(Engine(said("go")), text="x" * 110)


async def test_what_is_no_turn_is_a_failure_that_names_the_environment() -> None:
    world = World(lambda env, message: {"messages": []})
    outcome = await play(Engine(said("go")), world)
    assert outcome.status == "internal" and outcome.message.startswith("environment scripted: step returned")


@pytest.mark.parametrize(
    ("turns", "rewards"),
    [
        ([{"reward": 0.5}, {}, {"reward": 0.25, "done": True}], [0.5, 0.0, 0.25]),
        ([{"reward": 0.5}, {"reward": 0.25, "final": True, "done": True}], [0.5, -0.25]),
        ([{"reward": 1.0, "final": True}, {"final": True}, {"reward": 3.0, "final": True}], [1.0, 0.0, 2.0]),
    ],
)
async def test_rewards_of_turns_sum_to_that_of_the_episode(turns: list[dict[str, Any]], rewards: list[float]) -> None:
    """One that is final counts as its difference to those before it. Every turn has its place among the tokens."""
    answers = World(lambda env, message: Turn([{"role": "user", "content": "on"}], **turns[len(env.said) - 1]))
    outcome = await play(Engine(said("go")), answers)
    assert outcome.turn_rewards == rewards and sum(outcome.turn_rewards) == outcome.reward
    length = len(said("go").token_ids)
    assert len(outcome.turn_starts) == len(rewards)
    assert all(outcome.completion_ids[start : start + length] == said("go").token_ids for start in outcome.turn_starts)
