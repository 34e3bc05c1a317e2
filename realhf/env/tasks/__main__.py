"""``python -m realhf.env.tasks validate``: play every task against MiniStack and print a table of verdicts."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from realhf.env.grader import criteria_of
from realhf.env.task import TaskError
from realhf.env.tasks.loader import Template, get_template, instantiate, load_templates
from realhf.env.tasks.static_checks import collection_problems, kind_of, template_problems
from realhf.env.tasks.validation import validate


def choose(ids: Sequence[int] | None, tiers: Sequence[str] | None) -> list[Template]:
    """The templates with these ids, or of these tiers. Raises TaskError."""
    return [get_template(task_id) for task_id in ids] if ids else load_templates(tiers)


def verdicts(templates: Sequence[Template], found: dict[int, list[str]]) -> Table:
    """One row per template."""
    table = Table("id", "tier", "split", "strategy", "task", "commands", "verdict")
    for template in templates:
        wrong = found[template.task_id]
        verdict = "[red]" + escape("\n".join(wrong)) if wrong else "[green]ok"
        table.add_row(str(template.task_id), kind_of(template), template.split, _strategy(template), template.name,
                      str(len(template.solution)), verdict)  # fmt: skip
    return table


def _strategy(template: Template) -> str:
    try:
        return criteria_of(instantiate(template.task_id, 0)).strategy
    except TaskError:
        return "?"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m realhf.env.tasks", description=(__doc__ or "").strip())
    parser.add_argument("action", choices=["validate"])
    parser.add_argument("--tiers", nargs="+", help="default: all")
    parser.add_argument("--ids", nargs="+", type=int, help="templates by number, instead of tiers")
    parser.add_argument("--seeds", type=int, default=3, help="instances per template, besides one with held-out names")
    parser.add_argument("--pool-size", type=int, default=4, help="simulators that play in parallel")
    options = parser.parse_args(argv)
    try:
        templates = choose(options.ids, options.tiers)
    except TaskError as error:
        parser.error(str(error))
    console, began = Console(), time.monotonic()
    found = validate(templates, options.seeds, options.pool_size, console)
    for template in templates:
        found[template.task_id] = template_problems(template) + found[template.task_id]
    console.print(verdicts(templates, found))
    together = [] if options.ids or options.tiers else collection_problems(templates)
    for text in together:
        console.print(f"[red]{escape(text)}")
    bad = sum(bool(wrong) for wrong in found.values())
    console.print(f"{len(templates)} tasks, {bad} with problems, {time.monotonic() - began:.0f} s")
    return 1 if bad or together else 0


if __name__ == "__main__":
    sys.exit(main())
