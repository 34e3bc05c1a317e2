"""``python -m tests.aws.validation.mutation``: prove the grader with generated mutants of every
solution.

Each mutant is played as an agent would play it. A mutant that reaches another state than the solution and is paid is
*wrongly paid*; one that reaches the same state and is not paid is *wrongly refused*. *Doubtful* is one of which the
describe calls tell another story than the grader: to be read, not counted as wrong. All are counted by template and
listed with their commands."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from realhf.api.passport import MODIFIED, Counts, Passport
from realhf.aws.episode.validation import Failure, play_in_parallel
from realhf.aws.tasks.loader import Template, get_template, instantiate, load_templates
from realhf.aws.tasks.task import TIERS, Task, TaskError
from realhf.base.installation import PACKAGE, git_state
from realhf.env.loader.load import passport_file
from tests.aws.validation.mutant import KINDS, Mutant
from tests.aws.validation.mutant_player import MAX_STEPS, Goals, Played, play_mutant
from tests.aws.validation.mutants import mutants_of

ABOVE_WARMUP = TIERS[1:]
MOST = 140
MAX_WRONGLY_PAID = 0.001
MAX_WRONGLY_REFUSED = 0.005
"""Largest shares of all mutants."""
_FILE_COLUMNS = 160

Turn = tuple[Task, Mutant]
Key = tuple[int, int, tuple[str, ...]]
"""Template, seed and commands: what tells one play from another."""


@dataclass
class Tally:
    """Counts what came of mutants; ``broken`` could not be played."""

    played: list[Played] = field(default_factory=list)
    broken: int = 0

    @property
    def paid(self) -> list[Played]:
        """Those paid for another state."""
        return [one for one in self.played if one.wrongly_paid]

    @property
    def refused(self) -> list[Played]:
        """Those not paid for the wanted state."""
        return [one for one in self.played if one.wrongly_refused]

    @property
    def doubtful(self) -> list[Played]:
        """Those right by their states, of which the describe calls tell otherwise."""
        return [
            one
            for one in self.played
            if one.doubtful and not one.wrongly_paid and not one.wrongly_refused
        ]

    def cells(self) -> tuple[str, ...]:
        """Return the numbers of a row of the table."""
        right = sum(one.right for one in self.played)
        numbers = (
            len(self.played),
            right,
            len(self.paid),
            len(self.refused),
            len(self.doubtful),
            self.broken,
        )
        return tuple(map(str, numbers))

    def shares(self) -> tuple[float, float]:
        """Return the shares wrongly paid and wrongly refused."""
        number = max(1, len(self.played))
        return len(self.paid) / number, len(self.refused) / number


def turns_of(templates: Sequence[Template], most: int, seed: int) -> list[Turn]:
    """Return at most ``most`` mutants of an instance of each template, with the instance."""
    found: list[Turn] = []
    for template in templates:
        task = instantiate(template.task_id, seed)
        found += [(task, mutant) for mutant in mutants_of(task, most, seed)]
    return found


def play_all(
    turns: Sequence[Turn], pool_size: int, console: Console
) -> Iterator[tuple[Turn, Played | Failure]]:
    """Yield what came of each mutant, in their order."""
    goals = Goals()
    results = play_in_parallel(
        turns,
        lambda episode, turn: play_mutant(episode, *turn, goals),
        pool_size,
        console,
        MAX_STEPS,
    )
    yield from zip(turns, results, strict=True)


def table(tallies: Mapping[str, Tally], title: str) -> Table:
    """Return a table with one row per name and one for all."""
    found = Table(
        title, "mutants", "to be paid", "wrongly paid", "wrongly refused", "doubtful", "not played"
    )
    whole = Tally()
    for name, tally in tallies.items():
        found.add_row(name, *tally.cells())
        whole.played += tally.played
        whole.broken += tally.broken
    found.add_section()
    found.add_row("all", *whole.cells())
    return found


def markdown(tallies: Mapping[str, Tally]) -> str:
    """Return the table as a page of the documentation holds it."""
    rows = [
        "| tier | templates | mutants | to be paid | wrongly paid | wrongly refused | doubtful |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    whole = Tally(played=[one for tally in tallies.values() for one in tally.played])
    for name, tally in {**tallies, "all": whole}.items():
        templates = len({one.task_id for one in tally.played})
        rows.append(f"| {name} | {templates} | {' | '.join(tally.cells()[:5])} |")
    return "\n".join(rows)


def _tallies(
    results: Iterable[Played], name: Callable[[Played], str], names: Iterable[str] = ()
) -> dict[str, Tally]:
    """Return what came of the mutants of each name, ``names`` first."""
    tallies = {each: Tally() for each in names}
    for one in results:
        tallies.setdefault(name(one), Tally()).played.append(one)
    return tallies


def _known(path: Path | None) -> dict[Key, Played]:
    """Return what a file of an earlier run says. Raises ValueError naming the line that is no
    record; the last one may be cut off by what ended that run."""
    if path is None or not path.exists():
        return {}
    found: dict[Key, Played] = {}
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines, 1):
        try:
            one = Played.from_json(json.loads(line))
        except (ValueError, TypeError, AttributeError) as error:
            if number == len(lines):
                break
            raise ValueError(f"{path}, line {number}: {error}") from None
        found[one.task_id, one.seed, one.commands] = one
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.aws.validation.mutation", description=__doc__
    )
    parser.add_argument(
        "--templates", nargs="+", type=int, metavar="ID", help="default: all above warm-up"
    )
    parser.add_argument("--tiers", nargs="+", help="instead of templates")
    parser.add_argument(
        "--most", type=int, default=MOST, help="mutants of a template (default %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="decides the instance and the sample")
    parser.add_argument("--pool-size", type=int, default=4, help="simulators that play in parallel")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="JSON lines; a file that is there is gone on with",
    )
    for name, share in (
        ("--wrongly-paid", MAX_WRONGLY_PAID),
        ("--wrongly-refused", MAX_WRONGLY_REFUSED),
    ):
        parser.add_argument(
            name, type=float, default=share, help="largest share of all (default %(default)s)"
        )
    parser.add_argument(
        "--passport",
        action="store_true",
        help="write the passport of the environment, of all templates",
    )
    parser.add_argument(
        "--markdown", action="store_true", help="print the table of the documentation as well"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program. Returns the exit status: 0 within the bounds, 1 outside or when a mutant
    could not be played, 130 after an interrupt."""
    parser = _parser()
    options = parser.parse_args(argv)
    for name in ("most", "pool_size"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is at least 1")
    if options.passport and (options.templates or options.tiers):
        parser.error("--passport is about all templates: give neither --templates nor --tiers")
    try:
        chosen = options.templates and [get_template(task_id) for task_id in options.templates]
        templates = chosen or load_templates(options.tiers or ABOVE_WARMUP)
        turns = turns_of(templates, options.most, options.seed)
        record = _known(options.output)
    except (TaskError, ValueError) as error:
        parser.error(str(error))
    console = Console() if sys.stdout.isatty() else Console(width=_FILE_COLUMNS)
    keys = [(task.task_id, task.seed, mutant.commands) for task, mutant in turns]
    results = [record[key] for key in keys if key in record]
    left = [turn for turn, key in zip(turns, keys, strict=True) if key not in record]
    known = len(results)
    broken: list[int] = []
    began = time.monotonic()
    interrupted = False
    with options.output.open("a") if options.output else nullcontext() as file:
        try:
            for turn, result in play_all(left, options.pool_size, console):
                if isinstance(result, Failure):
                    broken.append(turn[0].task_id)
                    console.print(
                        f"[red]{turn[0].task_id}: {escape(str(turn[1]))}: {escape(result.text)}"
                    )
                    continue
                results.append(result)
                if file is not None:
                    print(json.dumps(result.to_json()), file=file, flush=True)
        except KeyboardInterrupt:
            interrupted = True
    _report(console, templates, results, broken)
    fresh = results[known:]
    seconds = time.monotonic() - began
    sent = sum(one.sent for one in fresh)
    console.print(
        f"{len(results)} mutants, {len(fresh)} played now in {seconds:.0f} s: "
        f"{len(fresh) / seconds:.1f} mutants and "
        f"{sent / seconds:.1f} commands a second"
    )
    if options.markdown:
        tiers = {template.task_id: template.kind for template in templates}
        console.print(markdown(_tallies(results, lambda one: tiers[one.task_id])), markup=False)
    if interrupted:
        console.print(f"interrupted: {len(turns) - len(results)} mutants were not played")
        return 130
    if options.passport:
        file = passport_file("aws")
        passport_of(results, f"make mutation MOST={options.most} SEED={options.seed}").write(file)
        console.print(f"passport: {file}", markup=False, soft_wrap=True)
    paid, refused = Tally(results).shares()
    return 1 if broken or paid > options.wrongly_paid or refused > options.wrongly_refused else 0


def passport_of(results: Iterable[Played], command: str) -> Passport:
    """Return what mutants found, by their kinds."""
    kinds: dict[str, Counts] = {}
    for one in results:
        kinds.setdefault(one.kind, Counts()).add(
            right=one.right and not one.wrongly_paid, paid=one.achieved
        )
    git = git_state(PACKAGE)
    commit = f"{git['commit'] or ''}{MODIFIED if git['modified'] else ''}"
    return Passport("aws", command, date.today().isoformat(), commit, kinds)


def _report(
    console: Console,
    templates: Sequence[Template],
    results: Sequence[Played],
    broken: Sequence[int],
) -> None:
    names = {template.task_id: f"{template.task_id} {template.name}" for template in templates}
    tallies = _tallies(results, lambda one: names[one.task_id], names.values())
    for task_id in broken:
        tallies[names[task_id]].broken += 1
    for name, tally in tallies.items():
        for wrong, listed in (
            ("wrongly paid", tally.paid),
            ("wrongly refused", tally.refused),
            ("doubtful, paid", [one for one in tally.doubtful if one.achieved]),
            ("doubtful, refused", [one for one in tally.doubtful if not one.achieved]),
        ):
            for one in listed:
                console.print(f"[red]{escape(name)}, {wrong}: {escape(one.says)}")
                reasons = [f"  state: {text}" for text in one.differences] + [
                    f"  told: {text}" for text in one.told
                ]
                for line in (*one.commands, *reasons):
                    console.print(f"    {line}", markup=False, highlight=False, soft_wrap=True)
    console.print(table(tallies, "template"))
    console.print(table(_tallies(results, lambda one: one.kind, KINDS), "kind"))


if __name__ == "__main__":
    sys.exit(main())
