"""Documentation of all options, generated from the fields of the configuration: the text of
``--help`` and the reference page.

python -m realhf.launch --options-reference
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from realhf.api.config import ExperimentConfig
from realhf.api.option import REFERENCE, NamedOption, Option, walk
from realhf.base.installation import CONFIGS
from realhf.env.loader.load import with_environment
from realhf.env.loader.mixture import MixtureOptions, PartLimits
from realhf.launch.compose import (
    GROUPS,
    EnvironmentMissing,
    Schema,
    compose_config,
    list_choices,
    shipped_schemas,
)
from realhf.launch.plugins import with_scheduler
from realhf.registry import environments, registered_names, schedulers

_COLUMN = 44
"""Column in which descriptions begin, unless the option is longer."""
_ANY_ENVIRONMENT = "countdown"
"""Environment with which an experiment is described if none was chosen. The environment's own
options are then omitted."""
_USAGE = """usage: python -m realhf.launch experiment=NAME [key=value ...]
       python -m realhf.launch --version

{groups}

A custom experiment: +experiment_path=FILE.py (its options in FILE.yaml in the same folder).
Modes: mode=check validates, mode=graph prints the dataflow graph, mode=run (default) trains.
Options of one experiment, with its own values: experiment=NAME --help

Options with the library's defaults:"""
_HEAD = """# Options

Every option of `python -m realhf.launch`, with the library's default. An experiment's YAML overrides some of them;
`python -m realhf.launch experiment=NAME --help` shows the resulting values. Precedence:
[running.md](../running.md#which-value-wins). The last column tells whether the value may change when a run
resumes from a checkpoint: *free*, it may; *warns*, it may from that step on, with a warning; *refuses*, it may
not, since it would be another experiment ([running.md](../running.md#going-on-with-a-run)). This page is
generated from the fields of the configuration: `python -m realhf.launch --options-reference > docs/reference/{page}`.
"""


def help_text(config_dir: Path = CONFIGS) -> str:
    """Return the usage, the choices of each group, and all options with the library's defaults."""
    groups = "\n".join(
        f"  {group:11}{', '.join(list_choices(group, config_dir))}" for group in GROUPS
    )
    lines = [_USAGE.format(groups=groups), *_format_lines(Schema().options.values())]
    for section, (owners, schema) in _own_sections(config_dir).items():
        lines += ["", f"Of {', '.join(owners)}:", *_format_lines(_section_options(schema, section))]
    for name, schema in scheduler_schemas().items():
        lines += [
            "",
            f"Of the scheduler {name} (scheduler.path={name}):",
            *_format_lines(_scheduler_options(schema)),
        ]
    for name, schema in environment_schemas().items():
        lines += [
            "",
            f"Of the environment {name} (env.path={name}):",
            *_format_lines(_section_options(schema, "env")),
        ]
    lines += ["", "Of a mixture of environments:", *_format_lines(_mixture_options())]
    return "\n".join(lines)


def experiment_help(arguments: Sequence[str], config_dir: Path = CONFIGS) -> str:
    """Return the help for one experiment: its options, with the values from its YAML file and the
    command line.

    Without an environment among ``arguments`` the environment's options are omitted. Raises
    ConfigError.
    """
    has_environment = True
    try:
        composed = compose_config(arguments, config_dir)
    except EnvironmentMissing:
        has_environment = False
        composed = compose_config([*arguments, f"env.path={_ANY_ENVIRONMENT}"], config_dir)
    about = inspect.getdoc(composed.file.module) or ""
    lines = [f"{composed.file.name}: {about}", "", "Options with the values of this experiment:"]
    options = [
        entry
        for entry in walk(composed.config)
        if has_environment or not entry.name.startswith("env.")
    ]
    if not has_environment:
        choice = (
            f"choose an environment with env=NAME ({', '.join(environments)}) or "
            f"env.path=FILE.py:Name, or several with env.mix=[NAME,NAME]"
        )
        lines.insert(
            2,
            f"To run it, {choice}; with one --help shows its options and the values that it changes, "
            f"too.\n",
        )
    return "\n".join([*lines, *_format_lines(options)])


