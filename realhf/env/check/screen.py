"""Shows a check to a person: a line for every check, on a terminal what is going on right now, and then a line for
every finding."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.status import Status
from rich.text import Text

from realhf.env.check.finding import Finding, counted, quoted
from realhf.env.check.order import FAULT, NOW, READ, SKIPPED, STAGE, VERDICT
from realhf.env.check.report import Report

_NAME = 16
_STYLES = {FAULT: "red", READ: "yellow", SKIPPED: "yellow"}


class Screen:
    """Prints on ``console``; nothing when that is quiet."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._stage = ""
        self._skipped: dict[str, list[str]] = {}
        self._status: Status | None = None

    def begin(self, reference: str) -> None:
        """Say what is checked."""
        self._line(f"check of {reference}", "bold")
        if self._console.is_terminal:
            self._status = self._console.status("starting a process")
            self._status.start()

    def hear(self, event: Sequence[Any]) -> None:
        """Show an event of the child."""
        kind, *values = event
        if kind == STAGE:
            self._stage = values[0]
            self._now(self._stage)
        elif kind == NOW and self._status is not None:
            self._now(f"{self._stage}: {values[0]} {quoted(values[1], 40)}")
        elif kind == VERDICT and values[1] == SKIPPED:
            self._skipped.setdefault(values[2], []).append(values[0])
        elif kind == VERDICT:
            name, outcome, remark = values
            self._line(f"{outcome:<8} {name:<{_NAME}} {remark}".rstrip(), _STYLES.get(outcome, "green"))

    def show(self, finding: Finding) -> None:
        """Show a finding on a line of its own."""
        self._line(f"{'FAULT' if finding.is_fault else 'note'} {finding.line()}", "red" if finding.is_fault else "")

    def finish(self, report: Report) -> None:
        """Show the tools, what was found, and the sum."""
        self.close()
        for why, names in self._skipped.items():
            self._line(f"{SKIPPED:<8} {', '.join(names)}: {why}", _STYLES[SKIPPED])
        tools = report.about.get("tools", ())
        for tool in tools:
            function = tool["function"]
            about = quoted(function.get("description", ""), 100)
            self._line(f"tool {function['name']}: {about}")
            self._line(f"  {json.dumps(function.get('parameters', {}), ensure_ascii=False)}")
        for finding in report.findings:
            self.show(finding)
        name = report.about.get("name", report.reference)
        found = f"{counted(report.faults, 'fault')}, {counted(report.notes, 'note')}"
        self._line(f"{name}: {found}, {report.seconds:.1f} s", "bold red" if report.faults else "bold green")

    def close(self) -> None:
        """Leave the terminal as it was found."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def _now(self, text: str) -> None:
        if self._status is not None:
            self._status.update(Text(text))

    def _line(self, text: str, style: str = "") -> None:
        shown = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
        self._console.print(Text(shown, style=style), soft_wrap=True)
