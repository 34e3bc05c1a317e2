"""Lookup of environments by registered name or by the user's own file or module, and parsing of
their options."""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

from realhf.api.environment import EnvironmentDefinition, EnvironmentSpec
from realhf.api.option import problems, with_path, with_section
from realhf.api.passport import ENDING
from realhf.base.dataclass_json import to_json_value
from realhf.base.plugin import import_user_code, load_reference, split_reference
from realhf.base.text import suggest_names
from realhf.env.loader.author import NoOptions, format_error, source_location
from realhf.env.loader.mixture import define_mixture, name_members, split_mixture
from realhf.env.loader.multi_turn import build_message_class
from realhf.env.loader.reference import absolute_environment, split_scheme
from realhf.env.loader.single_turn import build_verifier, is_verifier
from realhf.env.loader.tool_env import build_tool_class
from realhf.env.loader.validation import coerce
from realhf.registry import environments, registered_names


def parse_options(texts: Sequence[str]) -> dict[str, Any]:
    """Parse options such as ``["size=3", "names=[1, 2]"]`` into a map from name to value.

    Lists, maps and ``null`` are parsed as JSON; other values stay text, which ``build_environment``
    converts by the type hints of the environment's options. Raises ValueError for text without "="
    or name, a repeated option or invalid JSON.
    """
    options: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.strip().removeprefix("env.")
        if not equals or not name:
            raise ValueError(f"{text!r} is not an option: write option=value")
        if name in options:
            raise ValueError(f"the option {name!r} is given twice")
        options[name] = (
            _json_value(value, name) if value[:1] in ("[", "{") or value == "null" else value
        )
    return options


def _json_value(text: str, name: str) -> Any:
    """Parse a JSON value. Raises ValueError; the message begins with ``name``."""
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deep"
        raise ValueError(f"{name}: {text[:60]!r} is no JSON: {reason}") from None


EXPECTED = (
    "an EnvironmentDefinition, an EnvironmentSpec, a class with reset and get_reward, a class with "
    "async "
    "reset(task, *, seed) and step(message), or a function reward(completion, **row)"
)
"""Supported kinds of objects, for error messages."""
MAX_PROBLEMS = 8
"""Maximum number of option errors listed in one message."""


def load_definition(reference: str) -> EnvironmentDefinition:
    """Return the definition of the environment that ``reference`` names: a registered name,
    ``file.py:Name``, ``package.module:Name``, ``file.py`` if it defines exactly one environment,
    ``harbor:`` with the folder of Harbor tasks, or ``mcp:`` with the command or address of an MCP
    server. The reference of a mixture is a list of these (``mixture_reference``).

    Raises ValueError whose message is one sentence that says what is wrong and where.
    """
    if members := split_mixture(reference):
        named = name_members(members)
        return define_mixture(
            members, {name: load_definition(each) for name, each in named.items()}
        )
    if reference in environments:
        return _build_definition(
            import_user_code(reference, lambda: environments.get(reference)), reference
        )
    if scheme := split_scheme(reference):
        return _complete_definition(load_definition(scheme[0]), scheme[1])
    if not split_reference(reference).place:
        suggestion = suggest_names(reference, [*environments])
        raise ValueError(
            f"unknown environment {reference!r}{suggestion}; one of your own is file.py:Name or "
            f"module:Name"
        )
    module, name = load_reference(reference)
    if not name:
        return _load_only_definition(module, reference)
    return _build_definition(getattr(module, name), reference)


def build_environment(reference: str, options: Mapping[str, Any]) -> EnvironmentSpec:
    """Build the specification of the environment that ``reference`` names. ``options``: its options
    as plain values.

    Raises the errors of ``load_definition``, and ValueError for an unknown or invalid option or an
    error in the environment's own ``build``.
    """
    definition = load_definition(reference)
    try:
        values = coerce(options, definition.options, "env")
        errors = [*problems(values, "env", registered_names)]
        if errors:
            more = f"; and {len(errors) - MAX_PROBLEMS} more" if len(errors) > MAX_PROBLEMS else ""
            raise ValueError("; ".join(errors[:MAX_PROBLEMS]) + more)
        spec = definition.build(values)
    except ValueError as error:
        raise ValueError(f"{reference}: {error}") from None
    except Exception as error:
        raise ValueError(f"{reference}: {format_error(error, definition.build)}") from error
    if not isinstance(spec, EnvironmentSpec):
        raise ValueError(
            f"{reference}: build must return an EnvironmentSpec, not {type(spec).__name__}"
        )
    return spec


def _complete_definition(definition: EnvironmentDefinition, value: str) -> EnvironmentDefinition:
    """Return the definition with ``value`` for the option that it needs."""
    needed = definition.options.needs

    def build(options: Any) -> EnvironmentSpec:
        """Build the specification. Raises ValueError if the option is also set by itself."""
        if getattr(options, needed):
            raise ValueError(f"env.{needed} has no effect: env.path names it")
        return definition.build(replace(options, **{needed: value}))

    return EnvironmentDefinition(definition.options, build)


