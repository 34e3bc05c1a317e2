"""Plays episodes: the one driver of training, evaluation, demonstrations and agents, each slot with its environment.

A player has *slots*. Each has an environment of its own and a row of the engine's cache, and plays one episode after
another. What differs between runs are values: where tokens come from (a ``TokenSource``), in which order slots take
episodes (a ``SlotOrder``, for runs that must not depend on timing), who speaks (an ``EpisodeAgent``), and what a failed
episode means (retries here; groups are judged by a ``FailurePolicy``). Source: docs/reference/environment.md 9.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from realhf.api.chat_template import TemplateChat
from realhf.api.config import GenConfig
from realhf.api.environment import (
    AssistantMessage,
    ChatMessage,
    Environment,
    EnvironmentFailure,
    EnvironmentSpec,
    Opening,
    Turn,
)
from realhf.api.experiment import RolloutOptions
from realhf.api.generation import GenerationFailed, TokenSource
from realhf.api.messages import message_problems
from realhf.api.model import GenOutput, GenRequest
from realhf.api.rollout import ChatFormat, RolloutOutcome
from realhf.base import process_clock
from realhf.env.loader.validation import whole_text
from realhf.rollout.episode import EpisodeRequest, ForgetfulSpeaker, Limits, PolicySpeaker, play_episode

T = TypeVar("T")
_RESENDS = 8
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.5
_CLOSE_S = 5.0
_log = logging.getLogger(__name__)


class ReplayDiverged(EnvironmentFailure):
    """The new instance did not answer as the lost one did: the episode cannot go on in it."""

    def __init__(self, message: str) -> None:
        super().__init__("lost", message)


class SlotEnvironment:
    """Is the environment of a slot, over all its episodes: an ``Environment`` that raises nothing but
    EnvironmentFailure, named after the environment.

    A step that was not executed, by the environment's own report, is sent again. An environment that is lost in the
    middle of an episode is made anew, reset with the same task and seed, and given the same messages; where it answers
    as before, the episode goes on as if nothing had happened. This needs an environment that is deterministic; another
    is played again from the start. Source: docs/reference/dataflow.md 9 (a failure is never a reward of 0).

    Args:
        name: of the environment, for messages. make: returns a new instance.
        message_timeout_s: reset or step, each. patience_s: how long to wait, each time, for a service that is away or
            full. deterministic: whether a lost episode may be resumed.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Environment],
        *,
        message_timeout_s: float,
        patience_s: float,
        deterministic: bool,
    ) -> None:
        self.failures: Counter[str] = Counter()
        self.resumed = 0
        self._name, self._make = name, make
        self._timeout_s, self._patience_s = message_timeout_s, patience_s
        self._deterministic = deterministic
        self._env: Environment | None = None
        self._retries = 0
        self._task: Mapping[str, Any] = {}
        self._seed = 0
        self._opening: Opening | None = None
        self._played: list[tuple[AssistantMessage, Turn]] = []

    def begin(self, retries: int) -> None:
        """Prepare for an episode that may be resumed ``retries`` times; counts from zero."""
        self.failures, self.resumed, self._retries = Counter(), 0, retries

    async def reset(self, task: Mapping[str, Any], *, seed: int) -> Opening:
        """Start an episode; a service that is away or full is waited for. Raises EnvironmentFailure."""
        self._task, self._seed, self._opening, self._played = task, seed, None, []
        try:
            self._opening = await self._patiently()
        except EnvironmentFailure as error:
            self._opening = await self._resume(error)
        return self._opening

    async def step(self, message: AssistantMessage) -> Turn:
        """Run a turn. Raises EnvironmentFailure."""
        while True:
            try:
                turn = await self._send_step(message)
                break
            except EnvironmentFailure as error:
                await self._resume(error)
        self._played.append((message, turn))
        return turn

    async def close(self) -> None:
        """Close the instance within seconds; what it raises is logged."""
        env, self._env = self._env, None
        if env is None:
            return
        try:
            async with asyncio.timeout(_CLOSE_S):
                await env.close()
        except Exception as error:
            _log.warning("environment %s: close failed: %s", self._name, described(error))

    async def _send_reset(self) -> Opening:
        async def send() -> Opening:
            if self._env is None:
                self._env = self._make()
            return await self._env.reset(self._task, seed=self._seed)

        opening = await self._sent("reset", send)
        if not isinstance(opening, Opening):
            raise EnvironmentFailure("internal", f"environment {self._name}: reset returned {opening!r:.80}")
        self._check("the messages of reset", opening.messages)
        return opening

    async def _send_step(self, message: AssistantMessage) -> Turn:
        async def send() -> Turn:
            if self._env is None:
                raise EnvironmentFailure("lost", "the instance is gone")
            return await self._env.step(message)

        turn = await self._sent("step", send)
        if not isinstance(turn, Turn):
            raise EnvironmentFailure("internal", f"environment {self._name}: step returned {turn!r:.80}")
        self._check("the messages of step", turn.messages)
        return turn

    def _check(self, what: str, messages: Any) -> None:
        """Raise EnvironmentFailure for messages that a chat template would render as something else, or not at all:
        not every environment came through the loader, which checks them, too. Half a character, which an environment
        may echo, is none of these: the chat replaces it."""
        if not any(message_problems(messages, what)):
            return
        for problem in message_problems(_whole(messages), what):
            raise EnvironmentFailure("internal", f"environment {self._name}: {problem}")

    async def _sent(self, what: str, send: Callable[[], Awaitable[T]]) -> T:
        """Return the answer to a request, which is sent again while the environment reports that it was not
        executed."""
        pause_s = 0.0
        for _ in range(_RESENDS):
            try:
                return await self._guarded(what, send)
            except EnvironmentFailure as error:
                if error.kind != "unavailable":
                    raise
            self.failures["unavailable"] += 1
            await asyncio.sleep(pause_s)
            pause_s = min(max(_FIRST_PAUSE_S, 2 * pause_s), _LONGEST_PAUSE_S)
        return await self._guarded(what, send)

    async def _guarded(self, what: str, send: Callable[[], Awaitable[T]]) -> T:
        """Run a method of the environment within the deadline; whatever it raises becomes an EnvironmentFailure."""
        deadline = asyncio.timeout(self._timeout_s)
        try:
            async with deadline:
                return await send()
        except EnvironmentFailure:
            raise
        except TimeoutError as error:
            if deadline.expired():
                told = f"environment {self._name}: no answer to {what} within {self._timeout_s:g} s"
            else:
                told = f"environment {self._name}: {what}: {described(error)}"
            raise EnvironmentFailure("timeout", told) from error
        except Exception as error:
            raise EnvironmentFailure("internal", f"environment {self._name}: {what}: {described(error)}") from error

    async def _resume(self, error: EnvironmentFailure) -> Opening:
        """Make a new instance and bring it into the state of the lost one; returns its opening. Raises what went wrong
        last."""
        while True:
            self.failures["diverged" if isinstance(error, ReplayDiverged) else error.kind] += 1
            await self.close()
            may_resume = self._deterministic or self._opening is None
            if self._retries == 0 or not may_resume or error.kind == "internal":
                raise error
            self._retries -= 1
            try:
                opening = await self._replayed()
            except EnvironmentFailure as again:
                error = again
                continue
            self.resumed += 1
            return opening

    async def _replayed(self) -> Opening:
        opening = await self._patiently()
        if self._opening is not None and list(opening.messages) != list(self._opening.messages):
            raise ReplayDiverged(f"environment {self._name}: a new instance opened the same task differently")
        for number, (message, seen) in enumerate(self._played):
            again = await self._send_step(message)
            if _compared(again) != _compared(seen):
                raise ReplayDiverged(
                    f"environment {self._name}: turn {number} was answered {str(_compared(seen))[:120]}, in the new "
                    f"instance {str(_compared(again))[:120]}"
                )
        return opening

    async def _patiently(self) -> Opening:
        """Reset a new instance; a service that is away or full is waited for until the patience is over."""
        deadline, pause_s = process_clock.now() + self._patience_s, _FIRST_PAUSE_S
        while True:
            try:
                return await self._send_reset()
            except EnvironmentFailure as error:
                await self.close()
                if error.kind not in ("lost", "capacity") or process_clock.now() + pause_s > deadline:
                    raise
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _whole(messages: Any) -> Any:
    """Return messages with halves of characters in their texts replaced."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        return messages
    return [
        {key: whole_text(value) if isinstance(value, str) else value for key, value in message.items()}
        if isinstance(message, Mapping)
        else message
        for message in messages
    ]


def described(error: BaseException) -> str:
    """Return an error in one line, with the line of code that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    text = next(iter(str(error).splitlines()), "")[:300]
    return f"{type(error).__name__}{f': {text}' if text else ''}{where}"


