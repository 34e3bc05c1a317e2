"""What the scripts of files demonstrate is what the policy's own parser reads, whatever the
template of its model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from realhf.api.chat_template import ChatTemplateError, TemplateChat
from realhf.api.environment import Demonstration, DemonstrationRequest
from realhf.api.tool_parser import parse_turn
from realhf.data.chat_dataset import conversation_tokens
from realhf.env.loader.load import build_environment
from realhf.env.loader.tool_schemas import collect_tools
from realhf.rollout.demonstrations import play_demonstrations, script_message
from tests.api.chat.families import FAMILIES_OF_MODELS, family_chat

READ = [name for name, family in FAMILIES_OF_MODELS.items() if family.parser]
Row = dict[str, Any]


@pytest.fixture(scope="module")
def rows() -> list[tuple[Demonstration, Row]]:
    """A solution of every template, and some recoveries and habits, played in the environment."""
    spec = build_environment("files", {})
    assert spec.demonstrate is not None
    scripts = [*spec.demonstrate(DemonstrationRequest(1, 7))]
    for kind, request in (
        ("recovery", DemonstrationRequest(1, 8, 0.0, 1.0)),
        ("habit", DemonstrationRequest(1, 9, 1.0)),
    ):
        scripts += [script for script in spec.demonstrate(request) if script.kind == kind][:5]
    return list(zip(scripts, asyncio.run(play_demonstrations(spec, scripts)), strict=True))


def turns(ids: Sequence[int], mask: Sequence[bool]) -> list[list[int]]:
    """The runs of ids that are trained on."""
    found: list[list[int]] = []
    for place, (token, trained) in enumerate(zip(ids, mask, strict=True)):
        if trained and not (place and mask[place - 1]):
            found.append([])
        if trained:
            found[-1].append(token)
    return found


def calls(message: Any) -> list[tuple[str, Any, str]]:
    return [(call.name, dict(call.arguments), call.problem) for call in message.tool_calls]


@pytest.mark.slow
@pytest.mark.parametrize("name", READ)
def test_what_is_demonstrated_is_what_the_parser_reads(
    name: str, rows: list[tuple[Demonstration, Row]]
) -> None:
    chat: TemplateChat = family_chat(name)
    for script, row in rows:
        ids, mask = conversation_tokens(row, chat, "Work on a folder.")
        learned = script.learned or (True,) * len(script.turns)
        wanted = [
            parse_turn(text, "hermes")
            for text, train in zip(script.turns, learned, strict=True)
            if train
        ]
        said = [chat.parse(turn, row["tools"]) for turn in turns(ids, mask)]
        assert [calls(message) for message in said] == [calls(message) for message in wanted]
        assert all(len(message.tool_calls) == 1 for message in said)


@pytest.mark.parametrize("name", [name for name in FAMILIES_OF_MODELS if name not in READ])
def test_a_template_whose_calls_no_parser_reads_is_refused(
    name: str, rows: list[tuple[Demonstration, Row]]
) -> None:
    with pytest.raises(
        ChatTemplateError, match=r"the chat template (writes the call|does not write)"
    ):
        conversation_tokens(rows[0][1], family_chat(name))


class Shop:
    """A class whose tools take more than texts."""

    def order(
        self, items: list[str], fast: bool, count: int, price: float, note: str | None = None
    ) -> str:
        """Order things.

        Args:
            items: what
            fast: by courier
            count: how many of each
            price: at most
            note: on the parcel
        """
        return f"{items} {fast} {count} {price} {note}"


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("note", [None, "True", "a 'quote'\n{b}", ""])
def test_arguments_keep_their_types(name: str, note: str | None) -> None:
    """Some templates write them as JSON, others as Python does."""
    chat: TemplateChat = family_chat(name)
    tools = [tool.schema for tool in collect_tools(Shop).values()]
    arguments = {"items": ["it's", "ü"], "fast": True, "count": 3, "price": 2.5, "note": note}
    function = {"name": "order", "arguments": arguments}
    message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": function}],
    }
    if name == "lfm2.5" and "'" in (note or ""):
        # Its template puts texts between quotes without escaping theirs.
        with pytest.raises(ChatTemplateError, match="sees a mistake: neither ',' nor '\\)'"):
            chat.encode_turn(message, tools)
        return
    (read,) = chat.parse(chat.encode_turn(message, tools), tools).tool_calls
    assert calls_of(read) == ("order", arguments)


def calls_of(call: Any) -> tuple[str, Any]:
    assert not call.problem
    return call.name, dict(call.arguments)


def test_a_turn_of_a_script_keeps_its_words_and_its_reasoning() -> None:
    text = (
        '<think>\nhm\n</think>\n\nI look.\n<tool_call>{"name": "look", "arguments": {"x": '
        "1}}</tool_call>"
    )
    message = script_message(parse_turn(text, "hermes"))
    function = {"name": "look", "arguments": {"x": 1}}
    assert message == {
        "role": "assistant",
        "content": "<think>\nhm\n</think>\n\nI look.",
        "tool_calls": [{"type": "function", "id": "call_0", "function": function}],
    }
    assert script_message(parse_turn("SELECT 1", "hermes")) == {
        "role": "assistant",
        "content": "SELECT 1",
    }
    with pytest.raises(ValueError, match="cannot be read"):
        script_message(parse_turn("<tool_call>{</tool_call>", "hermes"))


def test_the_built_in_policy_learns_the_text_of_the_scripts() -> None:
    """To the letter, so that a policy that was warm-started before speaks as one that is
    warm-started now."""
    from realhf.backends.builtin_policy import train_tokenizer

    spec = build_environment("files", {})
    assert spec.demonstrate is not None
    chat = TemplateChat(train_tokenizer(["some words of a task"], 300, 512))
    for script in spec.demonstrate(DemonstrationRequest(1, 3)):
        for text in script.turns:
            message = script_message(parse_turn(text, "hermes"))
            assert chat.encode_turn(message) == chat.encode(text)
