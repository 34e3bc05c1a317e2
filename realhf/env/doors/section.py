"""Makes the section ``env`` of an experiment from the options of the environment that was chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NamedTuple, TypeVar

from realhf.api.config.option import with_path, with_section
from realhf.api.environment import EnvironmentSpec
from realhf.base.dataclass_json import to_json_value
from realhf.base.plugin import absolute
from realhf.env.doors.load import definition_of

C = TypeVar("C")


class ChosenEnvironment(NamedTuple):
    """An environment as an experiment names it: ``reference`` and ``options`` (plain values) rebuild it anywhere."""

    reference: str
    options: Mapping[str, Any]
    spec: EnvironmentSpec


def environment_section(reference: str) -> type[Any]:
    """Return a dataclass with the options of an environment and ``path``, which names it. Raises ValueError when there
    is no such environment."""
    about = "The environment: a registered name, or FILE.py:Name for one of your own."
    return with_path(definition_of(reference).options, absolute(reference), about)


def with_environment(config: type[C], reference: str) -> type[C]:
    """Return ``config`` with the section of an environment as its ``env``. Raises ValueError when there is no such
    environment."""
    return with_section(config, "env", environment_section(reference))


def chosen_environment(chosen: Any) -> ChosenEnvironment:
    """Return what a section made by ``environment_section`` describes. Raises ValueError for options that contradict
    each other."""
    definition = definition_of(chosen.path)
    names = [field.name for field in fields(definition.options)]
    options = definition.options(**{name: getattr(chosen, name) for name in names})
    return ChosenEnvironment(chosen.path, to_json_value(options), definition.build(options))
