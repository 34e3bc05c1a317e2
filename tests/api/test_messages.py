"""Every kind of bad message through every entrance: one line that names the field, and file and
line where it has any.

What the entrances are, the docstring of ``realhf.api.messages`` says; ``CALLERS`` holds the modules
that must check.
"""

from __future__ import annotations

import asyncio
import json
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from realhf.api.environment import AssistantMessage, Environment, EnvironmentFailure, Opening, Turn
from realhf.api.messages import demonstration_problems, find_missing_request, message_problems
from realhf.backends.builtin_policy import demonstration_texts
from realhf.data.chat_dataset import ChatDataset
from realhf.data.row_formats import SUPERVISED, check_rows
from realhf.env.adapters.openenv_episode import MessagesEnvironment
from realhf.env.adapters.policy_endpoint import Unplayable, read_messages
from realhf.env.check.contract import opening_problems, turn_problems
from realhf.env.loader.load import build_environment
from realhf.env.loader.validation import BrokenContract
from realhf.env.openenv_client import StepResult
from realhf.env.server.spec.messages import opening_observation, turn_observation
from realhf.rollout.api_errors import ApiError
from realhf.rollout.openai_requests import ChatRequest
from realhf.rollout.player import SlotEnvironment
from realhf.trajectory.wire.intake import Offload, parse_groups
from realhf.web.refusal import Refusal
from tests.api.chat.templates import QWEN25, tokenizer

ROOT = Path(__file__).resolve().parents[2]
USER = {"role": "user", "content": "Where is it?"}
CALL = {"type": "function", "id": "a", "function": {"name": "look", "arguments": "{}"}}

ANSWER = {"role": "tool", "content": "x", "tool_call_id": "a"}


def calling(**changed: Any) -> dict[str, Any]:
    function = {**CALL["function"], **changed}  # type: ignore[dict-item]
    return {"role": "assistant", "content": None, "tool_calls": [{**CALL, "function": function}]}


BAD: dict[str, tuple[Any, str]] = {
    "no map": (5, "must be a map with role and content"),
    "no role": ({"content": "x"}, "has no role"),
    "no content": ({"role": "user"}, "has no content"),
    "unknown role": ({"role": "god", "content": "x"}, "the role is one of"),
    "a role that is no text": ({"role": ["user"], "content": "x"}, "the role is one of"),
    "content in parts": (
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
        "the content must be text",
    ),
    "a picture": ({"role": "user", "content": [{"type": "image_url"}]}, "the content must be text"),
    "content null": ({"role": "user", "content": None}, "the content must be text"),
    "content a number": ({"role": "user", "content": 5}, "the content must be text"),
    "a turn that is null": ({"role": "assistant", "content": None}, "the content must be text"),
    "calls of a user": (
        {**USER, "tool_calls": [CALL]},
        "tool_calls is for messages of the role assistant",
    ),
    "calls no list": ({**calling(), "tool_calls": CALL}, "tool_calls must be a list"),
    "a call without name": (calling(name=""), "tool_calls[0] must be"),
    "arguments no JSON": (
        calling(arguments="{'a': 1}"),
        "tool_calls[0].arguments must be an object",
    ),
    "arguments a list": (calling(arguments="[1]"), "tool_calls[0].arguments must be an object"),
    "arguments missing": (calling(arguments=None), "tool_calls[0].arguments must be an object"),
    "an id that is a number": ({**ANSWER, "tool_call_id": 5}, "tool_call_id must be text"),
    "a name that is a list": ({**ANSWER, "name": ["a"]}, "name must be text"),
    "reasoning no text": (
        {"role": "assistant", "content": "x", "reasoning_content": 5},
        "reasoning_content must be",
    ),
    "train as text": (
        {"role": "assistant", "content": "x", "train": "false"},
        "train must be true or false",
    ),
    "train of a user": ({**USER, "train": False}, "train is for messages of the role assistant"),
    "not a number": ({**USER, "score": float("nan")}, "nan|NaN"),
    "half a character": ({**USER, "content": "a\ud800"}, "half a character"),
}
REWARD = "def reward(completion, **row):\n    return 1.0\n"
TOOLS = """
    class Looks:
        def reset(self, **row):
            return "Go."

        def look(self) -> str:
            '''Look around.'''
            return "nothing"

        def get_reward(self):
            return 1.0
"""
SPEAKS = """
    class Speaks:
        async def reset(self, task, *, seed):
            return {"messages": task["messages"]}

        async def step(self, message):
            return {"messages": self.answer}
"""


