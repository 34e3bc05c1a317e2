"""The checks that play, one at a time and in this process: demonstrations, ids, an end, instances that are closed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

import pytest

from realhf.api.environment import Demonstration, EnvironmentSpec, Opening, Task, Turn
from realhf.env.check.calls import Caller, UserCode
from realhf.env.check.checks import (
    Run,
    check_demonstrations,
    check_determinism,
    check_end,
    check_openings,
    check_wrong_messages,
)
from realhf.env.check.episodes import Arena, first_difference
from realhf.env.check.report import Finding, Order

TASK = Task("t", "g", {"word": "xyzzy"}, seed=3)


class Game:
    """Say the word of the task; ``quirk`` spoils one thing."""

    def __init__(self, quirk: str) -> None:
        self.quirk = quirk
        self.turns = 0

    async def reset(self, task: Any, *, seed: int) -> Opening:
        self.word, self.turns = task["word"], 0
        number = seed if self.quirk == "opens by seed" else 0
        return Opening([{"role": "user", "content": f"Say the word {number}."}])

    async def step(self, message: Any) -> Turn:
        self.turns += 1
        right = float(message.content == self.word)
        done = bool(right) if self.quirk == "ends by success" else self.turns >= 3
        paid = 0.0 if self.quirk == "pays nothing" else right
        return Turn([{"role": "user", "content": "noted"}], done, paid, metrics={"success": right})

    async def close(self) -> None:
        if self.quirk == "cannot close":
            raise RuntimeError("no")


def found(
    quirk: str, check: Callable[[Run], Coroutine[Any, Any, str]], held: dict[str, Any], **spec: Any
) -> list[Finding]:
    """What a check says of a game."""
    findings: list[Finding] = []
    about = EnvironmentSpec("game", lambda _: Game(quirk), lambda _: None, **spec)  # type: ignore[arg-type,return-value]
    caller = Caller(UserCode(), 5.0, lambda name, task: None)
    asyncio.run(check(Run(Arena(about, caller, findings.append), Order("game", most_turns=20), **held)))
    return findings


@pytest.mark.parametrize(
    ("turns", "succeeds", "quirk", "says"),
    [
        (("no", "xyzzy"), True, "", ""),
        (("no", "no", "no"), False, "", ""),
        (("no", "maybe"), True, "", "does not succeed: the last answer is 'noted'"),
        (("xyzzy",), False, "", "succeeds, though succeeds=False"),
        (("xyzzy", "xyzzy"), True, "", "is over after turn 1 of 2"),
        (("xyzzy",), True, "pays nothing", "succeeds and earns 0"),
    ],
)
def test_a_demonstration_ends_as_it_is_labelled(turns: Sequence[str], succeeds: bool, quirk: str, says: str) -> None:
    script = Demonstration(TASK, tuple(turns), kind="sort", succeeds=succeeds)
    lines = [finding.line() for finding in found(quirk, check_demonstrations, {"scripts": [script]})]
    assert len(lines) == bool(says)
    assert not says or lines[0].startswith(f"demonstrations: a demonstration of the kind 'sort' {says}")


def test_silence_that_solves_a_task_is_a_fault_unless_a_demonstration_is_silent_there() -> None:
    """A task may have nothing that is to be done, and the check could not be told so."""
    task = replace(TASK, payload={"word": ""})
    silent = Demonstration(replace(task, id="as it was drawn for the solver"), ("",))
    for scripts, is_fault in (
        ([], True),
        ([silent], False),
        ([replace(silent, turns=("", "xyzzy"))], True),
        ([replace(silent, succeeds=False)], True),
        ([replace(silent, task=replace(TASK, id="another"))], True),
    ):
        held = {"scripts": scripts, "playable": [task]}
        assert {each.is_fault for each in found("ends by success", check_wrong_messages, held)} == {is_fault}


def test_one_id_may_not_open_two_episodes() -> None:
    held = {"tasks": [TASK], "twins": [(TASK, replace(TASK, seed=9))]}
    [finding] = found("opens by seed", check_openings, held)
    assert finding.what == "one id names two episodes: seeds 3 and 9 open otherwise" and " in reset" in finding.where
    assert found("", check_openings, held | {"playable": []}) == []


def test_an_episode_that_ends_by_success_alone_is_a_note_where_there_are_scripts() -> None:
    for demonstrated in (True, False):
        held = {"playable": [TASK], "scripts": [Demonstration(TASK, ("xyzzy",))] if demonstrated else []}
        [finding] = found("ends by success", check_end, held, system_prompt="x")
        assert finding.is_fault is not demonstrated
        assert finding.what.startswith("no episode ended within 20 turns")


def test_an_instance_that_cannot_be_made_costs_one_episode() -> None:
    made: list[Game] = []

    def make(_: str) -> Game:
        made.append(Game(""))
        if len(made) == 3:
            raise OSError("no port")
        return made[-1]

    findings: list[Finding] = []
    spec = EnvironmentSpec("game", make, lambda _: None)  # type: ignore[arg-type,return-value]
    arena = Arena(spec, Caller(UserCode(), 5.0, lambda name, task: None), findings.append)
    tasks = [replace(TASK, id=str(number)) for number in range(3)]
    run = Run(arena, Order("game", most_turns=20), tasks)
    asyncio.run(check_openings(run))
    assert [task.id for task in run.playable] == ["0", "2"]
    [finding] = findings
    assert finding.line().startswith("make: make raised OSError: no port, at ")


def test_a_close_that_raises_is_a_fault_and_ends_nothing() -> None:
    [finding] = found("cannot close", check_openings, {"tasks": [TASK]})[:1]
    assert finding.line().startswith("close: close raised RuntimeError: no, at ")


def test_what_is_declared_not_to_be_deterministic_is_played_once() -> None:
    turns: list[int] = []

    async def check(run: Run) -> str:
        await check_determinism(run)
        turns.append(run.arena.turns)
        return ""

    assert found("", check, {"playable": [TASK]}, deterministic=False) == []
    assert found("", check, {"playable": [TASK]}) == []
    assert turns == [3, 10]


def test_the_first_difference_of_two_transcripts_is_named() -> None:
    one = [{"messages": [{"content": "a" * 200 + "x"}]}, {"reward": 1.0}]
    assert first_difference(one, one) == ""
    assert first_difference(one, [one[0], {"reward": 2.0}]) == "turn 1 differs: reward is 1.0 and then 2.0"
    assert first_difference(one, one[:1]) == "the episode is over after 1 turns, and then after 0"
    other = [{"messages": [{"content": "a" * 200 + "y"}]}]
    assert first_difference(one, other) == (
        f'the opening differs: messages[0].content is …{"a" * 20}x" and then …{"a" * 20}y"'
    )
