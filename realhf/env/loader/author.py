"""Helpers that inspect an author's class or function and turn its errors into episode failures that
name the source line."""

from __future__ import annotations

import asyncio
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass
from functools import partial
from pathlib import Path
from typing import Any

from realhf.api.environment import (
    Environment,
    EnvironmentDefinition,
    EnvironmentFailure,
    EnvironmentSpec,
    TaskSet,
)
from realhf.base.plugin import describe_user_error
from realhf.env.loader.tasks import (
    Row,
    RowOptions,
    SeedTaskSet,
    extract_row_options,
    load_task_sets,
    to_task_set,
)
from realhf.env.loader.validation import BrokenContract

ATTRIBUTES: Mapping[str, tuple[Any, Callable[[Any], bool], str]] = {
    "system_prompt": ("", lambda value: isinstance(value, str), "text"),
    "concurrency": (
        None,
        lambda value: value is None or (type(value) is int and value > 0),
        "a positive number or None",
    ),
    "deterministic": (True, lambda value: isinstance(value, bool), "true or false"),
    "demonstrate": (None, lambda value: value is None or callable(value), "a static method"),
}
"""Attributes by which a class or module describes its environment. Each name maps to (default,
check of a value, expected type in words for messages)."""


def source_file(thing: Any) -> str:
    """Return the path of the file that defines a class or function; "" if there is none."""
    module = sys.modules.get(getattr(thing, "__module__", ""))
    return getattr(module, "__file__", None) or ""


def source_location(thing: Any) -> str:
    """Return the file and line where a class or function is defined, such as ``env.py, line
    12``."""
    thing = inspect.unwrap(thing) if callable(thing) else thing
    try:
        if code := getattr(thing, "__code__", None):
            return f"{code.co_filename}, line {code.co_firstlineno}"
        return f"{source_file(thing)}, line {inspect.getsourcelines(thing)[1]}"
    except (OSError, TypeError):
        return source_file(thing) or repr(thing)


def format_error(error: BaseException, thing: Any) -> str:
    """Format an error in one line, with the line where it was raised in the file of ``thing`` or of
    one of its base classes."""
    files = {source_file(each) for each in (thing.__mro__ if isinstance(thing, type) else (thing,))}
    frames = [
        frame.filename
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename in files
    ]
    return describe_user_error(error, frames[-1] if frames else source_file(thing))


def accepts_keyword(function: Callable[..., Any], name: str) -> bool:
    """Return whether a function can be called with this keyword argument."""
    parameters = inspect.signature(function).parameters
    keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    if name in parameters and parameters[name].kind in keyword:
        return True
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())


def find_options(kind: type[Any]) -> type[Any] | None:
    """Return the nested dataclass ``Options`` of a class; None if there is none.

    Raises ValueError if ``Options`` is not a dataclass.
    """
    options = getattr(kind, "Options", None)
    if options is None:
        return None
    if not (isinstance(options, type) and is_dataclass(options)):
        raise ValueError(f"{kind.__name__}.Options must be a dataclass ({source_location(kind)})")
    return options


def read_attributes(kind: Any) -> dict[str, Any]:
    """Return the ``ATTRIBUTES`` of a class or module by name, with defaults for missing ones.

    Raises ValueError for a value of the wrong type.
    """
    attributes = {
        name: getattr(kind, name, default) for name, (default, _, _) in ATTRIBUTES.items()
    }
    for name, (_, is_valid, expected) in ATTRIBUTES.items():
        if not is_valid(attributes[name]):
            raise ValueError(
                f"{name} of {kind.__name__} must be {expected}, not {attributes[name]!r} "
                f"({source_location(kind)})"
            )
    _check_static(kind, "demonstrate")
    return attributes


@dataclass
class NoOptions:
    """Options of an environment that has none."""


def build_class_definition(
    kind: type[Any],
    make_factory: Callable[[Callable[[], Any], int | None], Callable[[], Environment]],
    *,
    seeded: bool,
    check: Callable[[Row], None] = lambda row: None,
    tools: Sequence[Mapping[str, Any]] = (),
) -> EnvironmentDefinition:
    """Build the definition of an environment class.

    Its options are those of the nested dataclass ``Options``. If neither the class nor its module
    has ``tasks(split)``, the options that select a data set (``RowOptions``) are added. Raises
    ValueError for a wrong declaration in the class.

    Args:
        kind: The author's class.
        make_factory: (factory of instances of the class, ``concurrency``) -> factory of environments.
        seeded: Whether ``reset`` uses the seed to draw what a row leaves open.
        check: Raises ValueError for an unusable row.
        tools: The JSON schemas of the tools of the class.
    """
    declared, function, attributes = find_options(kind), tasks_function(kind), read_attributes(kind)
    options = declared or NoOptions
    if function is None and "data" not in {each.name for each in fields(options)}:
        options = _add_row_options(options)

    def tasks(values: Any) -> Callable[[str], TaskSet]:
        """Return the factory of task sets, by split, for these options."""
        if function is not None:
            return build_task_sets(function, kind.__name__, values, seeded=seeded, check=check)
        if options is not declared and (rows := extract_row_options(values)).data:
            return load_task_sets(rows, Path(source_file(kind)).parent, seeded=seeded, check=check)
        return partial(SeedTaskSet, kind.__name__)

    def build(values: Any) -> EnvironmentSpec:
        """Build the EnvironmentSpec for these options."""
        make = make_factory(
            kind if declared is None else partial(kind, values), attributes["concurrency"]
        )
        return EnvironmentSpec(
            kind.__name__, lambda _: make(), tasks(values), tools=tools, **attributes
        )

    return EnvironmentDefinition(options, build)


