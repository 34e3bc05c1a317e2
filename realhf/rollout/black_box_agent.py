"""Episodes of black-box agents: ordinary programs that talk to an OpenAI-compatible model at a base
URL.

The program is a function in its own file: ``async def rollout(task, base_url, session) -> reward``.
``task`` is the argument of the environment's ``reset``, ``session`` gives access to the environment
of the episode (``AgentSession``). The function may use any client, hold any number of
conversations, and take steps of the environment at any time, or none.

The reward is the one that the function returns or reports, otherwise that of the environment. It is
a number for all conversations, or a map from the id of a completion (``reply.id``) to the reward of
its conversation. The function runs on the rollout worker's event loop and must not block it.
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
from realhf.base.plugin import describe_user_error, load_plugin
from realhf.env.loader.mixture import own_payload
from realhf.rollout.anthropic_messages import find_signature, read_turn
from realhf.rollout.api_errors import ApiError
from realhf.rollout.episode import EpisodeLimits, EpisodeProgress, EpisodeRequest
from realhf.rollout.openai_requests import ChatMessage, OpenAiCall, OpenAiMessage
from realhf.rollout.openai_responses import read_output
from realhf.rollout.openai_server import OpenAiServer
from realhf.rollout.openai_sessions import (
    Ending,
    OpenAiSession,
    OpenAiSessions,
    Reward,
    read_reward,
)

_OVER = "error: the episode is over"


@dataclass(frozen=True)
class Answer:
    """The environment's answer to a step."""

    messages: list[dict[str, Any]]
    """Messages to pass on to the model."""
    text: str
    """Joined text of all messages."""
    done: bool
    """Whether the episode has ended."""
    reward: float | None = None
    """Reward of the turn, None if it has none."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the turn."""


class AgentSession:
    """Access to the environment of one episode, for its agent. Use it on the event loop on which
    the agent was called.

    - ``messages``, ``tools``: the environment's opening in the form of the chat API, its system
      prompt first;
    - ``text``: the user messages of the opening;
    - ``id``: id of the task; ``group``: name of the group under which success is reported;
      ``seed``: seed of the task instance; ``environment``: name of the task's environment in a
      mixture, else "".
    """

    def __init__(
        self,
        env: Environment,
        progress: EpisodeProgress,
        endpoint: OpenAiSession,
        system_prompt: str = "",
    ) -> None:
        task = progress.request.task
        self.id = task.id
        self.group = task.group
        self.seed = task.seed
        self.environment = task.environment
        self.messages: list[dict[str, Any]] = []
        self.tools: list[dict[str, Any]] = []
        self.text = ""
        self._env = env
        self._progress = progress
        self._endpoint = endpoint
        self._system: list[dict[str, Any]] = (
            [{"role": "system", "content": system_prompt}] if system_prompt else []
        )
        self._step_lock = asyncio.Lock()
        self._failure: EnvironmentFailure | None = None
        self._ended = False
        self._running_step: asyncio.Task[Turn] | None = None

    @property
    def failure(self) -> EnvironmentFailure | None:
        """The environment's failure; None if it has not failed."""
        return self._failure

    async def open(self) -> None:
        """Start the episode. Called before the agent. Raises EnvironmentFailure."""
        task = self._progress.request.task
        opening = await self._env.reset(task.payload, seed=task.seed)
        self.messages = [dict(message) for message in (*self._system, *opening.messages)]
        self.tools = [dict(tool) for tool in opening.tools]
        self.text = self._progress.start(opening)

    def end(self) -> None:
        """Refuse further steps and cancel a running one, so that tasks that the agent leaves
        running cannot affect the next episode in the same environment."""
        self._ended = True
        if self._running_step is not None:
            self._running_step.cancel()

    async def step(self, message: object) -> Answer:
        """Send a message to the environment and return its answer.

        ``message`` is a string, a message of the chat API, a response of the Responses API or a
        message of Anthropic's API (also only its role and content), as a map or as an object of the
        client's package, possibly with tool calls. The answer's messages are those of the chat API.
        A message that the endpoint returned in this episode reaches the environment as the policy
        sampled it, including its reasoning and calls that could not be parsed. Concurrent steps are
        run one after the other. After the end of the episode every step returns an answer with
        ``done``.

        Raises EnvironmentFailure, at this and every later step, and TypeError for an object that is
        not a message.
        """
        policy_turn = self._find_policy_turn(*_parse_message(message))
        async with self._step_lock:
            if self._failure is not None:
                raise self._failure
            if self._ended or self._progress.status:
                return Answer([{"role": "user", "content": _OVER}], _OVER, True)
            try:
                turn = await self._run_step(policy_turn)
                text = self._progress.add_turn(policy_turn, turn)
            except EnvironmentFailure as error:
                self._failure = error
                raise
        messages = [dict(each) for each in turn.messages]
        return Answer(messages, text, bool(self._progress.status), turn.reward, dict(turn.metrics))

    async def _run_step(self, policy_turn: AssistantMessage) -> Turn:
        self._running_step = asyncio.ensure_future(self._env.step(policy_turn))
        try:
            return await self._running_step
        finally:
            self._running_step = None

    def _find_policy_turn(self, message: OpenAiMessage, reply: str) -> AssistantMessage:
        """Return the policy's turn that the endpoint returned as ``message`` in the completion with
        the id ``reply`` ("" if unknown), with the call ids that the agent knows. For a message that
        the agent wrote itself, return that message."""
        sampled = self._endpoint.ledger.find_turn(message, reply)
        if sampled is None:
            return AssistantMessage(
                message.content, tuple(map(_parse_call, message.calls)), text=message.content
            )
        known = iter(message.calls)
        calls = [
            call if call.problem or not message.calls else replace(call, id=next(known).id)
            for call in sampled.tool_calls
        ]
        return replace(sampled, tool_calls=tuple(calls))


