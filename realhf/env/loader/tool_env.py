"""Env format of a class with tools, compatible with TRL's ``environment_factory``:
``reset(**row)``, ``get_reward()`` and public methods as tools.

Source: TRL 1.16, GRPOTrainer, ``environment_factory``. Optional attributes and methods beyond
TRL's: a dataclass ``Options``, ``done``, ``metrics``, ``view``, ``state_key``, ``close()``,
``user_reply(text)``, ``tasks(split)``, ``system_prompt``, ``deterministic``, ``concurrency``,
``demonstrate``.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from realhf.api.environment import (
    AssistantMessage,
    ChatMessage,
    EnvironmentDefinition,
    EnvironmentFailure,
    Opening,
    ToolCall,
    Turn,
)
from realhf.api.messages import find_missing_request
from realhf.env.loader.author import (
    accepts_keyword,
    author_code,
    build_class_definition,
    build_failure,
    format_error,
    source_location,
)
from realhf.env.loader.tasks import Row
from realhf.env.loader.threads import MAX_THREADS, Threads
from realhf.env.loader.tool_schemas import (
    USER_REPLY,
    ToolMethod,
    collect_tools,
    convert_arguments,
    shorten_name,
    unknown_tool_error,
)
from realhf.env.loader.validation import (
    BrokenContract,
    copy_json,
    format_value,
    json_problem,
    replace_surrogates,
    require_valid,
    state_key_problems,
    validate_messages,
    validate_numbers,
    validate_rewards,
)

T = TypeVar("T")
logger = logging.getLogger(__name__)
TOOL_ERRORS = "tool_errors"
"""Key under which a turn's info lists the errors of the author's tools in the current episode, and
under which its metrics hold their number."""
MAX_RESULT_CHARS = 1 << 18
"""Maximum length of a tool's result in characters; longer results are truncated."""
TOOL_BUGS = (
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    NotImplementedError,
    RecursionError,
    TypeError,
    ZeroDivisionError,
)
"""Errors that point to a bug in a tool rather than to a wrong call by the policy; they are
logged."""
SOLVED = 1 - 1e-9
"""Minimum reward at the end of an episode that counts as success, unless the class defines the
metric itself."""


class ToolClass(NamedTuple):
    """Description of an author's class with tools, read once per class."""

    kind: type[Any]
    """The author's class."""
    tools: Mapping[str, ToolMethod]
    """Tools by name."""
    schemas: Sequence[Mapping[str, Any]]
    """JSON schemas of the tools."""
    blocking: bool
    """Whether the class has no async method, so that each turn is run as one job in a thread."""
    seeded: bool
    """Whether ``reset`` takes a seed."""
    logged_errors: set[str]
    """Keys of the tool errors that were already logged."""


