"""Countdown behind the contract: an episode is one turn, and the scripted solver does what it says."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from realhf.api.environment import (
    AssistantMessage,
    DemonstrationRequest,
    Environment,
    EnvironmentFailure,
    EnvironmentSpec,
    Task,
    Turn,
)
from realhf.api.option import problems
from realhf.environments.countdown import CountdownOptions
from realhf.registry import environments

KINDS = ("solution", "recovery", "habit")


def spec(**options: Any) -> EnvironmentSpec:
    definition = environments.get("countdown")
    return definition.build(definition.options(**options))


async def play(environment: Environment, task: Task, text: str) -> Turn:
    opening = await environment.reset(task.payload, seed=task.seed)
    assert [message["role"] for message in opening.messages] == ["user"]
    assert not opening.tools
    return await environment.step(AssistantMessage(text, text=text))


async def test_every_demonstration_ends_as_it_says_and_the_shares_are_kept():
    """Solutions and recoveries earn 1, habits at most the partial credit; each level has its share of each kind."""
    countdown = spec()
    environment, counts = countdown.make(""), Counter()
    assert countdown.demonstrate
    for shown in countdown.demonstrate(DemonstrationRequest(20, 5, habit_fraction=0.35, recovery_fraction=0.15)):
        assert len(shown.turns) == 1
        turn = await play(environment, shown.task, shown.turns[0])
        assert turn.done
        assert turn.metrics["success"] == shown.succeeds == (turn.reward == 1)
        assert turn.reward is not None and (shown.succeeds or turn.reward <= 0.1)
        counts[shown.task.group, shown.kind] += 1
    levels = countdown.tasks("train").groups
    assert counts == {(level, kind): n for level in levels for kind, n in zip(KINDS, (10, 3, 7), strict=True)}


def test_demonstrations_are_decided_by_the_seed_and_leave_held_out_puzzles_alone():
    countdown = spec(levels=["two-small"])
    assert countdown.demonstrate
    first, again, other = (
        [*countdown.demonstrate(DemonstrationRequest(30, seed, habit_fraction=0.5))] for seed in (1, 1, 2)
    )
    assert first == again != other
    held_out = countdown.tasks("heldout")
    kept = {(tuple(sorted(task.payload["numbers"])), task.payload["target"]) for task in
            (held_out.instantiate("two-small", seed) for seed in range(200))}  # fmt: skip
    assert not kept & {(tuple(sorted(d.task.payload["numbers"])), d.task.payload["target"]) for d in first + other}


async def test_nothing_earns_nothing():
    environment = spec().make("")
    task = spec().tasks("train").instantiate("three-large", 1)
    for text in ("", " ", "I do not know.", str(task.payload["target"])):
        turn = await play(environment, task, text)
        assert (turn.reward, turn.done, turn.metrics["success"]) == (0, True, 0)


@pytest.mark.slow
async def test_an_instance_plays_one_episode_after_another_and_many_live_at_once():
    """Instances share nothing: five hundred of them play different puzzles at the same time."""
    countdown = spec()
    tasks = countdown.tasks("heldout")

    async def episode(seed: int) -> float | None:
        environment = countdown.make("")
        assert isinstance(environment, Environment)
        earned = None
        for again in (seed, seed + 1):
            puzzle = tasks.puzzle("three-small", again)  # pyright: ignore[reportAttributeAccessIssue]
            task = tasks.instantiate("three-small", again)
            earned = (await play(environment, task, ", ".join(map(str, puzzle.solution)))).reward
            assert earned == 1
        await environment.close()
        return earned

    assert await asyncio.gather(*(episode(seed) for seed in range(500))) == [1.0] * 500


@pytest.mark.parametrize("task", [{}, {"prompt": "x", "numbers": [1, 2]}, {"prompt": "x", "target": 3}])
async def test_a_task_without_a_column_is_an_error(task: dict[str, Any]):
    """The player counts it as a failure of the environment, not as a reward."""
    environment = spec().make("")
    with pytest.raises(EnvironmentFailure) as failed:
        await environment.reset(task, seed=1)
        await environment.step(AssistantMessage("1+2"))
    assert failed.value.kind == "internal"


async def test_the_partial_credit_is_an_option():
    for credit in (0.0, 0.25):
        countdown = spec(partial_credit=credit)
        task = countdown.tasks("train").instantiate("two-small", 1)
        first, second = task.payload["numbers"]
        wrong = "+" if first + second != task.payload["target"] else "*"
        turn = await play(countdown.make(""), task, f"{first}{wrong}{second}")
        assert (turn.reward, turn.metrics["success"]) == (credit, 0)


def test_options_are_checked():
    assert not [*problems(CountdownOptions())]
    assert [*problems(CountdownOptions(levels=["five"]))]
    assert [*problems(CountdownOptions(partial_credit=2))]
