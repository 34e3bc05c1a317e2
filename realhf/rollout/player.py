"""Player of episodes, used for training, evaluation, demonstrations and agents alike.

A player has *slots*. Each slot has an environment and a slot of the engine's cache, and plays one
episode after another. Runs differ by the objects they pass in: the source of tokens
(``TokenSource``), the order in which slots take episodes (``SlotOrder``, for runs that must not
depend on timing), the agent (``EpisodeAgent``), and the handling of failed episodes (retries here;
for groups a ``FailurePolicy``). Source: docs/reference/environment.md 9.
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
from realhf.api.config import CONSTRAIN, GenConfig
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
from realhf.env.loader.validation import replace_surrogates
from realhf.rollout.episode import (
    Conversation,
    EpisodeLimits,
    EpisodeRequest,
    TruncatingConversation,
    play_episode,
)

T = TypeVar("T")
_RESENDS = 8
"""Maximum number of times that a request is sent again if the environment reports that it was not
executed."""
# Exponential back-off between attempts, in seconds.
_FIRST_PAUSE_S = 0.01
_MAX_PAUSE_S = 0.5
_CLOSE_S = 5.0
"""Seconds that an environment gets to close."""
_log = logging.getLogger(__name__)


class ReplayDiverged(EnvironmentFailure):
    """Error: a new environment instance answered the replayed turns differently from the lost one,
    so the episode cannot be resumed."""

    def __init__(self, message: str) -> None:
        super().__init__("lost", message)


class SlotEnvironment:
    """Environment of a slot, for all its episodes: an ``Environment`` that raises only
    EnvironmentFailure.

    A step that the environment reports as not executed is sent again. If a deterministic
    environment is lost in the middle of an episode, a new instance is reset with the same task and
    seed and gets the same messages; if it gives the same answers, the episode continues. Episodes of
    other environments are played again from the start. Source: docs/reference/dataflow.md 9 (a
    failure is never a reward of 0).

    Args:
        name: Name of the environment, for error messages.
        make: Function that returns a new instance.
        message_timeout_s: Timeout of a reset or a step, in seconds.
        patience_s: Seconds to wait, each time, for a service that is unreachable or full.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Environment],
        *,
        message_timeout_s: float,
        patience_s: float,
    ) -> None:
        self.failures: Counter[str] = Counter()
        """Number of failures in this episode by kind, including those that a retry or a resumption
        repaired."""
        self.resumed = 0
        """Number of times that this episode was resumed."""
        self._name = name
        self._make = make
        self._timeout_s = message_timeout_s
        self._patience_s = patience_s
        self._deterministic = True
        self._env: Environment | None = None
        self._retries = 0
        self._task: Mapping[str, Any] = {}
        self._seed = 0
        self._opening: Opening | None = None
        self._history: list[tuple[AssistantMessage, Turn]] = []
        """The turns of this episode so far, for a replay."""

    def prepare(self, retries: int, *, deterministic: bool = True) -> None:
        """Reset the counters for a new episode, which may be resumed up to ``retries`` times; once
        it has begun, only if its environment is ``deterministic``."""
        self.failures = Counter()
        self.resumed = 0
        self._retries = retries
        self._deterministic = deterministic

    async def reset(self, task: Mapping[str, Any], *, seed: int) -> Opening:
        """Start an episode, after waiting for a service that is unreachable or full. Raises
        EnvironmentFailure."""
        self._task = task
        self._seed = seed
        self._opening = None
        self._history = []
        try:
            self._opening = await self._reset_with_patience()
        except EnvironmentFailure as error:
            self._opening = await self._resume(error)
        return self._opening

    async def step(self, message: AssistantMessage) -> Turn:
        """Send a turn to the environment and return its answer. Raises EnvironmentFailure."""
        while True:
            try:
                turn = await self._send_step(message)
                break
            except EnvironmentFailure as error:
                await self._resume(error)
        self._history.append((message, turn))
        return turn

    async def close(self) -> None:
        """Close the environment instance within ``_CLOSE_S`` seconds; errors are logged."""
        env = self._env
        self._env = None
        if env is None:
            return
        try:
            async with asyncio.timeout(_CLOSE_S):
                await env.close()
        except Exception as error:
            _log.warning("environment %s: close failed: %s", self._name, describe_error(error))

    async def _send_reset(self) -> Opening:
        async def send() -> Opening:
            if self._env is None:
                self._env = self._make()
            return await self._env.reset(self._task, seed=self._seed)

        opening = await self._send_with_retries("reset", send)
        if not isinstance(opening, Opening):
            raise EnvironmentFailure(
                "internal", f"environment {self._name}: reset returned {opening!r:.80}"
            )
        self._check("the messages of reset", opening.messages)
        return opening

    async def _send_step(self, message: AssistantMessage) -> Turn:
        async def send() -> Turn:
            if self._env is None:
                raise EnvironmentFailure("lost", "the instance is gone")
            return await self._env.step(message)

        turn = await self._send_with_retries("step", send)
        if not isinstance(turn, Turn):
            raise EnvironmentFailure(
                "internal", f"environment {self._name}: step returned {turn!r:.80}"
            )
        self._check("the messages of step", turn.messages)
        return turn

    def _check(self, what: str, messages: Any) -> None:
        """Raise EnvironmentFailure for messages that a chat template would render wrongly or not at
        all.

        The loader makes the same check, but not every environment is loaded by it. Lone surrogates,
        which an environment may echo, are allowed: the chat replaces them.
        """
        if not any(message_problems(messages, what)):
            return
        for problem in message_problems(_replace_surrogates(messages), what):
            raise EnvironmentFailure("internal", f"environment {self._name}: {problem}")

    async def _send_with_retries(self, what: str, send: Callable[[], Awaitable[T]]) -> T:
        """Send a request, repeating it while the environment reports that it was not executed;
        return the answer."""
        pause_s = 0.0
        for _ in range(_RESENDS):
            try:
                return await self._send_guarded(what, send)
            except EnvironmentFailure as error:
                if error.kind != "unavailable":
                    raise
            self.failures["unavailable"] += 1
            await asyncio.sleep(pause_s)
            pause_s = min(max(_FIRST_PAUSE_S, 2 * pause_s), _MAX_PAUSE_S)
        return await self._send_guarded(what, send)

    async def _send_guarded(self, what: str, send: Callable[[], Awaitable[T]]) -> T:
        """Call a method of the environment within the timeout; turn every error into an
        EnvironmentFailure."""
        deadline = asyncio.timeout(self._timeout_s)
        try:
            async with deadline:
                return await send()
        except EnvironmentFailure:
            raise
        except TimeoutError as error:
            if deadline.expired():
                text = f"environment {self._name}: no answer to {what} within {self._timeout_s:g} s"
            else:
                text = f"environment {self._name}: {what}: {describe_error(error)}"
            raise EnvironmentFailure("timeout", text) from error
        except Exception as error:
            raise EnvironmentFailure(
                "internal", f"environment {self._name}: {what}: {describe_error(error)}"
            ) from error

    async def _resume(self, error: EnvironmentFailure) -> Opening:
        """Bring a new instance to the state of the lost one, and return its opening.

        Raises the last failure if that is not possible or the retries are used up.
        """
        while True:
            self.failures["diverged" if isinstance(error, ReplayDiverged) else error.kind] += 1
            await self.close()
            may_resume = self._deterministic or self._opening is None
            if self._retries == 0 or not may_resume or error.kind == "internal":
                raise error
            self._retries -= 1
            try:
                opening = await self._replay()
            except EnvironmentFailure as again:
                error = again
                continue
            self.resumed += 1
            return opening

    async def _replay(self) -> Opening:
        """Reset a new instance and repeat the turns of the episode; return the opening. Raises
        ReplayDiverged if an answer differs."""
        opening = await self._reset_with_patience()
        if self._opening is not None and list(opening.messages) != list(self._opening.messages):
            raise ReplayDiverged(
                f"environment {self._name}: a new instance opened the same task differently"
            )
        for number, (message, turn) in enumerate(self._history):
            new_turn = await self._send_step(message)
            if _compared_fields(new_turn) != _compared_fields(turn):
                raise ReplayDiverged(
                    f"environment {self._name}: turn {number} was answered "
                    f"{str(_compared_fields(turn))[:120]}, in the "
                    f"new instance {str(_compared_fields(new_turn))[:120]}"
                )
        return opening

    async def _reset_with_patience(self) -> Opening:
        """Reset a new instance, with retries for ``patience_s`` seconds while the service is
        unreachable or full."""
        deadline = process_clock.now() + self._patience_s
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return await self._send_reset()
            except EnvironmentFailure as error:
                await self.close()
                if (
                    error.kind not in ("lost", "capacity")
                    or process_clock.now() + pause_s > deadline
                ):
                    raise
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)


