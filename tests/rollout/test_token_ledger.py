"""The ledger of a black-box agent against a plain model of what it promises, for agents that do anything."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.api.environment import MAX_BRANCHES
from realhf.api.model import GenOutput
from realhf.rollout.episode import Limits
from realhf.rollout.openai_requests import ApiError, Message
from realhf.rollout.openai_sessions import TokenLedger
from tests.rollout.black_box import chat, spelt

STOP = chat().stop_ids[0]


def ledger() -> TokenLedger:
    return TokenLedger(chat(), Limits(max_total_tokens=4000, turn_tokens=16, max_turns=100), slot=1, seed=None)


def sampled(words: str, reason: str = "stop") -> GenOutput:
    ids = spelt(words) + ([STOP] if reason == "stop" else [])
    return GenOutput(ids, [-1.0] * len(ids), [0] * len(ids), reason)


def rendered(messages: list[Message], ids: dict[tuple[Message, ...], list[list[int]]]) -> list[list[int]]:
    """What the engine may see: the ids that were sampled where the words were (the same words may have been sampled
    more than once), the template's text elsewhere."""
    spoken = [n for n, message in enumerate(messages, 1) if message.role == "assistant"]
    if not spoken or tuple(messages[: spoken[-1]]) not in ids:
        return [chat().opening([message.for_template() for message in messages])]
    head, tail = messages[: spoken[-1]], messages[spoken[-1] :]
    between = [message.for_template() for message in tail]
    return [known + chat().following_messages(between, ended=known[-1] == STOP) for known in ids[tuple(head)]]


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
    conversations: list[list[Message]] = [[Message("user", "task")]]
    ids: dict[tuple[Message, ...], list[list[int]]] = {}
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
        said = [*messages, Message("assistant", words)]
        ids.setdefault(tuple(said), []).append(turn.prompt + turn.ids)
        conversations.append(messages if deed == "again" else [*said, Message("user", f"answer {number}")])
    assert sum(branch.sampled for branch in book.branches) == kept
    for branch in book.branches:
        branch.tokens.check()
        assert len(branch.turns()) == len(branch.marks)
    assert len(set(book.slots)) == len(book.slots) and book.slots[0] == 1


def test_what_is_no_turn_is_refused() -> None:
    book = ledger()
    turn = book.begin([Message("user", "task")])
    with pytest.raises(ValueError, match="0 tokens"):
        book.add(turn, GenOutput([], [], [], "stop"))
    with pytest.raises(ValueError, match="2 logprobs"):
        book.add(turn, GenOutput([5], [0.0, 0.0], [0], "stop"))
    assert not book.add(turn, GenOutput([], [], [], "interrupted")), "interrupted before the first token"
    assert book.add(turn, sampled("ls"))


def test_the_number_of_conversations_is_bounded() -> None:
    book = ledger()
    for _ in range(MAX_BRANCHES):
        book.discard(book.begin([Message("user", "task")]))
    with pytest.raises(ApiError, match="conversations"):
        book.begin([Message("user", "task")])


def test_the_main_trajectory_has_the_most_tokens() -> None:
    book = ledger()
    for words in ("ls", "aws 1", "aws 2", "s3"):
        turn = book.begin([Message("user", words)])
        book.add(turn, sampled(words))
        book.keep(turn)
    assert [branch.turns()[0].text for branch in book.ordered()] == ["aws 2", "aws 1", "s3", "ls"]
