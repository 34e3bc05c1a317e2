"""Composition of an experiment's configuration from the command line and YAML files with Hydra,
with one-line error messages.

Importing this module is cheap: only ``compose_config`` imports Hydra, and torch is never imported.
"""

from __future__ import annotations

import difflib
import re
import secrets
import time
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cached_property, lru_cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, NoReturn, cast

from realhf.api.algorithm import is_user_algorithm
from realhf.api.config import ConfigError, ExperimentConfig, Mode
from realhf.api.option import NamedOption, sections, walk
from realhf.base.installation import CONFIGS
from realhf.base.plugin import absolute_reference
from realhf.env.loader.mixture import mixture_reference, split_mixture
from realhf.env.loader.reference import absolute_environment
from realhf.launch.checks import BUILTIN, BUILTIN_PATHS, is_builtin, start_untrained
from realhf.launch.plugins import (
    ExperimentFile,
    base_experiments,
    load_experiment,
    load_scheduler,
    read_yaml_mapping,
    with_algorithm,
    with_scheduler,
)
from realhf.launch.step_trace import choose_machine
from realhf.launch.vllm_choice import (
    choose_dtype,
    choose_engine,
    host_warnings,
    row_warnings,
    version_warnings,
)
from realhf.registry import environments
from realhf.scheduler.machine import NO_GPUS, Machine, plan_machine, read_machine

GROUPS = ("experiment", "model", "env", "scheduler")
"""Configuration groups, whose files are selected with ``GROUP=NAME``."""
BUILTIN_DEFAULTS = "builtin_policy.yaml"
"""File in the configuration folder with the defaults for the built-in policy, which replace the
library's defaults. ``builtin_policy_NAME.yaml`` contains the defaults for the environment NAME."""


class ComposedConfig(NamedTuple):
    """A composed configuration and the origin of its values."""

    config: ExperimentConfig
    """The configuration."""
    file: ExperimentFile
    """The experiment's imported file."""
    overridden: tuple[str, ...]
    """Options set on the command line, by dotted name."""
    written: Mapping[str, str]
    """File that sets each option, for options set in YAML files of the experiment."""
    chosen: Mapping[str, tuple[str, ...]]
    """Options that each choice (``model=``, ``env=``, ``scheduler=``) sets."""
    warnings: tuple[str, ...] = ()
    """Warnings about automatic choices."""
    notes: tuple[str, ...] = ()
    """Automatic choices that are no reason to worry."""
    machine: Machine = NO_GPUS
    """The machine for which the choices were made."""


class Argument(NamedTuple):
    """A ``key=value`` argument of the command line."""

    key: str
    """Dotted name of an option, or name of a group."""
    value: str
    """The text after the equals sign."""


class EnvironmentMissing(ConfigError):
    """Raised if no environment was chosen for an experiment that needs one."""