_BLOCKS_OF_MESSAGES = ("thinking", "tool_use")
"""Types of content blocks that only Anthropic's API has."""


def _dump(argument: Any) -> Any:
    """Return an object of a client's package as a map, anything else unchanged."""
    dump = getattr(argument, "model_dump", None)
    return dump() if callable(dump) else argument


def _parse_message(argument: object) -> tuple[OpenAiMessage, str]:
    """Convert an agent's message to the form in which the endpoint compares messages; return it
    with the id of its completion, "" if it contains none. Raises TypeError."""
    if isinstance(argument, str):
        return OpenAiMessage("assistant", argument), ""
    body = _dump(argument)
    if not isinstance(body, Mapping):
        raise TypeError(
            f"step takes a text or a message of the chat API, not {type(argument).__name__}"
        )
    blocks = body.get("content")
    if isinstance(blocks, list):
        blocks = [_dump(block) for block in blocks]
        body = {**body, "content": blocks}
    try:
        if body.get("object") == "response":
            return read_output(body.get("output") or ()), str(body.get("id"))
        if body.get("type") == "message" and isinstance(blocks, list):
            return read_turn(blocks, "content"), str(body.get("id"))
    except ApiError as error:
        raise TypeError(f"step takes what the model answered: {error}") from None
    if body.get("role", "assistant") != "assistant":
        raise TypeError(
            f"step takes a message of the model (role assistant), not of the role "
            f"{str(body['role'])[:32]!r}"
        )
    if isinstance(blocks, list) and any(
        isinstance(block, Mapping) and block.get("type") in _BLOCKS_OF_MESSAGES for block in blocks
    ):
        try:
            return read_turn(blocks, "content"), find_signature(blocks)
        except ApiError as error:
            raise TypeError(f"step takes what the model answered: {error}") from None
    calls = body.get("tool_calls") or None
    # a message assembled from a stream may lack the id and type of a call
    if isinstance(calls, (list, tuple)):
        calls = [
            {"id": "", **_drop_none(call)} if isinstance(call, Mapping) else call for call in calls
        ]
    try:
        message = ChatMessage.model_validate({"role": "assistant", **body, "tool_calls": calls})
    except ValidationError as error:
        where = error.errors()[0]["loc"]
        wrong = error.errors()[0]["msg"]
        raise TypeError(
            f"step takes a message of the chat API: {'.'.join(map(str, where))}: {wrong}"
        ) from None
    reasoning = message.reasoning()
    return OpenAiMessage("assistant", message.text(), message.calls(), reasoning=reasoning), ""


def _drop_none(call: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in call.items() if value is not None}


