"""Finds an environment by name, or in a person's own file or module, whichever of the doors it comes through."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from types import ModuleType
from typing import Any

from realhf.api.config.option import problems
from realhf.api.environment import EnvironmentDefinition, EnvironmentSpec
from realhf.base.close_names import close_to
from realhf.base.plugin import imported, load_reference, split_reference
from realhf.builtins import environments, registered_names
from realhf.env.doors.author import NoOptions, place_of, raised
from realhf.env.doors.dataset import dataset, is_verifier
from realhf.env.doors.message_class import message_class
from realhf.env.doors.tool_class import tool_class
from realhf.env.doors.values import coerced

EXPECTED = (
    "an EnvironmentDefinition, an EnvironmentSpec, a class with reset and get_reward, a class with async "
    "reset(task, *, seed) and step(message), or a function reward(completion, **row)"
)
MOST_PROBLEMS = 8


def definition_of(reference: str) -> EnvironmentDefinition:
    """Return the environment that ``reference`` means: a registered name, ``file.py:Name``, ``package.module:Name``, or
    ``file.py`` if it holds one environment. Raises ValueError with one sentence that says what is wrong and where."""
    if reference in environments:
        return _definition(imported(reference, lambda: environments.get(reference)), reference)
    if not split_reference(reference).place:
        known = close_to(reference, [*environments])
        raise ValueError(f"unknown environment {reference!r}{known}; one of your own is file.py:Name or module:Name")
    module, name = load_reference(reference)
    if not name:
        return _only_one(module, reference)
    return _definition(getattr(module, name), reference)


def build_environment(reference: str, options: Mapping[str, Any]) -> EnvironmentSpec:
    """Return the specification of the environment that ``reference`` means, with these options as plain values. Raises
    ValueError with one sentence: what ``definition_of`` raises, an option that is unknown or cannot be, or what the
    environment itself finds wrong with its options."""
    definition = definition_of(reference)
    try:
        chosen = coerced(options, definition.options, "env")
        wrong = [*problems(chosen, "env", registered_names)]
        if wrong:
            more = f"; and {len(wrong) - MOST_PROBLEMS} more" if len(wrong) > MOST_PROBLEMS else ""
            raise ValueError("; ".join(wrong[:MOST_PROBLEMS]) + more)
        spec = definition.build(chosen)
    except ValueError as error:
        raise ValueError(f"{reference}: {error}") from None
    except Exception as error:
        raise ValueError(f"{reference}: {raised(error, definition.build)}") from error
    if not isinstance(spec, EnvironmentSpec):
        raise ValueError(f"{reference}: build must return an EnvironmentSpec, not {type(spec).__name__}")
    return spec


def _definition(found: Any, reference: str) -> EnvironmentDefinition:
    try:
        kind = _door(found)
        if kind is None:
            raise ValueError(f"found {_described(found)}, expected {EXPECTED}")
        definition = kind(found)
    except ValueError as error:
        raise ValueError(f"{reference}: {error}") from None
    except Exception as error:
        raise ValueError(f"{reference}: {raised(error, found)}") from error
    if not (isinstance(definition.options, type) and is_dataclass(definition.options)):
        raise ValueError(f"{reference}: options must be a dataclass, not {definition.options!r}")
    return definition


def _door(found: Any) -> Callable[[Any], EnvironmentDefinition] | None:
    """What makes a definition of an object, None for an object that is no environment."""
    if isinstance(found, EnvironmentDefinition):
        return lambda definition: definition
    if isinstance(found, EnvironmentSpec):
        return lambda spec: EnvironmentDefinition(NoOptions, lambda _: spec)
    if isinstance(found, type) and callable(getattr(found, "reset", None)):
        if callable(getattr(found, "get_reward", None)):
            return tool_class
        return message_class if callable(getattr(found, "step", None)) else None
    return dataset if inspect.isfunction(found) else None


def _only_one(module: ModuleType, reference: str) -> EnvironmentDefinition:
    """The one environment that a file defines. Definitions and specifications come first: a file that holds one has
    said what it is about; then classes, then functions whose first argument is called ``completion``."""
    public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    finished = {name: v for name, v in public.items() if isinstance(v, (EnvironmentDefinition, EnvironmentSpec))}
    own = {name: value for name, value in public.items() if getattr(value, "__module__", "") == module.__name__}
    classes = {name: value for name, value in own.items() if isinstance(value, type) and _door(value)}
    found = finished or classes or {name: value for name, value in own.items() if is_verifier(value)}
    if len(found) != 1:
        what = f"the environments {', '.join(found)}; name one: {reference}:NAME" if found else f"nothing of {EXPECTED}"
        raise ValueError(f"{reference}: the file defines {what}")
    return _definition(next(iter(found.values())), reference)


def _described(found: Any) -> str:
    if isinstance(found, type):
        methods = [name for name in ("reset", "step", "get_reward", "close") if callable(getattr(found, name, None))]
        return f"the class {found.__name__} with {', '.join(methods) or 'none of these methods'} ({place_of(found)})"
    return f"the function {found.__name__} ({place_of(found)})" if inspect.isfunction(found) else type(found).__name__
