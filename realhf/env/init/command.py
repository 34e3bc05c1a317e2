"""Is the command ``python -m realhf.env init``."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.text import Text

from realhf.env.init.scaffold import DOORS, write_start

ABOUT = "\n".join(
    [
        "Write NAME.py, a working environment of less than 60 lines to change, and test_NAME.py, which checks it.",
        "Files that are there already are left alone.",
        "",
        *(f"--door {name:<8} {about}" for name, about in DOORS.items()),
    ]
)
"""Shown by ``--help``."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.description = ABOUT
    parser.add_argument("name", metavar="NAME", help="small letters, digits and underscores: guess, my_game")
    parser.add_argument("--door", choices=[*DOORS], default="class", help="how it is written (class)")
    parser.add_argument("--folder", type=Path, default=Path(), help="where the files go (the working directory)")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Write the files and say what comes next. Returns 0; raises ValueError for what cannot be written."""
    start = write_start(arguments.name, arguments.door, arguments.folder)
    lines = [f"wrote {start.files[0]} and {start.files[1]}; next:", *(f"    {command}" for command in start.commands)]
    for line in lines:
        console.print(Text(line), soft_wrap=True)
    return 0
