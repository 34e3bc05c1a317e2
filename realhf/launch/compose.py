"""Command line to ``ExperimentConfig``: Hydra groups over structured dataclasses, errors of one line.

Importing this module is cheap; Hydra is imported by ``compose_config``. torch is never imported here.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from realhf.api.config import ConfigError, ExperimentConfig
from realhf.base.paths import CONFIGS

GROUPS = ("experiment", "model", "env", "scheduler")


class Composed(NamedTuple):
    """A configuration, and who set which dotted options: the command line (``overridden``), YAML files of the
    experiment (``written``: option to file), and the choices ``model=``, ``env=``, ``scheduler=`` (``chosen``: choice
    to its options)."""

    config: ExperimentConfig
    overridden: tuple[str, ...]
    written: Mapping[str, str]
    chosen: Mapping[str, tuple[str, ...]]


class Argument(NamedTuple):
    """One ``key=value`` of the command line."""

    key: str
    value: str


def compose_config(arguments: Sequence[str], config_dir: Path = CONFIGS) -> Composed:
    """The configuration for these ``key=value`` arguments. Raises ConfigError that names the option."""
    pairs = [_argument(text) for text in arguments]
    given = {pair.key: pair.value for pair in pairs}
    user_file = _user_file(given.get("experiment_path"))
    _check_names(pairs, config_dir)
    if user_file is not None:
        given.setdefault("experiment", user_file.stem)
    _check_experiment(given.get("experiment"), config_dir, user_file)
    # Options that hold a mapping have no fixed names inside, so Hydra has to be told that new ones are meant.
    overrides = [
        f"{'++' if _mapping_of(key) else ''}{key}={value}" for key, value in given.items() if key != "experiment_path"
    ]
    config = _compose(overrides, config_dir, user_file)
    config.experiment_path = str(user_file) if user_file else None
    overridden = tuple(_mapping_of(pair.key) or pair.key for pair in pairs if pair.key not in GROUPS)
    chosen = {
        f"{group}={given[group]}": tuple(yaml_options(config_dir / group / f"{given[group]}.yaml"))
        for group in GROUPS[1:]
        if group in given
    }
    own = user_file.with_suffix(".yaml") if user_file else config_dir / "experiment" / f"{given['experiment']}.yaml"
    written = _written(config, own)
    undone = {name for name in yaml_options(own) if name not in written}
    elsewhere = {*overridden, *(option for options in chosen.values() for option in options)}
    return Composed(
        config,
        tuple(name for name in overridden if name not in undone),
        {name: file for name, file in written.items() if name not in elsewhere},
        chosen,
    )


def yaml_options(path: Path) -> dict[str, Any]:
    """The dotted options that a YAML file sets itself, with their values; {} if there is no such file."""
    import yaml

    known = {name for name, _ in option_names()}

    def flat(section: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        for key, value in section.items():
            name = f"{prefix}{key}"
            if isinstance(value, Mapping) and name not in known:
                yield from flat(value, f"{name}.")
            else:
                yield name, value

    content = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {name: value for name, value in flat(content or {}, "") if name in known}


def _written(config: ExperimentConfig, own: Path) -> dict[str, str]:
    """What YAML files of the experiment set: its own, and those that it builds on, of which only values are known that
    differ from the library's. What one file sets and another, or the command line, sets back to the library's value is
    as if nobody had set it."""
    options = yaml_options(own)
    written = dict.fromkeys(options, own.name)
    builds_on = own.exists() and re.search(r"(?m)^defaults:", own.read_text("utf-8")) is not None
    for name, default in option_names():
        value = _option(config, name)
        if value != default:
            written.setdefault(name, f"what {own.name} builds on")
        elif name in options and (builds_on or value != options[name]):
            del written[name]
    return written


def _option(config: ExperimentConfig, name: str) -> Any:
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def option_names() -> Iterator[tuple[str, Any]]:
    """Every dotted option with its default, in the order of the dataclasses."""
    return _options_of(ExperimentConfig(), "")


def _options_of(section: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for field in fields(section):
        value = getattr(section, field.name)
        if is_dataclass(value):
            yield from _options_of(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", value


def experiment_names(config_dir: Path = CONFIGS) -> list[str]:
    return choices("experiment", config_dir)


def choices(group: str, config_dir: Path = CONFIGS) -> list[str]:
    """Names of the files of a configuration group."""
    return sorted(path.stem for path in (config_dir / group).glob("*.yaml"))


def _argument(text: str) -> Argument:
    match = re.fullmatch(r"(\+{0,2})([A-Za-z_][\w.]*)=(.*)", text, re.DOTALL)
    if not match:
        raise ConfigError(f"argument {text!r} is not of the form key=value")
    plus, key, value = match.groups()
    if plus and key != "experiment_path":
        raise ConfigError(f"option {plus}{key}: options cannot be added, only set: write {key}={value}")
    return Argument(key, value)


def _user_file(text: str | None) -> Path | None:
    if text is None:
        return None
    path = Path(text).expanduser().resolve()
    if path.suffix != ".py" or not path.is_file():
        raise ConfigError(f"experiment_path: no such Python file: {text}")
    return path


def _check_names(pairs: Sequence[Argument], config_dir: Path) -> None:
    known = [name for name, _ in option_names()]
    sections = {name.rpartition(".")[0] for name in known} - {""}
    for key, value in pairs:
        if key in ("model", "env", "scheduler"):
            if value not in (names := choices(key, config_dir)):
                raise ConfigError(f"{key}={value}: {_unknown('choice', value, names)}")
        elif key in sections or any(section.startswith(f"{key}.") for section in sections):
            raise ConfigError(
                f"{key}={value}: {key} is a section; set one of its options, e.g. "
                f"{next(name for name in known if name.startswith(key + '.'))}=..."
            )
        elif key not in known and not _mapping_of(key):
            raise ConfigError(_unknown("option", key, known))


def _mapping_of(key: str) -> str:
    """The option that holds a mapping and that ``key`` is, or is a name in; empty if there is none."""
    mappings = (name for name, default in option_names() if isinstance(default, dict))
    return next((name for name in mappings if key == name or key.startswith(f"{name}.")), "")


def _check_experiment(name: str | None, config_dir: Path, user_file: Path | None) -> None:
    names = experiment_names(config_dir) + ([user_file.stem] if user_file else [])
    if not name:
        raise ConfigError(f"experiment=NAME is missing (known: {', '.join(names)})")
    if name not in names:
        raise ConfigError(f"experiment={name}: {_unknown('experiment', name, names)}")


def _unknown(what: str, name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5) or _same_leaf(name, known)
    if close:
        return f"unknown {what} {name!r}; did you mean {close[0]!r}?"
    return f"unknown {what} {name!r}" + (f" (known: {', '.join(known)})" if len(known) < 12 else "")


def _same_leaf(name: str, known: Sequence[str]) -> list[str]:
    """Options whose last part resembles the last part of ``name`` (``lr`` finds ``actor.optimizer.lr``)."""
    leaves = {option.rpartition(".")[2]: option for option in reversed(known)}
    close = difflib.get_close_matches(name.rpartition(".")[2], leaves, n=1, cutoff=0.75)
    return [leaves[close[0]]] if close else []


def _compose(overrides: list[str], config_dir: Path, user_file: Path | None) -> ExperimentConfig:
    from hydra import compose, initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    store = ConfigStore.instance()
    store.store(name="base_config", node=ExperimentConfig)
    if user_file is not None:
        node = _user_yaml(user_file)
        store.store(group="experiment", name=user_file.stem, node=node, package="_global_")
    try:
        with initialize_config_dir(config_dir=str(config_dir.resolve()), version_base="1.3"):
            composed = compose("config", overrides=overrides)
        config = OmegaConf.to_object(composed)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        _raise_plain(error, overrides)
    assert isinstance(config, ExperimentConfig)
    return config


def _user_yaml(user_file: Path) -> Any:
    """The YAML beside an experiment file (none: library defaults), always naming the experiment."""
    import yaml

    path = user_file.with_suffix(".yaml")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from None
    return {"experiment": user_file.stem, **(content or {})}


def _raise_plain(error: Exception, overrides: Sequence[str]) -> NoReturn:
    """One line that names the option, out of Hydra's chain of exceptions."""
    unparsed = getattr(error, "override", None)
    if unparsed:
        raise ConfigError(f"{unparsed}: not a value; text with special characters needs quotes") from None
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    lines = [line.strip() for line in f"{cause}\n{error}".splitlines() if line.strip()]
    lines = [line for line in lines if not line.endswith("raised while composing config:")] or lines
    full_key = next((line.partition(":")[2].strip() for line in lines if line.startswith("full_key:")), "")
    given = next((text for text in overrides if text.partition("=")[0] == full_key), full_key)
    name = re.search(r"Key '([\w.]+)' (?:is )?not in", lines[0])
    if name:
        known = [option for option, _ in option_names()]
        raise ConfigError(_unknown("option", full_key or name.group(1), known)) from None
    raise ConfigError(f"{given}: {lines[0]}" if given and given not in lines[0] else lines[0]) from None


def help_text(config_dir: Path = CONFIGS) -> str:
    """Usage, the choices of every group and all options with the library's defaults."""
    lines = [
        "usage: python -m realhf.launch experiment=NAME [key=value ...]",
        "       python -m realhf.launch --version",
        "",
    ]
    lines += [f"  {group:11}{', '.join(choices(group, config_dir))}" for group in GROUPS]
    lines += [
        "",
        "An experiment file of your own: +experiment_path=FILE.py (its options in FILE.yaml beside it).",
        "Modes: mode=check validates, mode=graph prints the dataflow graph, mode=run (default) trains.",
        "",
        "Options and their defaults (experiments change some; see configs/experiment/NAME.yaml):",
    ]
    section = ""
    for name, default in option_names():
        head = name.rpartition(".")[0]
        if head != section:
            lines.append("")
            section = head
        shown = getattr(default, "value", default)
        lines.append(f"  {name}={'' if shown in ('???', None) else shown}")
    return "\n".join(lines)