class Raw:
    """An environment that came through no loader."""

    def __init__(self, opening: Any, answer: Any = ()) -> None:
        self._opening = opening
        self._answer = answer

    async def reset(self, task: Mapping[str, Any], *, seed: int) -> Opening:
        return Opening(self._opening)

    async def step(self, message: AssistantMessage) -> Turn:
        return Turn(self._answer)

    async def close(self) -> None:
        pass


def raised(run: Callable[[], object]) -> str:
    """What is said about it; "" where it is taken."""
    try:
        run()
    except (ValueError, EnvironmentFailure, ApiError, ValidationError) as error:
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"  # as the endpoint says it
        return str(error)
    except Refusal as refusal:
        assert refusal.status == 422
        return str(refusal.detail[0])
    return ""


def lines(folder: Path, *rows: Any) -> Path:
    """A file whose first line is blank, behind a mark, so that numbers of lines are not those of
    rows."""
    path = folder / "rows.jsonl"
    path.write_text("\ufeff\n" + "\n".join(map(json.dumps, rows)) + "\n \n", encoding="utf-8")
    return path


def demonstrated(folder: Path, messages: Any) -> Path:
    turn = {"role": "assistant", "content": "There."}
    return lines(folder, {"messages": [USER, turn]}, {"messages": [*messages, turn]})


def supervised(folder: Path, messages: Any) -> str:
    path = demonstrated(folder, messages)
    return raised(lambda: ChatDataset(str(path), of_qwen()))


def file_rows(folder: Path, messages: Any) -> str:
    path = demonstrated(folder, messages)
    return raised(lambda: check_rows(path, SUPERVISED))


@cache
def of_qwen() -> Any:
    return tokenizer(QWEN25, "<|im_end|>")


def vocabulary(folder: Path, messages: Any) -> str:
    path = demonstrated(folder, messages)
    return raised(lambda: [*demonstration_texts(path)])


def written(folder: Path, text: str) -> str:
    path = folder / "mine.py"
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return str(path)


def questions(option: str) -> Callable[[Path, Any], str]:
    def push(folder: Path, messages: Any) -> str:
        path = lines(folder, {"prompt": "1?"}, {"prompt": messages})
        good = folder / "good.jsonl"
        good.write_text('{"prompt": "2?"}\n', encoding="utf-8")
        files = {"data": str(path if option == "data" else good)}
        files |= {option: str(path)} if option != "data" else {}
        return raised(lambda: build_environment(written(folder, REWARD), files))

    return push


def tool_rows(folder: Path, messages: Any) -> str:
    path = lines(folder, {"prompt": "1?"}, {"prompt": messages})
    return raised(lambda: build_environment(written(folder, TOOLS), {"data": str(path)}))


def task_function(folder: Path, messages: Any) -> str:
    rows = (
        f"def tasks(split):\n    nan = float('nan')\n    return [{{'prompt': '1?'}}, {{'prompt': "
        f"{messages!r}}}]\n"
    )
    spec = build_environment(written(folder, REWARD + rows), {})
    return raised(lambda: spec.tasks("train"))


def speaking(folder: Path, messages: Any) -> str:
    environment = build_environment(written(folder, SPEAKS), {}).make("")
    return raised(lambda: asyncio.run(_reset(environment, {"messages": messages})))


async def _reset(environment: Environment, task: Mapping[str, Any]) -> Opening:
    return await environment.reset(task, seed=0)


