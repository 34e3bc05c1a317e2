"""Held-out evaluations of a run, kept in ``evaluations.json`` so that a resumed run knows where it began."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

EVALUATIONS_FILE = "evaluations.json"


class Evaluations:
    """Reports by the number of steps that were complete when they were made."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / EVALUATIONS_FILE
        try:
            content = json.loads(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            content = {}
        self._reports: dict[int, dict[str, Any]] = {int(step): report for step, report in content.items()}

    def at(self, step: int) -> dict[str, Any] | None:
        """The report made after ``step`` steps, if any; 0 is the one before training."""
        return self._reports.get(step)

    def all(self) -> list[tuple[int, dict[str, Any]]]:
        """Every report with its step, in order."""
        return sorted(self._reports.items())

    def add(self, step: int, report: dict[str, Any]) -> None:
        self._reports[step] = report
        self._write()

    def forget_after(self, step: int) -> None:
        """Drop reports of weights that a killed run lost."""
        self._reports = {known: report for known, report in self._reports.items() if known <= step}
        self._write()

    def _write(self) -> None:
        partial = self._path.with_suffix(".tmp")
        partial.write_text(json.dumps(self._reports, indent=1), encoding="utf-8")
        os.replace(partial, self._path)
