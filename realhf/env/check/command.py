"""The command ``python -m realhf.env check``: collects and displays the findings of a check."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.status import Status
from rich.text import Text

from realhf.api.passport import MODIFIED, Counts, Passport
from realhf.base.installation import git_state
from realhf.base.plugin import split_reference
from realhf.base.text import suggest_names
from realhf.env.check.calls import UserCode, environment_folders
from realhf.env.check.mutation import MUTANTS
from realhf.env.check.report import (
    ABOUT,
    ENDED,
    EXIT,
    FAULT,
    FINDING,
    FINGERPRINTS,
    FOLDER,
    NOW,
    OK,
    PASSPORT,
    READ,
    SKIPPED,
    VERDICT,
    Finding,
    Findings,
    Order,
    format_count,
    format_difference,
    quote,
)
from realhf.env.check.supervisor import CheckSupervisor
from realhf.env.loader.load import parse_options
from realhf.env.loader.reference import split_scheme
from realhf.registry import environments

_NAME_WIDTH = 16
"""Width, in characters, of the column with the names of checks."""
_ADVICE_ON_PASSPORT = "Describe under `view` what an episode leaves"
_STYLES = {FAULT: "red", READ: "yellow", SKIPPED: "yellow"}


class Report:
    """Results of a check, shown on ``console`` as they arrive.

    Attributes:
        about: Properties of the environment.
        verdicts: (check, outcome, remark) of each completed check.
    """

    def __init__(self, reference: str, console: Console | None = None) -> None:
        self.reference = reference
        self.about: dict[str, Any] = {}
        self.verdicts: list[tuple[str, str, str]] = []
        self.seconds = 0.0
        self._findings = Findings()
        self._console = console or Console(quiet=True)
        self._status: Status | None = None

    def begin(self) -> None:
        """Show what is checked, and start the status display on a terminal."""
        self._print_line(f"check of {self.reference}", "bold")
        if self._console.is_terminal:
            self._status = self._console.status("starting a process")
            self._status.start()

    def record_event(self, event: Sequence[Any]) -> None:
        """Record and show an event of the child process."""
        kind, *values = event
        if kind == NOW and self._status is not None:
            check, call, task, _ = values
            self._status.update(
                Text(check if call == check else f"{check}: {call} {quote(task, 40)}")
            )
        elif kind == ABOUT:
            self.about.update(values[0])
        elif kind == FINDING:
            self.add(Finding(**values[0]))
        elif kind == VERDICT:
            name, outcome, remark = values
            self.verdicts.append((name, outcome, remark))
            if outcome != SKIPPED:
                self._print_line(
                    f"{outcome:<8} {name:<{_NAME_WIDTH}} {remark}".rstrip(),
                    _STYLES.get(outcome, "green"),
                )

    def add(self, finding: Finding) -> None:
        """Record a finding."""
        self._findings.add(finding)

    def compare(self, other: Report) -> None:
        """Compare the fingerprints with those from another process with a different hash seed, and
        add the faults found there."""
        if other.faults:
            for finding in other.findings:
                if finding.is_fault:
                    self.add(replace(finding, what=f"in another process, {finding.what}"))
            return
        repeated = other.about.get(FINGERPRINTS, {})
        mend = "Nothing may depend on hash(), the order of a set, the clock or a process id"
        for key, turns in self.about[FINGERPRINTS].items():
            if key not in repeated:
                self.add(
                    Finding(
                        "determinism",
                        f"another process has other tasks: {key!r} is missing there",
                        mend,
                    )
                )
                return
            for number, (before, after) in enumerate(zip(turns, repeated[key], strict=False)):
                if before[0] != after[0]:
                    name = f"turn {number}" if number else "the opening"
                    what = (
                        f"another process answers differently: {name} is "
                        f"{format_difference(before[1], after[1], 100)}"
                    )
                    self.add(Finding("determinism", what, mend, task=key))
                    return

    def show_findings(self) -> None:
        """Show each finding on its own line."""
        for finding in self.findings:
            self._print_line(
                f"{'FAULT' if finding.is_fault else 'note'} {finding.line()}",
                "red" if finding.is_fault else "",
            )

    def finish(self) -> None:
        """Show the tools, the findings, and the totals."""
        self.close()
        skipped: dict[str, list[str]] = {}
        for name, outcome, why in self.verdicts:
            if outcome == SKIPPED:
                skipped.setdefault(why, []).append(name)
        for why, names in skipped.items():
            self._print_line(f"{SKIPPED:<8} {', '.join(names)}: {why}", _STYLES[SKIPPED])
        for tool in self.about.get("tools", ()):
            function = tool["function"]
            self._print_line(
                f"tool {function['name']}: {quote(function.get('description', ''), 100)}"
            )
            self._print_line(f"  {json.dumps(function.get('parameters', {}), ensure_ascii=False)}")
        self.show_findings()
        name = self.about.get("name", self.reference)
        notes = len(self.findings) - self.faults
        totals = f"{format_count(self.faults, 'fault')}, {format_count(notes, 'note')}"
        self._print_line(
            f"{name}: {totals}, {self.seconds:.1f} s", "bold red" if self.faults else "bold green"
        )

    def close(self) -> None:
        """Stop the status display."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    @property
    def findings(self) -> list[Finding]:
        """Findings in order of arrival."""
        return self._findings.all

    @property
    def faults(self) -> int:
        """Number of findings that are faults."""
        return self._findings.faults()

    def to_json(self) -> dict[str, Any]:
        """Return the results as a map for JSON, without internal data."""
        inner = (FOLDER, FINGERPRINTS, EXIT, ENDED, PASSPORT)
        findings = [asdict(finding) | {"line": finding.line()} for finding in self.findings]
        return {
            "reference": self.reference,
            "ok": not self.faults,
            **{name: value for name, value in self.about.items() if name not in inner},
            "checks": [
                {"name": name, "outcome": outcome, "remark": text}
                for name, outcome, text in self.verdicts
            ],
            "findings": [
                {key: value for key, value in each.items() if key != "kind"} for each in findings
            ],
            "seconds": round(self.seconds, 3),
        }

    def _print_line(self, text: str, style: str = "") -> None:
        printable = "".join(
            char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text
        )
        self._console.print(Text(printable, style=style), soft_wrap=True)