def answering(folder: Path, messages: Any) -> str:
    environment = build_environment(written(folder, SPEAKS), {}).make("")

    async def play() -> None:
        await environment.reset({"messages": [USER]}, seed=0)
        environment._instance.answer = messages  # type: ignore[attr-defined]
        await environment.step(AssistantMessage("x"))

    return raised(lambda: asyncio.run(play()))


def slot(opening: Any, answer: Any = ()) -> str:
    async def play() -> None:
        limits: dict[str, Any] = {
            "message_timeout_s": 5.0,
            "patience_s": 0.0,
        }
        environment = SlotEnvironment("raw", lambda: Raw(opening, answer), **limits)
        environment.prepare(0)
        await environment.reset({}, seed=0)
        await environment.step(AssistantMessage("x"))

    return raised(lambda: asyncio.run(play()))


def served(answer: Mapping[str, Any], method: str) -> str:
    """What a remote server said, to those who play on it."""

    async def told(data: Any) -> StepResult:
        return StepResult(dict(answer), None, False)

    environment = MessagesEnvironment([])
    environment._session = SimpleNamespace(reset=told, step=told)  # type: ignore[assignment]
    play = {
        "reset": lambda: environment.reset({}, seed=0),
        "step": lambda: environment.step(AssistantMessage("x")),
    }
    return raised(lambda: asyncio.run(play[method]()))  # type: ignore[arg-type]


def pushed(folder: Path, messages: Any) -> str:
    group = {"tokens": [[1, 2]], "masks": [[-100, 2]], "scores": [1.0], "messages": [messages]}
    body = json.dumps(group).encode()
    read = parse_groups(body, None, listed=False, int64=True, offload=Offload())
    return raised(lambda: asyncio.run(read))


def first(problems: Sequence[str]) -> str:
    return problems[0] if problems else ""


ENTRANCES: dict[str, tuple[Callable[[Path, Any], str], str]] = {
    "supervised training": (supervised, r"rows\.jsonl, line 3: messages\[1\]"),
    "rows of a file": (file_rows, r"rows\.jsonl, line 3: messages\[1\]"),
    "vocabulary of the built-in policy": (vocabulary, r"rows\.jsonl, line 3: messages\[1\]"),
    "env.data": (questions("data"), r"rows\.jsonl, line 3: the column 'prompt'\[1\]"),
    "env.heldout_data": (
        questions("heldout_data"),
        r"rows\.jsonl, line 3: the column 'prompt'\[1\]",
    ),
    "env.data of a class with tools": (tool_rows, r"rows\.jsonl, line 3: the column 'prompt'\[1\]"),
    "tasks of an author": (
        task_function,
        r"mine\.py, line 3\), split 'train', row 1: the column 'prompt'\[1\]",
    ),
    "opening of an author's class": (
        speaking,
        r"Speaks\.reset \(seed 0\): messages\[1\].*mine\.py, line 3\)",
    ),
    "turn of an author's class": (
        answering,
        r"Speaks\.step \(seed 0\): messages\[1\].*mine\.py, line 6\)",
    ),
    "opening of any environment": (
        lambda _, m: slot(m),
        r"environment raw: the messages of reset\[1\]",
    ),
    "turn of any environment": (
        lambda _, m: slot([USER], m),
        r"environment raw: the messages of step\[1\]",
    ),
    "opening that is served": (
        lambda _, m: raised(lambda: opening_observation(Opening(m), "")),
        r"messages\[1\]",
    ),
    "turn that is served": (
        lambda _, m: raised(lambda: turn_observation(Turn(m))),
        r"messages\[1\]",
    ),
    "opening of a remote server": (
        lambda _, m: served({"messages": m}, "reset"),
        r"the server's messages\[1\]",
    ),
    "turn of a remote server": (
        lambda _, m: served({"messages": m}, "step"),
        r"the server's messages\[1\]",
    ),
    "opening that is tried out": (
        lambda _, m: first([*opening_problems(Opening(m), "")]),
        r"messages\[1\]",
    ),
    "turn that is tried out": (lambda _, m: first([*turn_problems(Turn(m))]), r"messages\[1\]"),
    "verifiers": (lambda _, m: raised(lambda: read_messages(m)), r"it sent "),
    "agents' endpoint": (
        lambda _, m: raised(lambda: ChatRequest.model_validate({"messages": m}).conversation()),
        r"messages|tool_calls",
    ),
    "trajectory server": (pushed, r"'loc'|nan|NaN"),
}
LENIENT: dict[str, tuple[set[str], str]] = {
    "rows of a file": ({"content in parts"}, "joins parts of text"),
    "verifiers": (
        {
            "no content",
            "content in parts",
            "content null",
            "a turn that is null",
            "half a character",
            "not a number",
        }
        | {
            name
            for name in BAD
            if name.startswith(("calls", "a call", "arguments", "reasoning", "train"))
        },
        "joins parts of text, mends halves of characters, and drops keys that are not played",
    ),
    "agents' endpoint": (
        {
            "no content",
            "content in parts",
            "content null",
            "a turn that is null",
            "a name that is a list",
        }
        | {name for name in BAD if name.startswith(("reasoning", "train", "not a number"))},
        "joins parts of text, and drops keys that no template is given",
    ),
    "opening of any environment": ({"half a character"}, "the chat replaces it"),
    "turn of any environment": ({"half a character"}, "the chat replaces it"),
    "trajectory server": (
        {*BAD} - {"no map", "no role", "no content", "not a number", "half a character"},
        "carries values of any kind to other trainers, and reads none",
    ),
}
OTHER_WORDS = {"verifiers", "agents' endpoint", "trajectory server"}
"""These may find a fault by their own schema first."""


