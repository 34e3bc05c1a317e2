"""Messages that say the same are equal; the ledger of a black-box agent keeps every token once."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.api.environment import AssistantMessage, ToolCall
from realhf.api.model import GenOutput
from realhf.api.rollout import MAX_BRANCHES
from realhf.rollout.api_errors import ApiError
from realhf.rollout.episode import EpisodeLimits
from realhf.rollout.openai_requests import (
    OpenAiCall,
    OpenAiMessage,
    build_message,
    canonical_json,
)
from realhf.rollout.openai_sessions import TokenLedger
from tests.api.chat.families import family_chat
from tests.rollout.black_box import chat, spelt

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(-1e6, 1e6)
    | st.text(max_size=5)
)
VALUES: Any = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
UTF8 = st.text(st.characters(exclude_categories=["Cs"]))


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(VALUES, st.booleans(), st.sampled_from([None, 2]))
def test_json_is_the_same_in_any_way_of_writing(
    value: Any, escaped: bool, indent: int | None
) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return
    other = json.dumps(
        dict(reversed(value.items())) if isinstance(value, dict) else value, indent=indent
    )
    assert canonical_json(json.dumps(value, ensure_ascii=escaped)) == canonical_json(f" {other}\n")


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(VALUES, VALUES)
def test_json_of_different_values_differs(one: Any, other: Any) -> None:
    def tagged(value: Any) -> Any:
        """Python finds True == 1; JSON does not."""
        if isinstance(value, dict):
            return {key: tagged(item) for key, item in value.items()}
        if isinstance(value, list):
            return [tagged(item) for item in value]
        return (isinstance(value, bool), value)

    if tagged(one) != tagged(other):
        assert canonical_json(json.dumps(one)) != canonical_json(json.dumps(other))


@pytest.mark.parametrize(
    "text", ['{"a": 1, "a": 1}', '{"a": 1', "", "{} {}", '{"a": NaN}', "[" * 10_000, "9" * 5000]
)
def test_what_programs_may_read_differently_is_compared_as_text(text: str) -> None:
    assert canonical_json(text) == text


def test_a_number_may_lose_its_fraction_of_nothing() -> None:
    assert OpenAiCall("a", "f", '{"x": 100.0}') == OpenAiCall("a", "f", '{"x":100}')
    assert OpenAiCall("a", "f", '{"x": 1}') != OpenAiCall("a", "f", '{"x": true}')


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["f", "g"]), st.dictionaries(UTF8, SCALARS, max_size=2)),
        max_size=3,
    )
)
def test_an_answer_has_ids_of_its_own_that_the_tokens_decide(
    calls: list[tuple[str, dict[str, Any]]],
) -> None:
    said = AssistantMessage(
        "words", tuple(ToolCall(name, arguments) for name, arguments in calls), text="all"
    )
    message = build_message(said, [1, 2], [3])
    assert message == build_message(said, [1, 2], [3])
    assert message.content == "words"
    assert build_message(said, [1], [2], reads_calls=False).content == ("all" if calls else "words")
    ids = [call.id for call in message.calls]
    others = [
        call.id
        for other in (build_message(said, [1], [2, 3]), build_message(said, [1, 2], [4]))
        for call in other.calls
    ]
    assert len({*ids, *others}) == 3 * len(calls)
    assert all(len(name) == 9 and name.isalnum() for name in ids)


def test_what_could_not_be_read_stays_in_the_content() -> None:
    broken = ToolCall("", {}, "call_1", "<tool_call>{</tool_call>", "no JSON")
    both = AssistantMessage("words", (ToolCall("f"), broken), text="all")
    assert build_message(both, [1], [2]).content == f"words\n{broken.text}"
    assert build_message(
        AssistantMessage("words", (broken,), text="all"), [1], [2]
    ) == OpenAiMessage("assistant", "all")


STOP = chat().stop_ids[0]


def ledger() -> TokenLedger:
    return TokenLedger(
        chat(),
        EpisodeLimits(max_total_tokens=4000, turn_tokens=16, max_turns=100),
        slot=1,
        seed=None,
    )


def sampled(words: str, reason: str = "stop") -> GenOutput:
    ids = spelt(words) + ([STOP] if reason == "stop" else [])
    return GenOutput(ids, [-1.0] * len(ids), [0] * len(ids), reason)


def rendered(
    messages: list[OpenAiMessage], ids: dict[tuple[OpenAiMessage, ...], list[list[int]]]
) -> list[list[int]]:
    """What the engine may see: the ids that were sampled where the words were (the same words may
    have been sampled more than once), the template's text elsewhere."""
    spoken = [n for n, message in enumerate(messages, 1) if message.role == "assistant"]
    if not spoken or tuple(messages[: spoken[-1]]) not in ids:
        return [chat().opening([message.for_template() for message in messages])]
    head = messages[: spoken[-1]]
    tail = messages[spoken[-1] :]
    between = [message.for_template() for message in tail]
    return [
        known + chat().following_messages(between, ended=known[-1] == STOP)
        for known in ids[tuple(head)]
    ]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 5),
            st.sampled_from(["extend", "again", "edit", "lost", "fails"]),
            st.sampled_from(["aws 1", "ls"]),
            st.sampled_from(["stop", "length"]),
        ),
        min_size=1,
        max_size=10,
    )
)
def test_every_request_sees_the_sampled_ids_and_every_kept_token_is_trained_once(
    deeds: list[tuple[int, str, str, str]],
) -> None:
    book = ledger()
    conversations: list[list[OpenAiMessage]] = [[OpenAiMessage("user", "task")]]
    ids: dict[tuple[OpenAiMessage, ...], list[list[int]]] = {}
    kept = 0
    for number, (which, deed, words, reason) in enumerate(deeds):
        messages = list(conversations[which % len(conversations)])
        if deed == "edit" and messages[-2:-1]:
            messages[-2] = replace(messages[-2], content=messages[-2].content + "!")
        turn = book.begin(messages)
        assert turn.prompt in rendered(messages, ids)
        assert list(turn.request().token_ids) == turn.prompt and turn.request().sampled == 0
        if deed in ("lost", "fails"):
            if deed == "lost":
                book.add(turn, sampled(words, reason))
            book.discard(turn)
            continue
        assert book.add(turn, sampled(words, reason)) and turn.text == words
        book.keep(turn)
        kept += len(turn.ids)
        said = [*messages, OpenAiMessage("assistant", words)]
        ids.setdefault(tuple(said), []).append(turn.prompt + turn.ids)
        conversations.append(
            messages if deed == "again" else [*said, OpenAiMessage("user", f"answer {number}")]
        )
    assert sum(branch.n_sampled for branch in book.branches) == kept
    for branch in book.branches:
        branch.tokens.check()
        assert len(branch.turns()) == len(branch.marks)
    assert len(set(book.slots)) == len(book.slots) and book.slots[0] == 1


