"""Plays episodes on one session of an OpenEnv server, by actions or, where the server takes them,
by chat messages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from realhf.api.environment import (
    TRAIN,
    AssistantMessage,
    ChatMessage,
    EnvironmentFailure,
    Opening,
    Task,
    ToolCall,
    Turn,
)
from realhf.api.messages import tool_problems
from realhf.env.adapters.openenv_action import (
    LISTED,
    TEXT,
    ActionForm,
    Refused,
    cut,
    listed_form,
    observation_text,
    refusal_text,
    result_text,
)
from realhf.env.loader.tasks import SeedTaskSet
from realhf.env.loader.validation import (
    BrokenContract,
    checked,
    checked_messages,
    checked_number,
    checked_numbers,
    json_problem,
    shown,
    whole_text,
)
from realhf.env.openenv_client import CapacityError, EnvError, OpenEnvClient, StepResult

REFUSED = "VALIDATION_ERROR"
"""The code of an error that is about what was sent."""
_OF_THE_ROW = ("id", "group")
"""Columns that name a row and are not for the server."""


def reset_data(task: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """What a reset is given: the columns of the row, and the seed."""
    return {name: value for name, value in task.items() if name not in _OF_THE_ROW} | {"seed": seed}


class Session:
    """One session after another. ``clients`` make a connection to each server, the one to try first
    at the beginning; ``opened`` prepares each new one."""

    def __init__(
        self,
        clients: Sequence[Callable[[], OpenEnvClient]],
        opened: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._clients = clients
        self._opened = opened
        self._client: OpenEnvClient | None = None

    async def reset(self, data: Mapping[str, Any]) -> StepResult:
        """Begin an episode; a session that the server closed in silence is opened anew. Raises
        EnvironmentFailure."""
        kept = self._client is not None and self._client.usable
        try:
            return await self._begun(data)
        except EnvironmentFailure as failure:
            if failure.kind != "lost" or not kept:
                raise
            return await self._begun(data)

    async def step(
        self, action: Mapping[str, Any], told: Callable[[EnvError], bool] = lambda error: False
    ) -> StepResult:
        """Take an action. Raises EnvironmentFailure, or the EnvError for which ``told`` holds."""
        if self._client is None:
            raise EnvironmentFailure("lost", "there is no session: reset comes first")
        return _checked(await _asked(self._client.step(action), told))

    async def close(self) -> None:
        """End the session."""
        client = self._client
        self._client = None
        if client is not None:
            await client.close()

    async def _begun(self, data: Mapping[str, Any]) -> StepResult:
        client = await self._connected()
        return _checked(await _asked(client.reset(**data)))

    async def _connected(self) -> OpenEnvClient:
        """The session, or a new one on the first server that has one."""
        if self._client is not None and self._client.usable:
            return self._client
        await self.close()
        refusals: list[Exception] = []
        for make in self._clients:
            client = make()
            try:
                await client.connect()
            except ConnectionError as error:
                refusals.append(error)
                continue
            self._client = client
            try:
                if self._opened is not None:
                    await self._opened()
            except BaseException:
                await self.close()
                raise
            return client
        for error in refusals:
            if isinstance(error, CapacityError):
                raise EnvironmentFailure(
                    "capacity", f"{error} (env.sessions: how many a server has)"
                ) from error
        raise EnvironmentFailure("lost", "; ".join(str(error) for error in refusals)) from refusals[
            0
        ]


async def _asked(
    answer: Awaitable[StepResult], told: Callable[[EnvError], bool] = lambda error: False
) -> StepResult:
    """Await an answer. Raises the EnvError that is for the policy; what went wrong otherwise is
    EnvironmentFailure."""
    try:
        return await answer
    except EnvError as error:
        if error.retryable:
            raise EnvironmentFailure("unavailable", str(error)) from error
        if told(error):
            raise
        raise EnvironmentFailure(
            error.kind or "internal", f"the server reported {error}"
        ) from error
    except TimeoutError as error:
        raise EnvironmentFailure("timeout", f"{error} (env.timeout_s)") from error
    except ConnectionError as error:
        raise EnvironmentFailure("lost", str(error)) from error


def _checked(result: StepResult) -> StepResult:
    """The answer of a server that speaks the wire. Raises EnvironmentFailure for what no server may
    say."""
    if not isinstance(result.done, bool):
        raise EnvironmentFailure(
            "internal", f"the server's done must be true or false, not {shown(result.done)}"
        )
    if not isinstance(result.observation, Mapping):
        raise EnvironmentFailure(
            "internal", f"the server's observation must be a map, not {shown(result.observation)}"
        )
    with _broken_is_internal():
        reward = (
            None if result.reward is None else checked_number(result.reward, "the server's reward")
        )
    return StepResult(result.observation, reward, result.done)


@contextmanager
def _broken_is_internal() -> Iterator[None]:
    """Let what a server breaks of the contract be EnvironmentFailure."""
    try:
        yield
    except BrokenContract as error:
        raise EnvironmentFailure("internal", str(error)) from None


T = TypeVar("T")
NO_CALL = "error: no tool was called; call one"
OVER = "error: the episode is over; this was not done"
_SOLVED = 1e-9


@dataclass(frozen=True)
class Reading:
    """How answers are read: which ``field`` of an observation is shown, and how many characters of
    it at ``most``; ``level``: the last reward counts, not the sum; ``success_reward``: what a
    success is worth; ``error``: ``fail``, or ``tell`` when the policy reads errors of a step."""

    field: str = ""
    most: int = 4000
    level: bool = False
    success_reward: float = 1.0
    error: str = "fail"


@dataclass
class _Answers:
    """What is known of the answer to a turn whose calls are made one by one: a call that was not
    executed is made again without those before it."""

    message: AssistantMessage
    messages: list[ChatMessage] = field(default_factory=list)
    reward: float | None = None


class OpenEnvEnvironment:
    """Plays one episode after another on a session that is opened when it is needed.

    ``clients`` make a connection to each server, the one to try first at the beginning. ``form``:
    of the action, None when the server lists its tools itself, for which each new session is asked.
    """

    def __init__(
        self,
        clients: Sequence[Callable[[], OpenEnvClient]],
        form: ActionForm | None,
        reading: Reading,
    ) -> None:
        self._form = form
        self._reading = reading
        self._session = Session(clients, self._ask_tools)
        self._tools: ActionForm | None = form
        self._done = False
        self._return = 0.0
        self._answers: _Answers | None = None

    async def reset(self, task: Mapping[str, Any], *, seed: int) -> Opening:
        """Begin an episode: the server's reset is given the seed and the columns of the row. Raises
        EnvironmentFailure."""
        self._done = False
        self._return = 0.0
        self._answers = None
        result = await self._session.reset(reset_data(task, seed))
        self._done = result.done
        self._return = (result.reward or 0.0) if self._done else 0.0
        text = self._said(result.observation)
        return Opening(
            [{"role": "user", "content": text}], self._tools.tools if self._tools else ()
        )

    async def step(self, message: AssistantMessage) -> Turn:
        """Take the actions of a turn, one after the other. What the policy did wrong it reads.
        Raises EnvironmentFailure."""
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

    async def _act(
        self, action: Mapping[str, Any], answers: _Answers
    ) -> tuple[str, Mapping[str, Any] | None]:
        """Take one action; returns what the policy reads, and the observation unless the server
        refused the action."""
        try:
            result = await self._session.step(action, self._told)
        except EnvError as error:
            return refusal_text(error, self._reading.most), None
        self._done = result.done
        if result.reward is not None:
            answers.reward = (
                result.reward if self._reading.level else (answers.reward or 0.0) + result.reward
            )
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
        return self._json(
            lambda seen, most: observation_text(seen, self._reading.field, most), observation
        )

    def _json(
        self, read: Callable[[Mapping[str, Any], int], str], observation: Mapping[str, Any]
    ) -> str:
        try:
            return read(observation, self._reading.most)
        except ValueError as error:
            raise EnvironmentFailure("internal", f"the server's observation: {error}") from None


_OF_AN_ACTION = frozenset({"content", "tool_calls"})


def speaks_messages(action: Any, metadata: Mapping[str, Any]) -> bool:
    """Whether a server with this schema of its action and these metadata serves messages."""
    properties = action.get("properties") if isinstance(action, Mapping) else None
    return (
        metadata.get("messages") is True
        and isinstance(properties, Mapping)
        and {*properties} >= _OF_AN_ACTION
    )


class ServedTaskSet(SeedTaskSet):
    """An endless set whose seeds draw from the tasks of a server's split; the server keeps its
    splits apart."""

    def instantiate(self, template_id: str, seed: int) -> Task:
        """Return the task of a seed. Raises KeyError for an unknown template."""
        if template_id != self._name:
            raise KeyError(template_id)
        held_out = "" if self._split == TRAIN else f" {self._split}"
        return Task(f"{self._name}{held_out}@{seed}", self._name, {"split": self._split}, seed=seed)


class MessagesEnvironment:
    """Plays one episode after another on a session that is opened when it is needed."""

    def __init__(self, clients: Sequence[Callable[[], OpenEnvClient]]) -> None:
        self._session = Session(clients)

    async def reset(self, task: Mapping[str, Any], *, seed: int) -> Opening:
        """Begin an episode. Raises EnvironmentFailure."""
        result = await self._session.reset(reset_data(task, seed))
        seen = result.observation
        tools = seen.get("tools") or []
        with _broken_is_internal():
            messages = checked_messages(seen.get("messages"), "the server's messages")
            tools = checked(tools, tool_problems(tools, "the server's tools"))
            return Opening(messages, tools, _info(seen), _state_key(seen))

    async def step(self, message: AssistantMessage) -> Turn:
        """Send a turn and return the answer to it. Raises EnvironmentFailure."""
        result = await self._session.step(_action(message))
        seen = result.observation
        with _broken_is_internal():
            messages = checked_messages(seen.get("messages"), "the server's messages")
            rewards = checked_numbers(seen.get("rewards") or {}, "the server's rewards")
            metrics = checked_numbers(seen.get("metrics") or {}, "the server's metrics")
        final = seen.get("final") is True
        return Turn(
            messages,
            result.done,
            result.reward,
            rewards,
            metrics,
            _info(seen),
            final,
            _state_key(seen),
        )

    async def close(self) -> None:
        """End the session."""
        await self._session.close()


def _action(message: AssistantMessage) -> dict[str, Any]:
    action: dict[str, Any] = {
        "content": whole_text(message.content),
        "token_count": message.token_count,
    }
    if message.tool_calls:
        action["tool_calls"] = [_call(call) for call in message.tool_calls]
    return action | {
        name: whole_text(value)
        for name, value in (("reasoning", message.reasoning), ("text", message.text))
        if value
    }


def _call(call: ToolCall) -> dict[str, Any]:
    """A call; one that could not be parsed is sent as it was written, and the server says what is
    wrong with it."""
    readable = not call.problem and not json_problem(call.arguments)
    written = {"name": whole_text(call.name), "arguments": dict(call.arguments)}
    if not readable:
        written["arguments"] = whole_text(call.text or call.problem or "?")
    return written | ({"id": whole_text(call.id)} if call.id else {})


def _state_key(seen: Mapping[str, Any]) -> str:
    key = seen.get("state_key")
    return key if isinstance(key, str) else ""


def _info(seen: Mapping[str, Any]) -> Mapping[str, Any]:
    info = seen.get("info") or {}
    return info if isinstance(info, Mapping) and not json_problem(info) else {}
