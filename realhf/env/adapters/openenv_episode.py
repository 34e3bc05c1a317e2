"""Episodes on one OpenEnv session, played by actions or, if the server takes them, by chat
messages."""

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
    InvalidAction,
    build_listed_form,
    cut,
    observation_text,
    refusal_text,
    result_text,
)
from realhf.env.loader.tasks import SeedTaskSet
from realhf.env.loader.validation import (
    BrokenContract,
    format_value,
    json_problem,
    replace_surrogates,
    require_valid,
    validate_messages,
    validate_number,
    validate_numbers,
)
from realhf.env.openenv_client import CapacityError, EnvError, OpenEnvClient, StepResult

REFUSED = "VALIDATION_ERROR"
"""Error code of the server for an invalid request."""
_LABEL_COLUMNS = ("id", "group")
"""Columns that identify a row and are not sent to the server."""


def reset_data(task: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Return the data sent with a reset: the columns of the task's row, and the seed."""
    return {name: value for name, value in task.items() if name not in _LABEL_COLUMNS} | {
        "seed": seed
    }


class ServerSession:
    """Session on an OpenEnv server; it is replaced by a new one when it is lost.

    clients: functions that each return a client of one server, in the order in which they are
    tried. on_open: called after each new session is opened, to prepare it.
    """

    def __init__(
        self,
        clients: Sequence[Callable[[], OpenEnvClient]],
        on_open: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._clients = clients
        self._on_open = on_open
        self._client: OpenEnvClient | None = None

    async def reset(self, data: Mapping[str, Any]) -> StepResult:
        """Start an episode. If the server has silently closed the session, open a new one. Raises
        EnvironmentFailure."""
        had_session = self._client is not None and self._client.usable
        try:
            return await self._start_episode(data)
        except EnvironmentFailure as failure:
            if failure.kind != "lost" or not had_session:
                raise
            return await self._start_episode(data)

    async def step(
        self,
        action: Mapping[str, Any],
        is_for_policy: Callable[[EnvError], bool] = lambda error: False,
    ) -> StepResult:
        """Take an action.

        Raises EnvironmentFailure. An EnvError for which ``is_for_policy`` returns true is raised
        unchanged, so that it can be shown to the policy.
        """
        if self._client is None:
            raise EnvironmentFailure("lost", "there is no session: reset comes first")
        return _check_types(await _await_answer(self._client.step(action), is_for_policy))

    async def close(self) -> None:
        """Close the session."""
        client = self._client
        self._client = None
        if client is not None:
            await client.close()

    async def _start_episode(self, data: Mapping[str, Any]) -> StepResult:
        """Start an episode on the session, or on a new one. Raises EnvironmentFailure."""
        client = await self._connect()
        return _check_types(await _await_answer(client.reset(**data)))

    async def _connect(self) -> OpenEnvClient:
        """Return the client of the current session, or of a new session on the first server with a
        free one. Raises EnvironmentFailure."""
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
                if self._on_open is not None:
                    await self._on_open()
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


async def _await_answer(
    answer: Awaitable[StepResult], is_for_policy: Callable[[EnvError], bool] = lambda error: False
) -> StepResult:
    """Await an answer. An EnvError for which ``is_for_policy`` returns true is raised unchanged;
    any other error becomes an EnvironmentFailure."""
    try:
        return await answer
    except EnvError as error:
        if error.retryable:
            raise EnvironmentFailure("unavailable", str(error)) from error
        if is_for_policy(error):
            raise
        raise EnvironmentFailure(
            error.kind or "internal", f"the server reported {error}"
        ) from error
    except TimeoutError as error:
        raise EnvironmentFailure("timeout", f"{error} (env.timeout_s)") from error
    except ConnectionError as error:
        raise EnvironmentFailure("lost", str(error)) from error


def _check_types(result: StepResult) -> StepResult:
    """Return the answer if its done, reward and observation have valid types; otherwise raise
    EnvironmentFailure."""
    if not isinstance(result.done, bool):
        raise EnvironmentFailure(
            "internal", f"the server's done must be true or false, not {format_value(result.done)}"
        )
    if not isinstance(result.observation, Mapping):
        raise EnvironmentFailure(
            "internal",
            f"the server's observation must be a map, not {format_value(result.observation)}",
        )
    with _contract_errors_as_failures():
        reward = (
            None if result.reward is None else validate_number(result.reward, "the server's reward")
        )
    return StepResult(result.observation, reward, result.done)


@contextmanager
def _contract_errors_as_failures() -> Iterator[None]:
    """Context manager that converts BrokenContract to EnvironmentFailure (internal)."""
    try:
        yield
    except BrokenContract as error:
        raise EnvironmentFailure("internal", str(error)) from None


T = TypeVar("T")
NO_CALL = "error: no tool was called; call one"
"""Answer to a turn without a tool call."""
OVER = "error: the episode is over; this was not done"
"""Answer to a call after the end of the episode."""
_SOLVED = 1e-9
"""Tolerance when a return is compared with ``success_reward``."""


@dataclass(frozen=True)
class OpenEnvRules:
    """How the server's answers are interpreted."""

    field: str = ""
    """Field of an observation that the policy reads; "" for all of it."""
    max_chars: int = 4000
    """Maximum number of characters of an observation that the policy reads."""
    level: bool = False
    """Whether the episode's return is the last reward instead of the sum of all rewards."""
    success_reward: float = 1.0
    """Minimum return of a successful episode."""
    error: str = "fail"
    """What to do with an error of a step: ``fail`` (the environment failed) or ``tell`` (show it to
    the policy)."""


@dataclass
class _Answers:
    """Answers so far to the calls of one turn, which are executed one by one. If a call could not
    be executed, the turn is later resumed at this call, without repeating the calls before it."""

    message: AssistantMessage
    """The policy's turn."""
    messages: list[ChatMessage] = field(default_factory=list)
    """Messages that answer the calls executed so far."""
    reward: float | None = None
    """Reward of the calls so far; None if there was none."""


class OpenEnvEnvironment:
    """Environment that plays one episode after another on a session, which is opened when it is
    needed.

    clients: functions that each return a client of one server, in the order in which they are
    tried. form: how turns become actions; None if the server lists its own tools, which are
    requested from each new session.
    """

    def __init__(
        self,
        clients: Sequence[Callable[[], OpenEnvClient]],
        form: ActionForm | None,
        rules: OpenEnvRules,
    ) -> None:
        self._form = form
        self._rules = rules
        self._session = ServerSession(clients, self._ask_tools)
        self._tools: ActionForm | None = form
        self._done = False
        self._return = 0.0
        self._answers: _Answers | None = None

    async def reset(self, task: Mapping[str, Any], *, seed: int) -> Opening:
        """Start an episode; the server's reset gets the seed and the columns of the row. Raises
        EnvironmentFailure."""
        self._done = False
        self._return = 0.0
        self._answers = None
        result = await self._session.reset(reset_data(task, seed))
        self._done = result.done
        self._return = (result.reward or 0.0) if self._done else 0.0
        text = self._observation_text(result.observation)
        return Opening(
            [{"role": "user", "content": text}], self._tools.tools if self._tools else ()
        )

    async def step(self, message: AssistantMessage) -> Turn:
        """Take the actions of a turn, one after another. The policy's mistakes are explained in the
        answers. Raises EnvironmentFailure."""
        if self._tools is None:
            raise EnvironmentFailure("lost", "there is no session: reset comes first")
        if self._done:
            return self._turn(_Answers(message, [{"role": "user", "content": OVER}], self._return))
        if self._answers is None or self._answers.message is not message:
            self._answers = _Answers(message)
        answers = self._answers
        if self._tools.kind == TEXT:
            text, _ = await self._act(self._tools.text(message), answers)
            answers.messages.append({"role": "user", "content": text})
        elif not message.tool_calls:
            answers.messages.append({"role": "user", "content": NO_CALL})
        for call in message.tool_calls[len(answers.messages) :] if self._tools.kind != TEXT else ():
            answers.messages.append(await self._answer(self._tools, call, answers))
        self._answers = None
        if answers.reward is not None:
            self._return = answers.reward if self._rules.level else self._return + answers.reward
        return self._turn(answers)

    async def close(self) -> None:
        """Close the session."""
        await self._session.close()

    def _turn(self, answers: _Answers) -> Turn:
        """Return the answers to a turn as a ``Turn``, including whether the episode succeeded."""
        solved = self._done and self._return >= self._rules.success_reward - _SOLVED
        return Turn(
            answers.messages,
            self._done,
            answers.reward,
            metrics={"success": float(solved)},
            final=self._rules.level,
        )

    async def _answer(self, form: ActionForm, call: ToolCall, answers: _Answers) -> ChatMessage:
        """Take the action of a call and return the tool message that answers it."""
        try:
            if self._done:
                raise InvalidAction(OVER)
            text, observation = await self._act(form.action(call), answers)
            if form.kind == LISTED and observation is not None:
                text = self._convert_observation(result_text, observation)
        except InvalidAction as problem:
            text = f"error: {problem}" if not self._done else OVER
        name = replace_surrogates(call.name[:60]) or "unknown"
        answer = {"role": "tool", "name": name, "content": cut(text, self._rules.max_chars)}
        return answer | {"tool_call_id": call.id} if call.id else answer

    async def _act(
        self, action: Mapping[str, Any], answers: _Answers
    ) -> tuple[str, Mapping[str, Any] | None]:
        """Take one action. Return (text for the policy, observation); the observation is None if
        the server refused the action."""
        try:
            result = await self._session.step(action, self._is_for_policy)
        except EnvError as error:
            return refusal_text(error, self._rules.max_chars), None
        self._done = result.done
        if result.reward is not None:
            answers.reward = (
                result.reward if self._rules.level else (answers.reward or 0.0) + result.reward
            )
        return self._observation_text(result.observation), result.observation

    async def _ask_tools(self) -> None:
        """Request a new session's list of tools, which needs no episode. Raises
        EnvironmentFailure."""
        if self._form is not None:
            return
        try:
            result = await self._session.step({"type": "list_tools"})
            self._tools = build_listed_form(result.observation.get("tools"))
        except ValueError as error:
            raise EnvironmentFailure("internal", f"listing its tools failed: {error}") from None

    def _is_for_policy(self, error: EnvError) -> bool:
        """Return whether an error of the server is shown to the policy."""
        return error.code == REFUSED or self._rules.error == "tell"

    def _observation_text(self, observation: Mapping[str, Any]) -> str:
        """Return an observation as text for the policy."""
        return self._convert_observation(
            lambda value, max_chars: observation_text(value, self._rules.field, max_chars),
            observation,
        )

    def _convert_observation(
        self, to_text: Callable[[Mapping[str, Any], int], str], observation: Mapping[str, Any]
    ) -> str:
        """Convert an observation to text by ``to_text``. Raises EnvironmentFailure if it is not
        JSON."""
        try:
            return to_text(observation, self._rules.max_chars)
        except ValueError as error:
            raise EnvironmentFailure("internal", f"the server's observation: {error}") from None


_MESSAGE_ACTION_FIELDS = frozenset({"content", "tool_calls"})
"""Fields by which an action of chat messages is recognised."""


def speaks_messages(action: Any, metadata: Mapping[str, Any]) -> bool:
    """Return whether a server with this action schema and metadata is played by chat messages
    instead of actions."""
    properties = action.get("properties") if isinstance(action, Mapping) else None
    return (
        metadata.get("messages") is True
        and isinstance(properties, Mapping)
        and {*properties} >= _MESSAGE_ACTION_FIELDS
    )


class ServedTaskSet(SeedTaskSet):
    """Infinite task set of a server that takes chat messages. The server draws a task of the split
    from each seed, and keeps the splits disjoint."""

    def instantiate(self, template_id: str, seed: int) -> Task:
        """Return the task of a seed. Raises KeyError for an unknown template."""
        if template_id != self._name:
            raise KeyError(template_id)
        held_out = "" if self._split == TRAIN else f" {self._split}"
        return Task(f"{self._name}{held_out}@{seed}", self._name, {"split": self._split}, seed=seed)


class MessagesEnvironment:
    """Environment that plays one episode after another by chat messages, on a session that is
    opened when it is needed."""

    def __init__(self, clients: Sequence[Callable[[], OpenEnvClient]]) -> None:
        self._session = ServerSession(clients)

    async def reset(self, task: Mapping[str, Any], *, seed: int) -> Opening:
        """Start an episode. Raises EnvironmentFailure."""
        result = await self._session.reset(reset_data(task, seed))
        observation = result.observation
        tools = observation.get("tools") or []
        with _contract_errors_as_failures():
            messages = validate_messages(observation.get("messages"), "the server's messages")
            tools = require_valid(tools, tool_problems(tools, "the server's tools"))
            return Opening(messages, tools, _info(observation), _state_key(observation))

    async def step(self, message: AssistantMessage) -> Turn:
        """Send a turn and return the answer to it. Raises EnvironmentFailure."""
        result = await self._session.step(_action(message))
        observation = result.observation
        with _contract_errors_as_failures():
            messages = validate_messages(observation.get("messages"), "the server's messages")
            rewards = validate_numbers(observation.get("rewards") or {}, "the server's rewards")
            metrics = validate_numbers(observation.get("metrics") or {}, "the server's metrics")
        final = observation.get("final") is True
        return Turn(
            messages,
            result.done,
            result.reward,
            rewards,
            metrics,
            _info(observation),
            final,
            _state_key(observation),
        )

    async def close(self) -> None:
        """Close the session."""
        await self._session.close()


def _action(message: AssistantMessage) -> dict[str, Any]:
    """Return the action that carries the policy's turn."""
    action: dict[str, Any] = {
        "content": replace_surrogates(message.content),
        "token_count": message.token_count,
    }
    if message.tool_calls:
        action["tool_calls"] = [_call(call) for call in message.tool_calls]
    return action | {
        name: replace_surrogates(value)
        for name, value in (("reasoning", message.reasoning), ("text", message.text))
        if value
    }


def _call(call: ToolCall) -> dict[str, Any]:
    """Return a tool call in the wire format. A call that could not be parsed is sent as the policy
    wrote it, so that the server can explain what is wrong."""
    readable = not call.problem and not json_problem(call.arguments)
    entry = {"name": replace_surrogates(call.name), "arguments": dict(call.arguments)}
    if not readable:
        entry["arguments"] = replace_surrogates(call.text or call.problem or "?")
    return entry | ({"id": replace_surrogates(call.id)} if call.id else {})


def _state_key(observation: Mapping[str, Any]) -> str:
    """Return the state key of an observation; "" if there is none."""
    key = observation.get("state_key")
    return key if isinstance(key, str) else ""


def _info(observation: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the info of an observation; {} if there is none or it is not JSON."""
    info = observation.get("info") or {}
    return info if isinstance(info, Mapping) and not json_problem(info) else {}