def compose_config(
    arguments: Sequence[str], config_dir: Path = CONFIGS, machine: Machine | None = None
) -> ComposedConfig:
    """Compose and return the configuration for ``key=value`` arguments on a machine (None: this
    one).

    Imports the experiment's file, which defines the class of the configuration. Raises ConfigError
    that names the option.
    """
    pairs = [_parse_argument(text) for text in arguments]
    values = {pair.key: pair.value for pair in pairs}
    user_file = _resolve_user_file(values.get("experiment_path"))
    if user_file is not None:
        values.setdefault("experiment", user_file.stem)
    name = _check_experiment(values.get("experiment"), config_dir, user_file)
    own_file = (
        user_file.with_suffix(".yaml") if user_file else config_dir / "experiment" / f"{name}.yaml"
    )
    _check_choices(values, config_dir)
    environment = _find_environment(values, config_dir, own_file)
    scheduler = _find_component("scheduler", values, config_dir, own_file)
    algorithm = _find_component("ppo", values, config_dir, own_file, "algo")
    env_argument = next(
        (
            f"{key}={value}"
            for key, value in reversed(pairs)
            if key in ("env.mix", "env.path", "env")
        ),
        "",
    )
    _check_environment(
        name, env_argument, environment, _read_environment(own_file, config_dir), config_dir
    )
    file = load_experiment(config_dir, name, user_file, environment)
    if environment is None and hasattr(file.module, "config_class"):
        trains_on_file = hasattr(file.module, "build_on_rows")
        path = values.get("dataset.path")
        rows = _read_component(own_file, "dataset", bases=config_dir / "experiment")
        if not (trains_on_file and (rows if path is None else path != "null")):
            file_advice = "; or rows to train on with dataset.path=FILE.jsonl"
            raise EnvironmentMissing(
                f"experiment={name}: choose an environment with env=NAME (known: "
                f"{', '.join(environments)}), with "
                "env.path=FILE.py:Name, or several with env.mix=[NAME,NAME]"
                f"{file_advice if trains_on_file else ''}"
            )
    if scheduler is not None:
        try:
            file = file._replace(config_class=with_scheduler(file.config_class, scheduler))
        except ValueError as error:
            raise ConfigError(f"scheduler.path: {error}") from None
    if (
        algorithm is not None
        and is_user_algorithm(algorithm)
        and "ppo.algo" in Schema(file.config_class).options
    ):
        try:
            file = file._replace(config_class=with_algorithm(file.config_class, algorithm))
        except ValueError as error:
            raise ConfigError(str(error)) from None
    schema = Schema(file.config_class)
    _check_names(pairs, name, schema, config_dir)
    if "env" in schema.sections and not hasattr(file.module, "config_class"):
        fixed = str(schema.options["env.path"].value) if "env.path" in schema.options else ""
        _check_environment(name, env_argument, environment, fixed, config_dir)
    # A registered environment without a YAML file.
    if values.get("env") not in (
        None,
        *_list_files("env", config_dir),
    ):
        values["env.path"] = values.pop("env")
    _check_texts(schema, values, config_dir, own_file, user_file)
    overrides = []
    for key, value in values.items():
        if key != "experiment_path":
            # Mapping options have no fixed keys, and Hydra accepts new keys only with "++".
            prefix = "++" if schema.find_mapping(key) else ""
            overrides.append(f"{prefix}{key}={_quote_texts(schema.text_kind(key), value)}")
    try:
        config, defaults = _compose_with_defaults(
            overrides, values, config_dir, schema, user_file, environment
        )
    except _UnknownOption as unknown:
        raise ConfigError(_describe_unknown(unknown.option, name, schema, config_dir)) from None
    _check_scheduler(config, scheduler, own_file)
    _check_algorithm(config, algorithm, own_file)
    config.experiment_path = str(user_file) if user_file else None
    overridden = tuple(
        schema.find_mapping(pair.key) or pair.key for pair in pairs if pair.key not in GROUPS
    )
    by_choice = {
        f"{group}={values[group]}": tuple(
            schema.options_in(config_dir / group / f"{values[group]}.yaml", group)
        )
        for group in GROUPS[1:]
        if group in values
    }
    from_files = _options_in_yaml(config, schema, own_file, defaults)
    set_elsewhere = {*overridden, *(option for options in by_choice.values() for option in options)}
    machine, pretended = choose_machine(config, _find_machine(config, machine))
    untrained = start_untrained(config, trains_on_file=hasattr(file.module, "build_on_rows"))
    given = {*set_elsewhere, *from_files}
    is_named_builtin = config.actor.path in BUILTIN_PATHS
    slow = choose_engine(config, given, machine, builtin=is_named_builtin)
    note = choose_dtype(config, given, machine, builtin=is_builtin(config.actor.path))
    warnings = [untrained, slow, *version_warnings(config, machine), *row_warnings(config, machine)]
    if load_scheduler(config.scheduler.path).several_hosts:
        warnings += host_warnings(config, given, machine, builtin=is_builtin(config.actor.path))
    config.trial_name = config.trial_name or make_trial_name()
    reverted = {option for option in schema.options_in(own_file) if option not in from_files}
    return ComposedConfig(
        config,
        file,
        tuple(option for option in overridden if option not in reverted),
        {option: source for option, source in from_files.items() if option not in set_elsewhere},
        by_choice,
        tuple(warning for warning in warnings if warning),
        tuple(note for note in (pretended, note) if note),
        machine,
    )