@pytest.mark.slow
@pytest.mark.sampled(110)
@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("entrance", ENTRANCES)
def test_a_bad_message_is_one_line_at_every_entrance(
    entrance: str, kind: str, tmp_path: Path
) -> None:
    message, field = BAD[kind]
    push, place = ENTRANCES[entrance]
    said = push(tmp_path, [USER, message])
    if kind in LENIENT.get(entrance, ((), ""))[0]:
        assert not said, "a rule of its own that is not needed, or another than is written here"
        return
    assert said and len(said.splitlines()) == 1
    if kind == "not a number" and "rows.jsonl" in place:
        place = r"rows\.jsonl, line 3: not JSON"  # found before the columns are looked at
    if kind in ("not a number", "half a character"):
        place = place.removesuffix(r"messages\[1\]").removesuffix(r"the column 'prompt'\[1\]")
    assert re.search(place, said), said
    if entrance not in OTHER_WORDS:
        assert re.search(field if "|" in field else re.escape(field), said), said


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_a_good_conversation_is_taken_at_every_entrance(entrance: str, tmp_path: Path) -> None:
    """Also with what is null, as programs write it, and with calls in either form."""
    short = {"role": "assistant", "tool_calls": [{"name": "look", "arguments": {}}]}
    calls = calling() if entrance in OTHER_WORDS else short
    answer = {"role": "tool", "content": "here", "tool_call_id": "a", "name": None}
    blank = {**USER, "tool_calls": None, "reasoning_content": None, "train": None}
    messages = [USER, calling(), answer, calls, answer, blank]
    if entrance.startswith("turn"):
        messages = [answer, blank]
    if entrance == "trajectory server":
        messages = [USER, calling(), answer]
    if entrance == "agents' endpoint":
        messages = [USER, calling(), answer, calling(arguments='{"x": 1}'), answer, blank]
    assert not ENTRANCES[entrance][0](tmp_path, messages)


def test_an_empty_list_of_calls_counts_as_missing_whoever_says_the_message() -> None:
    """Exports of chats write it beside every message; whole files were refused for it."""
    talk = [{**USER, "tool_calls": []}, {"role": "assistant", "content": "here", "tool_calls": []}]
    assert not [*message_problems(talk, "messages")]
    silent = [{"role": "assistant", "content": None, "tool_calls": []}]
    assert "the content must be text" in " ".join(message_problems(silent, "messages"))


