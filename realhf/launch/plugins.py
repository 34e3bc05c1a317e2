"""Finds the parts that a person chooses: the file of an experiment with its configuration class, and the scheduler."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

from realhf.api.algorithm import algorithm_of
from realhf.api.config import ConfigError, ExperimentConfig
from realhf.api.option import walk, with_path, with_section
from realhf.base.plugin import absolute, imported, load_plugin, load_reference, located, split_reference
from realhf.base.text import close_to
from realhf.registry import REGISTRIES, schedulers
from realhf.scheduler.base import Scheduler, SchedulerDefinition


class ExperimentFile(NamedTuple):
    """An imported experiment. ``plugin``: what every process of the run imports, a module or a file."""

    name: str
    plugin: str
    module: ModuleType
    config_class: type[ExperimentConfig]


def load_experiment(
    config_dir: Path, name: str, user_file: Path | None, environment: str | None = None
) -> ExperimentFile:
    """The experiment ``name``, or the one in ``user_file``; what it registers is known afterwards. ``environment``: the
    one that was chosen, for an experiment whose module has ``config_class(environment)``. Raises ConfigError that names
    the line of a mistake in the file."""
    plugin = str(user_file) if user_file else f"experiments.{_named(config_dir, name)}"
    try:
        module = load_plugin(plugin)
    except Exception as error:
        where = str(user_file) if user_file else f"{plugin.replace('.', '/')}.py"
        raise ConfigError(f"experiment={name}: {located(error, where)}") from None
    kind = config_class(name, module)
    if environment is not None and (chosen := getattr(module, "config_class", None)):
        try:
            kind = chosen(environment)
        except ValueError as error:
            raise ConfigError(f"env.path={environment}: {error}") from None
    return ExperimentFile(name, plugin, module, kind)


def config_class(name: str, module: ModuleType) -> type[ExperimentConfig]:
    """The class that the first parameter of ``build`` is annotated with; ``ExperimentConfig`` if it is not."""
    build = getattr(module, "build", None)
    if build is None:
        raise ConfigError(f"experiment={name}: {module.__file__} defines no build(config)")
    first = next(iter(inspect.signature(build).parameters.values()), None)
    if first is None or first.annotation is inspect.Parameter.empty:
        return ExperimentConfig
    try:
        kind = _evaluated(first.annotation, vars(module))
    except Exception as error:
        raise ConfigError(f"experiment={name}: build({first.name}: {first.annotation}): {error}") from None
    if not (isinstance(kind, type) and issubclass(kind, ExperimentConfig)):
        raise ConfigError(f"experiment={name}: build({first.name}: {first.annotation}) must take an ExperimentConfig")
    _check_class(name, kind)
    return kind


def _check_class(name: str, kind: type[ExperimentConfig]) -> None:
    """Raise ConfigError for a class that declares no options although it means to."""
    for part in kind.__mro__:
        if inspect.get_annotations(part) and "__dataclass_params__" not in vars(part):
            raise ConfigError(f"experiment={name}: the class {part.__name__} lacks @dataclass, so it adds no options")
    try:
        options = [*walk(kind())]
    except TypeError as error:
        raise ConfigError(f"experiment={name}: every option of {kind.__name__} needs a default: {error}") from None
    for option, about, _ in options:
        if about.registry and about.registry not in REGISTRIES:
            known = ", ".join(REGISTRIES)
            raise ConfigError(f"experiment={name}: option {option}: no registry {about.registry!r} (known: {known})")


def _evaluated(annotation: Any, names: Mapping[str, Any]) -> Any:
    """What an annotation means where it is written."""
    holder = type("Holder", (), {"__annotations__": {"config": annotation}})
    return typing.get_type_hints(holder, globalns=dict(names), localns={})["config"]


def bases_of(content: Mapping[str, Any], path: Path) -> list[str]:
    """Names of the experiments that the YAML file at ``path`` builds on; the last one wins. Raises ConfigError where
    its ``defaults`` are no list."""
    given = content.get("defaults") or []
    if not isinstance(given, list):
        raise ConfigError(f"{path}: defaults must be a list of names")
    return [base for base in given if isinstance(base, str) and base not in ("_self_", path.stem)]


def yaml_map(path: Path) -> Mapping[str, Any]:
    """What a YAML file says; {} where there is none, or none that holds options."""
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}


def _named(config_dir: Path, name: str, seen: frozenset[str] = frozenset()) -> str:
    """The module of the experiment that the YAML of this name is about: one of its own name, of the name that it gives,
    or that of what it builds on. ``seen``: those that build on it."""
    path = config_dir / "experiment" / f"{name}.yaml"
    content = yaml_map(path)
    bases = [base for base in bases_of(content, path) if base not in seen]
    given = content.get("experiment")
    if isinstance(given, str) and (not bases or find_spec(f"experiments.{given}")):
        return given
    return _named(config_dir, bases[-1], seen | {name}) if bases else name


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
    about = "Scheduler to use: a registered name, or FILE.py:Name for a custom one."
    try:
        kind = with_path(options, absolute(reference), about)
        kind()
    except Exception as error:
        raise ValueError(f"{reference}: {options.__name__}: {located(error, _file(reference))}") from None
    return with_section(config, "scheduler", kind)


def with_algorithm(config: type[C], reference: str) -> type[C]:
    """Return ``config`` with the own options of an algorithm, which its author wrote, as the section ``algorithm``; as
    it is where the algorithm has none. Raises ValueError when there is no such algorithm, or ``config`` has a section
    of that name."""
    options = algorithm_of(reference).options
    if options is None:
        return config
    if any(every.name == "algorithm" for every in fields(config)):
        raise ValueError(f"ppo.algo={reference}: has options, and the experiment has a section algorithm of its own")
    try:
        return with_section(config, "algorithm", options)
    except Exception as error:
        raise ValueError(f"ppo.algo={reference}: {options.__name__}: {located(error, _file(reference))}") from None


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
