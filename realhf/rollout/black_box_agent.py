"""Plays episodes of agents that only know a base URL: ordinary programs that talk to an OpenAI-compatible model.

The program is a function in a file of its own: ``async def rollout(task, base_url, session) -> reward``. ``task`` is
what the environment's ``reset`` gets, ``session`` the environment of the episode (``AgentSession``). It may use any
client, keep any conversations, and take steps of the environment when it likes, or none. The reward is what it returns
or reports, else what the environment gave: a number for all its conversations, or one for each, in a map from the id of
a completion (``reply.id``) of the conversation. It runs on the rollout worker's event loop and must not block it.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from realhf.api.chat_template import TemplateChat
from realhf.api.environment import AssistantMessage, Environment, EnvironmentFailure, ToolCall, Turn
from realhf.api.generation import TokenSource
from realhf.api.rollout import AGENT_FAILED, POLICY_FAILED, RolloutOutcome
from realhf.api.tool_parser import CallProblem, read_json
from realhf.base.plugin import load_plugin, located
from realhf.rollout.episode import EpisodeProgress, EpisodeRequest, Limits
from realhf.rollout.openai_requests import Call, ChatMessage, Message
from realhf.rollout.openai_server import OpenAiServer
from realhf.rollout.openai_sessions import Ending, Reward, Session, Sessions, read_reward

_OVER = "error: the episode is over"


@dataclass(frozen=True)
class Answer:
    """What the environment answered to a step: ``messages`` to be sent to the model, ``text`` of all of them, the
    ``reward`` of the turn (None: there was none), and whether the episode is ``done``."""

    messages: list[dict[str, Any]]
    text: str
    done: bool
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


class AgentSession:
    """The environment of one episode, in the hands of its agent.

    ``messages`` and ``tools`` are how the environment opens the episode, its system prompt first, in the form of the
    chat API; ``text`` is what it says there as a user. ``id`` is the task's, ``group`` what success is reported by,
    ``seed`` that of the instance. Use it on the event loop that the agent was called on.
    """

    def __init__(self, env: Environment, progress: EpisodeProgress, endpoint: Session, system_prompt: str = "") -> None:
        task = progress.wanted.task
        self.id, self.group, self.seed = task.id, task.group, task.seed
        self.messages: list[dict[str, Any]] = []
        self.tools: list[dict[str, Any]] = []
        self.text = ""
        self._env, self._progress, self._endpoint = env, progress, endpoint
        self._system: list[dict[str, Any]] = [{"role": "system", "content": system_prompt}] if system_prompt else []
        self._turn = asyncio.Lock()
        self._failure: EnvironmentFailure | None = None
        self._ended = False
        self._under_way: asyncio.Task[Turn] | None = None

    @property
    def failure(self) -> EnvironmentFailure | None:
        """How the environment failed, if it did."""
        return self._failure

    async def open(self) -> None:
        """Begin the episode. The player does it before the agent is called. Raises EnvironmentFailure."""
        task = self._progress.wanted.task
        opening = await self._env.reset(task.payload, seed=task.seed)
        self.messages = [dict(message) for message in (*self._system, *opening.messages)]
        self.tools = [dict(tool) for tool in opening.tools]
        self.text = self._progress.start(opening)

    def end(self) -> None:
        """Take no more steps, and cancel one under way: what an agent leaves running must not reach the next episode
        that is played in the same environment."""
        self._ended = True
        if self._under_way is not None:
            self._under_way.cancel()

    async def step(self, message: object) -> Answer:
        """Say something to the environment and return its answer.

        ``message`` is a text; a message of the chat API, as a map or as the ``openai`` package returns it, tool calls
        included. One that the endpoint gave in this episode reaches the environment as the policy said it, with its
        reasoning and with the calls that could not be read. After the end every step is answered as done. Steps are
        taken one after another. Raises EnvironmentFailure, and again at every later step; TypeError for what is no
        message.
        """
        said = self._said(_as_message(message))
        async with self._turn:
            if self._failure is not None:
                raise self._failure
            if self._ended or self._progress.status:
                return Answer([{"role": "user", "content": _OVER}], _OVER, True)
            try:
                turn = await self._taken(said)
                text = self._progress.add_turn(said, turn)
            except EnvironmentFailure as error:
                self._failure = error
                raise
        return self._answer(turn, text)

    async def _taken(self, said: AssistantMessage) -> Turn:
        self._under_way = asyncio.ensure_future(self._env.step(said))
        try:
            return await self._under_way
        finally:
            self._under_way = None

    def _answer(self, turn: Turn, text: str) -> Answer:
        messages = [dict(each) for each in turn.messages]
        return Answer(messages, text, bool(self._progress.status), turn.reward, dict(turn.metrics))

    def _said(self, message: Message) -> AssistantMessage:
        """What reaches the environment: what the policy said in this turn, with the ids of calls that the agent knows;
        else the agent's own words."""
        sampled = self._endpoint.ledger.said(message)
        if sampled is None:
            return AssistantMessage(message.content, tuple(map(_tool_call, message.calls)), text=message.content)
        known = iter(message.calls)
        calls = [
            call if call.problem or not message.calls else replace(call, id=next(known).id)
            for call in sampled.tool_calls
        ]
        return replace(sampled, tool_calls=tuple(calls))


