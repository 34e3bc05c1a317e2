"""``python -m tests.aws.validation.adversarial``: play against the grader, with a look, other
spellings of every solution and what a person wrote, and print which play earned more or less than
its class may."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from realhf.aws.episode.validation import Failure, play_in_parallel
from realhf.aws.tasks.__main__ import select_templates
from realhf.aws.tasks.loader import Template
from realhf.aws.tasks.task import Task, TaskError
from tests.aws.validation.equivalent import LOOK, equivalent_plays
from tests.aws.validation.play import (
    ASKED,
    KINDS,
    Outcome,
    Play,
    instance_to_play,
    perform,
    written_plays,
)

MAX_STEPS = 64
"""Largest number of steps of an episode with a play: to build a second set-up takes more commands
than an agent has."""


@dataclass
class Report:
    """Reports what the plays of one template earned. ``broken``: plays that could not be played,
    with the error."""

    template: Template
    outcomes: list[Outcome] = field(default_factory=list)
    broken: list[tuple[Play, str]] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        """Return everything outside the bounds, in words."""
        found = [
            f"{one.play.kind}, {one.play.name}: {one.problem}"
            for one in self.outcomes
            if one.problem
        ]
        return found + [f"{play.kind}, {play.name}: {error}" for play, error in self.broken]


def plays_of(task: Task) -> list[Play]:
    """Return every play of an ``instance_to_play``, in the order of the classes."""
    everything = [Play("nothing", "looks", (LOOK,)), *equivalent_plays(task), *written_plays(task)]
    return sorted(everything, key=lambda play: KINDS.index(play.kind))


def play_against(
    templates: Sequence[Template], seeds: int, pool_size: int, console: Console
) -> list[Report]:
    """Play against the grader; returns one report per template, with the plays of ``seeds``
    instances. Raises TaskError for a malformed written play."""
    reports = {template.task_id: Report(template) for template in templates}
    turns: list[tuple[Task, Play]] = []
    for template in templates:
        for seed in range(seeds):
            task = instance_to_play(template.task_id, seed)
            turns += [(task, play) for play in plays_of(task)]
    results = play_in_parallel(
        turns, lambda episode, turn: perform(episode, *turn), pool_size, console, MAX_STEPS
    )
    for (task, play), result in zip(turns, results, strict=True):
        if isinstance(result, Failure):
            reports[task.task_id].broken.append((play, result.text))
        else:
            reports[task.task_id].outcomes.append(result)
    return list(reports.values())


def play_table(reports: Sequence[Report]) -> Table:
    """Return a table with one row per play."""
    table = Table("id", "tier", "class", "play", "origin", "score", "asked", "verdict")
    for report in reports:
        head = (str(report.template.task_id), report.template.kind)
        for one in report.outcomes:
            verdict = f"[red]{escape(one.problem)}" if one.problem else "[green]ok"
            if one.skipped:
                verdict = f"[yellow]skipped: {escape(one.failures[0])}"
            table.add_row(
                *head, *_play_cells(one.play), f"{one.score:.3f}", ASKED[one.play.kind], verdict
            )
        for play, error in report.broken:
            table.add_row(*head, *_play_cells(play), "", ASKED[play.kind], f"[red]{escape(error)}")
        table.add_section()
    return table


def _play_cells(play: Play) -> tuple[str, str, str]:
    return play.kind, escape(play.name), "written" if play.written else "generated"


def summary_table(reports: Sequence[Report]) -> Table:
    """Return a table with one row per class: how many plays, of which origin, and how many outside
    the bounds."""
    table = Table("class", "asked", "plays", "generated", "written", "skipped", "outside")
    for kind in KINDS:
        outcomes = [one for report in reports for one in report.outcomes if one.play.kind == kind]
        broken = [play for report in reports for play, _ in report.broken if play.kind == kind]
        counts = Counter(play.written for play in [*(one.play for one in outcomes), *broken])
        outside = sum(bool(one.problem) for one in outcomes) + len(broken)
        numbers = (
            sum(counts.values()),
            counts[False],
            counts[True],
            sum(one.skipped for one in outcomes),
        )
        table.add_row(kind, ASKED[kind], *map(str, (*numbers, outside)))
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program. Returns the exit status: 0 when every play earned what its class may, else
    1."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.aws.validation.adversarial", description=__doc__
    )
    parser.add_argument("--tiers", nargs="+", help="default: all")
    parser.add_argument("--ids", nargs="+", type=int, help="templates by number, instead of tiers")
    parser.add_argument("--seeds", type=int, default=1, help="instances per template (default 1)")
    parser.add_argument("--pool-size", type=int, default=4, help="simulators that play in parallel")
    options = parser.parse_args(argv)
    for name in ("seeds", "pool_size"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is at least 1")
    try:
        templates = select_templates(options.ids, options.tiers)
    except TaskError as error:
        parser.error(str(error))
    console = Console(width=None if sys.stdout.isatty() else 160)
    began = time.monotonic()
    reports = play_against(templates, options.seeds, options.pool_size, console)
    console.print(play_table(reports))
    console.print(summary_table(reports))
    plays = sum(len(report.outcomes) + len(report.broken) for report in reports)
    wrong = [f"{report.template.task_id}: {text}" for report in reports for text in report.problems]
    for text in wrong:
        console.print(f"[red]{escape(text)}")
    seconds = time.monotonic() - began
    console.print(
        f"{len(reports)} templates, {plays} plays, {len(wrong)} outside the bounds, {seconds:.0f} s"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
