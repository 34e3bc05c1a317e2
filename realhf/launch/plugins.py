"""Loading of components that the user selects: the experiment's file with its configuration class,
the scheduler, and the options of a custom algorithm."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

from realhf.api.algorithm import load_algorithm
from realhf.api.config import ConfigError, ExperimentConfig
from realhf.api.option import walk, with_path, with_section
from realhf.base.plugin import (
    absolute_reference,
    describe_user_error,
    import_user_code,
    load_plugin,
    load_reference,
    split_reference,
)
from realhf.base.text import suggest_names
from realhf.env.loader.mixture import split_mixture
from realhf.registry import REGISTRIES, schedulers
from realhf.scheduler.base import Scheduler, SchedulerDefinition


class ExperimentFile(NamedTuple):
    """The imported file of an experiment."""

    name: str
    """Name of the experiment."""
    plugin: str
    """Module or file that every process of the run imports."""
    module: ModuleType
    """The imported module, which defines ``build``."""
    config_class: type[ExperimentConfig]
    """Class of the configuration."""


def load_experiment(
    config_dir: Path, name: str, user_file: Path | None, environment: str | None = None
) -> ExperimentFile:
    """Import the experiment ``name``, or the one in ``user_file``. The import registers the
    experiment's components.

    ``environment`` is the chosen environment, for an experiment that defines
    ``config_class(environment)``. Raises ConfigError that names the line of a mistake in the file.
    """
    plugin = str(user_file) if user_file else f"experiments.{_find_module(config_dir, name)}"
    try:
        module = load_plugin(plugin)
    except Exception as error:
        where = str(user_file) if user_file else f"{plugin.replace('.', '/')}.py"
        raise ConfigError(f"experiment={name}: {describe_user_error(error, where)}") from None
    kind = config_class(name, module)
    if environment is not None and (build_class := getattr(module, "config_class", None)):
        try:
            kind = build_class(environment)
        except ValueError as error:
            option = "env.mix" if split_mixture(environment) else "env.path"
            raise ConfigError(f"{option}={environment}: {error}") from None
    return ExperimentFile(name, plugin, module, kind)


def config_class(name: str, module: ModuleType) -> type[ExperimentConfig]:
    """Return the class with which the first parameter of ``build`` is annotated;
    ``ExperimentConfig`` if it has no annotation.

    Raises ConfigError for a module without ``build`` and for an invalid annotation or class.
    """
    build = getattr(module, "build", None)
    if build is None:
        raise ConfigError(f"experiment={name}: {module.__file__} defines no build(config)")
    parameter = next(iter(inspect.signature(build).parameters.values()), None)
    if parameter is None or parameter.annotation is inspect.Parameter.empty:
        return ExperimentConfig
    try:
        kind = _evaluate_annotation(parameter.annotation, vars(module))
    except Exception as error:
        raise ConfigError(
            f"experiment={name}: build({parameter.name}: {parameter.annotation}): {error}"
        ) from None
    if not (isinstance(kind, type) and issubclass(kind, ExperimentConfig)):
        raise ConfigError(
            f"experiment={name}: build({parameter.name}: {parameter.annotation}) must take an "
            f"ExperimentConfig"
        )
    _check_class(name, kind)
    return kind


def _check_class(name: str, kind: type[ExperimentConfig]) -> None:
    """Raise ConfigError for a class without ``@dataclass``, with options that have no default, or
    with unknown registries."""
    for part in kind.__mro__:
        if inspect.get_annotations(part) and "__dataclass_params__" not in vars(part):
            raise ConfigError(
                f"experiment={name}: the class {part.__name__} lacks @dataclass, so it adds no "
                f"options"
            )
    try:
        options = [*walk(kind())]
    except TypeError as error:
        raise ConfigError(
            f"experiment={name}: every option of {kind.__name__} needs a default: {error}"
        ) from None
    for option, about, _ in options:
        if about.registry and about.registry not in REGISTRIES:
            known = ", ".join(REGISTRIES)
            raise ConfigError(
                f"experiment={name}: option {option}: no registry {about.registry!r} (known: "
                f"{known})"
            )


def _evaluate_annotation(annotation: Any, names: Mapping[str, Any]) -> Any:
    """Return the class to which an annotation refers, which may be a string, in a module with the
    given names."""
    holder = type("Holder", (), {"__annotations__": {"config": annotation}})
    return typing.get_type_hints(holder, globalns=dict(names), localns={})["config"]


def base_experiments(content: Mapping[str, Any], path: Path) -> list[str]:
    """Return the names of the experiments on which the YAML file at ``path`` builds, in ascending
    precedence.

    Raises ConfigError if its ``defaults`` are not a list.
    """
    defaults = content.get("defaults") or []
    if not isinstance(defaults, list):
        raise ConfigError(f"{path}: defaults must be a list of names")
    return [
        base for base in defaults if isinstance(base, str) and base not in ("_self_", path.stem)
    ]


def read_yaml_mapping(path: Path) -> Mapping[str, Any]:
    """Return the mapping in a YAML file; {} if the file is missing, is invalid or contains another
    type."""
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}


def _find_module(config_dir: Path, name: str, seen: frozenset[str] = frozenset()) -> str:
    """Return the name of the module in ``experiments`` that belongs to the experiment file
    ``name``.yaml.

    It is the value of the file's key ``experiment`` if that is set and importable, else the module
    of the experiment on which the file builds, else the file's own name. ``seen`` contains the
    experiments from which this one was reached, to end cycles.
    """
    path = config_dir / "experiment" / f"{name}.yaml"
    content = read_yaml_mapping(path)
    bases = [base for base in base_experiments(content, path) if base not in seen]
    module = content.get("experiment")
    if isinstance(module, str) and (not bases or find_spec(f"experiments.{module}")):
        return module
    return _find_module(config_dir, bases[-1], seen | {name}) if bases else name


C = TypeVar("C", bound=ExperimentConfig)
METHODS = ("start", "wait", "kill", "stop")
"""Methods that a scheduler must have."""


def load_scheduler(reference: str) -> SchedulerDefinition:
    """Return the definition of the scheduler that ``reference`` names, which is a registered name,
    ``file.py:Name`` or ``package.module:Name``.

    Raises ValueError with one sentence about the cause and its location.
    """
    if reference in schedulers:
        definition = import_user_code(reference, lambda: schedulers.get(reference))
    elif reference.endswith(".py"):
        raise ValueError(f"{reference}: name the scheduler in it, {reference}:NAME")
    elif not split_reference(reference).name:
        known = suggest_names(reference, [*schedulers])
        raise ValueError(
            f"unknown scheduler {reference!r}{known}; one of your own is file.py:Name or "
            f"module:Name"
        )
    else:
        definition = getattr(*load_reference(reference))
    if not isinstance(definition, SchedulerDefinition):
        kind = (
            f"the class {definition.__name__}"
            if isinstance(definition, type)
            else type(definition).__name__
        )
        raise ValueError(f"{reference}: found {kind}, expected a SchedulerDefinition")
    return definition


def with_scheduler(config: type[C], reference: str) -> type[C]:
    """Return a subclass of ``config`` that has the options of a scheduler as its section
    ``scheduler``.

    Raises ValueError for an unknown scheduler, and for options that cannot form a section.
    """
    options = load_scheduler(reference).options
    if not (isinstance(options, type) and is_dataclass(options)):
        raise ValueError(f"{reference}: options must be a dataclass, not {options!r}")
    if any(field.name == "path" for field in fields(options)):
        raise ValueError(
            f"{reference}: {options.__name__}.path: this name is reserved; rename the option"
        )
    about = "Scheduler to use: a registered name, or FILE.py:Name for a custom one."
    try:
        kind = with_path(options, absolute_reference(reference), about)
        kind()
    except Exception as error:
        raise ValueError(
            f"{reference}: {options.__name__}: {describe_user_error(error, _find_file(reference))}"
        ) from None
    return with_section(config, "scheduler", kind)


def with_algorithm(config: type[C], reference: str) -> type[C]:
    """Return a subclass of ``config`` that has the options of a custom algorithm as its section
    ``algorithm``, or ``config`` itself if the algorithm has no options.

    Raises ValueError for an unknown algorithm, and if ``config`` already has a section
    ``algorithm``.
    """
    options = load_algorithm(reference).options
    if options is None:
        return config
    if any(every.name == "algorithm" for every in fields(config)):
        raise ValueError(
            f"ppo.algo={reference}: the algorithm has options, but the experiment already has a "
            "section named algorithm"
        )
    try:
        return with_section(config, "algorithm", options)
    except Exception as error:
        raise ValueError(
            f"ppo.algo={reference}: {options.__name__}: {describe_user_error(error, _find_file(reference))}"
        ) from None


def read_scheduler_options(section: Any) -> Any:
    """Return the section ``scheduler`` of a configuration as an instance of the scheduler's own
    options class."""
    options = load_scheduler(section.path).options
    return options(**{field.name: getattr(section, field.name) for field in fields(options)})


def make_scheduler(section: Any) -> Scheduler:
    """Create the scheduler that the section ``scheduler`` of a configuration describes. Raises
    ValueError if it cannot be created."""
    definition = load_scheduler(section.path)
    try:
        scheduler = definition.make(read_scheduler_options(section))
    except Exception as error:
        raise ValueError(
            f"{section.path}: {describe_user_error(error, _find_file(section.path))}"
        ) from error
    if missing := [name for name in METHODS if not callable(getattr(scheduler, name, None))]:
        raise ValueError(
            f"{section.path}: make returned a {type(scheduler).__name__} without "
            f"{', '.join(missing)}"
        )
    return scheduler


def _find_file(reference: str) -> str:
    return str(split_reference(reference).file or "")