def _replace_surrogates(messages: Any) -> Any:
    """Return the messages with lone surrogates in their texts replaced."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        return messages
    return [
        {
            key: replace_surrogates(value) if isinstance(value, str) else value
            for key, value in message.items()
        }
        if isinstance(message, Mapping)
        else message
        for message in messages
    ]


def describe_error(error: BaseException) -> str:
    """Return an error as one line of text that includes the line of code that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    text = next(iter(str(error).splitlines()), "")[:300]
    return f"{type(error).__name__}{f': {text}' if text else ''}{where}"


def _compared_fields(turn: Turn) -> tuple[Any, ...]:
    """Return the fields of a turn that must be equal in a replay: all but ``info``."""
    return (
        [*map(dict, turn.messages)],
        turn.done,
        turn.reward,
        turn.final,
        dict(turn.rewards),
        dict(turn.metrics),
    )


_SHAPES = ((("user",), ("user",)), (("user",), ("tool",)), (("user",), ("user",), ("user",)))
"""Example conversations, given as the roles of the messages before each turn. A template that drops
old reasoning does so in at least one of them."""


class NoTokens:
    """``TokenSource`` without tokens, for agents with scripted turns."""

    async def generate(self, request: GenRequest) -> GenOutput:
        """Raise GenerationFailed."""
        raise GenerationFailed(f"the episode on slot {request.slot} is played without an engine")

    def free(self, slots: Sequence[int]) -> None:
        """Do nothing."""
        del slots