def _as_message(given: object) -> Message:
    """An agent's message in the form that the endpoint compares. Raises TypeError."""
    if isinstance(given, str):
        return Message("assistant", given)
    dump = getattr(given, "model_dump", None)
    body = dump() if callable(dump) else given
    if not isinstance(body, Mapping):
        raise TypeError(f"step takes a text or a message of the chat API, not {type(given).__name__}")
    if body.get("role", "assistant") != "assistant":
        raise TypeError(f"step takes what the model said, not a message of the role {str(body['role'])[:32]!r}")
    calls = body.get("tool_calls") or None
    if isinstance(calls, (list, tuple)):  # What was put together from a stream may lack the id and the kind of a call.
        calls = [{"id": "", **_said(call)} if isinstance(call, Mapping) else call for call in calls]
    try:
        message = ChatMessage.model_validate({"role": "assistant", **body, "tool_calls": calls})
    except ValidationError as error:
        where, wrong = error.errors()[0]["loc"], error.errors()[0]["msg"]
        raise TypeError(f"step takes a message of the chat API: {'.'.join(map(str, where))}: {wrong}") from None
    return Message("assistant", message.text(), message.calls())


def _said(call: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in call.items() if value is not None}


def _tool_call(call: Call) -> ToolCall:
    words = call.arguments.strip() or "{}"
    try:
        value, end = read_json(words, 0)
        if not isinstance(value, dict) or end != len(words):
            raise CallProblem("arguments are one JSON object")
    except CallProblem as error:
        return ToolCall(call.name, {}, call.id, call.arguments, str(error))
    return ToolCall(call.name, value, call.id, call.arguments)


AgentFunction = Callable[[Mapping[str, Any], str, AgentSession], Awaitable[Reward | None]]


def load_agent(name: str, options: Mapping[str, Any] | None = None) -> AgentFunction:
    """Import the function that ``file.py:function`` or ``module:function`` names; it is called with ``options`` as
    keyword arguments. Raises ValueError."""
    place, _, function = name.rpartition(":")
    if not place or not function:
        raise ValueError(f"{name!r} names no agent: it is file.py:function or module:function")
    file = Path(place).expanduser().resolve() if place.endswith(".py") else None
    if file is not None and not file.is_file():
        raise ValueError(f"{name!r} names no agent: there is no file {file}")
    try:
        found = getattr(load_plugin(file or place), function, None)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{name!r} names no agent: {located(error, str(file or ''))}") from error
    if not inspect.iscoroutinefunction(found):
        raise ValueError(f"{name!r} is not an async function")
    try:
        inspect.signature(found).bind({}, "url", None, **(options or {}))
    except TypeError as error:
        given = f"(task, base_url, session{''.join(f', {option}=...' for option in options or ())})"
        raise ValueError(f"{name!r} cannot be called with {given}: {error}") from error
    return partial(found, **options) if options else found


