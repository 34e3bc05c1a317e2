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
from realhf.api.messages import silence
from realhf.env.loader.author import (
    author_code,
    class_definition,
    failure_of,
    place_of,
    raised,
    takes,
)
from realhf.env.loader.tasks import Row
from realhf.env.loader.threads import MOST_THREADS, Threads
from realhf.env.loader.tool_schemas import (
    USER_REPLY,
    Tool,
    arguments_for,
    short,
    tools_of,
    unknown_tool,
)
from realhf.env.loader.validation import (
    BrokenContract,
    checked,
    checked_messages,
    checked_numbers,
    checked_rewards,
    copied,
    json_problem,
    shown,
    state_key_problems,
    whole_text,
)

T = TypeVar("T")
logger = logging.getLogger(__name__)
TOOL_ERRORS = "tool_errors"
"""Key of the errors of the author's tools in the current episode: the list in a turn's info and
their number in its metrics."""
LONGEST_RESULT = 1 << 18
"""Maximum length of a tool's result in characters; longer results are truncated."""
MISTAKES = (
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
    tools: Mapping[str, Tool]
    """Tools by name."""
    schemas: Sequence[Mapping[str, Any]]
    """JSON schemas of the tools."""
    blocking: bool
    """Whether the class has no async method, so that each turn runs in a single thread job."""
    seeded: bool
    """Whether ``reset`` takes a seed."""
    told: set[str]
    """Keys of the tool errors that were already logged."""


class ToolPlay:
    """An instance of the author's class and the state of its current episode.

    ``lost`` becomes True when a call is cancelled whose thread may still use the instance. The
    instance must then not be used again; its thread closes it when the call returns.
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
        self.lost = False

    async def open(self, task: Mapping[str, Any], seed: int) -> Opening:
        """Start an episode; the first call also creates the instance."""
        self._seed = seed
        self._calls = self._failures = 0
        self._mistakes = []
        return await self._run(partial(self._opening, task, seed))

    async def turn(self, message: AssistantMessage) -> Turn:
        """Run the tool calls of a turn and compute the reward."""
        return await self._run(partial(self._turn, message))

    async def reward_again(self) -> float:
        """Recompute the reward of the state after the last turn."""
        return await self._run(self._reward_again)

    async def close(self) -> None:
        """Close the instance, if one exists and has a ``close`` method."""
        if not self.lost and callable(self._own("close")):
            await self._run(partial(self._call, "close", {}))

    def _own(self, name: str) -> Any:
        """Return an optional attribute of the instance for the loader's own use; None if it is
        missing or is a tool."""
        return None if name in self._class.tools else getattr(self._instance, name, None)

    async def _opening(self, task: Mapping[str, Any], seed: int) -> Opening:
        self._method = "__init__"
        if self._instance is None:
            self._instance = self._make()
        row = {name: copied(value) for name, value in task.items()}
        if self._class.seeded:
            row.setdefault("seed", seed)
        text = await self._call("reset", row)
        if text is not None and not isinstance(text, str):
            raise BrokenContract(f"reset must return text or None, not {shown(text)}")
        messages = _with_text(messages_of(task.get("prompt", ""), "prompt"), whole_text(text or ""))
        if "prompt" in task and (problem := silence(messages)):
            raise BrokenContract(f"with what reset returned, the prompt {problem}")
        return Opening(messages, self._class.schemas, state_key=self._state_key())

    def _state_key(self) -> str:
        """Return the current ``state_key`` of the instance; "" if it has none."""
        self._method = "state_key"
        key = self._own("state_key")
        if callable(key):
            raise BrokenContract(
                "state_key must be text, which a function is not: make it a property"
            )
        return "" if key is None else checked(key, state_key_problems(key))

    async def _turn(self, message: AssistantMessage) -> Turn:
        if self._instance is None:
            raise BrokenContract("there is no episode: reset comes first")
        answers = [await self._answer(call) for call in message.tool_calls]
        if not message.tool_calls and (said := await self._user_reply(message)) is not None:
            answers = [{"role": "user", "content": said}]
        reward, components = checked_rewards(await self._call("get_reward", {}), "the reward")
        self._method = "done"
        done = getattr(self._instance, "done", False)
        if callable(done):
            raise BrokenContract(
                "done must be true or false, which a function is not: it would end no episode"
            )
        ended = not answers or bool(done)
        metrics = {
            "success": float(ended and reward >= SOLVED),  # success ends an episode
            "tool_calls": float(self._calls),
            "tool_failures": float(self._failures),
            TOOL_ERRORS: float(len(self._mistakes)),
        }
        self._method = "metrics"
        if (own := self._own("metrics")) is not None:
            metrics |= checked_numbers(
                await self._call("metrics", {}) if callable(own) else own, "metrics"
            )
        info: dict[str, Any] = {TOOL_ERRORS: [*self._mistakes]} if self._mistakes else {}
        self._method = "view"
        if isinstance(view := self._own("view"), Mapping):
            if problem := json_problem(view):
                raise BrokenContract(f"view: {problem}")
            info["view"] = copied(view)
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
        if not callable(self._own(USER_REPLY)):
            return None
        said = await self._call(USER_REPLY, {"text": message.content})
        if said is not None and not isinstance(said, str):
            raise BrokenContract(
                f"{USER_REPLY} must return text, or None to end the episode, not {shown(said)}"
            )
        return None if said is None else whole_text(said)

    async def _reward_again(self) -> float:
        return checked_rewards(await self._call("get_reward", {}), "the reward")[0]

    async def _answer(self, call: ToolCall) -> ChatMessage:
        """Run one tool call and return the ``tool`` message. Errors of the call are returned to the
        policy as text in TRL's format."""
        self._calls += 1
        try:
            if call.problem:
                raise ValueError(call.problem)
            if call.name not in self._class.tools:
                raise ValueError(unknown_tool(call.name, self._class.tools))
            tool = self._class.tools[call.name]
            arguments = arguments_for(tool, call.arguments)
            self._method = call.name
            try:
                result = str(await self._called(tool.bound(self._instance), arguments))
            except MISTAKES as error:
                self._note(error)
                raise
        except (EnvironmentFailure, MemoryError, BrokenContract):
            raise
        except Exception as error:
            self._failures += 1
            result = str({"error": _reason(error)})
        if len(result) > LONGEST_RESULT:
            result = (
                f"{result[:LONGEST_RESULT]}... ({len(result) - LONGEST_RESULT} more characters)"
            )
        name = whole_text(short(call.name)) or "unknown"
        message = {"role": "tool", "name": name, "content": whole_text(result)}
        return message | {"tool_call_id": call.id} if call.id else message

    def _note(self, error: Exception) -> None:
        """Record an error that points to a bug in a tool; log it once per source line."""
        told = f"{self._class.kind.__name__}.{self._method}: {raised(error, self._class.kind)}"
        self._mistakes.append(told)
        line = error.__traceback__
        while line is not None and line.tb_next is not None:
            line = line.tb_next
        place = f"{self._method} {type(error).__name__} {line.tb_lineno if line else 0}"
        if place not in self._class.told:
            self._class.told.add(place)
            logger.warning(
                "%s; the policy is told so as if the mistake were its own (seed %d)",
                told,
                self._seed,
            )

    async def _call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Call a method of the instance that is not a tool."""
        self._method = name
        return await self._called(getattr(self._instance, name), arguments)

    async def _called(self, method: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        if self._class.blocking:
            result = method(**arguments)
            if inspect.iscoroutine(result):
                result.close()
                raise BrokenContract(f"{self._method} must be written with async def")
            return result
        if inspect.iscoroutinefunction(method):
            return await method(**arguments)
        result = await self._in_thread(partial(self._in_a_thread_of_its_own, method, arguments))
        return await result if inspect.isawaitable(result) else result

    def _in_a_thread_of_its_own(
        self, method: Callable[..., Any], arguments: Mapping[str, Any]
    ) -> Any:
        """Call a method in a worker thread.

        An error that is not an ``Exception``, such as KeyboardInterrupt, becomes
        EnvironmentFailure, because on the event loop it would be mistaken for one of the loop's
        own.
        """
        try:
            return method(**arguments)
        except Exception:
            raise
        except BaseException as error:
            raise (
                failure_of(error, self._class.kind, self._method, self._seed, on_loop=False)
                or error
            ) from error

    async def _run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run the coroutine of ``work``: entirely in one thread if the class is blocking, else on
        the event loop."""
        if self._class.blocking:
            return await self._in_thread(lambda: _finished(self._guarded(work())))
        return await self._guarded(work())

    async def _in_thread(self, work: Callable[[], T]) -> T:
        try:
            return await self._threads.run(work, after=self._close_at_last)
        except asyncio.CancelledError:
            self.lost = True
            raise

    def _close_at_last(self) -> None:
        """Close the instance in the thread that used it last, unless ``close`` is a coroutine
        function."""
        close = self._own("close")
        if callable(close) and not inspect.iscoroutinefunction(close):
            close()

    async def _guarded(self, work: Awaitable[T]) -> T:
        with author_code(self._class.kind, self._called_now, on_loop=not self._class.blocking):
            return await work

    def _called_now(self) -> tuple[str, int]:
        return self._method, self._seed


def messages_of(prompt: Any, what: str) -> Sequence[ChatMessage]:
    """Return the messages of a prompt: a text becomes one user message, and messages are checked.

    Raises BrokenContract that begins with ``what`` for invalid values.
    """
    return (
        [{"role": "user", "content": prompt}]
        if isinstance(prompt, str)
        else checked_messages(prompt, what)
    )


def question_of(prompt: Any, what: str) -> Sequence[ChatMessage]:
    """Return the messages of a prompt that must ask the policy something. Raises BrokenContract
    that begins with ``what``."""
    messages = messages_of(prompt, what)
    if problem := silence(messages):
        raise BrokenContract(f"{what} {problem}")
    return messages


def _with_text(messages: Sequence[ChatMessage], text: str) -> Sequence[ChatMessage]:
    """Return the messages with ``text`` appended to the last user message, or as a new one if there
    is none."""
    if not text:
        return messages
    for number in range(len(messages) - 1, -1, -1):
        if messages[number]["role"] == "user":
            changed = {**messages[number], "content": messages[number]["content"] + text}
            return [*messages[:number], changed, *messages[number + 1 :]]
    return [*messages, {"role": "user", "content": text}]


def _reason(error: Exception) -> str:
    try:
        return str(error) or type(error).__name__
    except Exception:
        return type(error).__name__


def _finished(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends and return its result.

    Raises EnvironmentFailure("internal") if it suspends.
    """
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    work.close()
    raise EnvironmentFailure("internal", "a method without async waited for the event loop")


def tool_class(kind: type[Any]) -> EnvironmentDefinition:
    """Build the definition of a class with tools.

    Raises ValueError that names the line for a class without tools, a tool without type hints or
    docstring, and a ``get_reward`` that requires arguments.
    """
    about = read_class(kind)

    def plays(
        make: Callable[[], Any], concurrency: int | None
    ) -> Callable[[], ToolClassEnvironment]:
        """Return a factory of environments that share a thread pool."""
        threads = Threads(kind.__name__, max(MOST_THREADS, concurrency or 0))
        return lambda: ToolClassEnvironment(about, make, threads)

    seeded = "seed" in inspect.signature(kind.reset).parameters
    return class_definition(kind, plays, seeded=seeded, check=_check_prompt, tools=about.schemas)


def read_class(kind: type[Any]) -> ToolClass:
    """Inspect the methods of a class. Raises ValueError as ``tool_class`` does, and for a
    ``user_reply`` with a wrong signature."""
    tools = tools_of(kind)
    try:
        inspect.signature(kind.get_reward).bind(None)
    except TypeError as error:
        place = place_of(kind.get_reward)
        raise ValueError(
            f"{kind.__name__}.get_reward must take no arguments: {error} ({place})"
        ) from None
    if reply := getattr(kind, USER_REPLY, None):
        try:
            inspect.signature(reply).bind(None, text="")
        except TypeError as error:
            raise ValueError(
                f"{kind.__name__}.{USER_REPLY} must be {USER_REPLY}(self, text): {error} "
                f"({place_of(reply)})"
            ) from None
    methods = [tool.function for tool in tools.values()]
    others = ("reset", "get_reward", "close", "metrics", USER_REPLY)
    methods += [getattr(kind, name, None) for name in others if name not in tools]
    blocking = not any(
        inspect.iscoroutinefunction(inspect.unwrap(each)) for each in methods if callable(each)
    )
    schemas = tuple(tool.schema for tool in tools.values())
    return ToolClass(kind, tools, schemas, blocking, takes(kind.reset, "seed"), set())


class ToolClassEnvironment:
    """An environment that runs an instance of the author's class.

    Errors of tools and invalid calls are answered with a ``tool`` message, as in TRL. Errors and
    invalid return values of other methods, such as reset and get_reward, become
    EnvironmentFailure("internal") that names the class, the seed and the line. Every turn has the
    reward of the state after it, so the last reward is right whenever the episode ends.
    """

    def __init__(self, about: ToolClass, make: Callable[[], Any], threads: Threads) -> None:
        self._make_play = lambda: ToolPlay(about, make, threads)
        self._play = self._make_play()

    async def reset(self, task: Mapping[str, Any], *, seed: int) -> Opening:
        """Start an episode. An instance whose last call was cancelled is left to its thread and
        replaced."""
        if self._play.lost:
            self._play = self._make_play()
        return await self._play.open(task, seed)

    async def step(self, message: AssistantMessage) -> Turn:
        """Run the tool calls of a turn. A turn without calls gets the reply of ``user_reply``, or
        ends the episode if the class has none."""
        if self._play.lost:
            raise EnvironmentFailure(
                "lost",
                "the call before was cancelled and may still be running; reset starts a new one",
            )
        return await self._play.turn(message)

    async def reward_again(self) -> float:
        """Recompute the reward of the current state, which must equal that of the last turn."""
        return await self._play.reward_again()

    async def close(self) -> None:
        """Close the instance, if one exists and has a ``close`` method."""
        await self._play.close()


def _check_prompt(row: Row) -> None:
    try:
        messages_of(row.values.get("prompt", ""), "the column 'prompt'")
    except BrokenContract as error:
        raise ValueError(f"{row.where}: {error}") from None
