"""What a class that speaks messages returns is taken as it is, or fails the episode with the place
of the mistake."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from realhf.api.environment import (
    AssistantMessage,
    EnvironmentFailure,
    EnvironmentSpec,
    Opening,
    Turn,
)

Build = Callable[..., EnvironmentSpec]

HEAD = """
from realhf.api.environment import EnvironmentFailure, Opening, Turn

TOOLS = [{"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {}}}]

class Guess:
    async def reset(self, task, *, seed):
        self.task = task
        return OPENING

    async def step(self, message):
        return TURN
"""
OPENING = """{"messages": [{"role": "user", "content": "Guess."}], "tools": TOOLS, "info": {"secret": [1, None]}}"""
TURN = """{"messages": [{"role": "user", "content": "No."}], "reward": 0.5, "metrics": {"progress": 1}}"""


def guess(opening: str = OPENING, turn: str = TURN) -> str:
    return HEAD.replace("return OPENING", f"return {opening}").replace(
        "return TURN", f"return {turn}"
    )


async def test_maps_become_openings_and_turns(build: Build) -> None:
    """Fields that are left out have the values of the contract, and numbers are floats."""
    environment = build(guess()).make("")
    opening = await environment.reset({"a": 1}, seed=2)
    assert (
        isinstance(opening, Opening)
        and opening.info == {"secret": [1, None]}
        and len(opening.tools) == 1
    )
    turn = await environment.step(AssistantMessage("5"))
    assert turn == Turn(
        [{"role": "user", "content": "No."}], False, 0.5, {}, {"progress": 1.0}, {}, False
    )
    assert isinstance(turn.metrics["progress"], float)
    await environment.close()
    await environment.close()


async def test_openings_and_turns_pass_as_they_are(build: Build) -> None:
    text = guess(
        "Opening([{'role': 'user', 'content': 'é'}])", "Turn(done=True, reward=True, final=True)"
    )
    environment = build(text).make("")
    assert (await environment.reset({}, seed=0)).messages == [{"role": "user", "content": "é"}]
    turn = await environment.step(AssistantMessage(""))
    assert (turn.done, turn.reward, turn.final, type(turn.reward)) == (True, 1.0, True, float)


OPENINGS = {
    "5": "must return Opening or a map with its fields, not 5",
    "Turn()": r"must return Opening or a map with its fields, not Turn\(",
    "{}": "an Opening needs messages",
    "{'mesages': []}": "Opening has no field 'mesages'; did you mean 'messages'",
    "{'messages': 'Hello'}": "messages must be a list of messages, not 'Hello'",
    "{'messages': ['Hello']}": r"messages\[0\] must be a map with role and content, not 'Hello'",
    "{'messages': [{'role': 'user'}]}": r"messages\[0\] has no content",
    "{'messages': [{'content': 'x'}]}": r"messages\[0\] has no role",
    "{'messages': [{'role': 'bot', 'content': "
    "'x'}]}": r"messages\[0\]: the role is one of .* assistant, tool: 'bot'",
    "{'messages': [{'role': [], 'content': 'x'}]}": r"messages\[0\]: the role is one of",
    "{'messages': [{'role': 'user', 'content': "
    "5}]}": r"messages\[0\]: the content must be text, not 5",
    "{'messages': [{'role': 'user', 'content': 'x', 'n': {1, "
    "2}}]}": r"messages\[0\]: set is not JSON",
    "{'messages': [{'role': 'user', 'content': 'x', 'n': "
    "float('nan')}]}": r"messages\[0\]: nan is not JSON",
    "{'messages': [{'role': 'user', 'content': 'x', 5: "
    "6}]}": r"messages\[0\]: the key 5 is not a string",
    "{'messages': [{'role': 'user', 'content': "
    "chr(0xdc00)}]}": r"messages\[0\]: text with '.udc00', half a character",
    "{'messages': [], 'tools': {}}": "tools must be a list of JSON schemas, not {}",
    "{'messages': [], 'tools': [{'name': 'look'}]}": r"tools\[0\] must be",
    "{'messages': [], 'tools': [{'function': {'name': 'look', 'x': "
    "print}}]}": r"tools\[0\]: .* is not JSON",
    "{'messages': [], 'info': []}": r"info must be a map, not \[\]",
    "{'messages': [], 'info': {'x': print}}": "info: builtin_function_or_method is not JSON",
}
TURNS = {
    "None": "must return Turn or a map with its fields, not None",
    "(1, 2)": r"must return Turn or a map with its fields, not \(1, 2\)",
    "{'done': 1}": "done must be true or false, not 1",
    "{'final': None}": "final must be true or false, not None",
    "{'reward': 'much'}": "reward must be a finite number, not 'much'",
    "{'reward': float('nan')}": "reward must be a finite number, not nan",
    "{'rewards': {'a': float('inf')}}": r"rewards\['a'\] must be a finite number, not inf",
    "{'rewards': [1]}": r"rewards must be a map from names to numbers, not \[1\]",
    "{'metrics': {1: 1}}": "metrics: a name must be text, not 1",
    "{'metrics': {'success': None}}": r"metrics\['success'\] must be a finite number, not None",
    "{'messages': [{'role': 'user', 'content': b'x'}]}": r"messages\[0\]: the content must be text",
    "{'info': {'x': 1j}}": "info: complex is not JSON",
    "{'reward': 1}['rewards']": r"KeyError: 'rewards' \(.*mine\.py, line 12\)",
    "exec('raise SystemExit(1)')": r"SystemExit: 1 \(.*mine\.py, line 12\)",
    "exec('import asyncio; raise "
    "asyncio.CancelledError')": r"CancelledError:  \(.*mine\.py, line 12\)",
}


@pytest.mark.parametrize("returned", OPENINGS)
async def test_a_wrong_opening_fails_the_episode(build: Build, returned: str) -> None:
    """The failure is of the kind internal, and names class, seed and line, and not the
    payload: it reaches clients, and the answer may be in it."""
    environment = build(guess(opening=returned)).make("")
    where = r"Guess\.reset \(seed 3\): "
    with pytest.raises(EnvironmentFailure, match=where + OPENINGS[returned]) as caught:
        await environment.reset({"id": 7}, seed=3)
    assert caught.value.kind == "internal" and str(caught.value).endswith("mine.py, line 7)")


@pytest.mark.parametrize("returned", TURNS)
async def test_a_wrong_turn_fails_the_episode(build: Build, returned: str) -> None:
    environment = build(guess(turn=returned)).make("")
    await environment.reset({"id": 7}, seed=3)
    where = r"Guess\.step \(seed 3\): "
    with pytest.raises(EnvironmentFailure, match=where + TURNS[returned]) as caught:
        await environment.step(AssistantMessage("x"))
    assert caught.value.kind == "internal"


async def test_an_author_may_change_the_task(build: Build) -> None:
    """The next episode of the task is as the first."""
    environment = build(
        guess().replace("self.task = task", "task['xs'].append(1); assert task['xs'] == [1]")
    ).make("")
    row: dict[str, Any] = {"xs": []}
    for _ in range(2):
        await environment.reset(row, seed=0)


async def test_a_failure_of_the_author_keeps_its_kind(build: Build) -> None:
    text = guess().replace(
        "self.task = task", 'raise EnvironmentFailure("unavailable", "no licence")'
    )
    with pytest.raises(EnvironmentFailure, match="no licence") as caught:
        await build(text).make("").reset({}, seed=0)
    assert caught.value.kind == "unavailable"


async def test_a_constructor_that_raises_fails_the_first_episode(build: Build) -> None:
    """The environment is made on an event loop that must go on; the reset names the line."""
    environment = build(
        guess().replace("class Guess:", "class Guess:\n    def __init__(self): 1 / 0\n")
    ).make("")
    with pytest.raises(EnvironmentFailure, match=r"ZeroDivisionError.*mine\.py, line 7\)"):
        await environment.reset({}, seed=0)
    await environment.close()


async def test_a_deadline_passes_through_and_close_is_the_authors(build: Build) -> None:
    """A cancelled step is cancelled and not a failure; what close raises is a failure."""
    text = (
        guess(turn="await __import__('asyncio').sleep(60)")
        + "\n    async def close(self):\n        {}['x']\n"
    )
    environment = build(text).make("")
    await environment.reset({}, seed=0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await environment.step(AssistantMessage("x"))
    with pytest.raises(EnvironmentFailure, match=r"Guess\.close .*KeyError: 'x'"):
        await environment.close()


@pytest.mark.parametrize("where", ["class", "module"])
def test_tasks_are_those_of_the_class_or_its_module(build: Build, where: str) -> None:
    """``tasks(split)`` returns rows; ``tasks(split, options)`` is given the options as well."""
    rows = "[{'n': n, 'group': str(n % 2)} for n in range(4) if (n < 2) == (split == 'train')]"
    function = f"def tasks(split): return {rows}"
    method = f"    @staticmethod\n    def tasks(split, options): return {rows}\n"
    spec = build(guess() + "\n" + (method if where == "class" else function))
    train = spec.tasks("train")
    held_out = spec.tasks("heldout")
    payloads: list[list[Any]] = [
        [each.instantiate(name, 0).payload["n"] for name in each.group_of]
        for each in (train, held_out)
    ]
    assert payloads == [[0, 1], [2, 3]] and train.groups == ("0", "1")
    name = next(iter(train.group_of))
    assert train.instantiate(name, 1).id != train.instantiate(name, 2).id
    assert train.instantiate(name, 1) == train.instantiate(name, 1)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("return 5", "split 'train' must return rows, tasks or a TaskSet, not 5"),
        ("return {'n': 1}", "must return rows, tasks or a TaskSet, not {'n': 1}"),
        ("return [1]", "split 'train', row 0: a row is a map from columns to values, not 1"),
        ("return [{'n': float('nan')}]", "row 0: nan is not JSON"),
        ("return [{'id': 1}, {'id': '1'}]", "row 1: an earlier row has the id '1', too"),
        ("return []", "the split 'train' has no task"),
        ("return [{}][1]", r"IndexError: list index out of range \(.*mine\.py, line 15\)"),
        ("yield {}['x']", r"KeyError: 'x' \(.*mine\.py, line 15\)"),
    ],
)
def test_tasks_that_are_none_are_refused(build: Build, body: str, sentence: str) -> None:
    spec = build(guess() + f"\ndef tasks(split):\n    {body}\n")
    with pytest.raises(ValueError, match=r"tasks of Guess \(.*mine\.py, line 14\).*" + sentence):
        spec.tasks("train")