def _compared(turn: Turn) -> tuple[Any, ...]:
    """Return what must be the same in a replay; ``info`` may differ."""
    return [*map(dict, turn.messages)], turn.done, turn.reward, turn.final, dict(turn.rewards), dict(turn.metrics)


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
        self._chat, self._limits = chat, limits
        self._system: list[ChatMessage] = [{"role": "system", "content": system_prompt}] if system_prompt else []
        self._keep_reasoning = keep_reasoning
        self._without_calls = 0
        if not keep_reasoning and not any(any(chat.forgotten(shape)) for shape in _SHAPES):
            raise ValueError("rollout.keep_reasoning=false has no effect: the chat template drops no old reasoning")

    async def play(self, env: Environment, wanted: EpisodeRequest, llm: TokenSource, slot: int) -> RolloutOutcome:
        """See ``EpisodeAgent``."""
        kind = PolicySpeaker if self._keep_reasoning else ForgetfulSpeaker
        speaker = kind(self._chat, self._limits, llm, slot, wanted.sampling_seed, self._system)
        outcome = await play_episode(env, wanted, speaker, self._limits.max_turns)
        self._look_for_calls(speaker, outcome)
        # With the system prompt, the opening is what the policy read.
        outcome = replace(outcome, opening=(*self._system, *outcome.opening)) if self._system else outcome
        return speaker.in_rows(outcome) if isinstance(speaker, ForgetfulSpeaker) else outcome

    def _look_for_calls(self, speaker: PolicySpeaker, outcome: RolloutOutcome) -> None:
        """Warn once where a policy that is offered tools has not called any in its first episodes."""
        if self._without_calls >= _SILENT_EPISODES or not (speaker.tools and outcome.valid):
            return
        if any(turn.said is not None and turn.said.tool_calls for turn in outcome.turns):
            self._without_calls = _SILENT_EPISODES
            return
        self._without_calls += 1
        if self._without_calls == _SILENT_EPISODES:
            _log.warning(
                "the first %d episodes offered tools, and in no turn of the policy was a call found; where its turns "
                "hold calls, choose the parser of their syntax with actor.tool_parser (said once)",
                _SILENT_EPISODES,
            )