def _find_machine(config: ExperimentConfig, machine: Machine | None) -> Machine:
    """Return the machine for which the options are checked: the one that ``machine=`` names, else
    ``machine`` (None: this one). Raises ConfigError."""
    if config.machine is None:
        return read_machine() if machine is None else machine
    if config.mode is not Mode.check:
        raise ConfigError(
            f"machine={config.machine}: has no effect with mode={config.mode.value}, which is for "
            "this machine; mode=check plans for another one"
        )
    try:
        return plan_machine(config.machine)
    except ValueError as error:
        raise ConfigError(f"machine={config.machine}: {error}") from None


def make_trial_name() -> str:
    """Return a default trial name, which consists of the local time and a random suffix that
    distinguishes launches in the same second."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def shipped_schemas(config_dir: Path = CONFIGS) -> dict[str, Schema]:
    """Return the schema of each experiment of the package whose file can be imported."""
    schemas = {}
    for name in experiment_names(config_dir):
        try:
            schemas[name] = Schema(load_experiment(config_dir, name, None).config_class)
        except ConfigError:
            continue
    return schemas


def _compose_with_defaults(
    overrides: list[str],
    values: Mapping[str, str],
    config_dir: Path,
    schema: Schema,
    user_file: Path | None,
    environment: str | None,
) -> tuple[ExperimentConfig, Mapping[str, Any]]:
    """Return (configuration, defaults of the built-in policy that were applied, by option).

    These defaults apply only if the actor is the built-in policy, and some of them only in one
    environment. Because any file may set the actor and the environment, both are guessed first, and
    the configuration is composed again if the guess was wrong.
    """
    from omegaconf import OmegaConf

    def default_files(builtin: bool, environment: str) -> list[Path]:
        general = config_dir / BUILTIN_DEFAULTS
        special = config_dir / f"{general.stem}_{environment}.yaml"
        return (
            [general, *([special] if environment.isidentifier() and special.is_file() else [])]
            if builtin
            else []
        )

    builtin = (
        is_builtin(values["actor.path"])
        if "actor.path" in values
        else values.get("model", BUILTIN).startswith(BUILTIN)
    )
    next_files = default_files(builtin, environment or "")
    # Adding or removing default files may in turn change the actor or the environment.
    for _ in range(3):
        files = next_files
        defaults_tree = (
            OmegaConf.to_container(OmegaConf.merge(*map(_read_yaml, files))) if files else {}
        )
        config = _compose(
            overrides, config_dir, schema, user_file, cast("Mapping[str, Any]", defaults_tree)
        )
        next_files = default_files(
            is_builtin(config.actor.path), getattr(getattr(config, "env", None), "path", "")
        )
        if next_files == files:
            break
    defaults = {name: value for file in files for name, value in schema.options_in(file).items()}
    return config, defaults


def _options_in_yaml(
    config: ExperimentConfig, schema: Schema, own_file: Path, defaults: Mapping[str, Any]
) -> dict[str, str]:
    """Return the options that YAML files of the experiment set, as {option: file}.

    In the files on which the experiment's own file builds, only values that differ from the
    library's default (or from the built-in policy's ``defaults``) are detected. An option that
    another file or the command line sets back to its default counts as not set.
    """
    options = schema.options_in(own_file)
    from_files = dict.fromkeys(options, own_file.name)
    builds_on = (
        own_file.exists() and re.search(r"(?m)^defaults:", own_file.read_text("utf-8")) is not None
    )
    for name, _, value in walk(config):
        if value != defaults.get(name, schema.options[name].value):
            from_files.setdefault(name, f"what {own_file.name} builds on")
        elif name in options and (builds_on or value != options[name]):
            del from_files[name]
    return from_files


def experiment_names(config_dir: Path = CONFIGS) -> list[str]:
    """Return the names of the experiments in the package."""
    return list_choices("experiment", config_dir)


def list_choices(group: str, config_dir: Path = CONFIGS) -> list[str]:
    """Return the names that can be selected in a group: the names of its files and, for ``env``,
    all registered environments."""
    return sorted({*_list_files(group, config_dir), *(environments if group == "env" else ())})


def _list_files(group: str, config_dir: Path) -> list[str]:
    return [path.stem for path in (config_dir / group).glob("*.yaml")]


def _parse_argument(text: str) -> Argument:
    match = re.fullmatch(r"(\+{0,2})([A-Za-z_][\w.]*)=(.*)", text, re.DOTALL)
    if not match:
        raise ConfigError(f"argument {text!r} is not of the form key=value")
    plus, key, value = match.groups()
    if plus and key != "experiment_path":
        raise ConfigError(
            f"option {plus}{key}: options cannot be added, only set: write {key}={value}"
        )
    return Argument(key, value)


def _find_component(
    section: str, values: dict[str, str], config_dir: Path, own_file: Path, option: str = "path"
) -> str | None:
    """Return the chosen environment, scheduler or algorithm (``section``), or None.

    It is chosen by the option ``section.option`` on the command line, by the file of
    ``section=NAME``, or by the experiment's YAML file ``own_file``. A path in ``values`` is made
    absolute, so that every process finds it.
    """
    name = option
    option = f"{section}.{option}"
    if option in values:
        make_absolute = absolute_environment if section == "env" else absolute_reference
        values[option] = make_absolute(values[option].strip("'\""))
        return values[option]
    choice = values.get(section, "")
    registered = choice if section == "env" and choice in environments else None
    return (
        _read_component(config_dir / section / f"{choice}.yaml", section, name)
        or registered
        or _read_component(own_file, section, name, bases=config_dir / "experiment")
    )


def _find_environment(values: dict[str, str], config_dir: Path, own_file: Path) -> str | None:
    """Return the reference of the chosen environment or mixture (``env.mix``), or None.

    References in ``values`` are made absolute, so that every process finds them. Raises ConfigError
    if both a mixture and a single environment were chosen.
    """
    if "env.mix" not in values:
        chosen = _find_component("env", values, config_dir, own_file)
        if chosen is not None and split_mixture(chosen):
            raise ConfigError(f"env.path={chosen}: several environments are chosen with env.mix")
        return chosen or _read_environment(own_file, config_dir)
    for key in ("env", "env.path"):
        if key in values:
            raise ConfigError(
                f"env.mix={values['env.mix']}, {key}={values[key]}: choose one of them; the "
                f"environments of a mixture are those that env.mix names"
            )
    listed = values["env.mix"].strip()
    if not (listed.startswith("[") and listed.endswith("]")):
        raise ConfigError(f"env.mix={listed}: give a list, such as [sql,countdown]")
    reference = mixture_reference([text.strip(" '\"") for text in listed[1:-1].split(",")])
    if not split_mixture(reference):
        raise ConfigError(f"env.mix={listed}: name at least two environments")
    values["env.mix"] = "[{}]".format(",".join(f"'{text}'" for text in split_mixture(reference)))
    return reference


def _read_environment(own_file: Path, config_dir: Path) -> str | None:
    """Return the reference of the environment or mixture that the experiment's YAML file sets, or
    None."""
    bases = config_dir / "experiment"
    return _read_component(own_file, "env", bases=bases) or _read_component(
        own_file, "env", "mix", bases
    )


def _check_environment(
    experiment: str, env_argument: str, environment: str | None, fixed: str | None, config_dir: Path
) -> None:
    """Raise ConfigError if the argument ``env_argument`` chooses an environment for an experiment
    whose environment is fixed.

    ``fixed`` is the fixed environment, "" if it has no name, or None if the experiment does not fix
    one.
    """
    if not env_argument or fixed in (None, environment):
        return
    general = experiment.replace(f"_{fixed}", "") if fixed else ""
    general = (
        general if general != experiment and general in experiment_names(config_dir) else "grpo"
    )
    own_environment = f"the environment {fixed}" if fixed else "an environment of its own"
    raise ConfigError(
        f"{env_argument}: experiment {experiment} has {own_environment}; type "
        f"experiment={general} {env_argument}"
    )


def _check_scheduler(config: ExperimentConfig, chosen_path: str | None, own_file: Path) -> None:
    """Raise ConfigError if the scheduler was set in a file that is read too late for the
    scheduler's options to be added."""
    if absolute_reference(config.scheduler.path) != absolute_reference(
        chosen_path or ExperimentConfig().scheduler.path
    ):
        raise ConfigError(
            f"scheduler.path={config.scheduler.path}: set it in {own_file.name} or on the command "
            "line; no other choice (model=, env=) can make this one"
        )


