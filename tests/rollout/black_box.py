"""Tokens without a model for tests of the OpenAI endpoint: words spelt letter by letter, as no
tokenizer would."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

import openai

from realhf.api.chat_template import TemplateChat
from realhf.api.generation import GenerationFailed
from realhf.api.model import GenOutput, GenRequest
from realhf.api.rollout import RolloutOutcome
from realhf.rollout.episode import EpisodeLimits
from realhf.rollout.openai_server import OpenAiServer
from realhf.rollout.openai_sessions import OpenAiSession, OpenAiSessions

Endpoint = tuple[OpenAiServer, Any]


@cache
def chat() -> TemplateChat:
    from realhf.backends.builtin_policy import train_tokenizer

    return TemplateChat(
        train_tokenizer(["aws s3 ls", "aws s3api list-buckets", "ok"] * 3, 400, 512),
        system_prompt=None,
    )


def spelt(text: str) -> list[int]:
    return [token for letter in text for token in chat().encode(letter)]


@asynccontextmanager
async def serving(limits: EpisodeLimits) -> AsyncIterator[Endpoint]:
    """An endpoint that is up, and one pool of connections to it."""
    server = OpenAiServer(OpenAiSessions(chat(), limits))
    http = openai.DefaultAsyncHttpxClient(trust_env=False, verify=False)
    await server.start()
    try:
        yield server, http
    finally:
        await http.aclose()
        await server.stop()


@asynccontextmanager
async def served(
    endpoint: Endpoint, tokens: FakeTokens, retries: int = 0, max_turns: int = 0
) -> AsyncIterator[tuple[OpenAiServer, OpenAiSession, openai.AsyncOpenAI]]:
    """A session of ``tokens`` and the client of its agent."""
    server, http = endpoint
    session = server.sessions.open(tokens, slot=3, seed=7, max_turns=max_turns)
    client = openai.AsyncOpenAI(
        base_url=server.base_url(session), api_key="x", max_retries=retries, http_client=http
    )
    try:
        yield server, session, client
    finally:
        server.sessions.close(session)


def check_trained(outcome: RolloutOutcome, tokens: FakeTokens) -> None:
    """The only trajectory of a session trains exactly the ids that were sampled, each after the ids
    that the engine read before it."""
    ids = outcome.prompt_ids + outcome.completion_ids
    for request in tokens.requests:
        assert ids[: len(request.token_ids)] == list(request.token_ids)
    masked = zip(outcome.completion_ids, outcome.loss_mask, strict=True)
    assert [token for token, mask in masked if mask] == tokens.sampled
    assert outcome.valid and not outcome.branches


class FakeTokens:
    """A ``TokenSource`` that says what ``speak(prompt text)`` says. ``part``: turns come in parts
    of so many tokens, each under a version of its own; ``said`` are their lengths and ``sampled``
    all tokens. ``fail`` counts
    down failures; ``hold`` keeps answers back."""

    def __init__(self, speak: Callable[[str], str], *, part: int = 0, finish: str = "stop") -> None:
        self.requests: list[GenRequest] = []
        self.freed: list[int] = []
        self.said: list[int] = []
        self.sampled: list[int] = []
        self.fail = 0
        self.hold: asyncio.Event | None = None
        self.cancelled = 0
        self._speak = speak
        self._part = part
        self._finish = finish

    async def generate(self, request: GenRequest) -> GenOutput:
        self.requests.append(request)
        if self.fail:
            self.fail -= 1
            raise GenerationFailed("no generation worker is there")
        try:
            await (self.hold.wait() if self.hold else asyncio.sleep(0))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        prompt = list(request.token_ids)[: len(request.token_ids) - request.sampled]
        words = self._speak(chat()._tokenizer.decode(prompt))
        whole = spelt(words) + ([chat().stop_ids[0]] if self._finish == "stop" else [])
        rest = whole[request.sampled :]
        version = len(self.requests)
        room = request.max_new_tokens - request.sampled
        if request.max_new_tokens and room < min(len(rest), self._part or len(rest)):
            self.said.append(room)
            self.sampled += rest[:room]
            return GenOutput(rest[:room], [-0.5] * room, [version] * room, "length")
        self.said.append(len(rest[: self._part] if self._part else rest))
        if self._part and len(rest) > self._part:
            part = rest[: self._part]
            self.sampled += part
            return GenOutput(part, [-0.5] * len(part), [version] * len(part), "interrupted")
        self.sampled += rest
        return GenOutput(rest, [-0.5] * len(rest), [version] * len(rest), self._finish)

    def free(self, slots: Sequence[int]) -> None:
        self.freed += slots


def call_text(x: int) -> str:
    return f"<tool_call>{json.dumps({'name': 'look', 'arguments': {'x': x}})}</tool_call>"


def plays(prompt: str) -> str:
    """Calls in the first two turns, with words and reasoning in the second; then an answer."""
    turn = prompt.count("<|assistant|>")
    return {1: call_text(1), 2: f"<think>hm</think>I look.\n{call_text(2)}{call_text(3)}"}.get(
        turn, "<think>so</think>\n\ndone"
    )