def _add_row_options(options: type[Any]) -> type[Any]:
    """Return a subclass of the dataclass with the options of ``RowOptions`` that it lacks."""
    names = {each.name for each in fields(options)}
    added = [
        (each.name, each.type, field(default=each.default, metadata=each.metadata, kw_only=True))
        for each in fields(RowOptions)
        if each.name not in names
    ]
    frozen = options.__dataclass_params__.frozen
    return make_dataclass(options.__name__, added, bases=(options,), frozen=frozen)


def tasks_function(thing: type[Any] | Callable[..., Any]) -> Callable[..., Any] | None:
    """Return ``tasks`` of a class, or else of the module of a class or function; None if there is
    none.

    Raises ValueError for a method that needs an instance.
    """
    raw = inspect.getattr_static(thing, "tasks", None)
    if raw is None:
        function = getattr(sys.modules.get(thing.__module__), "tasks", None)
        return function if inspect.isroutine(function) else None
    _check_static(thing, "tasks")
    return thing.tasks  # type: ignore[attr-defined]


def _check_static(thing: Any, name: str) -> None:
    """Raise ValueError if an attribute of a class is an instance method and not a static method."""
    raw = inspect.getattr_static(thing, name, None)
    if inspect.isfunction(raw) and "self" in inspect.signature(raw).parameters:
        raise ValueError(
            f"{thing.__name__}.{name} must be a static method ({source_location(raw)})"
        )


def build_task_sets(
    function: Callable[..., Any],
    name: str,
    options: Any,
    *,
    seeded: bool,
    check: Callable[[Row], None],
) -> Callable[[str], TaskSet]:
    """Return a function from split to task set. It calls the author's ``tasks(split)``, or
    ``tasks(split, options)`` if that takes two arguments.

    The returned function raises ValueError, naming the line, if the author's function raises an
    error, returns an invalid value or has no task for the split.
    """
    description = f"tasks of {name} ({source_location(function)})"
    extra_arguments = (options,) if len(inspect.signature(function).parameters) > 1 else ()
    places: dict[str, str] = {}

    def tasks(split: str) -> TaskSet:
        """Return the task set of a split. Raises ValueError that names the line of the author's
        function."""
        try:
            result = function(split, *extra_arguments)
            if inspect.isgenerator(result):
                result = [*result]
        except Exception as error:
            raise ValueError(
                f"{description}, split {split!r}: {format_error(error, function)}"
            ) from None
        task_set = to_task_set(
            result, f"{description}, split {split!r}", seeded=seeded, check=check, places=places
        )
        if not task_set.group_of:
            raise ValueError(f"{description}: the split {split!r} has no task")
        return task_set

    return tasks


@contextmanager
def author_code(
    author: Any, current_call: Callable[[], tuple[str, int]], *, on_loop: bool = True
) -> Iterator[None]:
    """Convert errors of the code of ``author`` into EnvironmentFailure within a ``with`` block (see
    ``build_failure``).

    Args:
        author: The author's class or function.
        current_call: Returns the name of the method that is running ("" for a function) and the seed of
            the episode.
        on_loop: Whether the code runs on an event loop.
    """
    try:
        yield
    except BaseException as error:
        failure = build_failure(error, author, *current_call(), on_loop=on_loop)
        if failure is None:
            raise
        raise failure from error


def build_failure(
    error: BaseException, author: Any, method: str, seed: int, *, on_loop: bool = True
) -> EnvironmentFailure | None:
    """Return the EnvironmentFailure for an error from an author's code; None for an error that must
    be re-raised unchanged.

    Errors to re-raise are EnvironmentFailure and, on an event loop, KeyboardInterrupt,
    GeneratorExit and the cancellation of the task. The message names the episode by its seed and
    omits its payload, because failures are sent to clients and the payload may contain the answer.
    """
    if isinstance(error, EnvironmentFailure):
        return None
    where = f"{author.__name__}{method and f'.{method}'} (seed {seed})"
    if isinstance(error, BrokenContract):
        method_object = getattr(author, method, None)
        return EnvironmentFailure(
            "internal",
            f"{where}: {error} "
            f"({source_location(method_object if inspect.isroutine(method_object) else author)})",
        )
    if on_loop and (
        isinstance(error, (KeyboardInterrupt, GeneratorExit)) or _is_cancellation(error)
    ):
        return None
    return EnvironmentFailure("internal", f"{where}: {format_error(error, author)}")


def _is_cancellation(error: BaseException) -> bool:
    """Return whether the current task was cancelled; False for a CancelledError that the author's
    code raised by itself."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0