def _check_algorithm(config: ExperimentConfig, chosen_path: str | None, own_file: Path) -> None:
    """Raise ConfigError if a custom algorithm was set in a file that is read too late for the
    algorithm's options to be added."""
    section: Any = getattr(config, "ppo", None)
    algo = getattr(section, "algo", "")
    if is_user_algorithm(algo) and absolute_reference(algo) != absolute_reference(
        chosen_path or ""
    ):
        raise ConfigError(
            f"ppo.algo={algo}: it can be set only in {own_file.name} or on the command line"
        )


def _read_component(
    path: Path,
    section: str,
    option: str = "path",
    bases: Path | None = None,
    seen: frozenset[str] = frozenset(),
) -> str | None:
    """Return the value of ``section.option`` that a YAML file sets, or that the files in the folder
    ``bases`` set on which it builds; None if none does. A list of environments is returned as the
    reference of their mixture.

    ``seen`` contains the files from which this file was reached, to end cycles.
    """
    content = read_yaml_mapping(path)
    part = content.get(section)
    value = part.get(option) if isinstance(part, dict) else None
    if isinstance(value, list):
        value = mixture_reference([str(item) for item in value])
    if isinstance(value, str) or bases is None:
        return value if isinstance(value, str) else None
    base_names = (base for base in reversed(base_experiments(content, path)) if base not in seen)
    values = (
        _read_component(bases / f"{base}.yaml", section, option, bases, seen | {path.stem})
        for base in base_names
    )
    return next((inherited for inherited in values if inherited is not None), None)


