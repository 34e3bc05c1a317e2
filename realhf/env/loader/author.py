"""Looks at what an author wrote, and turns what it raised into the failure of an episode that names
the line."""

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
"""What a class or module may say of its environment by attributes: what holds without one, and what
it must be."""


def file_of(thing: Any) -> str:
    """The file in which a class or function is written, "" if there is none."""
    module = sys.modules.get(getattr(thing, "__module__", ""))
    return getattr(module, "__file__", None) or ""


def place_of(thing: Any) -> str:
    """``env.py, line 12``: where a class or function begins."""
    thing = inspect.unwrap(thing) if callable(thing) else thing
    try:
        if code := getattr(thing, "__code__", None):
            return f"{code.co_filename}, line {code.co_firstlineno}"
        return f"{file_of(thing)}, line {inspect.getsourcelines(thing)[1]}"
    except (OSError, TypeError):
        return file_of(thing) or repr(thing)


def raised(error: BaseException, thing: Any) -> str:
    """The error in one line, with the line of the author's file, or that of a base class, where it
    arose."""
    files = {file_of(each) for each in (thing.__mro__ if isinstance(thing, type) else (thing,))}
    frames = [
        frame.filename
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename in files
    ]
    return located(error, frames[-1] if frames else file_of(thing))


def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether a function can be called with this keyword."""
    parameters = inspect.signature(function).parameters
    keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    if name in parameters and parameters[name].kind in keyword:
        return True
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())


def own_options(kind: type[Any]) -> type[Any] | None:
    """The nested dataclass ``Options`` of a class. Raises ValueError when it is something else."""
    found = getattr(kind, "Options", None)
    if found is None:
        return None
    if not (isinstance(found, type) and is_dataclass(found)):
        raise ValueError(f"{kind.__name__}.Options must be a dataclass ({place_of(kind)})")
    return found


def attributes_of(kind: Any) -> dict[str, Any]:
    """Read the ``ATTRIBUTES`` of a class or module. Raises ValueError for one of another type."""
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
    """The definition of a class. Its options are those of its nested dataclass ``Options`` and,
    where neither it nor its module brings ``tasks(split)``, those that say where rows come from.
    ``plays`` is given what makes an instance of the class, and its ``concurrency``, and returns
    what makes an environment. ``seeded``: its reset draws from the seed what a row leaves open.
    ``check`` raises ValueError for a row that will not do; ``tools`` are the schemas of its tools.
    Raises ValueError for what the class declares wrongly."""
    own, function, attributes = own_options(kind), tasks_function(kind), attributes_of(kind)
    options = own or NoOptions
    if function is None and "data" not in {each.name for each in fields(options)}:
        options = _with_rows(options)

    def tasks(chosen: Any) -> Callable[[str], TaskSet]:
        """Return what makes the task set of a split, for these options."""
        if function is not None:
            return sets_of(function, kind.__name__, chosen, seeded=seeded, check=check)
        if options is not own and (rows := row_options(chosen)).data:
            return tasks_of_data(rows, Path(file_of(kind)).parent, seeded=seeded, check=check)
        return partial(SeedTaskSet, kind.__name__)

    def build(chosen: Any) -> EnvironmentSpec:
        """Return the environment for these options."""
        make = plays(kind if own is None else partial(kind, chosen), attributes["concurrency"])
        return EnvironmentSpec(
            kind.__name__, lambda _: make(), tasks(chosen), tools=tools, **attributes
        )

    return EnvironmentDefinition(options, build)


def _with_rows(options: type[Any]) -> type[Any]:
    """The dataclass with the options of ``RowOptions`` added that it lacks; its instances are the
    original's, too."""
    known = {each.name for each in fields(options)}
    added = [
        (each.name, each.type, field(default=each.default, metadata=each.metadata, kw_only=True))
        for each in fields(RowOptions)
        if each.name not in known
    ]
    frozen = options.__dataclass_params__.frozen
    return make_dataclass(options.__name__, added, bases=(options,), frozen=frozen)


def tasks_function(thing: type[Any] | Callable[..., Any]) -> Callable[..., Any] | None:
    """``tasks`` of a class, or else of the module of a class or function. Raises ValueError for one
    that needs an instance."""
    raw = inspect.getattr_static(thing, "tasks", None)
    if raw is None:
        found = getattr(sys.modules.get(thing.__module__), "tasks", None)
        return found if inspect.isroutine(found) else None
    _check_static(thing, "tasks")
    return thing.tasks  # type: ignore[attr-defined]


def _check_static(thing: Any, name: str) -> None:
    """Raise ValueError for a method that needs an instance where there is none."""
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
    """Call the author's ``tasks(split)``, or ``tasks(split, options)`` if it takes two. The result
    raises ValueError that names the line for what the function raises, or returns against the
    contract."""
    what = f"tasks of {name} ({place_of(function)})"
    given = (chosen,) if len(inspect.signature(function).parameters) > 1 else ()
    places: dict[str, str] = {}

    def tasks(split: str) -> TaskSet:
        """Return the task set of a split. Raises ValueError with the line of the author's
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
    """Let what the code of ``author``, a class or function, raises within be
    ``EnvironmentFailure``; ``called`` says which method is called, "" for a function, and the seed
    of the episode. See ``failure_of``."""
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
    """Return the failure for an error from an author's code; None for an error that must be passed
    on: a failure already, or, on an event loop, what the loop and not the author raised. It names
    the episode without its payload, which may hold the answer: failures travel to clients."""
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
    """Whether this task was cancelled; an author's code may raise CancelledError, too."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0