class ToolPlay:
    """An instance of the author's class and the state of its current episode.

    ``is_abandoned`` becomes True if a call is cancelled while its thread may still use the
    instance. The instance must then not be used again; its thread closes it when the call returns.
    """

    def __init__(self, about: ToolClass, make: Callable[[], Any], threads: Threads) -> None:
        self._class = about
        self._make = make
        self._threads = threads
        self._instance: Any = None
        self._seed = 0
        self._method = "reset"
        self._calls = self._failures = 0
        self._mistakes: list[str] = []
        self.is_abandoned = False

    async def open(self, task: Mapping[str, Any], seed: int) -> Opening:
        """Start an episode; the first call also creates the instance."""
        self._seed = seed
        self._calls = self._failures = 0
        self._mistakes = []
        return await self._run(partial(self._open, task, seed))

    async def turn(self, message: AssistantMessage) -> Turn:
        """Run the tool calls of a turn and compute the reward."""
        return await self._run(partial(self._run_turn, message))

    async def reward_again(self) -> float:
        """Compute the reward of the state after the last turn once more."""
        return await self._run(self._reward_again)

    async def close(self) -> None:
        """Close the instance, if one exists and has a ``close`` method."""
        if not self.is_abandoned and callable(self._optional_attribute("close")):
            await self._run(partial(self._call, "close", {}))

    def _optional_attribute(self, name: str) -> Any:
        """Return an optional attribute of the instance that the loader uses; None if it is missing,
        or is a tool."""
        return None if name in self._class.tools else getattr(self._instance, name, None)

    async def _open(self, task: Mapping[str, Any], seed: int) -> Opening:
        self._method = "__init__"
        if self._instance is None:
            self._instance = self._make()
        row = {name: copy_json(value) for name, value in task.items()}
        if self._class.seeded:
            row.setdefault("seed", seed)
        text = await self._call("reset", row)
        if text is not None and not isinstance(text, str):
            raise BrokenContract(f"reset must return text or None, not {format_value(text)}")
        messages = _append_text(
            prompt_messages(task.get("prompt", ""), "prompt"), replace_surrogates(text or "")
        )
        if "prompt" in task and (problem := find_missing_request(messages)):
            raise BrokenContract(f"with what reset returned, the prompt {problem}")
        return Opening(messages, self._class.schemas, state_key=self._state_key())

    def _state_key(self) -> str:
        """Return the current ``state_key`` of the instance; "" if it has none."""
        self._method = "state_key"
        key = self._optional_attribute("state_key")
        if callable(key):
            raise BrokenContract(
                "state_key must be text, which a function is not: make it a property"
            )
        return "" if key is None else require_valid(key, state_key_problems(key))

    async def _run_turn(self, message: AssistantMessage) -> Turn:
        if self._instance is None:
            raise BrokenContract("there is no episode: reset comes first")
        answers = [await self._answer(call) for call in message.tool_calls]
        if not message.tool_calls and (reply := await self._user_reply(message)) is not None:
            answers = [{"role": "user", "content": reply}]
        reward, components = validate_rewards(await self._call("get_reward", {}), "the reward")
        self._method = "done"
        is_done = getattr(self._instance, "done", False)
        if callable(is_done):
            raise BrokenContract(
                "done must be true or false, which a function is not: it would end no episode"
            )
        ended = not answers or bool(is_done)
        metrics = {
            "success": float(ended and reward >= SOLVED),  # success ends an episode
            "tool_calls": float(self._calls),
            "tool_failures": float(self._failures),
            TOOL_ERRORS: float(len(self._mistakes)),
        }
        self._method = "metrics"
        if (class_metrics := self._optional_attribute("metrics")) is not None:
            metrics |= validate_numbers(
                await self._call("metrics", {}) if callable(class_metrics) else class_metrics,
                "metrics",
            )
        info: dict[str, Any] = {TOOL_ERRORS: [*self._mistakes]} if self._mistakes else {}
        self._method = "view"
        if isinstance(view := self._optional_attribute("view"), Mapping):
            if problem := json_problem(view):
                raise BrokenContract(f"view: {problem}")
            info["view"] = copy_json(view)
        return Turn(
            answers,
            ended,
            reward,
            components,
            metrics,
            info,
            final=True,
            state_key=self._state_key(),
        )

    async def _user_reply(self, message: AssistantMessage) -> str | None:
        """Return the simulated user's reply to a turn without a call; None if the class has no
        ``user_reply`` or the reply ends the episode."""
        if not callable(self._optional_attribute(USER_REPLY)):
            return None
        reply = await self._call(USER_REPLY, {"text": message.content})
        if reply is not None and not isinstance(reply, str):
            raise BrokenContract(
                f"{USER_REPLY} must return text, or None to end the episode, not {format_value(reply)}"
            )
        return None if reply is None else replace_surrogates(reply)

    async def _reward_again(self) -> float:
        return validate_rewards(await self._call("get_reward", {}), "the reward")[0]

    async def _answer(self, call: ToolCall) -> ChatMessage:
        """Run one tool call and return the ``tool`` message. Errors of the call are returned to the
        policy as text in TRL's format."""
        self._calls += 1
        try:
            if call.problem:
                raise ValueError(call.problem)
            if call.name not in self._class.tools:
                raise ValueError(unknown_tool_error(call.name, self._class.tools))
            tool = self._class.tools[call.name]
            arguments = convert_arguments(tool, call.arguments)
            self._method = call.name
            try:
                result = str(await self._call_method(tool.bind(self._instance), arguments))
            except TOOL_BUGS as error:
                self._record_tool_error(error)
                raise
        except (EnvironmentFailure, MemoryError, BrokenContract):
            raise
        except Exception as error:
            self._failures += 1
            result = str({"error": _error_text(error)})
        if len(result) > MAX_RESULT_CHARS:
            result = (
                f"{result[:MAX_RESULT_CHARS]}... ({len(result) - MAX_RESULT_CHARS} more characters)"
            )
        name = replace_surrogates(shorten_name(call.name)) or "unknown"
        message = {"role": "tool", "name": name, "content": replace_surrogates(result)}
        return message | {"tool_call_id": call.id} if call.id else message

    def _record_tool_error(self, error: Exception) -> None:
        """Record an error that points to a bug in a tool; log it once per source line."""
        description = (
            f"{self._class.kind.__name__}.{self._method}: {format_error(error, self._class.kind)}"
        )
        self._mistakes.append(description)
        line = error.__traceback__
        while line is not None and line.tb_next is not None:
            line = line.tb_next
        place = f"{self._method} {type(error).__name__} {line.tb_lineno if line else 0}"
        if place not in self._class.logged_errors:
            self._class.logged_errors.add(place)
            logger.warning(
                "%s; the policy reads it as an error of its own call (seed %d)",
                description,
                self._seed,
            )

    async def _call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Call a method of the instance that is not a tool."""
        self._method = name
        return await self._call_method(getattr(self._instance, name), arguments)

    async def _call_method(self, method: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        if self._class.blocking:
            result = method(**arguments)
            if inspect.iscoroutine(result):
                result.close()
                raise BrokenContract(f"{self._method} must be written with async def")
            return result
        if inspect.iscoroutinefunction(method):
            return await method(**arguments)
        result = await self._run_in_thread(partial(self._call_in_thread, method, arguments))
        return await result if inspect.isawaitable(result) else result

    def _call_in_thread(self, method: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        """Call a method in a worker thread.

        An error that is not an ``Exception``, such as KeyboardInterrupt, is converted to
        EnvironmentFailure, because on the event loop it would be mistaken for one of the loop's
        own.
        """
        try:
            return method(**arguments)
        except Exception:
            raise
        except BaseException as error:
            raise (
                build_failure(error, self._class.kind, self._method, self._seed, on_loop=False)
                or error
            ) from error

    async def _run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run the coroutine of ``work``: entirely in one thread if the class is blocking, else on
        the event loop."""
        if self._class.blocking:
            return await self._run_in_thread(lambda: _run_to_completion(self._guard(work())))
        return await self._guard(work())

    async def _run_in_thread(self, work: Callable[[], T]) -> T:
        try:
            return await self._threads.run(work, after=self._close_in_thread)
        except asyncio.CancelledError:
            self.is_abandoned = True
            raise

    def _close_in_thread(self) -> None:
        """Close the instance in the thread that used it last, unless ``close`` is a coroutine
        function."""
        close = self._optional_attribute("close")
        if callable(close) and not inspect.iscoroutinefunction(close):
            close()

    async def _guard(self, work: Awaitable[T]) -> T:
        with author_code(self._class.kind, self._current_call, on_loop=not self._class.blocking):
            return await work

    def _current_call(self) -> tuple[str, int]:
        return self._method, self._seed