def passport_file(reference: str) -> Path:
    """Return the path of the passport of an environment, which may not exist: the file is named
    after the environment and lies in the folder of its module.

    Raises ValueError for an unknown environment, for a mixture, which has no passport of its own,
    and for one that a reference names with its option.
    """
    if split_mixture(reference):
        raise ValueError(
            f"{reference}: a mixture has no passport; each of its environments has one"
        )
    if split_scheme(reference):
        raise ValueError(f"{reference}: it has no passport")
    if reference in environments:
        target = import_user_code(reference, lambda: environments.get(reference))
        owner = target.options if isinstance(target, EnvironmentDefinition) else target
        module = sys.modules[owner.__module__]
        name = reference
    else:
        module, name = load_reference(reference)
        name = name or _find_only_name(module, reference)
    return Path(str(module.__file__)).with_name(f"{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}{ENDING}")


def _build_definition(target: Any, reference: str) -> EnvironmentDefinition:
    try:
        build = _find_builder(target)
        if build is None:
            raise ValueError(f"found {_describe_object(target)}, expected {EXPECTED}")
        definition = build(target)
    except ValueError as error:
        raise ValueError(f"{reference}: {error}") from None
    except Exception as error:
        raise ValueError(f"{reference}: {format_error(error, target)}") from error
    if not (isinstance(definition.options, type) and is_dataclass(definition.options)):
        raise ValueError(f"{reference}: options must be a dataclass, not {definition.options!r}")
    return definition


def _find_builder(target: Any) -> Callable[[Any], EnvironmentDefinition] | None:
    """Return the function that builds a definition from an object of this kind; None if the object
    is not an environment."""
    if isinstance(target, EnvironmentDefinition):
        return lambda definition: definition
    if isinstance(target, EnvironmentSpec):
        return lambda spec: EnvironmentDefinition(NoOptions, lambda _: spec)
    if isinstance(target, type) and callable(getattr(target, "reset", None)):
        if callable(getattr(target, "get_reward", None)):
            return build_tool_class
        return build_message_class if callable(getattr(target, "step", None)) else None
    return build_verifier if inspect.isfunction(target) else None


def _load_only_definition(module: ModuleType, reference: str) -> EnvironmentDefinition:
    return _build_definition(getattr(module, _find_only_name(module, reference)), reference)


def _find_only_name(module: ModuleType, reference: str) -> str:
    """Return the name of the only environment that a file defines.

    Definitions and specifications take precedence over classes, and classes over functions whose
    first argument is called ``completion``. Raises ValueError if there is not exactly one.
    """
    public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    finished = {
        name: v
        for name, v in public.items()
        if isinstance(v, (EnvironmentDefinition, EnvironmentSpec))
    }
    local = {
        name: value
        for name, value in public.items()
        if getattr(value, "__module__", "") == module.__name__
    }
    classes = {
        name: value
        for name, value in local.items()
        if isinstance(value, type) and _find_builder(value)
    }
    candidates = (
        finished or classes or {name: value for name, value in local.items() if is_verifier(value)}
    )
    if len(candidates) != 1:
        contents = (
            f"the environments {', '.join(candidates)}; name one: {reference}:NAME"
            if candidates
            else f"nothing of {EXPECTED}"
        )
        raise ValueError(f"{reference}: the file defines {contents}")
    return next(iter(candidates))


def _describe_object(target: Any) -> str:
    if isinstance(target, type):
        methods = [
            name
            for name in ("reset", "step", "get_reward", "close")
            if callable(getattr(target, name, None))
        ]
        return (
            f"the class {target.__name__} with {', '.join(methods) or 'none of these methods'} "
            f"({source_location(target)})"
        )
    return (
        f"the function {target.__name__} ({source_location(target)})"
        if inspect.isfunction(target)
        else type(target).__name__
    )


C = TypeVar("C")


class ChosenEnvironment(NamedTuple):
    """An environment selected by an experiment; ``reference`` and ``options`` suffice to build it
    again in another process."""

    reference: str
    """Name of the environment, as ``load_definition`` takes it."""
    options: Mapping[str, Any]
    """Options as plain JSON values."""
    spec: EnvironmentSpec
    """The built specification."""


def environment_section(reference: str) -> type[Any]:
    """Return a dataclass with the options of an environment and ``path``, which names the
    environment. Raises ValueError for an unknown environment."""
    if split_mixture(reference):
        about = "The environments of env.mix, which sets this option."
        return with_path(load_definition(reference).options, reference, about)
    about = "The environment: a registered name, or FILE.py:Name for one of your own."
    return with_path(load_definition(reference).options, absolute_environment(reference), about)


def with_environment(config: type[C], reference: str) -> type[C]:
    """Return ``config`` with the section of an environment as its field ``env``. Raises ValueError
    for an unknown environment."""
    return with_section(config, "env", environment_section(reference))


def chosen_environment(section: Any) -> ChosenEnvironment:
    """Build the environment that a section made by ``environment_section`` describes. Raises
    ValueError for contradictory options."""
    definition = load_definition(section.path)
    names = [field.name for field in fields(definition.options)]
    options = definition.options(**{name: getattr(section, name) for name in names})
    return ChosenEnvironment(section.path, to_json_value(options), definition.build(options))