CALLERS = {
    "realhf/backends/builtin_policy.py",
    "realhf/data/chat_dataset.py",
    "realhf/data/row_formats.py",
    "realhf/env/adapters/policy_endpoint.py",
    "realhf/env/adapters/openenv_episode.py",
    "realhf/env/check/contract.py",
    "realhf/env/loader/multi_turn.py",
    "realhf/env/loader/tool_env.py",
    "realhf/env/loader/validation.py",
    "realhf/env/server/spec/messages.py",
    "realhf/rollout/openai_requests.py",
    "realhf/rollout/player.py",
}


def test_the_modules_that_check_are_known() -> None:
    """A new entrance gets a row in the table above."""
    names = ("message_problems(", "demonstration_problems(", "validate_messages(")
    texts = {path: path.read_text(encoding="utf-8") for path in (ROOT / "realhf").rglob("*.py")}
    files = [path for path, text in texts.items() if any(name in text for name in names)]
    assert {str(path.relative_to(ROOT)) for path in files} == CALLERS | {"realhf/api/messages.py"}


SILENT: dict[str, tuple[Any, str]] = {
    "empty": ("", "is blank"),
    "white space": (" \n\t", "is blank"),
    "no message": ([], "has no message"),
    "the system alone": ([{"role": "system", "content": "Be brief."}], "has only a system message"),
    "a blank user": (
        [{"role": "system", "content": "x"}, {"role": "user", "content": " "}],
        "is blank",
    ),
}


@pytest.mark.parametrize("kind", SILENT)
def test_a_prompt_that_asks_nothing_is_refused(kind: str, tmp_path: Path) -> None:
    """They were played, with whatever a policy says to nothing."""
    prompt, said = SILENT[kind]
    for push in (questions("data"), questions("heldout_data")):
        found = push(tmp_path, prompt)
        assert re.search(rf"rows\.jsonl, line 3: the column 'prompt' {said}", found), found
    (tmp_path / "own").mkdir()
    found = task_function(tmp_path / "own", prompt)
    assert f"row 1: the column 'prompt' {said}" in found
    if not isinstance(prompt, str):
        assert f"messages: the opening {said}" in supervised(tmp_path, prompt) or not prompt


async def test_a_class_with_tools_may_say_at_reset_what_a_row_leaves_out(tmp_path: Path) -> None:
    speaks = build_environment(written(tmp_path, TOOLS), {}).make("")
    assert (await speaks.reset({"prompt": ""}, seed=0)).messages == [
        {"role": "user", "content": "Go."}
    ]
    (tmp_path / "silent").mkdir()
    silent = build_environment(
        written(tmp_path / "silent", TOOLS.replace('return "Go."', "pass")), {}
    ).make("")
    await silent.reset({}, seed=0)
    with pytest.raises(EnvironmentFailure, match="with what reset returned, the prompt is blank"):
        await silent.reset({"prompt": ""}, seed=0)


IDS: dict[str, tuple[list[Any], str]] = {
    "a number and its text": ([1, "1"], r"an earlier row has the id '1', too \(.*line \d+\)"),
    "one text": (["a", "a"], r"an earlier row has the id 'a', too"),
    "true": ([True], r"an id must be text or a whole number, not True"),
    "a fraction": ([1.0], r"an id must be text or a whole number, not 1\.0"),
    "a list": ([[1]], r"an id must be text or a whole number, not \[1\]"),
}