def prompt_messages(prompt: Any, name: str) -> Sequence[ChatMessage]:
    """Return the messages of a prompt: a string becomes one user message, and messages are checked.

    Raises BrokenContract for invalid values; the message begins with ``name``.
    """
    return (
        [{"role": "user", "content": prompt}]
        if isinstance(prompt, str)
        else validate_messages(prompt, name)
    )


def read_question(prompt: Any, name: str) -> Sequence[ChatMessage]:
    """Return the messages of a prompt that must contain a question for the policy. Raises
    BrokenContract; the message begins with ``name``."""
    messages = prompt_messages(prompt, name)
    if problem := find_missing_request(messages):
        raise BrokenContract(f"{name} {problem}")
    return messages


def _append_text(messages: Sequence[ChatMessage], text: str) -> Sequence[ChatMessage]:
    """Return the messages with ``text`` appended to the last user message, or as a new one if there
    is none."""
    if not text:
        return messages
    for number in range(len(messages) - 1, -1, -1):
        if messages[number]["role"] == "user":
            changed = {**messages[number], "content": messages[number]["content"] + text}
            return [*messages[:number], changed, *messages[number + 1 :]]
    return [*messages, {"role": "user", "content": text}]


def _error_text(error: Exception) -> str:
    try:
        return str(error) or type(error).__name__
    except Exception:
        return type(error).__name__