def _parse_call(call: OpenAiCall) -> ToolCall:
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
    """Import the agent function ``file.py:function`` or ``module:function`` and bind ``options`` as
    keyword arguments.

    Raises ValueError if it cannot be loaded.
    """
    place, _, function = name.rpartition(":")
    if not place or not function:
        raise ValueError(f"{name!r} names no agent: it is file.py:function or module:function")
    file = Path(place).expanduser().resolve() if place.endswith(".py") else None
    if file is not None and not file.is_file():
        raise ValueError(f"{name!r} names no agent: there is no file {file}")
    try:
        agent = getattr(load_plugin(file or place), function, None)
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"{name!r} names no agent: {describe_user_error(error, str(file or ''))}"
        ) from error
    if not inspect.iscoroutinefunction(agent):
        raise ValueError(f"{name!r} is not an async function")
    try:
        inspect.signature(agent).bind({}, "url", None, **(options or {}))
    except TypeError as error:
        arguments = (
            f"(task, base_url, session{''.join(f', {option}=...' for option in options or ())})"
        )
        raise ValueError(f"{name!r} cannot be called with {arguments}: {error}") from error
    return partial(agent, **options) if options else agent


class BlackBoxAgent:
    """``EpisodeAgent`` that runs a black-box agent. The endpoint is served from the first episode
    until ``close``.

    Args:
        agent: The agent function.
        chat, limits: As for any agent; the endpoint enforces the limits.
        system_prompt: The environment's system prompt, which precedes its messages in
            ``AgentSession``.
        timeout_s: Seconds that an episode of the agent may take.
        constrain: Whether the engine enforces the form of answers that requests prescribe
            (``rollout.agent_structured``).

    An agent may hold several conversations, each of which is a trajectory. The one with the most
    sampled tokens is the main one; ``timings["branches"]`` is their number.
    """

    def __init__(
        self,
        agent: AgentFunction,
        chat: TemplateChat,
        limits: EpisodeLimits,
        system_prompt: str = "",
        *,
        timeout_s: float = 600.0,
        constrain: bool = False,
    ) -> None:
        self._agent = agent
        self._timeout_s = timeout_s
        self._system_prompt = system_prompt
        self._starting = asyncio.Lock()
        self._server = OpenAiServer(OpenAiSessions(chat, limits, constrain=constrain))

    async def close(self) -> None:
        """Stop serving the endpoint."""
        await self._server.stop()

    async def play(
        self, env: Environment, request: EpisodeRequest, llm: TokenSource, slot: int
    ) -> RolloutOutcome:
        """Play one episode. The main trajectory is the outcome, the others are its ``branches``
        (``OpenAiSession.outcomes``), so that no sampled token is lost.

        An exception in the agent counts as a failure of the agent, unless it is, or was raised
        from, the endpoint's refusal of a turn beyond a limit. If the engine fails and no later turn
        succeeds, the episode counts as a failure of the policy, whatever the agent does. Raises
        RuntimeError if the endpoint cannot be served.
        """
        started_at = time.perf_counter()
        async with self._starting:
            await self._server.start()
        session = self._server.sessions.open(
            llm,
            slot=slot,
            seed=request.sampling_seed,
            max_turns=request.task.max_turns,
            task_limits=request.task.limits,
        )
        progress = EpisodeProgress(request)
        agent_session = AgentSession(env, progress, session, self._system_prompt)
        try:
            ending = await self._run_agent(agent_session, progress, session)
        finally:
            agent_session.end()
            self._server.sessions.close(session)
        outcomes = session.outcomes(
            replace(ending, task=request.task, task_text=progress.task_text)
        )
        return replace(
            outcomes[0],
            branches=tuple(outcomes[1:]),
            timings=outcomes[0].timings | {"wall_s": time.perf_counter() - started_at},
            rewards=progress.rewards,
            metrics=progress.metrics,
            info=progress.opening.info,
            steps=tuple(progress.turns),
        )

    async def _run_agent(
        self, agent_session: AgentSession, progress: EpisodeProgress, session: OpenAiSession
    ) -> Ending:
        """Start the episode, call the agent, and return how the episode ended."""
        reward = None
        problem = ""
        limit = ""
        try:
            await agent_session.open()
        except EnvironmentFailure as error:
            return Ending(error.kind, message=str(error))
        try:
            async with asyncio.timeout(self._timeout_s):
                task = dict(own_payload(progress.request.task))
                reward = await self._agent(task, self._server.base_url(session), agent_session)
        except TimeoutError as error:
            problem = str(error) or f"the agent was not done after {self._timeout_s:g} s"
        except asyncio.CancelledError:
            if (episode := asyncio.current_task()) is None or episode.cancelling():
                raise
            problem = "the agent cancelled itself"
        except (Exception, SystemExit) as error:
            problem = f"{type(error).__name__}: {error}"[:500]
            limit = session.find_limit(error)
        if agent_session.failure is not None:
            return Ending(agent_session.failure.kind, message=str(agent_session.failure))
        # the agent's reward after a failed turn says nothing about the policy
        if session.engine_error is not None:
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
