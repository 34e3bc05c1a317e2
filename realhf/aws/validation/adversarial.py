"""Plays every play of many templates against the grader and reports which earned more or less than its class may.

``python -m realhf.aws.tasks validate --adversarial`` prints the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from realhf.aws.tasks.loader import Template
from realhf.aws.tasks.task import Task
from realhf.aws.validation.plays.collection import instance_to_play, plays_of
from realhf.aws.validation.plays.play import ASKED, KINDS, Outcome, Play, perform
from realhf.aws.validation.static_checks import kind_of
from realhf.aws.validation.validation import Failure, played

MAX_STEPS = 64
"""Largest number of steps of an episode with a play: to build a second set-up takes more commands than an agent has."""


@dataclass
class Report:
    """Reports what the plays of one template earned. ``broken``: plays that could not be played, with the error."""

    template: Template
    outcomes: list[Outcome] = field(default_factory=list)
    broken: list[tuple[Play, str]] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        """Return everything outside the bounds, in words."""
        found = [f"{one.play.kind}, {one.play.name}: {one.problem}" for one in self.outcomes if one.problem]
        return found + [f"{play.kind}, {play.name}: {error}" for play, error in self.broken]


def play_against(templates: Sequence[Template], seeds: int, pool_size: int, console: Console) -> list[Report]:
    """Play against the grader; returns one report per template, with the plays of ``seeds`` instances. Raises TaskError
    for a malformed written play."""
    reports = {template.task_id: Report(template) for template in templates}
    turns: list[tuple[Task, Play]] = []
    for template in templates:
        for seed in range(seeds):
            task = instance_to_play(template.task_id, seed)
            turns += [(task, play) for play in plays_of(task)]
    results = played(turns, lambda episode, turn: perform(episode, *turn), pool_size, console, MAX_STEPS)
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
        head = (str(report.template.task_id), kind_of(report.template))
        for one in report.outcomes:
            verdict = f"[red]{escape(one.problem)}" if one.problem else "[green]ok"
            if one.skipped:
                verdict = f"[yellow]skipped: {escape(one.failures[0])}"
            table.add_row(*head, *_play_cells(one.play), f"{one.score:.3f}", ASKED[one.play.kind], verdict)
        for play, error in report.broken:
            table.add_row(*head, *_play_cells(play), "", ASKED[play.kind], f"[red]{escape(error)}")
        table.add_section()
    return table


def _play_cells(play: Play) -> tuple[str, str, str]:
    return play.kind, escape(play.name), "written" if play.written else "generated"


def summary_table(reports: Sequence[Report]) -> Table:
    """Return a table with one row per class: how many plays, of which origin, and how many outside the bounds."""
    table = Table("class", "asked", "plays", "generated", "written", "skipped", "outside")
    for kind in KINDS:
        outcomes = [one for report in reports for one in report.outcomes if one.play.kind == kind]
        broken = [play for report in reports for play, _ in report.broken if play.kind == kind]
        counts = Counter(play.written for play in [*(one.play for one in outcomes), *broken])
        outside = sum(bool(one.problem) for one in outcomes) + len(broken)
        numbers = (sum(counts.values()), counts[False], counts[True], sum(one.skipped for one in outcomes))
        table.add_row(kind, ASKED[kind], *map(str, (*numbers, outside)))
    return table