def _run_to_completion(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends and return its result.

    Raises EnvironmentFailure("internal") if it suspends.
    """
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    work.close()
    raise EnvironmentFailure("internal", "a method without async waited for the event loop")


def build_tool_class(kind: type[Any]) -> EnvironmentDefinition:
    """Build the definition of a class with tools.

    Raises ValueError that names the line for a class without tools, a tool without type hints or
    docstring, and a ``get_reward`` that requires arguments.
    """
    about = read_class(kind)

    def make_factory(
        make: Callable[[], Any], concurrency: int | None
    ) -> Callable[[], ToolClassEnvironment]:
        """Return a factory of environments that share a thread pool."""
        threads = Threads(kind.__name__, max(MAX_THREADS, concurrency or 0))
        return lambda: ToolClassEnvironment(about, make, threads)

    seeded = "seed" in inspect.signature(kind.reset).parameters
    return build_class_definition(
        kind, make_factory, seeded=seeded, check=_check_prompt, tools=about.schemas
    )


def read_class(kind: type[Any]) -> ToolClass:
    """Inspect the methods of a class. Raises the errors of ``build_tool_class``, and ValueError for
    a ``user_reply`` with a wrong signature."""
    tools = collect_tools(kind)
    try:
        inspect.signature(kind.get_reward).bind(None)
    except TypeError as error:
        place = source_location(kind.get_reward)
        raise ValueError(
            f"{kind.__name__}.get_reward must take no arguments: {error} ({place})"
        ) from None
    if reply := getattr(kind, USER_REPLY, None):
        try:
            inspect.signature(reply).bind(None, text="")
        except TypeError as error:
            raise ValueError(
                f"{kind.__name__}.{USER_REPLY} must be {USER_REPLY}(self, text): {error} "
                f"({source_location(reply)})"
            ) from None
    methods = [tool.function for tool in tools.values()]
    loader_methods = ("reset", "get_reward", "close", "metrics", USER_REPLY)
    methods += [getattr(kind, name, None) for name in loader_methods if name not in tools]
    blocking = not any(
        inspect.iscoroutinefunction(inspect.unwrap(each)) for each in methods if callable(each)
    )
    schemas = tuple(tool.schema for tool in tools.values())
    return ToolClass(kind, tools, schemas, blocking, accepts_keyword(kind.reset, "seed"), set())


class ToolClassEnvironment:
    """Environment that plays on an instance of the author's class.

    Errors of tools and invalid calls are answered with a ``tool`` message, as in TRL. Errors and
    invalid return values of other methods, such as reset and get_reward, become
    EnvironmentFailure("internal") that names the class, the seed and the line. Every turn has the
    reward of the state after it, so the last reward is correct whenever the episode ends.
    """

    def __init__(self, about: ToolClass, make: Callable[[], Any], threads: Threads) -> None:
        self._make_play = lambda: ToolPlay(about, make, threads)
        self._play = self._make_play()

    async def reset(self, task: Mapping[str, Any], *, seed: int) -> Opening:
        """Start an episode. An instance whose last call was cancelled is left to its thread and
        replaced."""
        if self._play.is_abandoned:
            self._play = self._make_play()
        return await self._play.open(task, seed)

    async def step(self, message: AssistantMessage) -> Turn:
        """Run the tool calls of a turn. A turn without calls gets the reply of ``user_reply``, or
        ends the episode if the class has none."""
        if self._play.is_abandoned:
            raise EnvironmentFailure(
                "lost",
                "the call before was cancelled and may still be running; reset starts a new one",
            )
        return await self._play.turn(message)

    async def reward_again(self) -> float:
        """Compute the reward of the current state once more; it must equal the reward of the last
        turn."""
        return await self._play.reward_again()

    async def close(self) -> None:
        """Close the instance, if one exists and has a ``close`` method."""
        await self._play.close()


def _check_prompt(row: Row) -> None:
    try:
        prompt_messages(row.values.get("prompt", ""), "the column 'prompt'")
    except BrokenContract as error:
        raise ValueError(f"{row.where}: {error}") from None
