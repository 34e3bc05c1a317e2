"""The command ``python -m realhf.env list``: a table of the registered environments."""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from realhf.api.environment import SPLITS, TRAIN, EnvironmentSpec
from realhf.env.check.calls import describe_error
from realhf.env.loader.load import build_environment, load_definition
from realhf.registry import environments

ABOUT = (
    "List the registered environments with their default options: tasks, tools, solver, what they "
    "are about."
)
"""Shown by ``--help``."""
_RESET_S = 10.0
"""Maximum seconds for an environment's reset and close."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.description = ABOUT
    parser.add_argument("--json", action="store_true", help="print a JSON list and nothing else")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Print the table. Return 0, or 1 if an environment does not load."""
    rows = [describe_environment(name) for name in environments]
    if arguments.json:
        print(json.dumps(rows, indent=2))
    else:
        console.print(_build_table(rows))
    return 1 if any(row["error"] for row in rows) else 0


def describe_environment(name: str) -> dict[str, Any]:
    """Return the table row of an environment; its ``error`` is "" unless the environment cannot be
    loaded."""
    row: dict[str, Any] = {
        "name": name,
        "groups": {},
        "interface": "",
        "solver": False,
        "service": "",
        "about": "",
    }
    try:
        definition = load_definition(name)
        row["about"] = _first_sentence(inspect.getdoc(definition.options) or "")
        if needed := getattr(definition.options, "needs", ""):
            return row | {"interface": f"needs env.{needed}", "error": ""}
        spec = build_environment(name, {})
        row["solver"] = (
            spec.demonstrate is not None or getattr(spec, "demonstrations", None) is not None
        )
        row["service"] = spec.launch.module if spec.launch else ""
        for split in SPLITS:
            groups = [*spec.tasks(split).group_of.values()]
            row["groups"][split] = {group: groups.count(group) for group in dict.fromkeys(groups)}
        row["interface"] = "" if spec.launch else asyncio.run(_describe_interface(spec))
        row["error"] = ""
    except Exception as error:
        row["error"] = describe_error(error)
    return row


async def _describe_interface(spec: EnvironmentSpec) -> str:
    """Return a text such as ``3 tools``, or ``text``, according to the opening of the first
    task."""
    tasks = spec.tasks(TRAIN)
    task = tasks.instantiate(next(iter(tasks.group_of)), 0)
    environment = spec.make("")
    try:
        async with asyncio.timeout(_RESET_S):
            tools = len((await environment.reset(task.payload, seed=task.seed)).tools)
    finally:
        async with asyncio.timeout(_RESET_S):
            await environment.close()
    return f"{tools} tool{'' if tools == 1 else 's'}" if tools else "text"


def _first_sentence(text: str) -> str:
    sentence, stop, _ = " ".join(text.split()).partition(". ")
    return f"{sentence}." if stop else sentence


def _build_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(
        "name",
        "groups: templates to train on + held out",
        "policy sees",
        "solver",
        "lives in",
        "about",
    )
    for row in rows:
        train, held_out = (row["groups"].get(split, {}) for split in SPLITS)
        groups = ", ".join(
            f"{group} {train.get(group, 0)}+{held_out.get(group, 0)}"
            for group in {**train, **held_out}
        )
        table.add_row(
            row["name"],
            Text(groups),
            row["interface"] or "?",
            "yes" if row["solver"] else "no",
            row["service"] or "process",
            Text(f"{row['about']} {row['error']}".strip(), style="red" if row["error"] else ""),
        )
    return table