HELP = """\
Play an environment in a process of its own and say what is wrong with it: one line a fault, with the line of your code.

It resets tasks twice and compares every turn, plays many instances at once, sends messages that are wrong, looks for
calls that block the event loop, hang, leak or end the process, judges tasks, tools and rewards, and plays the scripted
solver. The exit status is 0 without faults, 1 with some, 2 for wrong arguments, 130 after Ctrl-C."""
"""Shown by ``--help``."""
_FIRST_SEED = 1
"""Hash seed of the first process."""
_OTHER_SEED = 2
"""Hash seed of the second process, which plays the episodes again."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.description = HELP
    parser.add_argument(
        "reference", metavar="ENVIRONMENT", help="a registered name, file.py:Name or module:Name"
    )
    parser.add_argument(
        "options", nargs="*", default=[], metavar="option=value", help="options of the environment"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object and nothing else"
    )
    parser.add_argument(
        "--instances", type=_parse_positive, default=100, help="instances that play at once (100)"
    )
    parser.add_argument(
        "--timeout",
        type=parse_seconds,
        default=10.0,
        metavar="S",
        help="seconds one call may take (10)",
    )
    parser.add_argument(
        "--slow",
        type=parse_seconds,
        default=60.0,
        metavar="S",
        help="seconds to load and make tasks (60)",
    )
    parser.add_argument(
        "--limit",
        type=parse_seconds,
        default=600.0,
        metavar="S",
        help="seconds for everything (600)",
    )
    parser.add_argument(
        "--turns",
        type=_parse_positive,
        default=100,
        help="turns within which an episode must end (100)",
    )
    parser.add_argument(
        "--tasks",
        type=_parse_positive,
        default=8,
        help="tasks that are played, over all groups (8)",
    )
    about = (
        "play mutants of the demonstrations and list those that are paid in full, and check "
        "nothing else"
    )
    parser.add_argument("--mutate", action="store_true", help=about)
    parser.add_argument(
        "--most", type=_parse_positive, default=2000, metavar="N", help="mutants in all (2000)"
    )
    about = "with --mutate: write what was found into NAME.passport.json beside the environment"
    parser.add_argument("--passport", action="store_true", help=about)
    parser.add_argument("--seed", type=int, default=0, help="draws demonstrations and mutants (0)")
    parser.add_argument(
        "--address", default="", help="address of the service that the environment is played on"
    )


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Run the command and return the exit status. Raises ValueError for wrong arguments."""
    check_reference(arguments.reference)
    if arguments.passport and not arguments.mutate:
        raise ValueError("--passport says what --mutate found: give both")
    order = Order(
        arguments.reference,
        parse_options(arguments.options),
        timeout_s=arguments.timeout,
        slow_s=arguments.slow,
        instances=arguments.instances,
        most_turns=arguments.turns,
        most_tasks=arguments.tasks,
        address=arguments.address,
        mutants=arguments.most if arguments.mutate else 0,
        seed=arguments.seed,
    )
    report = Report(order.reference, None if arguments.json else console)
    report.begin()
    try:
        check(order, report, arguments.limit)
    except KeyboardInterrupt:
        report.close()
        report.show_findings()
        print(
            "interrupted: the environment's process is gone, and what was not judged yet stays so",
            file=sys.stderr,
        )
        return 130
    finally:
        report.close()
    if arguments.passport:
        write_passport(report, arguments)
    report.finish()
    if arguments.json:
        print(json.dumps(report.to_json(), indent=2))
    return 1 if report.faults else 0