def _resolve_user_file(text: str | None) -> Path | None:
    if text is None:
        return None
    path = Path(text).expanduser().resolve()
    if path.suffix != ".py" or not path.is_file():
        raise ConfigError(f"experiment_path: no such Python file: {text}")
    return path


def _check_choices(values: Mapping[str, str], config_dir: Path) -> None:
    """Raise ConfigError for a choice ``GROUP=NAME`` that does not exist."""
    custom_hints = {
        "env": " One of your own: env.path=FILE.py:Name",
        "scheduler": " One of your own: scheduler.path=FILE.py:Name",
    }
    for key in GROUPS[1:]:
        if key in values and values[key] not in (names := list_choices(key, config_dir)):
            raise ConfigError(
                f"{key}={values[key]}: "
                f"{_describe_unknown_name('choice', values[key], names)}{custom_hints.get(key, '')}"
            )


def _check_names(
    pairs: Sequence[Argument], experiment: str, schema: Schema, config_dir: Path
) -> None:
    for key, value in pairs:
        if key in GROUPS[1:]:
            if key == "env" and key not in schema.sections:
                raise ConfigError(
                    f"{key}={value} has no effect in experiment {experiment}: it has no section "
                    f"{key}"
                )
        elif key in schema.sections:
            raise ConfigError(
                f"{key}={value}: {key} is a section; set one of its options, e.g. "
                f"{next(name for name in schema.options if name.startswith(f'{key}.'))}=..."
            )
        elif key != "experiment" and key not in schema.options and not schema.find_mapping(key):
            raise ConfigError(_describe_unknown(key, experiment, schema, config_dir))


def _describe_unknown(name: str, experiment: str, schema: Schema, config_dir: Path) -> str:
    """Return the error message about an option that the experiment does not have. It names the
    experiments that have the option, if any."""
    if problem := _describe_unknown_part(name, schema):
        return problem
    owners = [
        other
        for other, other_schema in shipped_schemas(config_dir).items()
        if name in other_schema.options or name in other_schema.sections
    ]
    if owners:
        return (
            f"option {name} has no effect in experiment {experiment}: it belongs to "
            f"{', '.join(owners)}"
        )
    return schema.describe_unknown(name)


def _describe_unknown_part(name: str, schema: Schema) -> str:
    """Return the error message about an option under ``env.of`` or ``env.limits`` of an environment
    that is not mixed; "" for any other option."""
    match = re.match(r"env\.(of|limits)\.(\w+)", name)
    if match is None or f"env.{match[1]}.{match[2]}" in schema.sections:
        return ""
    if "env.mix" not in schema.options:
        return f"option {name} has no effect without env.mix, which names several environments"
    return (
        f"option {name} has no effect: env.mix has no environment {match[2]!r}, but "
        f"{', '.join(f.name for f in fields(schema.sections['env.of']))}"
    )


