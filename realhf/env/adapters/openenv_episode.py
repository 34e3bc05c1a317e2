"""Plays episodes on one session of an OpenEnv server: what the policy says becomes an action, and what the server
observes becomes text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from realhf.api.environment import AssistantMessage, ChatMessage, EnvironmentFailure, Opening, ToolCall, Turn
from realhf.env.adapters.openenv_action import LISTED, TEXT, ActionForm, Refused, listed_form
from realhf.env.adapters.openenv_session import REFUSED, Session, reset_data
from realhf.env.adapters.openenv_text import cut, observation_text, refusal_text, result_text
from realhf.env.client.openenv_client import EnvError, OpenEnvClient
from realhf.env.doors.checks import whole_text

T = TypeVar("T")
NO_CALL = "error: no tool was called; call one"
OVER = "error: the episode is over; this was not done"
_SOLVED = 1e-9


@dataclass(frozen=True)
class Reading:
    """How answers are read: which ``field`` of an observation is shown, and how many characters of it at ``most``;
    ``level``: the last reward counts, not the sum; ``success_reward``: what a success is worth; ``error``: ``fail``, or
    ``tell`` when the policy reads errors of a step."""

    field: str = ""
    most: int = 4000
    level: bool = False
    success_reward: float = 1.0
    error: str = "fail"


@dataclass
class _Answers:
    """What is known of the answer to a turn whose calls are made one by one: a call that was not executed is made again
    without those before it."""

    message: AssistantMessage
    messages: list[ChatMessage] = field(default_factory=list)
    reward: float | None = None


class OpenEnvEnvironment:
    """Plays one episode after another on a session that is opened when it is needed.

    ``clients`` make a connection to each server, the one to try first at the beginning. ``form``: of the action, None
    when the server lists its tools itself, for which each new session is asked.
    """

    def __init__(
        self, clients: Sequence[Callable[[], OpenEnvClient]], form: ActionForm | None, reading: Reading
    ) -> None:
        self._form, self._reading = form, reading
        self._session = Session(clients, self._ask_tools)
        self._tools: ActionForm | None = form
        self._done = False
        self._return = 0.0
        self._answers: _Answers | None = None

    async def reset(self, task: Mapping[str, Any], *, seed: int) -> Opening:
        """Begin an episode: the server's reset is given the seed and the columns of the row. Raises
        EnvironmentFailure."""
        self._done, self._return, self._answers = False, 0.0, None
        result = await self._session.reset(reset_data(task, seed))
        self._done = result.done
        self._return = (result.reward or 0.0) if self._done else 0.0
        text = self._said(result.observation)
        return Opening([{"role": "user", "content": text}], self._tools.tools if self._tools else ())

    async def step(self, message: AssistantMessage) -> Turn:
        """Take the actions of a turn, one after the other. What the policy did wrong it reads. Raises
        EnvironmentFailure."""
        if self._tools is None:
            raise EnvironmentFailure("lost", "there is no session: reset comes first")
        if self._done:
            return self._turn(_Answers(message, [{"role": "user", "content": OVER}], self._return))
        if self._answers is None or self._answers.message is not message:
            self._answers = _Answers(message)
        answers = self._answers
        if self._tools.kind == TEXT:
            said, _ = await self._act(self._tools.text(message), answers)
            answers.messages.append({"role": "user", "content": said})
        elif not message.tool_calls:
            answers.messages.append({"role": "user", "content": NO_CALL})
        for call in message.tool_calls[len(answers.messages) :] if self._tools.kind != TEXT else ():
            answers.messages.append(await self._answer(self._tools, call, answers))
        self._answers = None
        if answers.reward is not None:
            self._return = answers.reward if self._reading.level else self._return + answers.reward
        return self._turn(answers)

    async def close(self) -> None:
        """End the session."""
        await self._session.close()

    def _turn(self, answers: _Answers) -> Turn:
        solved = self._done and self._return >= self._reading.success_reward - _SOLVED
        return Turn(
            answers.messages,
            self._done,
            answers.reward,
            metrics={"success": float(solved)},
            final=self._reading.level,
        )

    async def _answer(self, form: ActionForm, call: ToolCall, answers: _Answers) -> ChatMessage:
        try:
            if self._done:
                raise Refused(OVER)
            said, observation = await self._act(form.action(call), answers)
            if form.kind == LISTED and observation is not None:
                said = self._json(result_text, observation)
        except Refused as refused:
            said = f"error: {refused}" if not self._done else OVER
        name = whole_text(call.name[:60]) or "unknown"
        answer = {"role": "tool", "name": name, "content": cut(said, self._reading.most)}
        return answer | {"tool_call_id": call.id} if call.id else answer

    async def _act(self, action: Mapping[str, Any], answers: _Answers) -> tuple[str, Mapping[str, Any] | None]:
        """Take one action; returns what the policy reads, and the observation unless the server refused the action."""
        try:
            result = await self._session.step(action, self._told)
        except EnvError as error:
            return refusal_text(error, self._reading.most), None
        self._done = result.done
        if result.reward is not None:
            answers.reward = result.reward if self._reading.level else (answers.reward or 0.0) + result.reward
        return self._said(result.observation), result.observation

    async def _ask_tools(self) -> None:
        """Ask a new session for its tools, which needs no episode."""
        if self._form is not None:
            return
        try:
            result = await self._session.step({"type": "list_tools"})
            self._tools = listed_form(result.observation.get("tools"))
        except ValueError as error:
            raise EnvironmentFailure("internal", f"asked for its tools: {error}") from None

    def _told(self, error: EnvError) -> bool:
        return error.code == REFUSED or self._reading.error == "tell"

    def _said(self, observation: Mapping[str, Any]) -> str:
        return self._json(lambda seen, most: observation_text(seen, self._reading.field, most), observation)

    def _json(self, read: Callable[[Mapping[str, Any], int], str], observation: Mapping[str, Any]) -> str:
        try:
            return read(observation, self._reading.most)
        except ValueError as error:
            raise EnvironmentFailure("internal", f"the server's observation: {error}") from None
