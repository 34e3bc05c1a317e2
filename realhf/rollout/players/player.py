"""Plays episodes: the one driver of training, evaluation, demonstrations and agents.

A player has *slots*. Each has an environment of its own and a row of the engine's cache, and plays one episode after
another. What differs between runs are values: where tokens come from (a ``TokenSource``), in which order slots take
episodes (a ``SlotOrder``, for runs that must not depend on timing), who speaks (an ``EpisodeAgent``), and what a failed
episode means (retries here; groups are judged by a ``FailurePolicy``). Source: docs/reference/environment.md 9.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from realhf.api.env import ChatFormat, RolloutOutcome
from realhf.api.environment import Environment, EnvironmentSpec
from realhf.api.generation import GenerationFailed, TokenSource
from realhf.api.model import GenOutput, GenRequest
from realhf.rollout.episode.forgetful_speaker import ForgetfulSpeaker
from realhf.rollout.episode.played_episode import play_episode
from realhf.rollout.episode.request import EpisodeRequest, Limits
from realhf.rollout.episode.speaker import PolicySpeaker
from realhf.rollout.players.slot_environment import SlotEnvironment

_SHAPES = ((("user",), ("user",)), (("user",), ("tool",)), (("user",), ("user",), ("user",)))
"""Conversations by the roles of their messages, in one of which a template that drops old reasoning does so."""


class NoTokens:
    """Is a ``TokenSource`` without any, for agents whose turns are written already."""

    async def generate(self, request: GenRequest) -> GenOutput:
        """See ``TokenSource``. Raises GenerationFailed."""
        raise GenerationFailed(f"the episode on slot {request.slot} is played without an engine")

    def free(self, slots: Sequence[int]) -> None:
        """See ``TokenSource``."""
        del slots


NO_TOKENS = NoTokens()


class EpisodeAgent(Protocol):
    """Plays episodes, many at once on one event loop."""

    async def play(self, env: Environment, wanted: EpisodeRequest, llm: TokenSource, slot: int) -> RolloutOutcome:
        """Play one episode from its reset to its outcome; an environment or an engine that fails is an outcome.
        ``slot`` is the cache row that the episode has to itself."""
        ...


class SlotOrder(Protocol):
    """Decides when a slot may take its next episode."""

    async def may_take(self, slot: int) -> None:
        """Wait until the slot may take an episode."""
        ...

    def leave(self, slot: int) -> None:
        """Note that the slot takes no more."""
        ...


class TurnAgent:
    """Plays in turns: the policy speaks, and the environment answers. Without ``keep_reasoning`` old reasoning is
    dropped as the chat template does, and an episode may have several rows; ValueError for a template that drops none.
    """

    def __init__(self, chat: ChatFormat, limits: Limits, system_prompt: str, *, keep_reasoning: bool = True) -> None:
        self._chat, self._limits, self._system_prompt = chat, limits, system_prompt
        self._keep_reasoning = keep_reasoning
        if not keep_reasoning and not any(any(chat.forgotten(shape)) for shape in _SHAPES):
            raise ValueError("rollout.keep_reasoning=false has no effect: the chat template drops no old reasoning")

    async def play(self, env: Environment, wanted: EpisodeRequest, llm: TokenSource, slot: int) -> RolloutOutcome:
        """See ``EpisodeAgent``."""
        seed = wanted.sampling_seed
        if self._keep_reasoning:
            speaker = PolicySpeaker(self._chat, self._limits, llm, slot, seed, self._system_prompt)
            return self._whole(await play_episode(env, wanted, speaker, self._limits.max_turns))
        forgetful = ForgetfulSpeaker(self._chat, self._limits, llm, slot, seed, self._system_prompt)
        return forgetful.in_rows(self._whole(await play_episode(env, wanted, forgetful, self._limits.max_turns)))

    def _whole(self, outcome: RolloutOutcome) -> RolloutOutcome:
        """Return the outcome with the system prompt before its opening: what the policy read."""
        if not self._system_prompt:
            return outcome
        return replace(outcome, opening=({"role": "system", "content": self._system_prompt}, *outcome.opening))


@dataclass
class Played:
    """Holds the outcomes, in the order of the requests, and what went wrong by kind: ``failures`` also where it was
    mended, ``retried`` how it was (``resumed``, or the status of an episode that was played again)."""

    outcomes: list[RolloutOutcome]
    failures: Counter[str] = field(default_factory=Counter)
    retried: Counter[str] = field(default_factory=Counter)


class Player:
    """Plays episodes of one environment on ``size`` slots. Use it on one event loop, one ``play`` at a time.

    Args:
        spec, address: the environment, and the address of its service ("" for none), or what returns it, where the
            service may move.
        agent: who plays. first_slot: cache row of the first slot; the others follow.
        retries: how often a failed episode is played again, and a lost one resumed.
        message_timeout_s: reset or step, each. patience_s: for a service that is away or full.
    """

    def __init__(
        self,
        spec: EnvironmentSpec,
        address: str | Callable[[], str],
        agent: EpisodeAgent,
        size: int,
        *,
        first_slot: int = 0,
        retries: int = 0,
        message_timeout_s: float = 60.0,
        patience_s: float = 20.0,
    ) -> None:
        if size < 1:
            raise ValueError(f"a player needs at least one slot, not {size}")
        if spec.concurrency is not None:
            size = min(size, spec.concurrency)
        self.name, self.message_timeout_s, self.size = spec.name, message_timeout_s, size
        self.slots = range(first_slot, first_slot + size)
        self._agent, self._retries = agent, retries
        self._envs = {
            slot: SlotEnvironment(
                spec.name,
                lambda: spec.make(address if isinstance(address, str) else address()),
                message_timeout_s=message_timeout_s,
                patience_s=patience_s,
                deterministic=spec.deterministic,
            )
            for slot in self.slots
        }

    async def play(
        self, wanted: Sequence[EpisodeRequest], tokens: TokenSource, order: SlotOrder | None = None
    ) -> Played:
        """Play all requests. A failure is an outcome; any other error ends all episodes and is raised."""
        waiting, found = deque(wanted), dict[int, RolloutOutcome]()
        played = Played([])
        slots = [asyncio.ensure_future(self._serve(slot, waiting, found, played, tokens, order)) for slot in self.slots]
        try:
            await asyncio.gather(*slots)
        finally:
            for task in slots:
                task.cancel()
            await asyncio.gather(*slots, return_exceptions=True)
        played.outcomes = [found[request.index] for request in wanted]
        return played

    async def play_and_close(self, wanted: Sequence[EpisodeRequest], tokens: TokenSource) -> Played:
        """Play all requests, once and for all."""
        try:
            return await self.play(wanted, tokens)
        finally:
            await self.close()

    async def close(self) -> None:
        """Close all environments, within seconds."""
        await asyncio.gather(*(env.close() for env in self._envs.values()))

    async def _serve(
        self,
        slot: int,
        waiting: deque[EpisodeRequest],
        found: dict[int, RolloutOutcome],
        played: Played,
        tokens: TokenSource,
        order: SlotOrder | None,
    ) -> None:
        """Play one episode after another on one slot."""
        try:
            while True:
                if order is not None:
                    await order.may_take(slot)
                await asyncio.sleep(0)  # an environment that never waits must not keep the loop from the others
                if not waiting:
                    return
                wanted = waiting.popleft()
                found[wanted.index] = await self._attempts(slot, wanted, played, tokens)
        finally:
            if order is not None:
                order.leave(slot)

    async def _attempts(self, slot: int, wanted: EpisodeRequest, played: Played, tokens: TokenSource) -> RolloutOutcome:
        """Play an episode until it is valid or the retries are used up."""
        env = self._envs[slot]
        for attempt in range(1 + self._retries):
            env.begin(self._retries)
            try:
                outcome = await self._agent.play(env, wanted, tokens, slot)
            finally:
                tokens.free([slot])
            played.failures.update(env.failures)
            if env.resumed:
                played.retried["resumed"] += env.resumed
            if outcome.valid:
                return outcome
            if not env.failures.get(outcome.status):
                played.failures[outcome.status] += 1
            await env.close()
            if attempt < self._retries:
                played.retried[outcome.status] += 1
        return replace(outcome, reward=None)