_SILENT_EPISODES = 16
"""So many episodes without a call are pointed out."""


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
        self,
        wanted: Sequence[EpisodeRequest],
        tokens: TokenSource,
        order: SlotOrder | None = None,
        over: Callable[[], None] = lambda: None,
    ) -> Played:
        """Play all requests; ``over`` is called after each. A failure is an outcome; any other error ends all episodes
        and is raised."""
        waiting, found = deque(wanted), dict[int, RolloutOutcome]()
        played = Played([])
        slots = [
            asyncio.ensure_future(self._serve(slot, waiting, found, played, tokens, order, over)) for slot in self.slots
        ]
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
        over: Callable[[], None],
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
                over()
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


def make_agent(
    name: str,
    chat: TemplateChat,
    system_prompt: str,
    episodes: RolloutOptions,
    options: Mapping[str, Any] | None = None,
) -> EpisodeAgent:
    """Build the agent called ``name``, which plays as ``episodes`` say. ``options`` are the agent's own, which its
    function takes as keyword arguments. Raises ValueError for an agent that cannot be had."""
    check_whole_distribution(episodes.gen)
    limits = Limits(episodes.max_turns, episodes.max_total_tokens, episodes.gen.max_new_tokens)
    if not name and options:
        raise ValueError(f"the built-in agent has no options of its own: {', '.join(options)} would do nothing")
    if not name:
        return TurnAgent(chat, limits, system_prompt, keep_reasoning=episodes.keep_reasoning)
    from realhf.rollout.black_box_agent import BlackBoxAgent, load_agent

    try:
        return BlackBoxAgent(load_agent(name, options), chat, limits, system_prompt)
    except ValueError as error:
        raise ValueError(f"rollout.agent={error}") from error


def check_whole_distribution(gen: GenConfig) -> None:
    """Raise ValueError for sampling options with which no policy gradient can be computed."""
    if cut := gen.truncations():
        raise ValueError(
            f"gen.{', gen.'.join(cut)}: training samples from the whole distribution (top_p=1, top_k=0, "
            "min_new_tokens=0)"
        )
