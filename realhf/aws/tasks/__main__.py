"""``python -m realhf.aws.tasks validate``: play every task against MiniStack and print a table of
verdicts.

``python -m realhf.aws.tasks members tests/aws/validation/plays/*.yaml``: probe which members of
requests MiniStack keeps, and rewrite the table that grading uses.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import realhf
from realhf.aws.episode.member_probe import collect, make_table, served_writes, written_plays
from realhf.aws.episode.validation import validate
from realhf.aws.grading.member_notes import check_notes, read_notes
from realhf.aws.grading.sent_settings import TABLE, table_text
from realhf.aws.simulator.pool import MiniStackPool
from realhf.aws.tasks.loader import Template, get_template, load_file, load_templates
from realhf.aws.tasks.task import TaskError
from realhf.base.files import write_atomic

_FILE_COLUMNS = 160
"""Width of the tables when the output is not a terminal, in columns."""


def load_own_templates(files: Sequence[Path], tiers: Sequence[str] | None) -> list[Template]:
    """Return the templates in a user's files. Raises TaskError, or OSError for an unreadable
    file."""
    if not tiers or len(tiers) != 1:
        raise TaskError("say of which tier the files are: --tiers beginner")
    return [template for file in files for template in load_file(file, tiers[0])]


def select_templates(ids: Sequence[int] | None, tiers: Sequence[str] | None) -> list[Template]:
    """Return the templates with these ids or, if there are no ids, those of these tiers (None:
    all). Raises TaskError."""
    return [get_template(task_id) for task_id in ids] if ids else load_templates(tiers)


def build_verdict_table(templates: Sequence[Template], problems: dict[int, list[str]]) -> Table:
    """Return a table with one row per template. ``problems``: error messages by task_id; an empty
    list means that the task is valid."""
    table = Table("id", "tier", "split", "task", "commands", "verdict")
    for template in templates:
        wrong = problems[template.task_id]
        verdict = f"[red]{len(wrong)} wrong, see below" if wrong else "[green]ok"
        head = (str(template.task_id), template.kind, template.split, template.name)
        table.add_row(*head, str(len(template.solution)), verdict)
    return table


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m realhf.aws.tasks",
        description=(__doc__ or "").strip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"realhf {realhf.__version__}")
    parser.add_argument("action", choices=["validate", "members"])
    parser.add_argument(
        "files",
        nargs="*",
        type=Path,
        help="validate: YAML files of tasks of one's own, instead of ours; members: YAML files of "
        "plays, to be probed "
        "besides",
    )
    parser.add_argument(
        "--tiers", nargs="+", help="default: all; of files the one that they are of"
    )
    parser.add_argument("--ids", nargs="+", type=int, help="templates by number, instead of tiers")
    parser.add_argument(
        "--seeds",
        type=int,
        default=3,
        help="instances per template besides one with held-out names (default 3)",
    )
    parser.add_argument("--pool-size", type=int, default=4, help="simulators that play in parallel")
    parser.add_argument(
        "--output",
        type=Path,
        help="members: where the table is written (default: into the package)",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line program.

    Returns the exit status: 0 on success, 1 if a task has problems or the table cannot be written,
    130 after an interrupt.
    """
    parser = _build_parser()
    options = parser.parse_args(argv)
    for name in ("seeds", "pool_size"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is at least 1")
    if options.action == "members" and (options.ids or options.tiers) and options.output is None:
        parser.error(
            "members of some templates make a part of the table: name a file for it by --output"
        )
    if options.output is not None and not options.output.absolute().parent.is_dir():
        parser.error(f"--output {options.output}: there is no folder {options.output.parent}")
    own_files = options.files if options.action == "validate" else []
    try:
        check_notes()
        if own_files:
            templates = load_own_templates(own_files, options.tiers)
        else:
            templates = select_templates(options.ids, options.tiers)
        plays = written_plays(options.files) if options.action == "members" else {}
    except (TaskError, OSError) as error:
        parser.error(str(error))
    console = Console() if sys.stdout.isatty() else Console(width=_FILE_COLUMNS)
    if options.action == "members":
        return _write_member_table(templates, plays, options.pool_size, options.output, console)
    began = time.monotonic()
    try:
        problems = validate(templates, options.seeds, options.pool_size, console)
    except KeyboardInterrupt:
        console.print("interrupted: nothing was judged")
        return 130
    console.print(build_verdict_table(templates, problems))
    for text in (text for template in templates for text in problems[template.task_id]):
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    bad = sum(bool(wrong) for wrong in problems.values())
    console.print(f"{len(templates)} tasks, {bad} with problems, {time.monotonic() - began:.0f} s")
    return 1 if bad else 0


def _write_member_table(
    templates: Sequence[Template],
    plays: Mapping[int, Sequence[Mapping[str, Any]]],
    pool_size: int,
    output: Path | None,
    console: Console,
) -> int:
    """Probe every write operation that the simulator serves, with the requests in these templates
    and plays, and write the table. Returns the exit status."""
    began = time.monotonic()
    pool = MiniStackPool(pool_size)
    try:
        pool.start()
        slots = [pool.acquire() for _ in range(pool_size)]
        corpus = collect(slots[0], templates, plays)
        table = make_table(
            slots, corpus, read_notes(), served_writes(), partial(console.print, highlight=False)
        )
    except KeyboardInterrupt:
        console.print("interrupted: no table was written")
        return 130
    finally:
        pool.stop()
    try:
        write_atomic(output or TABLE, table_text(table))
    except OSError as error:
        console.print(
            f"the table cannot be written: {error}; name another file by --output", highlight=False
        )
        return 1
    fates = Counter(
        fate.partition(":")[0]
        for entry in table["operations"].values()
        for fate in entry.get("members", {}).values()
    )
    probed = sum("members" in entry for entry in table["operations"].values())
    console.print(
        f"{probed} operations of {len(table['operations'])} probed: {dict(fates)}", highlight=False
    )
    console.print(f"{time.monotonic() - began:.0f} s", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