class BlackBoxAgent:
    """``EpisodeAgent`` around a black-box agent. The endpoint is served from the first episode on, until ``close``.

    Args:
        chat, limits: as for any agent; max_turns and the token limits are enforced by the endpoint.
        system_prompt: the environment's, which the agent finds before its messages.
        timeout_s: what an episode of the agent may take.

    An agent may hold several conversations, and each is a trajectory; the one with the most sampled tokens is the main
    one, and ``timings["branches"]`` says how many there were.
    """

    def __init__(
        self,
        agent: AgentFunction,
        chat: TemplateChat,
        limits: Limits,
        system_prompt: str = "",
        *,
        timeout_s: float = 600.0,
    ) -> None:
        self._agent, self._timeout_s, self._system_prompt = agent, timeout_s, system_prompt
        self._starting = asyncio.Lock()
        self._server = OpenAiServer(Sessions(chat, limits))

    async def close(self) -> None:
        """Stop serving the endpoint."""
        await self._server.stop()

    async def play(self, env: Environment, wanted: EpisodeRequest, llm: TokenSource, slot: int) -> RolloutOutcome:
        """See ``EpisodeAgent``. The main trajectory is the outcome, the others are its ``branches``
        (``Session.outcomes``): every sampled token is in one of them. An exception of the agent makes the episode a
        failure of the agent, unless it is the endpoint's refusal of a turn beyond a limit, or was raised from that. An
        engine that fails, where no later turn succeeds, makes it a failure of the policy, whatever the agent does.
        Raises RuntimeError when the endpoint cannot be served."""
        began = time.perf_counter()
        async with self._starting:
            await self._server.start()
        session = self._server.sessions.open(llm, slot=slot, seed=wanted.sampling_seed, max_turns=wanted.task.max_turns)
        progress = EpisodeProgress(wanted)
        world = AgentSession(env, progress, session, self._system_prompt)
        try:
            ending = await self._ending(world, progress, session)
        finally:
            world.end()
            self._server.sessions.close(session)
        outcomes = session.outcomes(replace(ending, task=wanted.task, task_text=progress.task_text))
        return replace(
            outcomes[0],
            branches=tuple(outcomes[1:]),
            timings=outcomes[0].timings | {"wall_s": time.perf_counter() - began},
            rewards=progress.rewards,
            metrics=progress.metrics,
            info=progress.opening.info,
            steps=tuple(progress.turns),
        )

    async def _ending(self, world: AgentSession, progress: EpisodeProgress, session: Session) -> Ending:
        reward, problem, limit = None, "", ""
        try:
            await world.open()
        except EnvironmentFailure as error:
            return Ending(error.kind, message=str(error))
        try:
            async with asyncio.timeout(self._timeout_s):
                task = dict(progress.wanted.task.payload)
                reward = await self._agent(task, self._server.base_url(session), world)
        except TimeoutError as error:
            problem = str(error) or f"the agent was not done after {self._timeout_s:g} s"
        except asyncio.CancelledError:
            if (episode := asyncio.current_task()) is None or episode.cancelling():
                raise
            problem = "the agent cancelled itself"
        except (Exception, SystemExit) as error:
            problem, limit = f"{type(error).__name__}: {error}"[:500], session.limit_told_by(error)
        if world.failure is not None:
            return Ending(world.failure.kind, message=str(world.failure))
        if session.engine_error is not None:  # What an agent makes of a failed turn says nothing of the policy.
            return Ending(POLICY_FAILED, message=str(session.engine_error))
        if problem and not limit:
            return Ending(AGENT_FAILED, message=problem)
        try:
            reward = None if reward is None else read_reward(reward)
        except ValueError as error:
            return Ending(AGENT_FAILED, message=f"the agent returned {error}")
        limit = limit or session.ledger.limit_hit
        reward = progress.reward if reward is None and session.reward is None else reward
        status = "achieved" if progress.achieved else limit or "finished"
        return Ending(status, reward, progress.achieved, progress.fraction_done)