NO_TOKENS = NoTokens()


class EpisodeAgent(Protocol):
    """Agent that plays episodes, many at once on one event loop."""

    async def play(
        self, env: Environment, request: EpisodeRequest, llm: TokenSource, slot: int
    ) -> RolloutOutcome:
        """Play one episode from its reset to its outcome.

        A failure of the environment or the engine is returned as an outcome. ``slot`` is the slot
        of the engine's cache that is reserved for this episode.
        """
        ...


class SlotOrder(Protocol):
    """Order in which slots may take their next episodes."""

    async def may_take(self, slot: int) -> None:
        """Wait until the slot may take its next episode."""
        ...

    def leave(self, slot: int) -> None:
        """Remove a slot that will not take any more episodes."""
        ...


class TurnAgent:
    """Agent that plays in turns: the policy samples a turn, and the environment answers.

    Without ``keep_reasoning``, old reasoning is dropped as the chat template does, and an episode
    may have several rows. The constructor then raises ValueError for a template that drops no
    reasoning.
    """

    def __init__(
        self,
        chat: ChatFormat,
        limits: EpisodeLimits,
        system_prompt: str,
        *,
        keep_reasoning: bool = True,
    ) -> None:
        self._chat = chat
        self._limits = limits
        self._system: list[ChatMessage] = (
            [{"role": "system", "content": system_prompt}] if system_prompt else []
        )
        self._keep_reasoning = keep_reasoning
        self._episodes_without_calls = 0
        if not keep_reasoning and not any(
            any(chat.find_forgotten_turns(shape)) for shape in _SHAPES
        ):
            raise ValueError(
                "rollout.keep_reasoning=false has no effect: the chat template drops no old "
                "reasoning"
            )

    async def play(
        self, env: Environment, request: EpisodeRequest, llm: TokenSource, slot: int
    ) -> RolloutOutcome:
        """Play one episode from its reset to its outcome. Failures are returned as outcomes."""
        kind = Conversation if self._keep_reasoning else TruncatingConversation
        limits = self._limits.narrow(request.task.limits)
        conversation = kind(self._chat, limits, llm, slot, request.sampling_seed, self._system)
        outcome = await play_episode(env, request, conversation, limits.max_turns)
        self._warn_without_calls(conversation, outcome)
        # the opening of an outcome is all that the policy read before its first turn
        if self._system:
            outcome = replace(outcome, opening=(*self._system, *outcome.opening))
        return (
            conversation.split_rows(outcome)
            if isinstance(conversation, TruncatingConversation)
            else outcome
        )

    def _warn_without_calls(self, conversation: Conversation, outcome: RolloutOutcome) -> None:
        """Log a warning once if a policy that is offered tools has not called any in its first
        episodes."""
        if self._episodes_without_calls >= _SILENT_EPISODES or not (
            conversation.tools and outcome.valid
        ):
            return
        if any(
            turn.policy_turn is not None and turn.policy_turn.tool_calls for turn in outcome.turns
        ):
            self._episodes_without_calls = _SILENT_EPISODES
            return
        self._episodes_without_calls += 1
        if self._episodes_without_calls == _SILENT_EPISODES:
            _log.warning(
                "the first %d episodes offered tools, and in no turn of the policy was a call "
                "found; where its turns "
                "hold calls, choose the parser of their syntax with actor.tool_parser (logged "
                "once)",
                _SILENT_EPISODES,
            )


