"""Conversations whose old reasoning is dropped: rows, their prefixes, and what the engine saw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from realhf.api.chat_template import TemplateChat
from realhf.api.environment import (
    AssistantMessage,
    Environment,
    EnvironmentFailure,
    Opening,
    Task,
    Turn,
)
from realhf.api.model import GenOutput, GenRequest
from realhf.api.rollout import RolloutOutcome
from realhf.rollout.episode import EpisodeLimits, EpisodeRequest
from realhf.rollout.player import TurnAgent
from realhf.rollout.rollout_sample import outcomes_to_sample
from tests.api.chat.templates import QWEN3, QWEN25, tokenizer

LIMITS = EpisodeLimits(max_turns=4, max_total_tokens=700, turn_tokens=80)
CHAT = TemplateChat(tokenizer(QWEN3, "<|im_end|>", (("l", "s"),)), system_prompt=None)
STOP = CHAT.stop_ids[0]


def spelt(text: str) -> list[int]:
    """Letter by letter, as no tokenizer would."""
    return [token for letter in text for token in CHAT.encode(letter)]


class Engine:
    """Says these turns, in parts of ``part`` tokens where it is not 0."""

    def __init__(self, *turns: str, part: int = 0) -> None:
        self.turns = turns
        self.part = part
        self.requests: list[GenRequest] = []
        self.sampled = self._spoken = 0

    async def generate(self, request: GenRequest) -> GenOutput:
        self.requests.append(request)
        rest = [*spelt(self.turns[self._spoken]), STOP][request.sampled :]
        more = 0 < self.part < len(rest)
        ids = rest[: self.part] if more else rest
        self._spoken += not more
        self.sampled += len(ids)
        return GenOutput(
            ids,
            [-0.5] * len(ids),
            [len(self.requests)] * len(ids),
            "interrupted" if more else "stop",
        )

    def free(self, slots: Sequence[int]) -> None:
        raise AssertionError("the player frees the slots")


class World:
    """Answers with these messages, one turn after the other, and pays 1, 2, 4, ..."""

    def __init__(self, *answers: Any) -> None:
        self.answers = answers
        self.steps = 0

    async def reset(self, task: Mapping[str, Any], *, seed: int) -> Opening:
        return Opening([{"role": "user", "content": "begin"}])

    async def step(self, message: AssistantMessage) -> Turn:
        answer = self.answers[self.steps]
        self.steps += 1
        if isinstance(answer, Exception):
            raise answer
        role, content = answer
        done = self.steps == len(self.answers)
        return Turn(
            [{"role": role, "content": content}], done=done, reward=float(2 ** (self.steps - 1))
        )

    async def close(self) -> None:
        """Nothing to close."""


async def play(
    engine: Engine, env: Environment, *, keep: bool = False, limits: EpisodeLimits = LIMITS
) -> RolloutOutcome:
    agent = TurnAgent(CHAT, limits, "be brief", keep_reasoning=keep)
    return await agent.play(env, EpisodeRequest(0, Task("t"), 5), engine, 3)


def whole(row: RolloutOutcome) -> str:
    return CHAT._tokenizer.decode(row.prompt_ids + row.completion_ids, skip_special_tokens=False)


THOUGHTS = ("<think>\none\n</think>\n\nls a", "<think>\ntwo\n</think>\n\nls b", "ls c")


@pytest.mark.parametrize("part", [0, 7])
async def test_every_row_is_what_the_engine_saw_and_every_token_is_trained_once(part: int) -> None:
    engine = Engine(*THOUGHTS, part=part)
    outcome = await play(engine, World(*(("user", word) for word in ("x", "y", "z"))))
    rows = [*outcome.branches, outcome]
    assert len(rows) == 3 and sum(sum(row.loss_mask) for row in rows) == engine.sampled
    seen = [list(request.token_ids) for request in engine.requests]
    for row in rows:
        ids = row.prompt_ids + row.completion_ids
        assert all(ids[: len(row.prompt_ids) + start] in seen for start in row.turn_starts)
    assert len({request.seed for request in engine.requests}) == 3, (
        "a row has random numbers of its own"
    )
    assert {request.slot for request in engine.requests} == {3}


async def test_rows_are_as_the_template_renders_them_and_share_exact_prefixes() -> None:
    engine = Engine(*THOUGHTS)
    outcome = await play(engine, World(*(("user", word) for word in ("x", "y", "z"))))
    first, second, third = *outcome.branches, outcome
    history: list[dict[str, str]] = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "begin"},
    ]
    for row, said, told in zip((first, second, third), THOUGHTS, "xyz", strict=True):
        shown = CHAT._tokenizer.apply_chat_template(
            history, tokenize=False, add_generation_prompt=True
        )
        assert CHAT._tokenizer.decode(row.prompt_ids, skip_special_tokens=False) == shown
        history += [{"role": "assistant", "content": said}, {"role": "user", "content": told}]
    assert second.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids
    assert third.prompt_ids[: len(second.prompt_ids)] == second.prompt_ids
    assert "one" not in whole(second) and "one" not in whole(third) and "two" not in whole(third)
    words = spelt("ls a")
    assert any(
        second.prompt_ids[n : n + len(words)] == words for n in range(len(second.prompt_ids))
    ), "as sampled"
    assert CHAT.encode("ls a") != words


async def test_reasoning_that_the_template_keeps_stays_in_the_row() -> None:
    """A tool's answer forgets nothing; the user's word after it forgets both turns at once."""
    engine = Engine(*THOUGHTS[:2], "<think>\nthree\n</think>\n\nls c")
    outcome = await play(engine, World(("tool", "x"), ("user", "y"), ("user", "z")))
    (first,) = outcome.branches
    assert [len(row.turn_starts) for row in (first, outcome)] == [2, 1]
    assert (
        "one" in whole(first)
        and "two" in whole(first)
        and not {"one", "two"} & set(whole(outcome).split())
    )


async def test_without_reasoning_there_is_one_row_as_if_it_were_kept() -> None:
    plain = ("ls a", "ls b", "<think>\nlast\n</think>\n\nls c")
    answers = tuple(("user", word) for word in "xyz")
    dropped = Engine(*plain)
    kept = Engine(*plain)
    one = await play(dropped, World(*answers))
    other = await play(kept, World(*answers), keep=True)
    assert dropped.requests == kept.requests and not one.branches
    for name in (
        "prompt_ids",
        "completion_ids",
        "loss_mask",
        "turn_starts",
        "first_turn",
        "reward",
        "status",
    ):
        assert getattr(one, name) == getattr(other, name), name


async def test_turns_keep_their_numbers_and_all_rewards_of_the_episode() -> None:
    outcome = await play(Engine(*THOUGHTS), World(*(("user", word) for word in ("x", "y", "z"))))
    sample = outcomes_to_sample(["a"], [[outcome]], turns=True)
    assert (
        sample.seqlens["turn_rewards"] == [[3, 3, 3]]
        and sample["turn_rewards"].tolist() == [1.0, 2.0, 4.0] * 3
    )
    assert [row.first_turn for row in (*outcome.branches, outcome)] == [0, 1, 2]
    ids = sample["turn_ids"]
    assert sorted(set(ids[ids >= 0].tolist())) == [0, 1, 2] and bool(
        ((ids >= 0) == sample["loss_mask"]).all()
    )


async def test_a_row_without_room_for_a_turn_is_not_begun() -> None:
    """Dropping makes room first: what does not fit even then ends the episode with the rows so
    far."""
    answers = [("user", "x" * 300), ("user", "y" * 9000), ("user", "z")]
    limits = EpisodeLimits(max_turns=4, max_total_tokens=300, turn_tokens=60)
    engine = Engine(*THOUGHTS)
    outcome = await play(engine, World(*answers), limits=limits)
    assert (outcome.status, len(outcome.branches)) == ("token_budget", 1) and outcome.valid
    for row in (*outcome.branches, outcome):
        assert len(row.prompt_ids) + len(row.completion_ids) <= 300 and any(row.loss_mask)


async def test_an_engine_without_room_for_a_new_row_ends_the_episode_with_the_rows_before() -> None:
    class Full(Engine):
        async def generate(self, request: GenRequest) -> GenOutput:
            if len(self.requests) == 2:
                return GenOutput([], [], [], "length")
            return await super().generate(request)

    outcome = await play(Full(*THOUGHTS), World(*(("user", word) for word in ("x", "y", "z"))))
    assert (
        outcome.status == "token_budget" and len(outcome.branches) == 1 and any(outcome.loss_mask)
    )


async def test_a_failed_episode_is_one_row_without_a_reward() -> None:
    outcome = await play(
        Engine(*THOUGHTS), World(("user", "x"), EnvironmentFailure("lost", "gone"))
    )
    assert (outcome.status, outcome.reward, outcome.branches) == ("lost", None, ())


def test_a_template_that_drops_nothing_makes_the_option_an_error() -> None:
    kept = TemplateChat(tokenizer(QWEN25, "<|im_end|>"), system_prompt=None)
    with pytest.raises(ValueError, match=r"rollout.keep_reasoning=false has no effect"):
        TurnAgent(kept, LIMITS, "", keep_reasoning=False)
