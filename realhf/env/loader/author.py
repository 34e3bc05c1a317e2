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
from realhf.base.plugin import located
from realhf.env.loader.tasks import Row, RowOptions, SeedTaskSet, row_options, set_of, tasks_of_data
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
"""Attributes by which a class or module describes its environment: name -> (default, check of a
value, expected type in words for messages)."""


def file_of(thing: Any) -> str:
    """Return the path of the file that defines a class or function; "" if there is none."""
    module = sys.modules.get(getattr(thing, "__module__", ""))
    return getattr(module, "__file__", None) or ""


def place_of(thing: Any) -> str:
    """Return the file and line where a class or function is defined, such as ``env.py, line
    12``."""
    thing = inspect.unwrap(thing) if callable(thing) else thing
    try:
        if code := getattr(thing, "__code__", None):
            return f"{code.co_filename}, line {code.co_firstlineno}"
        return f"{file_of(thing)}, line {inspect.getsourcelines(thing)[1]}"
    except (OSError, TypeError):
        return file_of(thing) or repr(thing)


def raised(error: BaseException, thing: Any) -> str:
    """Format an error in one line, with the line in the file of ``thing``, or of one of its base
    classes, where it was raised."""
    files = {file_of(each) for each in (thing.__mro__ if isinstance(thing, type) else (thing,))}
    frames = [
        frame.filename
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename in files
    ]
    return located(error, frames[-1] if frames else file_of(thing))


def takes(function: Callable[..., Any], name: str) -> bool:
    """Return whether a function can be called with this keyword argument."""
    parameters = inspect.signature(function).parameters
    keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    if name in parameters and parameters[name].kind in keyword:
        return True
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())


def own_options(kind: type[Any]) -> type[Any] | None:
    """Return the nested dataclass ``Options`` of a class; None if there is none.

    Raises ValueError if ``Options`` is not a dataclass.
    """
    found = getattr(kind, "Options", None)
    if found is None:
        return None
    if not (isinstance(found, type) and is_dataclass(found)):
        raise ValueError(f"{kind.__name__}.Options must be a dataclass ({place_of(kind)})")
    return found


def attributes_of(kind: Any) -> dict[str, Any]:
    """Return the ``ATTRIBUTES`` of a class or module by name, with defaults for missing ones.

    Raises ValueError for a value of the wrong type.
    """
    found = {name: getattr(kind, name, default) for name, (default, _, _) in ATTRIBUTES.items()}
    for name, (_, holds, expected) in ATTRIBUTES.items():
        if not holds(found[name]):
            raise ValueError(
                f"{name} of {kind.__name__} must be {expected}, not {found[name]!r} "
                f"({place_of(kind)})"
            )
    _check_static(kind, "demonstrate")
    return found


@dataclass
class NoOptions:
    """The options of an environment that has none."""


