"""What a black-box agent has beside its endpoint: the environment of one episode, as messages."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from realhf.api.chat import CallProblem, read_json
from realhf.api.environment import AssistantMessage, ChatMessage, Environment, EnvironmentFailure, ToolCall, Turn
from realhf.rollout.episode.played_episode import Progress
from realhf.rollout.openai_endpoint.messages import Call, Message
from realhf.rollout.openai_endpoint.sessions import Session

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

    def __init__(self, env: Environment, progress: Progress, endpoint: Session, system_prompt: str = "") -> None:
        task = progress.wanted.task
        self.id, self.group, self.seed = task.id, task.group, task.seed
        self.messages: list[dict[str, Any]] = []
        self.tools: list[dict[str, Any]] = []
        self.text = ""
        self._env, self._progress, self._endpoint = env, progress, endpoint
        self._system: list[ChatMessage] = [{"role": "system", "content": system_prompt}] if system_prompt else []
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
        self.text = self._progress.begin(opening)

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
                text = self._progress.take(said, turn)
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
    content = body.get("content") or ""
    if not isinstance(content, str):
        raise TypeError(f"step takes a message whose content is a text, not {type(content).__name__}")
    return Message("assistant", content, tuple(map(_call, _calls_of(body))))


def _calls_of(body: Mapping[str, Any]) -> Sequence[Any]:
    calls = body.get("tool_calls") or ()
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise TypeError("the tool_calls of a message are a list")
    return calls


def _call(given: Any) -> Call:
    try:
        function = given["function"]
        name, arguments, call_id = function["name"], function["arguments"], given.get("id") or ""
    except (TypeError, KeyError, AttributeError):
        raise TypeError("a tool call has an id and a function with name and arguments") from None
    if not all(isinstance(value, str) for value in (name, arguments, call_id)):
        raise TypeError("the name, the arguments (JSON) and the id of a tool call are texts")
    return Call(call_id, name, arguments)


def _tool_call(call: Call) -> ToolCall:
    words = call.arguments.strip() or "{}"
    try:
        value, end = read_json(words, 0)
        if not isinstance(value, dict) or end != len(words):
            raise CallProblem("arguments are one JSON object")
    except CallProblem as error:
        return ToolCall(call.name, {}, call.id, call.arguments, str(error))
    return ToolCall(call.name, value, call.id, call.arguments)