@pytest.mark.parametrize("kind", IDS)
@pytest.mark.parametrize("two_files", [False, True])
def test_one_id_names_one_task_of_both_splits(kind: str, two_files: bool, tmp_path: Path) -> None:
    """The rows are in one file, on either side of the split, or in one for each."""
    ids, said = IDS[kind]
    rows = [{"prompt": f"{n}?", "id": f"other {n}"} for n in range(40)]
    named = [{"prompt": f"named {n}", "id": each} for n, each in enumerate(ids)]
    path = tmp_path / "rows.jsonl"
    held_out = tmp_path / "held_out.jsonl"
    path.write_text(
        "\n".join(map(json.dumps, [*rows, *(named[:1] if two_files else named)])), encoding="utf-8"
    )
    held_out.write_text(
        "\n".join(map(json.dumps, [{"prompt": "new?"}, *named[1:]])), encoding="utf-8"
    )
    files: dict[str, Any] = {"data": str(path)}
    files |= {"heldout_data": str(held_out)} if two_files else {"heldout_fraction": 0.5}
    with pytest.raises(ValueError, match=said) as caught:
        build_environment(written(tmp_path, REWARD), files)
    where = "held_out.jsonl, line 2" if two_files and len(ids) > 1 else "rows.jsonl, line 4"
    assert where in str(caught.value)


@pytest.mark.parametrize("ids", [(1, "1"), ("a", "a")])
def test_one_id_names_one_task_of_both_splits_of_an_author(
    ids: tuple[Any, Any], tmp_path: Path
) -> None:
    rows = (
        f"def tasks(split):\n    return [{{'prompt': split, 'id': {ids[0]!r} if split == 'train' "
        f"else {ids[1]!r}}}]\n"
    )
    spec = build_environment(written(tmp_path, REWARD + rows), {})
    assert [*spec.tasks("train").group_of] == [*spec.tasks("train").group_of] == [str(ids[0])]
    with pytest.raises(
        ValueError,
        match=r"'heldout', row 0: an earlier row has the id .*, too \(.*'train', row 0\)",
    ):
        spec.tasks("heldout")


TURN = {"role": "assistant", "content": "There."}
WRONG_ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "no messages": (
        {"prompt": "x", "completion": "y"},
        "the row has no messages (it has 'prompt', 'completion')",
    ),
    "an empty turn": (
        {"messages": [USER, {**TURN, "content": ""}]},
        "messages[1]: the turn is empty",
    ),
    "a turn of no calls": (
        {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": []}]},
        "messages[1]: the content must be text",
    ),
    "weight": (
        {"messages": [USER, {**TURN, "weight": 0}]},
        "messages[1]: weight is not read here; write train",
    ),
    "thinking": (
        {"messages": [USER, {**TURN, "thinking": "x"}]},
        "thinking is not read here; write reasoning_content",
    ),
    "an old call": (
        {"messages": [USER, {**TURN, "function_call": {}}]},
        "function_call is not read here",
    ),
    "tools": ({"messages": [USER, TURN], "tools": [{"name": "x"}]}, "tools[0] must be"),
    "a turn first": (
        {"messages": [TURN, USER]},
        "a demonstration needs an assistant turn, and a message before the first one",
    ),
    "no turn": (
        {"messages": [USER]},
        "a demonstration needs an assistant turn, and a message before the first one",
    ),
}


@pytest.mark.parametrize("kind", WRONG_ROWS)
def test_a_row_of_demonstrations_is_checked_beyond_its_messages(kind: str) -> None:
    """A null turn trained the policy to say nothing; what other programs call by other names was
    dropped."""
    row, said = WRONG_ROWS[kind]
    found = [*demonstration_problems(row)]
    assert len(found) == 1 and said in found[0], found
    assert not [
        *demonstration_problems(
            {"messages": [USER, {**TURN, "content": "", "train": False}, USER, TURN]}
        )
    ]


def test_all_problems_are_told_and_not_only_the_first() -> None:
    assert len([*message_problems([USER, 1, {"role": "user"}], "messages")]) == 2
    assert (
        find_missing_request(
            [{"role": "assistant", **{k: v for k, v in calling().items() if k != "role"}}]
        )
        == ""
    )


def test_broken_contracts_are_value_errors() -> None:
    """``raised`` above would pass them on otherwise."""
    assert issubclass(BrokenContract, ValueError) and issubclass(Unplayable, ValueError)
