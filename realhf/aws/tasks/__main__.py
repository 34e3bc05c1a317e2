"""``python -m realhf.aws.tasks validate``: play every task against MiniStack and print a table of verdicts.

With ``--adversarial``, play against the grader: what does nothing, harms or overdoes must not pay, and every right way
must."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from realhf.aws.grading.end_state import END_STATE, is_graded_by_end_state
from realhf.aws.grading.grader import criteria_of
from realhf.aws.tasks.loader import Template, get_template, instantiate, load_templates
from realhf.aws.tasks.task import TaskError
from realhf.aws.validation.adversarial import play_against, play_table, summary_table
from realhf.aws.validation.static_checks import collection_problems, kind_of, template_problems
from realhf.aws.validation.validation import validate

_FILE_COLUMNS = 160
"""Width of the tables where there is no terminal."""


def choose(ids: Sequence[int] | None, tiers: Sequence[str] | None) -> list[Template]:
    """Return the templates with these ids, or of these tiers. Raises TaskError."""
    return [get_template(task_id) for task_id in ids] if ids else load_templates(tiers)


def verdicts(templates: Sequence[Template], found: dict[int, list[str]]) -> Table:
    """Return a table with one row per template."""
    table = Table("id", "tier", "split", "strategy", "task", "commands", "verdict")
    for template in templates:
        wrong = found[template.task_id]
        verdict = "[red]" + escape("\n".join(wrong)) if wrong else "[green]ok"
        table.add_row(
            str(template.task_id),
            kind_of(template),
            template.split,
            _strategy(template),
            template.name,
            str(len(template.solution)),
            verdict,
        )
    return table


def _strategy(template: Template) -> str:
    try:
        task = instantiate(template.task_id, 0)
        return END_STATE if is_graded_by_end_state(task) else criteria_of(task).strategy
    except TaskError:
        return "?"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m realhf.aws.tasks", description=(__doc__ or "").strip())
    parser.add_argument("action", choices=["validate"])
    parser.add_argument("--adversarial", action="store_true", help="play against the grader; one row per play")
    parser.add_argument("--tiers", nargs="+", help="default: all")
    parser.add_argument("--ids", nargs="+", type=int, help="templates by number, instead of tiers")
    parser.add_argument(
        "--seeds",
        type=int,
        help="instances per template; default 3, besides one with held-out names, and 1 with --adversarial",
    )
    parser.add_argument("--pool-size", type=int, default=4, help="simulators that play in parallel")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program. Returns the exit status: 0 when every verdict is good, 1 when one is not, 130 after an
    interrupt."""
    parser = _parser()
    options = parser.parse_args(argv)
    for name in ("seeds", "pool_size"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is at least 1")
    try:
        templates = choose(options.ids, options.tiers)
    except TaskError as error:
        parser.error(str(error))
    console = Console() if sys.stdout.isatty() else Console(width=_FILE_COLUMNS)
    judge = _adversarial if options.adversarial else _plain
    try:
        return judge(templates, options, console)
    except KeyboardInterrupt:
        console.print("interrupted: nothing was judged")
        return 130


def _plain(templates: Sequence[Template], options: argparse.Namespace, console: Console) -> int:
    began = time.monotonic()
    found = validate(templates, options.seeds or 3, options.pool_size, console)
    for template in templates:
        found[template.task_id] = template_problems(template) + found[template.task_id]
    console.print(verdicts(templates, found))
    together = [] if options.ids or options.tiers else collection_problems(templates)
    for text in together:
        console.print(f"[red]{escape(text)}")
    bad = sum(bool(wrong) for wrong in found.values())
    console.print(f"{len(templates)} tasks, {bad} with problems, {time.monotonic() - began:.0f} s")
    return 1 if bad or together else 0


def _adversarial(templates: Sequence[Template], options: argparse.Namespace, console: Console) -> int:
    began = time.monotonic()
    reports = play_against(templates, options.seeds or 1, options.pool_size, console)
    console.print(play_table(reports))
    console.print(summary_table(reports))
    plays = sum(len(report.outcomes) + len(report.broken) for report in reports)
    outside = 0
    for report in reports:
        outside += len(report.problems)
        for text in report.problems:
            console.print(f"[red]{report.template.task_id}: {escape(text)}")
    console.print(
        f"{len(reports)} templates, {plays} plays, {outside or 'no'} verdict{'' if outside == 1 else 's'} outside the "
        f"bounds, {time.monotonic() - began:.0f} s"
    )
    return 1 if outside else 0


if __name__ == "__main__":
    sys.exit(main())
