"""A policy whose calls of tools are never found is pointed out, once."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence

import pytest

from realhf.api.environment import TRAIN
from realhf.api.model import GenOutput, GenRequest
from realhf.env.loader.load import build_environment
from realhf.rollout.episode import EpisodeLimits, EpisodeRequest
from realhf.rollout.player import TurnAgent
from tests.api.chat.families import family_chat

EPISODES = 20


class Says:
    """Samples the same turn every time."""

    def __init__(self, ids: list[int]) -> None:
        self._ids = ids

    async def generate(self, request: GenRequest) -> GenOutput:
        return GenOutput(list(self._ids), [0.0] * len(self._ids), [0] * len(self._ids), "stop")

    def free(self, slots: Sequence[int]) -> None:
        """Nothing is held."""


@pytest.mark.parametrize(
    ("name", "text", "warned"),
    [
        ("cohere", '<|START_ACTION|>[{"tool_name": "list_files"}]<|END_ACTION|>', True),
        ("lfm2.5", '<|tool_call_start|>[list_files(folder="x")]<|tool_call_end|>', False),
        ("qwen2.5", "I would list the files.", True),
        (
            "qwen2.5",
            f"<tool_call>{json.dumps({'name': 'list_files', 'arguments': {}})}</tool_call>",
            False,
        ),
        ("qwen2.5", "<tool_call>{</tool_call>", False),
    ],
)
async def test_a_policy_that_calls_no_tool_is_pointed_out(
    name: str, text: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A call that cannot be read is one all the same: the environment answers it with its
    mistake."""
    spec = build_environment("files", {})
    tasks = spec.tasks(TRAIN)
    template = next(iter(tasks.group_of))
    chat = family_chat(name)
    agent = TurnAgent(chat, EpisodeLimits(1, 20_000, 200), spec.system_prompt)
    source = Says([*chat.encode(text), chat.stop_ids[0]])
    env = spec.make("")
    with caplog.at_level(logging.WARNING, logger="realhf.rollout.player"):
        for number in range(EPISODES):
            wanted = EpisodeRequest(number, tasks.instantiate(template, number), number)
            outcome = await agent.play(env, wanted, source, 0)
            assert outcome.valid
    await env.close()
    found = [record for record in caplog.records if "actor.tool_parser" in record.getMessage()]
    assert len(found) == warned