def _check_experiment(name: str | None, config_dir: Path, user_file: Path | None) -> str:
    """Return the name of the experiment. Raises ConfigError if it is missing or unknown."""
    names = experiment_names(config_dir) + ([user_file.stem] if user_file else [])
    if not name:
        raise ConfigError(f"experiment=NAME is missing (known: {', '.join(names)})")
    if name not in names:
        raise ConfigError(f"experiment={name}: {_describe_unknown_name('experiment', name, names)}")
    return name


def _describe_unknown_name(what: str, name: str, known: Sequence[str]) -> str:
    if close := find_close_name(name, known):
        return f"unknown {what} {name!r}; did you mean {close!r}?"
    return f"unknown {what} {name!r} (known: {', '.join(known)})"


TextKind = Literal["", "one", "list"]
"""Whether an option is a string ("one"), a list of strings ("list"), or something else ("")."""
_ITEM = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|[^'"\[\]{}(),]*""")
"""Pattern of a list item: a quoted or an unquoted string."""


def _quote_texts(kind: TextKind, value: str) -> str:
    """Return a command-line value with quotes around strings that Hydra would read as a number or
    boolean, so that ``1e5`` remains a string."""
    if kind == "one":
        return _quote(value)
    inner = value.strip()
    if kind == "list" and inner.startswith("[") and inner.endswith("]"):
        inner = inner[1:-1]
        items = []
        while match := _ITEM.match(inner):
            items.append(_quote(match[0].strip()))
            inner = inner[match.end() :]
            if not inner.startswith(","):
                break
            inner = inner[1:]
        if not inner:
            return f"[{','.join(items)}]"
    return value  # Not a list: Hydra reports what is wrong with it.


def _quote(text: str) -> str:
    """Return ``text`` in quotes if Hydra would read it as a number or boolean, else unchanged."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        value = OverridesParser.create().parse_override(f"key={text}").value()
    except HydraException:
        return text
    return f"'{text}'" if isinstance(value, (bool, int, float)) else text


def _check_texts(
    schema: Schema,
    values: Mapping[str, str],
    config_dir: Path,
    own_file: Path,
    user_file: Path | None,
) -> None:
    """Raise ConfigError for an unquoted YAML value of a string option that YAML parses as another
    type and that prints differently. For example, ``1e5`` becomes 100000.0."""
    import yaml
    from omegaconf import OmegaConf

    def read(raw: str) -> Any:
        if user_file is not None and path == own_file:
            return yaml.safe_load(raw)
        values: Any = OmegaConf.to_container(OmegaConf.create(f"- {raw}"), resolve=False)
        return values[0]

    for path, group in _yaml_files(values, config_dir, own_file):
        for name, raw in schema.iterate_unquoted_texts(path, group):
            value = read(raw)
            unchanged = isinstance(value, (str, int, float)) and str(value) == raw
            if value is not None and not unchanged:
                raise ConfigError(
                    f"{path}: {name}: {raw} is {value!r} in YAML and the option is a text; put it "
                    f"in quotes: '{raw}'"
                )


def _yaml_files(
    values: Mapping[str, str], config_dir: Path, own_file: Path
) -> Iterator[tuple[Path, str]]:
    """Yield (file, group) for all YAML files of a configuration; the group is "" for experiment
    files. They are the experiment's file, the files on which it builds, and the files chosen by
    these or by the command line."""
    chosen = {(group, values[group]) for group in GROUPS[1:] if group in values}
    experiment_files = [own_file]
    for path in experiment_files:
        content = read_yaml_mapping(path)
        bases = (
            config_dir / "experiment" / f"{base}.yaml" for base in base_experiments(content, path)
        )
        experiment_files += [base for base in bases if base not in experiment_files]
        for entry in content.get("defaults") or []:
            for group, choice in entry.items() if isinstance(entry, dict) else ():
                chosen.add(
                    (
                        str(group).removeprefix("override ").strip(" /").partition("@")[0],
                        str(choice),
                    )
                )
    yield from ((path, "") for path in experiment_files)
    yield from ((config_dir / group / f"{choice}.yaml", group) for group, choice in sorted(chosen))


class _UnknownOption(Exception):
    """Raised for an option in a YAML file that does not exist."""

    def __init__(self, option: str) -> None:
        super().__init__(option)
        self.option = option


def _compose(
    overrides: list[str],
    config_dir: Path,
    schema: Schema,
    user_file: Path | None,
    policy_defaults: Mapping[str, Any],
) -> ExperimentConfig:
    """Compose the configuration with Hydra. Raises ConfigError or _UnknownOption."""
    from hydra import compose, initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    store = ConfigStore.instance()
    try:
        store.store(name="base_config", node=_structured_config(schema.kind))
    except (OmegaConfBaseException, ValueError) as error:
        reason = str(error).splitlines()[0]
        key = getattr(error, "full_key", "")
        raise ConfigError(
            f"the option {key!r} of {schema.kind.__name__} cannot be declared so: {reason}"
        ) from None
    store.store(name="policy_defaults", node=dict(policy_defaults))
    if user_file is not None:
        node = {"experiment": user_file.stem, **_read_yaml(user_file.with_suffix(".yaml"))}
        store.store(group="experiment", name=user_file.stem, node=node, package="_global_")
    try:
        with initialize_config_dir(config_dir=str(config_dir.resolve()), version_base="1.3"):
            composed = compose("config", overrides=overrides)
        config = OmegaConf.to_object(composed)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        _raise_config_error(error, overrides)
    assert isinstance(config, schema.kind)
    return config


@lru_cache(maxsize=8)
def _structured_config(kind: type[ExperimentConfig]) -> Any:
    """Return the OmegaConf schema of a configuration class. It can be cached because Hydra copies
    it."""
    from omegaconf import OmegaConf

    return OmegaConf.structured(kind)


def _read_yaml(path: Path) -> Mapping[str, Any]:
    """Return the mapping in a YAML file; {} if the file does not exist. Raises ConfigError if it
    does not contain a mapping."""
    import yaml

    try:
        content = (
            yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else None
        ) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path}: must contain options (name: value), not a {type(content).__name__}"
        )
    return content


def _raise_config_error(error: Exception, overrides: Sequence[str]) -> NoReturn:
    """Raise ConfigError with one line that names the option, extracted from Hydra's chain of
    exceptions."""
    unparsed = getattr(error, "override", None)
    if unparsed:
        raise ConfigError(
            f"{unparsed}: not a value; text with special characters needs quotes"
        ) from None
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    lines = [line.strip() for line in f"{cause}\n{error}".splitlines() if line.strip()]
    lines = [line for line in lines if not line.endswith("raised while composing config:")] or lines
    full_key = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("full_key:")), ""
    )
    override = next((text for text in overrides if text.partition("=")[0] == full_key), full_key)
    name = re.search(r"Key '([\w.]+)' (?:is )?not in", lines[0])
    if name:
        raise _UnknownOption(full_key or name.group(1)) from None
    raise ConfigError(
        f"{override}: {lines[0]}" if override and override not in lines[0] else lines[0]
    ) from None


class Schema:
    """The options and sections of a configuration class, with their defaults."""

    def __init__(self, kind: type[ExperimentConfig] = ExperimentConfig) -> None:
        self.kind = kind

    @cached_property
    def options(self) -> Mapping[str, NamedOption]:
        """All options by dotted name, in the order of the fields. Their values are the defaults."""
        return {entry.name: entry for entry in walk(self.kind())}

    @cached_property
    def sections(self) -> Mapping[str, Any]:
        """All sections with their default values, by dotted name. The configuration as a whole is
        not included."""
        return {name: part for name, part in sections(self.kind()) if name}

    @cached_property
    def _types(self) -> Mapping[str, Any]:
        """Types of all options and sections by dotted name. Raises ConfigError for an annotation
        that cannot be evaluated."""
        types = {}
        for name, part in sections(self.kind()):
            try:
                hints = typing.get_type_hints(type(part))
            except (NameError, TypeError, AttributeError) as error:
                raise ConfigError(
                    f"the options of {type(part).__name__} cannot be declared so: {error}"
                ) from None
            types |= {f"{name}.{field}" if name else field: kind for field, kind in hints.items()}
        return types

    def text_kind(self, key: str) -> TextKind:
        """Return whether an option, or a key of a mapping option, is a string or a list of strings.
        Options that may also be None are included, and groups count as strings."""
        if key in GROUPS:
            return "one"
        mapping = self.find_mapping(key)
        kind = _without_null(self._types.get(mapping or key))
        if mapping and mapping != key:
            kind = _without_null((*typing.get_args(kind), None, None)[1])
        if kind is str:
            return "one"
        is_list = typing.get_origin(kind) in (list, tuple)
        return "list" if is_list and _without_null(typing.get_args(kind)[0]) is str else ""

    def iterate_unquoted_texts(self, path: Path, group: str = "") -> Iterator[tuple[str, str]]:
        """Yield each unquoted string value of a YAML file as the option's dotted name and the raw
        text.

        ``group``: see ``options_in``."""
        import yaml

        def scalars(node: Any, name: str) -> Iterator[tuple[str, str]]:
            if isinstance(node, yaml.MappingNode):
                for key, value in node.value:
                    yield from scalars(value, f"{name}.{key.value}" if name else str(key.value))
                return
            kind = self.text_kind(name)
            items = node.value if isinstance(node, yaml.SequenceNode) else [node]
            if kind == ("list" if isinstance(node, yaml.SequenceNode) else "one"):
                plain = (
                    item
                    for item in items
                    if isinstance(item, yaml.ScalarNode) and item.style is None
                )
                yield from ((name, item.value) for item in plain)

        text = path.read_text(encoding="utf-8") if path.exists() else ""
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        yield from scalars(root, group if "@package _global_" not in text else "")

    def find_mapping(self, key: str) -> str:
        """Return the mapping option that ``key`` names or to which ``key`` belongs; "" if there is
        none."""
        mappings = (name for name, entry in self.options.items() if isinstance(entry.value, dict))
        return next((name for name in mappings if key == name or key.startswith(f"{name}.")), "")

    def describe_unknown(self, name: str) -> str:
        """Return the error message about an unknown option, which suggests the most similar option
        with its description."""
        close = find_close_name(name, [*self.options]) or self._find_same_leaf(name)
        if not close:
            return f"unknown option {name!r}"
        return (
            f"unknown option {name!r}; did you mean {close!r}? "
            f"{self.options[close].option.about}".rstrip()
        )

    def _find_same_leaf(self, name: str) -> str:
        """Return an option whose last part resembles that of ``name`` (``lr`` finds
        ``actor.optimizer.lr``), or ""."""
        leaves = {option.rpartition(".")[2]: option for option in reversed([*self.options])}
        return leaves.get(find_close_name(name.rpartition(".")[2], [*leaves], cutoff=0.75), "")

    def options_in(self, path: Path, group: str = "") -> dict[str, Any]:
        """Return the options that a YAML file sets itself, by dotted name; {} if the file does not
        exist.

        The options of a group's file belong to the section of that name, unless the file contains
        ``@package _global_``.
        """
        import yaml

        def flat(part: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
            for key, value in part.items():
                name = f"{prefix}{key}"
                if isinstance(value, Mapping) and name not in self.options:
                    yield from flat(value, f"{name}.")
                else:
                    yield name, value

        text = path.read_text(encoding="utf-8") if path.exists() else ""
        prefix = f"{group}." if group and "@package _global_" not in text else ""
        return {
            name: value
            for name, value in flat(yaml.safe_load(text) or {}, prefix)
            if name in self.options
        }


def _without_null(kind: Any) -> Any:
    """Return an optional type without None if exactly one type remains; return any other type
    unchanged."""
    if typing.get_origin(kind) not in (typing.Union, UnionType):
        return kind
    kinds = [each for each in typing.get_args(kind) if each is not NoneType]
    return kinds[0] if len(kinds) == 1 else kind


def find_close_name(name: str, known: Sequence[str], cutoff: float = 0.5) -> str:
    """Return the known name that resembles ``name`` most, or "" if none does."""
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=cutoff)), "")
