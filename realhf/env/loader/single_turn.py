"""Env format of a data set with a verifier: each row is a task of a single turn, and
``reward(completion, **row)`` returns the reward of the answer."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from realhf.api.environment import (
    AssistantMessage,
    EnvironmentDefinition,
    EnvironmentSpec,
    Opening,
    TaskSet,
    Turn,
)
from realhf.api.option import option
from realhf.base.text import suggest_names
from realhf.env.loader.author import (
    author_code,
    build_task_sets,
    read_attributes,
    source_file,
    source_location,
    tasks_function,
)
from realhf.env.loader.tasks import Row, RowOptions, extract_row_options, load_task_sets
from realhf.env.loader.threads import Threads
from realhf.env.loader.tool_env import SOLVED, read_question
from realhf.env.loader.validation import BrokenContract, copy_json, validate_rewards


@dataclass
class VerifierOptions:
    """A verifier whose file brings its questions by ``tasks(split)``."""

    prompt_column: str = option("prompt", "This column holds the question, as text or as messages.")


@dataclass
class DatasetOptions(VerifierOptions, RowOptions):
    """A data set with a verifier."""


class Verifier(NamedTuple):
    """A function that computes the reward of a completion."""

    function: Callable[..., Any]
    """The author's function."""
    completion_argument: str
    """Name of the argument that takes the completion; "" if it is positional only."""
    required_columns: tuple[str, ...]
    """Columns that the function requires, i.e. its arguments without a default."""
    accepted_columns: frozenset[str] | None
    """Columns that the function accepts; None if it accepts any (``**row``)."""
    is_async: bool
    """Whether the function is a coroutine function."""


def build_verifier(function: Callable[..., Any]) -> EnvironmentDefinition:
    """Build the definition of a verifier. Its rows come from ``env.data``, or from ``tasks(split)``
    in its module.

    Raises ValueError for a function whose first argument cannot be the completion.
    """
    verifier = read_verifier(function)
    tasks_source = tasks_function(function)
    attributes = (
        read_attributes(sys.modules[function.__module__])
        if function.__module__ in sys.modules
        else {}
    )

    def build(options: Any) -> EnvironmentSpec:
        """Build the EnvironmentSpec for these options. Raises ValueError without a data
        set."""
        threads = Threads(function.__name__)
        tasks = load_questions(verifier, options)
        return EnvironmentSpec(
            function.__name__,
            lambda _: VerifierEnvironment(verifier, options.prompt_column, threads),
            tasks,
            **attributes,
        )

    return EnvironmentDefinition(VerifierOptions if tasks_source else DatasetOptions, build)


def load_questions(verifier: Verifier, options: Any) -> Callable[[str], TaskSet]:
    """Return the function from split to task set of a verifier, for options with
    ``prompt_column`` and those of ``RowOptions``, if the verifier's module has no ``tasks(split)``.

    Raises ValueError without a data set, and for rows that the verifier cannot judge.
    """
    function = verifier.function
    check = partial(_check_row, verifier, options.prompt_column)
    if not getattr(options, "data", "") and (source := tasks_function(function)):
        return build_task_sets(source, function.__name__, options, seeded=False, check=check)
    if not options.data:
        raise ValueError(f"{function.__name__} judges answers, so it needs questions: set env.data")
    rows = extract_row_options(options)
    base_folder = Path(source_file(function)).parent
    key = lambda row: row[options.prompt_column]
    return load_task_sets(rows, base_folder, seeded=False, check=check, key=key)


def is_verifier(value: Any) -> bool:
    """Return whether an object is a function whose first argument is called ``completion``."""
    return (
        inspect.isfunction(value)
        and next(iter(inspect.signature(value).parameters), "") == "completion"
    )


def read_verifier(function: Callable[..., Any]) -> Verifier:
    """Inspect a verifier's arguments. Raises the errors of ``build_verifier``."""
    parameters = [*inspect.signature(function).parameters.values()]
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if not parameters or parameters[0].kind not in kinds:
        place = source_location(function)
        raise ValueError(
            f"{function.__name__} must take the completion first: reward(completion, **row) "
            f"({place})"
        )
    named_parameters = [
        each for each in parameters[1:] if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
    ]
    if wrong := [each.name for each in named_parameters if each.kind is each.POSITIONAL_ONLY]:
        raise ValueError(
            f"{function.__name__} must take the column {wrong[0]!r} by name "
            f"({source_location(function)})"
        )
    required_columns = tuple(each.name for each in named_parameters if each.default is each.empty)
    accepts_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
    accepted_columns = None if accepts_any else frozenset(each.name for each in named_parameters)
    is_named = parameters[0].kind is parameters[0].POSITIONAL_OR_KEYWORD
    return Verifier(
        function,
        parameters[0].name if is_named else "",
        required_columns,
        accepted_columns,
        inspect.iscoroutinefunction(inspect.unwrap(function)),
    )


class VerifierEnvironment:
    """Environment of a single turn: asks the question in a row and judges the answer."""

    def __init__(self, verifier: Verifier, prompt_column: str, threads: Threads) -> None:
        self._verifier = verifier
        self._prompt_column = prompt_column
        self._threads = threads
        self._row: Mapping[str, Any] = {}
        self._seed = 0

    async def reset(self, task: Mapping[str, Any], *, seed: int) -> Opening:
        """Return the question of the row ``task``; the seed has no effect."""
        accepted_columns = self._verifier.accepted_columns
        self._row = {
            name: value
            for name, value in task.items()
            if accepted_columns is None or name in accepted_columns
        }
        self._seed = seed
        with self._author_code():
            if self._prompt_column not in task:
                raise BrokenContract(f"the row has no column {self._prompt_column!r}")
            return Opening(read_question(task[self._prompt_column], self._prompt_column))

    async def step(self, message: AssistantMessage) -> Turn:
        """Return the final turn with the reward of the answer. The policy's reasoning is not
        judged."""
        judge = partial(self._verifier.function, message.content, **copy_json(self._row))
        with self._author_code():
            if self._verifier.is_async:
                result = await judge()
            else:
                result = await self._threads.run(partial(self._judge_in_thread, judge))
                result = await result if inspect.isawaitable(result) else result
            reward, components = validate_rewards(result, "the reward")
        return Turn((), True, reward, components, {"success": float(reward >= SOLVED)}, final=True)

    async def close(self) -> None:
        """Do nothing: there are no resources to release."""

    def _judge_in_thread(self, judge: Callable[[], Any]) -> Any:
        """Call the verifier in a worker thread, where its errors cannot be confused with the event
        loop's own."""
        with self._author_code(on_loop=False):
            return judge()

    def _author_code(self, *, on_loop: bool = True) -> AbstractContextManager[None]:
        return author_code(self._verifier.function, lambda: ("", self._seed), on_loop=on_loop)


def _check_row(verifier: Verifier, prompt_column: str, row: Row) -> None:
    """Raise ValueError for a row with which the verifier cannot be called, or that has no
    question."""
    for column in (prompt_column, *verifier.required_columns):
        if column not in row.values:
            raise ValueError(
                f"{row.where}: the row has no column {column!r}{suggest_names(column, [*row.values])}"
            )
    if verifier.completion_argument in row.values and (
        verifier.accepted_columns is None
        or verifier.completion_argument in verifier.accepted_columns
    ):
        raise ValueError(
            f"{row.where}: the column {verifier.completion_argument!r} has the name of the "
            f"verifier's first "
            f"argument"
        )
    try:
        read_question(row.values[prompt_column], f"the column {prompt_column!r}")
    except BrokenContract as error:
        raise ValueError(f"{row.where}: {error}") from None