def test_the_channels_of_gpt_oss_are_not_shown_to_an_agent() -> None:
    """Its answer is the final message, and its next request continues from the sampled tokens."""
    format = family_chat("gpt-oss")
    limits = EpisodeLimits(max_total_tokens=4000, turn_tokens=200, max_turns=9)
    book = TokenLedger(format, limits, slot=1, seed=None)
    messages = [OpenAiMessage("user", "task")]
    turn = book.begin(messages)
    text = (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    )
    ids = [*format.encode(text), format.stop_ids[0]]
    book.add(turn, GenOutput(ids, [-1.0] * len(ids), [0] * len(ids), "stop"))
    assert turn.answer == OpenAiMessage("assistant", "Yes.")
    book.keep(turn)
    following = book.begin([*messages, turn.answer, OpenAiMessage("user", "And now?")])
    assert following.prompt[: len(turn.prompt) + len(ids)] == [*turn.prompt, *ids]


def test_what_is_no_turn_is_refused() -> None:
    book = ledger()
    turn = book.begin([OpenAiMessage("user", "task")])
    with pytest.raises(ValueError, match="0 tokens"):
        book.add(turn, GenOutput([], [], [], "stop"))
    with pytest.raises(ValueError, match="2 logprobs"):
        book.add(turn, GenOutput([5], [0.0, 0.0], [0], "stop"))
    assert not book.add(turn, GenOutput([], [], [], "interrupted")), (
        "interrupted before the first token"
    )
    assert book.add(turn, sampled("ls"))


def test_the_number_of_conversations_is_bounded() -> None:
    book = ledger()
    for _ in range(MAX_BRANCHES):
        book.discard(book.begin([OpenAiMessage("user", "task")]))
    with pytest.raises(ApiError, match="conversations"):
        book.begin([OpenAiMessage("user", "task")])


def test_the_main_trajectory_has_the_most_tokens() -> None:
    book = ledger()
    for words in ("ls", "aws 1", "aws 2", "s3"):
        turn = book.begin([OpenAiMessage("user", words)])
        book.add(turn, sampled(words))
        book.keep(turn)
    assert [branch.turns()[0].text for branch in book.sort_branches()] == [
        "aws 2",
        "aws 1",
        "s3",
        "ls",
    ]
