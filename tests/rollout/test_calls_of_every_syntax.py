"""A policy of each family plays an episode: its calls reach the environment, the answers follow in
the template's form, and the tokens that it sampled are those that train."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from realhf.api.environment import TRAIN
from realhf.api.model import GenOutput, GenRequest
from realhf.env.loader.load import build_environment
from realhf.rollout.episode import EpisodeLimits, EpisodeRequest
from realhf.rollout.player import TurnAgent
from tests.api.chat.families import family_chat
from tests.api.chat.test_tool_syntax import FORMS

CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "type": "function",
            "id": "call_0",
            "function": {"name": "list_files", "arguments": {"folder": ""}},
        }
    ],
}
WORDS = {"role": "assistant", "content": "That is all."}

ENDS_DIFFER = {"gpt-oss", "glm4.6", "gemma4"}
"""Families in which a turn with calls ends with another token than one without."""


class Scripted:
    """Samples the turns of a list, one after the other."""

    def __init__(self, turns: Sequence[list[int]]) -> None:
        self.turns = list(turns)
        self.prompts: list[list[int]] = []

    async def generate(self, request: GenRequest) -> GenOutput:
        ids = self.turns[len(self.prompts)]
        self.prompts.append(list(request.token_ids))
        return GenOutput(list(ids), [-0.5] * len(ids), [0] * len(ids), "stop")

    def free(self, slots: Sequence[int]) -> None:
        """Nothing is held."""


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=() if name in ENDS_DIFFER else pytest.mark.slow) for name in FORMS],
)
async def test_a_call_is_answered_and_its_tokens_train(family: str) -> None:
    spec = build_environment("files", {})
    tasks = spec.tasks(TRAIN)
    chat = family_chat(family)
    tools = list(spec.tools)
    turns = [
        [*chat.encode_turn(CALL, tools), *chat.closing(with_calls=True)[:1]],
        [*chat.encode_turn(WORDS, tools), *chat.closing()[:1]],
    ]
    llm = Scripted(turns)
    agent = TurnAgent(chat, EpisodeLimits(2, 20_000, 400), spec.system_prompt)
    env = spec.make("")
    task = tasks.instantiate(next(iter(tasks.group_of)), 1)
    outcome = await agent.play(env, EpisodeRequest(0, task, 1), llm, 0)
    await env.close()
    assert outcome.valid
    sampled = [
        token
        for token, is_sampled in zip(outcome.completion_ids, outcome.loss_mask, strict=True)
        if is_sampled
    ]
    assert sampled == turns[0] + turns[1]
    listing = outcome.turns[0].output
    assert "." in listing, "the names of files"
    assert len(llm.prompts) == 2
    assert llm.prompts[1][: len(llm.prompts[0]) + len(turns[0])] == llm.prompts[0] + turns[0]
    between = chat._decode_all(llm.prompts[1][len(llm.prompts[0]) + len(turns[0]) :])
    assert listing.splitlines()[0].strip() in between