def class_definition(
    kind: type[Any],
    plays: Callable[[Callable[[], Any], int | None], Callable[[], Environment]],
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
        plays: (factory of instances of the class, ``concurrency``) -> factory of environments.
        seeded: Whether ``reset`` uses the seed to draw what a row leaves open.
        check: Raises ValueError for an unusable row.
        tools: The JSON schemas of the tools of the class.
    """
    own, function, attributes = own_options(kind), tasks_function(kind), attributes_of(kind)
    options = own or NoOptions
    if function is None and "data" not in {each.name for each in fields(options)}:
        options = _with_rows(options)

    def tasks(chosen: Any) -> Callable[[str], TaskSet]:
        """Return the factory of task sets, by split, for these options."""
        if function is not None:
            return sets_of(function, kind.__name__, chosen, seeded=seeded, check=check)
        if options is not own and (rows := row_options(chosen)).data:
            return tasks_of_data(rows, Path(file_of(kind)).parent, seeded=seeded, check=check)
        return partial(SeedTaskSet, kind.__name__)

    def build(chosen: Any) -> EnvironmentSpec:
        """Build the EnvironmentSpec for these options."""
        make = plays(kind if own is None else partial(kind, chosen), attributes["concurrency"])
        return EnvironmentSpec(
            kind.__name__, lambda _: make(), tasks(chosen), tools=tools, **attributes
        )

    return EnvironmentDefinition(options, build)


def _with_rows(options: type[Any]) -> type[Any]:
    """Return a subclass of the dataclass with the options of ``RowOptions`` that it lacks."""
    known = {each.name for each in fields(options)}
    added = [
        (each.name, each.type, field(default=each.default, metadata=each.metadata, kw_only=True))
        for each in fields(RowOptions)
        if each.name not in known
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
        found = getattr(sys.modules.get(thing.__module__), "tasks", None)
        return found if inspect.isroutine(found) else None
    _check_static(thing, "tasks")
    return thing.tasks  # type: ignore[attr-defined]


def _check_static(thing: Any, name: str) -> None:
    """Raise ValueError if an attribute of a class is an instance method and not a static method."""
    raw = inspect.getattr_static(thing, name, None)
    if inspect.isfunction(raw) and "self" in inspect.signature(raw).parameters:
        raise ValueError(f"{thing.__name__}.{name} must be a static method ({place_of(raw)})")


def sets_of(
    function: Callable[..., Any],
    name: str,
    chosen: Any,
    *,
    seeded: bool,
    check: Callable[[Row], None],
) -> Callable[[str], TaskSet]:
    """Return a function split -> task set that calls the author's ``tasks(split)``, or
    ``tasks(split, options)`` if it takes two arguments.

    The returned function raises ValueError, naming the line, if the author's function raises,
    returns an invalid value or has no task for the split.
    """
    what = f"tasks of {name} ({place_of(function)})"
    given = (chosen,) if len(inspect.signature(function).parameters) > 1 else ()
    places: dict[str, str] = {}

    def tasks(split: str) -> TaskSet:
        """Return the task set of a split. Raises ValueError that names the line of the author's
        function."""
        try:
            found = function(split, *given)
            if inspect.isgenerator(found):
                found = [*found]
        except Exception as error:
            raise ValueError(f"{what}, split {split!r}: {raised(error, function)}") from None
        made = set_of(found, f"{what}, split {split!r}", seeded=seeded, check=check, places=places)
        if not made.group_of:
            raise ValueError(f"{what}: the split {split!r} has no task")
        return made

    return tasks


@contextmanager
def author_code(
    author: Any, called: Callable[[], tuple[str, int]], *, on_loop: bool = True
) -> Iterator[None]:
    """Convert errors of the code of ``author`` into EnvironmentFailure within a ``with`` block (see
    ``failure_of``).

    Args:
        author: The author's class or function.
        called: Returns the name of the method that is running ("" for a function) and the seed of
            the episode.
        on_loop: Whether the code runs on an event loop.
    """
    try:
        yield
    except BaseException as error:
        failure = failure_of(error, author, *called(), on_loop=on_loop)
        if failure is None:
            raise
        raise failure from error


def failure_of(
    error: BaseException, author: Any, method: str, seed: int, *, on_loop: bool = True
) -> EnvironmentFailure | None:
    """Return the EnvironmentFailure for an error from an author's code; None for an error that must
    be re-raised unchanged.

    The latter are an EnvironmentFailure and, on an event loop, KeyboardInterrupt, GeneratorExit and
    the cancellation of the task. The message names the episode by its seed without its payload,
    because failures are sent to clients and the payload may contain the answer.
    """
    if isinstance(error, EnvironmentFailure):
        return None
    where = f"{author.__name__}{method and f'.{method}'} (seed {seed})"
    if isinstance(error, BrokenContract):
        broken = getattr(author, method, None)
        return EnvironmentFailure(
            "internal",
            f"{where}: {error} ({place_of(broken if inspect.isroutine(broken) else author)})",
        )
    if on_loop and (
        isinstance(error, (KeyboardInterrupt, GeneratorExit)) or _is_cancellation(error)
    ):
        return None
    return EnvironmentFailure("internal", f"{where}: {raised(error, author)}")


def _is_cancellation(error: BaseException) -> bool:
    """Return whether the current task was cancelled; False for a CancelledError that the author's
    code raised by itself."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0