def options_reference(config_dir: Path = CONFIGS) -> str:
    """Return the reference page of all options, as Markdown."""
    common = Schema()
    parts = [
        _HEAD.format(page="options.md"),
        "## All experiments\n",
        _format_table(entry for entry in common.options.values() if "." not in entry.name),
    ]
    for section in common.sections:
        parts += _format_chapter(section, common)
    for section, (owners, schema) in _own_sections(config_dir).items():
        parts += _format_chapter(section, schema, f" Of {', '.join(owners)}.")
    for name, schema in scheduler_schemas().items():
        kind = type(schema.sections["scheduler"])
        about = (inspect.getdoc(kind) or "").replace("``", "`")
        parts += [
            "## scheduler\n",
            f"{about} Of the scheduler `{name}`.\n",
            _format_table(_scheduler_options(schema)),
        ]
    for name, schema in environment_schemas().items():
        parts += _format_chapter("env", schema, f" Of the environment `{name}`.")
    parts += [
        "## env\n",
        f"{(inspect.getdoc(MixtureOptions) or '').replace('``', '`')}\n",
        _format_table(_mixture_options()),
    ]
    return "\n".join(parts)


def environment_schemas() -> Mapping[str, Schema]:
    """Return a schema for each registered environment, by name, in which the section ``env`` has
    that environment's options."""
    return {name: Schema(with_environment(ExperimentConfig, name)) for name in environments}


def scheduler_schemas() -> Mapping[str, Schema]:
    """Return the configuration schema for each registered scheduler that has options, by its name.

    The schema's section ``scheduler`` holds that scheduler's options.
    """
    schemas = {name: Schema(with_scheduler(ExperimentConfig, name)) for name in schedulers}
    return {name: schema for name, schema in schemas.items() if any(_scheduler_options(schema))}


def _scheduler_options(schema: Schema) -> Iterator[NamedOption]:
    """Return the options of a scheduler, except ``scheduler.path``, which selects it."""
    return (
        entry for entry in _section_options(schema, "scheduler") if entry.name != "scheduler.path"
    )


def _mixture_options() -> Iterator[NamedOption]:
    """Yield the options that every mixture of environments has. ``NAME`` stands for the name of
    each of its environments."""
    yield from walk(MixtureOptions(), "env")
    yield from walk(PartLimits(), "env.limits.NAME")


def _own_sections(config_dir: Path) -> Mapping[str, tuple[list[str], Schema]]:
    """Return the sections that shipped experiments add, except ``env``, as {section: (experiments
    that have it, a schema that contains it)}."""
    common = Schema().sections
    owners = {}
    for name, schema in shipped_schemas(config_dir).items():
        for section in schema.sections:
            if section not in common and section != "env":
                owners.setdefault(section, ([], schema))[0].append(name)
    return owners


def _format_chapter(section: str, schema: Schema, aside: str = "") -> list[str]:
    """Return the chapter about a section: a heading, the section's docstring followed by ``aside``,
    and a table of its options."""
    kind = type(schema.sections[section])
    about = (inspect.getdoc(kind) or "").replace("``", "`")
    return [
        f"## {section}\n",
        f"{about}{aside}\n",
        _format_table(_section_options(schema, section)),
    ]


def _section_options(schema: Schema, section: str) -> Iterator[NamedOption]:
    """Return the options of a section, without those of its subsections."""
    return (entry for entry in schema.options.values() if entry.name.rpartition(".")[0] == section)


def _format_lines(options: Iterable[NamedOption]) -> Iterator[str]:
    """Yield a line per option, with empty lines between sections."""
    section = ""
    for name, option, value in options:
        if (head := name.rpartition(".")[0]) != section:
            yield ""
            section = head
        assignment = f"  {name}={_format_value(value)}"
        allowed = f" [{text}]" if (text := _allowed_values(option, value)) else ""
        yield f"{assignment:{_COLUMN}} {option.about}{allowed}".rstrip()


def _format_table(options: Iterable[NamedOption]) -> str:
    rows = ["| option | default | description | allowed | on resume |", "|---|---|---|---|---|"]
    for name, option, value in options:
        default = f"`{text}`" if (text := _format_value(value)) else ""
        rows.append(
            f"| `{name}` | {default} | {option.about} | {_allowed_values(option, value)} | "
            f"{option.on_resume} |"
        )
    return "\n".join([*rows, ""])


def _allowed_values(option: Option, value: Any) -> str:
    """Return the bounds or choices of an option as text."""
    if option.registry:
        return ", ".join(registered_names(option.registry))
    if option.choices:
        return ", ".join([*option.choices, *([REFERENCE] if option.reference else [])])
    return (
        ", ".join(item.value for item in type(value)) if isinstance(value, Enum) else option.bound()
    )


def _format_value(value: Any) -> str:
    """Return a value in the form of the command line; "" for None and for an option that must be
    given."""
    if value is None or value == "???":
        return ""
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    return str(getattr(value, "value", value))
