"""Files behind the contract: episodes through the door for classes, and hostile turns."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from realhf.api.environment import DemonstrationRequest, Environment, EnvironmentSpec, Task, Turn
from realhf.api.option import problems
from realhf.api.tool_parser import parse_turn
from realhf.environments.files.definition import FilesOptions
from realhf.environments.files.tasks import GROUPS
from realhf.registry import environments

ASKED = DemonstrationRequest(4, 7, habit_fraction=0.25, recovery_fraction=0.25)


def spec(**options: Any) -> EnvironmentSpec:
    definition = environments.get("files")
    return definition.build(definition.options(**options))


async def play(environment: Environment, task: Task, *texts: str) -> list[Turn]:
    """The turns of an episode in which the policy says these texts, none after its end."""
    opening = await environment.reset(task.payload, seed=task.seed)
    assert [message["role"] for message in opening.messages] == ["user"]
    assert opening.messages[0]["content"] == task.payload["request"]
    assert len(opening.tools) == 8
    turns = []
    for text in texts:
        assert not turns or not turns[-1].done
        turns.append(await environment.step(parse_turn(text, "hermes")))
    return turns


async def test_every_demonstration_ends_as_it_says():
    """Through the door and the parser of calls: success ends the episode with its last turn and not
    before."""
    files = spec()
    environment = files.make("")
    kinds = Counter()
    assert files.demonstrate
    for shown in files.demonstrate(ASKED):
        turns = await play(environment, shown.task, *shown.turns)
        assert turns[-1].metrics["success"] == shown.succeeds == (turns[-1].reward == 1)
        assert turns[-1].done or not shown.succeeds
        assert all(turn.final and not turn.metrics["success"] for turn in turns[:-1])
        assert all(len(turn.messages) == 1 and turn.messages[0]["role"] == "tool" for turn in turns)
        assert 0 <= turns[-1].metrics["progress"] <= 1
        kinds[shown.kind] += 1
    assert kinds["solution"] > kinds["habit"] >= kinds["recovery"] > 10


@pytest.mark.parametrize(
    "text",
    [
        "",
        "I am done.",
        "<tool_call>",
        "<tool_call>{}</tool_call>",
        '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "reset", "arguments": {"request": "x", "files": []}}</tool_call>',
        '<tool_call>{"name": "get_reward", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "done", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "_known", "arguments": {"path": "x"}}</tool_call>',
        '<tool_call>{"name": "read_file", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "read_file", "arguments": {"path": ["x"]}}</tool_call>',
        '<tool_call>{"name": "read_file", "arguments": {"path": "../../etc/passwd"}}</tool_call>',
        '<tool_call>{"name": "read_file", "arguments": {"path": "x", "mode": "w"}}</tool_call>',
        '<tool_call>{"name": "answer", "arguments": {"text": "\\ud800"}}</tool_call>',
    ],
)
async def test_a_turn_that_is_no_use_earns_nothing_and_is_answered(text: str):
    """A call that cannot be made is answered by the reason; words alone end the episode."""
    files = spec()
    for template in ("rename", "count_files"):
        task = files.tasks("train").instantiate(template, 3)
        (turn,) = await play(files.make(""), task, text)
        assert (turn.reward, turn.metrics["success"]) == (0, 0)
        assert turn.done == (not turn.messages)
        assert all("error" in message["content"] for message in turn.messages)


@pytest.mark.slow
async def test_hundreds_of_instances_share_nothing():
    """Three hundred episodes at once, each with a solver of its own; all succeed, twice in a
    row."""
    files = spec()
    assert files.demonstrate
    scripts = [*files.demonstrate(DemonstrationRequest(18, 1))]
    assert len(scripts) > 300

    async def episode(script: Any) -> float | None:
        environment = files.make("")
        for _ in range(2):
            turns = await play(environment, script.task, *script.turns)
        await environment.close()
        return turns[-1].reward

    assert {*await asyncio.gather(*map(episode, scripts))} == {1.0}


def test_options_are_checked():
    assert not [*problems(FilesOptions())]
    assert [*problems(FilesOptions(groups=["hard"]))]
    assert {*spec(groups=["several"]).tasks("heldout").group_of.values()} == {"several"}
    assert spec().tasks("train").groups == GROUPS
