"""The checks, one at a time and in this process: task sets, what is handed out, what is said, what
is played."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

import pytest

from realhf.api.environment import Demonstration, EnvironmentSpec, Opening, Task, Turn
from realhf.env.check.calls import Caller, UserCode
from realhf.env.check.checks import (
    CheckRun,
    check_demonstrations,
    check_determinism,
    check_end,
    check_openings,
    check_wrong_messages,
)
from realhf.env.check.contract import opening_problems, tool_problems, turn_problems
from realhf.env.check.demonstrations import DemonstrationChoice
from realhf.env.check.episodes import CheckHarness, first_difference
from realhf.env.check.report import Finding, Order
from realhf.env.check.scripts import (
    call_text,
    policy_turn,
    random_turns,
    sample_value,
    wrong_messages,
)
from realhf.env.check.task_sets import TaskSetChecker, spread_evenly
from realhf.env.loader.author import build_task_sets

COUNT = itertools.count()


class Tasks:
    """Two groups with two templates each; ``change`` spoils one thing."""

    def __init__(self, split: str, change: Callable[[Tasks], None]) -> None:
        self.split = split
        self.group_of: dict[str, str] = {"a": "easy", "b": "easy", "c": "hard", "d": "hard"}
        self.groups: list[str] = ["easy", "hard"]
        self.made: Callable[[Task], Any] = lambda task: task
        change(self)

    def instantiate(self, template_id: str, seed: int) -> Any:
        number = 2 * seed + (self.split == "heldout")
        return self.made(
            Task(
                f"{template_id}/{number}",
                self.group_of[template_id],
                {"kind": template_id},
                seed=number,
            )
        )


def judged(change: Callable[[Tasks], None]) -> tuple[TaskSetChecker, list[str]]:
    found: list[Finding] = []
    spec = EnvironmentSpec("x", lambda _: None, lambda split: Tasks(split, change))  # type: ignore[arg-type,return-value]
    judge = TaskSetChecker(spec, UserCode(), found.append)
    judge.check()
    return judge, [finding.what for finding in found]


def spoiled(**values: Any) -> Callable[[Tasks], None]:
    return lambda tasks: vars(tasks).update(values)


def made(change: Callable[[Task], Any]) -> Callable[[Tasks], None]:
    return spoiled(made=change)


def test_a_sound_set_has_no_findings_and_every_group_is_played() -> None:
    judge, found = judged(lambda tasks: None)
    assert found == []
    assert judge.summary() == "train: 4 templates in 2 groups, heldout: 4 templates in 2 groups"
    chosen = judge.choose_tasks(4)
    assert {(task.seed % 2, task.group) for task in chosen} == {
        (0, "easy"),
        (0, "hard"),
        (1, "easy"),
        (1, "hard"),
    }
    assert chosen == judge.choose_tasks(4)


def moved(tasks: Tasks) -> None:
    tasks.group_of = {**tasks.group_of, f"new {next(COUNT)}": "easy"}


def raises(task: Task) -> Task:
    raise KeyError(task.id)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (spoiled(group_of={}), "the split 'train' has no task"),
        (
            spoiled(groups=["easy", "hard", "easy"]),
            "split 'train': a group is listed twice in groups",
        ),
        (
            spoiled(groups=["easy"]),
            "split 'train': the group 'hard' of a template is not in groups",
        ),
        (
            spoiled(groups=["easy", "hard", "none"]),
            "split 'train': the group 'none' has no template",
        ),
        (moved, "split 'train': a second call of tasks lists other templates or another order"),
        (
            made(lambda task: {"id": 1}),
            "instantiate('a', 0) returns a task whose type is dict and not Task",
        ),
        (
            made(lambda task: replace(task, id="")),
            "instantiate('a', 0) returns a task whose id is ''",
        ),
        (
            made(lambda task: replace(task, payload={"when": {1, 2}})),
            "instantiate('a', 0) returns a task whose payload is no JSON: set is not JSON",
        ),
        (
            spoiled(made=lambda task: replace(task, seed=1.5)),
            "instantiate('a', 0) returns a task whose seed is of the ",
        ),
        (
            made(lambda task: replace(task, seed=next(COUNT))),
            "instantiate('a', 0) returns another task the second ",
        ),
        (
            made(lambda task: replace(task, id="same")),
            "an id names two tasks: that of 'a' and that of 'b'",
        ),
        (made(raises), "the split 'train' cannot be made: KeyError: 'a/0'"),
        (
            made(lambda task: replace(task, seed=0)),
            "the splits share an instance: train 'a/",
        ),
    ],
)
def test_what_is_wrong_is_said(change: Callable[[Tasks], None], says: str) -> None:
    _, found = judged(change)
    assert found and found[0].startswith(says), found


def test_rows_of_one_list_are_no_two_splits_by_their_names() -> None:
    """An id or a group that names the split leaves the rest of a row to be compared."""

    def found(rows: Callable[[str], Any]) -> list[str]:
        tasks = build_task_sets(rows, "x", None, seeded=False, check=lambda row: None)
        findings: list[Finding] = []
        TaskSetChecker(
            EnvironmentSpec("x", lambda _: None, tasks), UserCode(), findings.append
        ).check()  # type: ignore[arg-type,return-value]
        return [finding.what for finding in findings]

    sums = [(one, other) for one in range(3) for other in range(3)]
    half = {"train": sums[::2], "heldout": sums[1::2]}

    def named(split: str, of: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
        return [
            {
                "id": f"{split}-{n}",
                "group": f"{split} sums",
                "prompt": f"{one}+{other}",
                "answer": str(one + other),
            }
            for n, (one, other) in enumerate(of)
        ]

    shared = "the splits share an instance: train 'train-0' and held-out 'heldout-0'"
    assert found(lambda split: named(split, sums)) == [shared]
    assert found(lambda split: named(split, half[split])) == []
    assert found(lambda split: [{"id": row["id"]} for row in named(split, half[split])]) == [], (
        "looked up by its id"
    )


def test_one_id_with_several_seeds_is_kept_for_a_look_at_its_openings() -> None:
    """A finite set may ignore the seed, so this is no fault by itself."""
    judge, found = judged(made(lambda task: replace(task, id=task.id.partition("/")[0])))
    assert found == [] and len(judge.twins) == 4
    assert all(one.id == other.id and one.seed != other.seed for one, other in judge.twins)


def test_a_spread_reaches_over_everything() -> None:
    names = [str(number) for number in range(10)]
    assert (
        spread_evenly(names, 20) == names
        and spread_evenly(names, 5) == ["0", "2", "4", "6", "8"]
        and len(spread_evenly(names, 3)) <= 3
    )


SAID = {"role": "user", "content": "text"}
CALL = {"type": "function", "function": {"name": "look", "arguments": "{}"}}


def tool(name: str = "look", parameters: Any = None, description: str = "Look.") -> dict[str, Any]:
    parameters = {"type": "object", "properties": {}} if parameters is None else parameters
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


@pytest.mark.parametrize(
    ("opening", "prompt", "says"),
    [
        (Opening([SAID]), "", []),
        (Opening([]), "You play.", []),
        (
            Opening([]),
            "",
            ["it returns no message, and there is no system prompt: the policy would see nothing"],
        ),
        (Opening(deque()), "", ["it returns no message"]),
        (None, "", ["it returns None and not an Opening"]),
        (Opening("hello"), "", ["messages must be a list of messages, not 'hello'"]),  # type: ignore[arg-type]
        (Opening([{"role": "user"}]), "", ["messages[0] has no content"]),
        (Opening([{"role": "god", "content": ""}]), "", ["messages[0]: the role is one of "]),
        (Opening([{"role": "assistant", "tool_calls": [CALL]}]), "", []),
        (
            Opening([{"role": "assistant", "tool_calls": [{}]}]),
            "",
            ["messages[0]: tool_calls[0] must be "],
        ),
        (
            Opening([{"role": "user", "content": " \n"}]),
            "You play.",
            ["its opening is blank, so it asks the policy"],
        ),
        (
            Opening([{"role": "system", "content": "x"}]),
            "",
            ["its opening has only a system message"],
        ),
        (Opening([SAID], info={"x": b""}), "", ["info: bytes is not JSON"]),
        (
            Opening([{"role": "user"}, SAID, {"role": "god", "content": ""}], info=[]),  # type: ignore[arg-type]
            "",
            [
                "messages[0] has no content",
                "messages[2]: the role is one of ",
                "info must be a map, not []",
            ],
        ),
    ],
)
def test_openings(opening: Any, prompt: str, says: list[str]) -> None:
    found = [*opening_problems(opening, prompt)]
    assert len(found) == len(says) and all(map(str.startswith, found, says)), found


@pytest.mark.parametrize(
    ("turn", "says"),
    [
        (Turn([SAID], True, 1.0, {"a": 1}, {"success": 1.0}), []),
        (Turn([{"role": "assistant", "content": "I"}]), ["messages[0] has the role 'assistant'"]),
        (
            Turn([{"role": "god", "content": ""}]),
            ["messages[0]: the role is one of system, user, tool: 'god'"],
        ),
        (Turn(done=1), ["done must be true or false, not 1"]),  # type: ignore[arg-type]
        (Turn(reward=math.inf), ["reward must be a finite number, not inf"]),
        (Turn(reward=True), ["the reward or metric 'reward' is of the type bool and no number"]),
        (
            Turn(reward=True, rewards={"reward": 1.0}),
            ["the reward or metric 'reward' is of the type bool and no number"],
        ),
        (Turn(rewards=None), ["rewards is None and not a map"]),  # type: ignore[arg-type]
        (Turn(metrics=[]), ["metrics is an object of the type list and not a map"]),  # type: ignore[arg-type]
        (Turn(reward=1e6), ["the reward is 1e+06; rewards beyond 1000 drown"]),
        (Turn(final=True), ["it is final and has no reward"]),
        (Turn(rewards={"style": math.nan}), ["rewards['style'] must be a finite number, not nan"]),
        (Turn(metrics={"progress": 1.5}), ["the metric 'progress' is 1.5 and not between 0 and 1"]),
        (Turn(metrics={"success": 1}), []),
        (
            Turn([{"role": "user"}], 1, math.nan, metrics={"progress": 2}),  # type: ignore[arg-type]
            [
                "messages[0] has no",
                "done must be",
                "reward must be a finite number, not nan",
                "the metric 'progress' is",
            ],
        ),
        ("yes", ["it returns an object of the type str and not a Turn"]),
    ],
)
def test_turns(turn: Any, says: list[str]) -> None:
    found = [*turn_problems(turn)]
    assert len(found) == len(says) and all(map(str.startswith, found, says)), found


@pytest.mark.parametrize(
    ("tools", "says"),
    [
        ([tool()], []),
        (
            [
                tool(
                    parameters={
                        "type": "object",
                        "properties": {"x": {"type": "integer"}},
                        "required": ["x"],
                    }
                )
            ],
            [],
        ),
        ([{"name": "look"}, tool(), "x"], ["tools[0] must be {", "tools[2] must be {"]),
        ([tool("no spaces")], ["tool 0 has the name 'no spaces'"]),
        ([tool(), tool()], ["two tools have the name 'look'"]),
        ([tool(description="")], ["tool 'look' has no description"]),
        (
            [tool(parameters=[])],
            ["tool 'look' has parameters that are not a JSON schema of the type object"],
        ),
        (
            [tool(parameters={"type": "object", "properties": {"x": {}}})],
            ["tool 'look' has the parameter 'x' without a type"],
        ),
        (
            [tool(parameters={"type": "object", "properties": {"x": {"type": "int"}}})],
            ["tool 'look' has the parameter 'x' of the unknown type 'int'"],
        ),
        (
            [tool(parameters={"type": "object", "properties": {}, "required": ["x"]})],
            ["tool 'look' requires a parameter that it does not have"],
        ),
    ],
)
def test_schemas_of_tools(tools: Any, says: list[str]) -> None:
    found = [*tool_problems(tools)]
    assert len(found) == len(says) and all(map(str.startswith, found, says)), found


SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "lines": {"type": "integer", "minimum": 3},
        "mode": {"enum": ["r", "w"]},
        "names": {"type": "array", "items": {"type": "string"}},
        "deep": {"type": "object", "properties": {"x": {"type": "boolean"}}},
        "either": {"anyOf": [{"type": "number"}, {"type": "null"}]},
    },
}
TOOLS = [
    {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": SCHEMA}}
]


def test_a_sample_fits_its_schema() -> None:
    for seed in range(20):
        found: dict[str, Any] = sample_value(SCHEMA, random.Random(seed))
        assert (
            isinstance(found["path"], str) and found["lines"] >= 3 and found["mode"] in ("r", "w")
        )
        assert all(isinstance(name, str) for name in found["names"])
        assert isinstance(found["deep"]["x"], bool) and isinstance(found["either"], float)


def test_trying_is_the_same_for_the_same_seed_and_calls_what_is_there() -> None:
    turns = random_turns(TOOLS, 5, 4)
    assert turns == random_turns(TOOLS, 5, 4) != random_turns(TOOLS, 6, 4)
    calls = [call for text in turns for call in policy_turn(text, TOOLS).tool_calls]
    assert [(call.name, call.problem) for call in calls] == [("look", "")] * 4


def test_wrong_messages_reach_an_environment_as_a_policy_would_bring_them_about() -> None:
    """Each is what the parser of turns makes of a text: broken calls have a problem, no text has
    half a character."""
    said = {name: message for name, message in wrong_messages(TOOLS)}
    assert said["an empty message"].content == ""
    assert said["a call of an unknown tool"].tool_calls[0].name == "no_such_tool"
    assert said["a call that is no JSON"].tool_calls[0].problem
    assert len(said["30 calls at once"].tool_calls) == 30
    assert said["a call of 'look' without arguments"].tool_calls[0].arguments == {}
    assert len(said["a message of 200,000 characters"].content) == 200_000
    assert all(message.text.encode() is not None for message in said.values())


def test_a_call_is_read_back_as_it_was_written() -> None:
    [call] = policy_turn(call_text("look", {"path": 'ü "x" </tool_call>'}), TOOLS).tool_calls
    assert (call.name, call.arguments, call.problem) == ("look", {"path": 'ü "x" </tool_call>'}, "")


TASK = Task("t", "g", {"word": "xyzzy"}, seed=3)


class Game:
    """Say the word of the task; ``quirk`` spoils one thing."""

    def __init__(self, quirk: str) -> None:
        self.quirk = quirk
        self.turns = 0

    async def reset(self, task: Any, *, seed: int) -> Opening:
        self.word = task["word"]
        self.turns = 0
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
    quirk: str,
    check: Callable[[CheckRun], Coroutine[Any, Any, str]],
    held: dict[str, Any],
    **spec: Any,
) -> list[Finding]:
    """What a check says of a game."""
    findings: list[Finding] = []
    about = EnvironmentSpec("game", lambda _: Game(quirk), lambda _: None, **spec)  # type: ignore[arg-type,return-value]
    caller = Caller(UserCode(), 5.0, lambda name, task: None)
    asyncio.run(
        check(
            CheckRun(
                CheckHarness(about, caller, findings.append), Order("game", most_turns=20), **held
            )
        )
    )
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
def test_a_demonstration_ends_as_it_is_labelled(
    turns: Sequence[str], succeeds: bool, quirk: str, says: str
) -> None:
    script = Demonstration(TASK, tuple(turns), kind="sort", succeeds=succeeds)
    lines = [
        finding.line()
        for finding in found(
            quirk, check_demonstrations, {"demonstrations": DemonstrationChoice([script])}
        )
    ]
    assert len(lines) == bool(says)
    assert not says or lines[0].startswith(
        f"demonstrations: a demonstration of the kind 'sort' {says}"
    )


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
        held = {"demonstrations": DemonstrationChoice(scripts), "playable": [task]}
        assert {each.is_fault for each in found("ends by success", check_wrong_messages, held)} == {
            is_fault
        }


def test_one_id_may_not_open_two_episodes() -> None:
    held = {"tasks": [TASK], "twins": [(TASK, replace(TASK, seed=9))]}
    [finding] = found("opens by seed", check_openings, held)
    assert (
        finding.what == "one id names two episodes: the seeds 3 and 9 give different openings"
        and " in reset" in finding.where
    )
    assert found("", check_openings, held | {"playable": []}) == []


def test_an_episode_that_ends_by_success_alone_is_a_note_where_there_are_scripts() -> None:
    for demonstrated in (True, False):
        scripts = DemonstrationChoice([Demonstration(TASK, ("xyzzy",))] if demonstrated else [])
        held = {"playable": [TASK], "demonstrations": scripts}
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
    harness = CheckHarness(spec, Caller(UserCode(), 5.0, lambda name, task: None), findings.append)
    tasks = [replace(TASK, id=str(number)) for number in range(3)]
    run = CheckRun(harness, Order("game", most_turns=20), tasks)
    asyncio.run(check_openings(run))
    assert [task.id for task in run.playable] == ["0", "2"]
    [finding] = findings
    assert finding.line().startswith("make: make raised OSError: no port, at ")


def test_a_close_that_raises_is_a_fault_and_ends_nothing() -> None:
    [finding] = found("cannot close", check_openings, {"tasks": [TASK]})[:1]
    assert finding.line().startswith("close: close raised RuntimeError: no, at ")


def test_what_is_declared_not_to_be_deterministic_is_played_once() -> None:
    turns: list[int] = []

    async def check(run: CheckRun) -> str:
        await check_determinism(run)
        turns.append(run.harness.turns)
        return ""

    assert found("", check, {"playable": [TASK]}, deterministic=False) == []
    assert found("", check, {"playable": [TASK]}) == []
    assert turns == [3, 10]


def test_the_first_difference_of_two_transcripts_is_named() -> None:
    one = [{"messages": [{"content": "a" * 200 + "x"}]}, {"reward": 1.0}]
    assert first_difference(one, one) == ""
    assert (
        first_difference(one, [one[0], {"reward": 2.0}])
        == "turn 1 differs: reward is 1.0 and then 2.0"
    )
    assert first_difference(one, one[:1]) == "the episode is over after 1 turns, and then after 0"
    other = [{"messages": [{"content": "a" * 200 + "y"}]}]
    assert first_difference(one, other) == (
        f'the opening differs: messages[0].content is …{"a" * 20}x" and then …{"a" * 20}y"'
    )