def write_passport(report: Report, arguments: argparse.Namespace) -> None:
    """Write the passport of an environment if all mutants were played; add a fault if it cannot be
    written."""
    outcome = report.about.get(MUTANTS, {})
    file = report.about.get(PASSPORT)
    kinds = {name: Counts(**counts) for name, counts in outcome.get("kinds", {}).items()}
    if file is None or not kinds:
        reason = (
            "not all mutants were played"
            if file is None
            else "without `view`, right and wrong plays cannot be distinguished"
        )
        report.add(
            Finding(
                MUTANTS,
                f"no passport is written: {reason}",
                _ADVICE_ON_PASSPORT if file else "",
            )
        )
        return
    words = [
        "python",
        "-m",
        "realhf.env",
        "check",
        arguments.reference,
        *arguments.options,
        "--mutate",
    ]
    command = shlex.join(
        [*words, "--most", str(arguments.most), "--seed", str(arguments.seed), "--passport"]
    )
    git = git_state(Path(file).parent)
    commit = f"{git['commit'] or ''}{MODIFIED if git['modified'] else ''}"
    try:
        Passport(report.about["name"], command, date.today().isoformat(), commit, kinds).write(
            Path(file)
        )
        report.record_event((VERDICT, PASSPORT, OK, file))
    except OSError as error:
        report.add(Finding(MUTANTS, f"the passport cannot be written: {error}"))


def check_reference(reference: str) -> None:
    """Raise ValueError for an unknown name or a missing file. The contents of a file are checked
    later, when it is loaded."""
    if split_scheme(reference):
        return
    parts = split_reference(reference)
    if parts.file is not None:
        if not parts.file.is_file():
            raise ValueError(f"there is no file {parts.place}")
    elif not parts.place and reference not in environments:
        suggestion = suggest_names(reference, [*environments])
        raise ValueError(
            f"unknown environment {reference!r}{suggestion}; one of your own is file.py:Name or "
            f"module:Name"
        )


def check(order: Order, report: Report, limit_s: float) -> None:
    """Check an environment in a child process. If there are no faults, play it again in a second
    process with another hash seed.

    The two processes together take at most ``limit_s`` seconds.
    """
    began = time.monotonic()
    code = UserCode(environment_folders(order.reference))
    CheckSupervisor(order, code, report.record_event).run(limit_s, _FIRST_SEED)
    if (fingerprints := report.about.get(FINGERPRINTS)) and not report.faults:
        left_s = max(1.0, limit_s - (time.monotonic() - began))
        repetition = Report(order.reference)
        repeat_order = replace(order, again=tuple(fingerprints))
        CheckSupervisor(repeat_order, code, repetition.record_event).run(left_s, _OTHER_SEED)
        report.compare(repetition)
    report.seconds = time.monotonic() - began


def _parse_positive(text: str) -> int:
    number = int(text) if text.isascii() and text.isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return number


def parse_seconds(text: str) -> float:
    """Parse a number of seconds from the command line. Raises ArgumentTypeError."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return number