_SILENT_EPISODES = 16
"""Number of episodes without a tool call after which the warning is logged."""


@dataclass
class PlayedEpisodes:
    """Result of ``EpisodePlayer.play``."""

    outcomes: list[RolloutOutcome]
    """Outcomes in the order of the requests."""
    failures: Counter[str] = field(default_factory=Counter)
    """Number of failures by kind, including those that a retry or a resumption repaired."""
    retried: Counter[str] = field(default_factory=Counter)
    """Number of repairs by kind: ``resumed``, or the status of an episode that was played again."""


class EpisodePlayer:
    """Player of episodes of one environment on ``size`` slots. Use it on one event loop, with one
    ``play`` at a time.

    Args:
        spec: The environment.
        address: Address of its service ("" for none), or a function that returns it, for a service
            that may move.
        agent: Agent that plays the episodes.
        size: Number of slots, which is also the number of concurrent episodes.
        first_slot: Engine cache slot of the first slot; the others follow.
        retries: Number of times that a failed episode is played again, and that a lost one is
            resumed.
        message_timeout_s: Timeout of a reset or a step, in seconds.
        patience_s: Seconds to wait, each time, for a service that is unreachable or full.
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
        self.name = spec.name
        self.message_timeout_s = message_timeout_s
        self.size = size
        self.slots = range(first_slot, first_slot + size)
        self._agent = agent
        self._is_deterministic = spec.is_deterministic
        self._retries = retries
        self._envs = {
            slot: SlotEnvironment(
                spec.name,
                lambda: spec.make(address if isinstance(address, str) else address()),
                message_timeout_s=message_timeout_s,
                patience_s=patience_s,
            )
            for slot in self.slots
        }

    async def play(
        self,
        requests: Sequence[EpisodeRequest],
        tokens: TokenSource,
        order: SlotOrder | None = None,
        on_finished: Callable[[], None] = lambda: None,
    ) -> PlayedEpisodes:
        """Play all requests, and call ``on_finished`` after each of them.

        A failed episode is returned as an outcome. Any other error cancels all episodes and is
        raised.
        """
        waiting = deque(requests)
        outcomes: dict[int, RolloutOutcome] = {}
        played = PlayedEpisodes([])
        slots = [
            asyncio.ensure_future(
                self._run_slot(slot, waiting, outcomes, played, tokens, order, on_finished)
            )
            for slot in self.slots
        ]
        try:
            await asyncio.gather(*slots)
        finally:
            for task in slots:
                task.cancel()
            await asyncio.gather(*slots, return_exceptions=True)
        played.outcomes = [outcomes[request.index] for request in requests]
        return played

    async def play_and_close(
        self, requests: Sequence[EpisodeRequest], tokens: TokenSource
    ) -> PlayedEpisodes:
        """Play all requests, then close the environments."""
        try:
            return await self.play(requests, tokens)
        finally:
            await self.close()

    async def close(self) -> None:
        """Close all environments, within seconds."""
        await asyncio.gather(*(env.close() for env in self._envs.values()))

    async def _run_slot(
        self,
        slot: int,
        waiting: deque[EpisodeRequest],
        outcomes: dict[int, RolloutOutcome],
        played: PlayedEpisodes,
        tokens: TokenSource,
        order: SlotOrder | None,
        on_finished: Callable[[], None],
    ) -> None:
        """Play one episode after another on one slot until no request is waiting."""
        try:
            while True:
                if order is not None:
                    await order.may_take(slot)
                await asyncio.sleep(0)  # let other slots run even if this environment never awaits
                if not waiting:
                    return
                request = waiting.popleft()
                outcomes[request.index] = await self._play_with_retries(
                    slot, request, played, tokens
                )
                on_finished()
        finally:
            if order is not None:
                order.leave(slot)

    async def _play_with_retries(
        self, slot: int, request: EpisodeRequest, played: PlayedEpisodes, tokens: TokenSource
    ) -> RolloutOutcome:
        """Play an episode until it is valid or the retries are used up."""
        env = self._envs[slot]
        for attempt in range(1 + self._retries):
            env.prepare(self._retries, deterministic=self._is_deterministic(request.task))
            try:
                outcome = await self._agent.play(env, request, tokens, slot)
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
    """Return the agent called ``name``; "" is the built-in agent.

    ``episodes`` are the options of the rollouts. ``options`` are the agent's own options, passed to
    its function as keyword arguments. Raises ValueError for an agent that cannot be loaded or does
    not accept these options.
    """
    check_whole_distribution(episodes.gen)
    limits = EpisodeLimits(
        episodes.max_turns, episodes.max_total_tokens, episodes.gen.max_new_tokens
    )
    if not name and options:
        raise ValueError(
            f"the built-in agent has no options of its own: {', '.join(options)} would do nothing"
        )
    if not name:
        return TurnAgent(chat, limits, system_prompt, keep_reasoning=episodes.keep_reasoning)
    from realhf.rollout.black_box_agent import BlackBoxAgent, load_agent

    try:
        agent = load_agent(name, options)
    except ValueError as error:
        raise ValueError(f"rollout.agent={error}") from error
    constrain = episodes.agent_structured == CONSTRAIN
    return BlackBoxAgent(agent, chat, limits, system_prompt, constrain=constrain)


def check_whole_distribution(gen: GenConfig) -> None:
    """Raise ValueError for sampling options that truncate the distribution, because the policy
    gradient needs the whole distribution."""
    if cut := gen.truncating_options():
        raise ValueError(
            f"gen.{', gen.'.join(cut)}: training samples from the whole distribution (top_p=1, "
            f"top_k=0, "
            "min_new_tokens=0)"
        )
