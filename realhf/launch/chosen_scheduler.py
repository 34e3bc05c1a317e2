"""Finds the scheduler that was chosen, by its name or in a person's own file, with its options as ``scheduler:``."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from realhf.api.config import ExperimentConfig
from realhf.api.config.option import with_path, with_section
from realhf.base.close_names import close_to
from realhf.base.plugin import absolute, imported, load_reference, located, split_reference
from realhf.builtins import schedulers
from realhf.scheduler.base import Scheduler, SchedulerDefinition

C = TypeVar("C", bound=ExperimentConfig)
METHODS = ("start", "wait", "kill", "stop")


def definition_of(reference: str) -> SchedulerDefinition:
    """Return the scheduler that ``reference`` means: a registered name, ``file.py:Name`` or ``package.module:Name``.
    Raises ValueError with one sentence that says what is wrong and where."""
    if reference in schedulers:
        found = imported(reference, lambda: schedulers.get(reference))
    elif reference.endswith(".py"):
        raise ValueError(f"{reference}: name the scheduler in it, {reference}:NAME")
    elif not split_reference(reference).name:
        known = close_to(reference, [*schedulers])
        raise ValueError(f"unknown scheduler {reference!r}{known}; one of your own is file.py:Name or module:Name")
    else:
        found = getattr(*load_reference(reference))
    if not isinstance(found, SchedulerDefinition):
        kind = f"the class {found.__name__}" if isinstance(found, type) else type(found).__name__
        raise ValueError(f"{reference}: found {kind}, expected a SchedulerDefinition")
    return found


def with_scheduler(config: type[C], reference: str) -> type[C]:
    """Return ``config`` with the options of a scheduler as its section ``scheduler``. Raises ValueError when there is
    no such scheduler, or its options cannot be a section."""
    options = definition_of(reference).options
    if not (isinstance(options, type) and is_dataclass(options)):
        raise ValueError(f"{reference}: options must be a dataclass, not {options!r}")
    if any(field.name == "path" for field in fields(options)):
        raise ValueError(f"{reference}: {options.__name__}.path: this name is taken, call the option otherwise")
    about = "The scheduler: a registered name, or FILE.py:Name for one of your own."
    try:
        kind = with_path(options, absolute(reference), about)
        kind()
    except Exception as error:
        raise ValueError(f"{reference}: {options.__name__}: {located(error, _file(reference))}") from None
    return with_section(config, "scheduler", kind)


def options_of(chosen: Any) -> Any:
    """Return the options of the chosen scheduler, as its own class has them."""
    options = definition_of(chosen.path).options
    return options(**{field.name: getattr(chosen, field.name) for field in fields(options)})


def make_scheduler(chosen: Any) -> Scheduler:
    """Return the scheduler that the section ``scheduler`` of a configuration describes. Raises ValueError that names it
    when it cannot be made."""
    definition = definition_of(chosen.path)
    try:
        scheduler = definition.make(options_of(chosen))
    except Exception as error:
        raise ValueError(f"{chosen.path}: {located(error, _file(chosen.path))}") from error
    if missing := [name for name in METHODS if not callable(getattr(scheduler, name, None))]:
        raise ValueError(f"{chosen.path}: make returned a {type(scheduler).__name__} without {', '.join(missing)}")
    return scheduler


def _file(reference: str) -> str:
    return str(split_reference(reference).file or "")
