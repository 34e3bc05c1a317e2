"""``python -m realhf.aws.tasks validate``: play every task against MiniStack and print a table of verdicts."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

import realhf
from realhf.aws.episode.validation import validate
from realhf.aws.tasks.loader import Template, get_template, load_file, load_templates
from realhf.aws.tasks.task import TaskError

_FILE_COLUMNS = 160
"""Width of the tables where there is no terminal."""


def own_templates(files: Sequence[Path], tiers: Sequence[str] | None) -> list[Template]:
    """Return the templates of files of one's own. Raises TaskError, and for a file that cannot be read OSError."""
    if not tiers or len(tiers) != 1:
        raise TaskError("say of which tier the files are: --tiers beginner")
    return [template for file in files for template in load_file(file, tiers[0])]


def choose(ids: Sequence[int] | None, tiers: Sequence[str] | None) -> list[Template]:
    """Return the templates with these ids, or of these tiers. Raises TaskError."""
    return [get_template(task_id) for task_id in ids] if ids else load_templates(tiers)


def verdicts(templates: Sequence[Template], found: dict[int, list[str]]) -> Table:
    """Return a table with one row per template."""
    table = Table("id", "tier", "split", "task", "commands", "verdict")
    for template in templates:
        wrong = found[template.task_id]
        verdict = f"[red]{len(wrong)} wrong, see below" if wrong else "[green]ok"
        head = (str(template.task_id), template.kind, template.split, template.name)
        table.add_row(*head, str(len(template.solution)), verdict)
    return table


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m realhf.aws.tasks", description=(__doc__ or "").strip())
    parser.add_argument("--version", action="version", version=f"realhf {realhf.__version__}")
    parser.add_argument("action", choices=["validate"])
    parser.add_argument("files", nargs="*", type=Path, help="YAML files of tasks of one's own, instead of ours")
    parser.add_argument("--tiers", nargs="+", help="default: all; of files the one that they are of")
    parser.add_argument("--ids", nargs="+", type=int, help="templates by number, instead of tiers")
    parser.add_argument(
        "--seeds", type=int, default=3, help="instances per template besides one with held-out names (default 3)"
    )
    parser.add_argument("--pool-size", type=int, default=4, help="simulators that play in parallel")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program. Returns the exit status: 0 when every verdict is good, 1 when one is not, 130 after an
    interrupt."""
    parser = _parser()
    options = parser.parse_args(argv)
    for name in ("seeds", "pool_size"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is at least 1")
    try:
        templates = own_templates(options.files, options.tiers) if options.files else choose(options.ids, options.tiers)
    except (TaskError, OSError) as error:
        parser.error(str(error))
    console = Console() if sys.stdout.isatty() else Console(width=_FILE_COLUMNS)
    began = time.monotonic()
    try:
        found = validate(templates, options.seeds, options.pool_size, console)
    except KeyboardInterrupt:
        console.print("interrupted: nothing was judged")
        return 130
    console.print(verdicts(templates, found))
    for text in (text for template in templates for text in found[template.task_id]):
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    bad = sum(bool(wrong) for wrong in found.values())
    console.print(f"{len(templates)} tasks, {bad} with problems, {time.monotonic() - began:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
