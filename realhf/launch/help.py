"""What the fields of a configuration say about themselves, as text for a terminal and as the reference of options.

python -m realhf.launch --options-reference
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from realhf.api.config import ExperimentConfig
from realhf.api.option import REFERENCE, Found, Option, walk
from realhf.base.installation import CONFIGS
from realhf.env.loader.load import with_environment
from realhf.launch.compose import GROUPS, EnvironmentMissing, Schema, choices, compose_config, shipped_schemas
from realhf.launch.plugins import with_scheduler
from realhf.registry import environments, registered_names, schedulers

_COLUMN = 44
"""Where the sentences begin, unless an option is longer."""
_ANY_ENVIRONMENT = "countdown"
"""Stands for the environment where an experiment is only described; its own options are left out."""
_USAGE = """usage: python -m realhf.launch experiment=NAME [key=value ...]
       python -m realhf.launch --version

{groups}

An experiment file of your own: +experiment_path=FILE.py (its options in FILE.yaml beside it).
Modes: mode=check validates, mode=graph prints the dataflow graph, mode=run (default) trains.
Options of one experiment, with its own values: experiment=NAME --help

Options with the library's defaults:"""
_HEAD = """# Options

Every option of `python -m realhf.launch`, with the library's default; an experiment's YAML changes some of them, and
`python -m realhf.launch experiment=NAME --help` shows what it makes of them. Which value wins:
[running.md](../running.md#which-value-wins). The last column says whether a run that goes on after a checkpoint may
have another value than before: *free*, it may; *warns*, it may from that step on, and says so; *refuses*, it would be
another experiment ([running.md](../running.md#going-on-with-a-run)). This page is made from the fields of the
configuration: `python -m realhf.launch --options-reference > docs/reference/{page}`.
"""


def help_text(config_dir: Path = CONFIGS) -> str:
    """Usage, the choices of every group, and all options with the library's defaults."""
    groups = "\n".join(f"  {group:11}{', '.join(choices(group, config_dir))}" for group in GROUPS)
    lines = [_USAGE.format(groups=groups), *_terminal(Schema().options.values())]
    for section, (owners, schema) in _own_sections(config_dir).items():
        lines += ["", f"Of {', '.join(owners)}:", *_terminal(_within(schema, section))]
    for name, schema in scheduler_schemas().items():
        lines += ["", f"Of the scheduler {name} (scheduler.path={name}):", *_terminal(_scheduler_options(schema))]
    for name, schema in environment_schemas().items():
        lines += ["", f"Of the environment {name} (env.path={name}):", *_terminal(_within(schema, "env"))]
    return "\n".join(lines)


def experiment_help(arguments: Sequence[str], config_dir: Path = CONFIGS) -> str:
    """The options of one experiment, with the values that its YAML and the command line give them. An environment need
    not be chosen: without one its own options are missing. Raises ConfigError."""
    try:
        composed, chosen = compose_config(arguments, config_dir), True
    except EnvironmentMissing:
        composed, chosen = compose_config([*arguments, f"env.path={_ANY_ENVIRONMENT}"], config_dir), False
    about = inspect.getdoc(composed.file.module) or ""
    lines = [f"{composed.file.name}: {about}", "", "Options with the values of this experiment:"]
    options = [found for found in walk(composed.config) if chosen or not found.name.startswith("env.")]
    if not chosen:
        more = f"choose an environment with env=NAME ({', '.join(environments)}) or env.path=FILE.py:Name"
        lines.insert(2, f"To run it, {more}; with one --help shows its options and the values that it changes, too.\n")
    return "\n".join([*lines, *_terminal(options)])


def options_reference(config_dir: Path = CONFIGS) -> str:
    """The page that lists every option, as Markdown."""
    common = Schema()
    parts = [
        _HEAD.format(page="options.md"),
        "## All experiments\n",
        _table(found for found in common.options.values() if "." not in found.name),
    ]
    for section in common.sections:
        parts += _chapter(section, common)
    for section, (owners, schema) in _own_sections(config_dir).items():
        parts += _chapter(section, schema, f" Of {', '.join(owners)}.")
    for name, schema in scheduler_schemas().items():
        kind = type(schema.sections["scheduler"])
        about = (inspect.getdoc(kind) or "").replace("``", "`")
        parts += ["## scheduler\n", f"{about} Of the scheduler `{name}`.\n", _table(_scheduler_options(schema))]
    for name, schema in environment_schemas().items():
        parts += _chapter("env", schema, f" Of the environment `{name}`.")
    return "\n".join(parts)


def environment_schemas() -> Mapping[str, Schema]:
    """The section ``env`` of every registered environment."""
    return {name: Schema(with_environment(ExperimentConfig, name)) for name in environments}


def scheduler_schemas() -> Mapping[str, Schema]:
    """The section ``scheduler`` of every registered scheduler that has options of its own."""
    found = {name: Schema(with_scheduler(ExperimentConfig, name)) for name in schedulers}
    return {name: schema for name, schema in found.items() if any(_scheduler_options(schema))}


def _scheduler_options(schema: Schema) -> Iterator[Found]:
    """The options of a scheduler, without the one that chooses it."""
    return (found for found in _within(schema, "scheduler") if found.name != "scheduler.path")


def _own_sections(config_dir: Path) -> Mapping[str, tuple[list[str], Schema]]:
    """The sections that shipped experiments add, other than their environment's: who has each of them, and where it is
    described."""
    common, found = Schema().sections, {}
    for name, schema in shipped_schemas(config_dir).items():
        for section in schema.sections:
            if section not in common and section != "env":
                found.setdefault(section, ([], schema))[0].append(name)
    return found


def _chapter(section: str, schema: Schema, aside: str = "") -> list[str]:
    """A section of the page: its docstring and its table."""
    kind = type(schema.sections[section])
    about = (inspect.getdoc(kind) or "").replace("``", "`")
    return [f"## {section}\n", f"{about}{aside}\n", _table(_within(schema, section))]


def _within(schema: Schema, section: str) -> Iterator[Found]:
    """The options of a section, without those of the sections in it."""
    return (found for found in schema.options.values() if found.name.rpartition(".")[0] == section)


def _terminal(options: Iterable[Found]) -> Iterator[str]:
    """A line for each option, an empty one between sections."""
    section = ""
    for name, about, value in options:
        if (head := name.rpartition(".")[0]) != section:
            yield ""
            section = head
        given = f"  {name}={_shown(value)}"
        allowed = f" [{text}]" if (text := _allowed(about, value)) else ""
        yield f"{given:{_COLUMN}} {about.about}{allowed}".rstrip()


def _table(options: Iterable[Found]) -> str:
    rows = ["| option | default | says | allowed | on resume |", "|---|---|---|---|---|"]
    for name, about, value in options:
        default = f"`{text}`" if (text := _shown(value)) else ""
        rows.append(f"| `{name}` | {default} | {about.about} | {_allowed(about, value)} | {about.on_resume} |")
    return "\n".join([*rows, ""])


def _allowed(about: Option, value: Any) -> str:
    """Bounds or choices, as short as they can be said."""
    if about.registry:
        return ", ".join(registered_names(about.registry))
    if about.choices:
        return ", ".join([*about.choices, *([REFERENCE] if about.reference else [])])
    return ", ".join(item.value for item in type(value)) if isinstance(value, Enum) else about.bound()


def _shown(value: Any) -> str:
    """A value as it is written on the command line; nothing for none."""
    if value is None or value == "???":
        return ""
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    return str(getattr(value, "value", value))
