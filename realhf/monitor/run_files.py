"""Writes files of a run that people and later runs read: held-out evaluations, sampled episodes, skipped steps, graph.

A resumed run learns from ``evaluations.json`` where it began.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from realhf.base.files.whole_file import write_whole

if TYPE_CHECKING:
    from realhf.api.graph import DataFlowGraph

EVALUATIONS_FILE = "evaluations.json"


class Evaluations:
    """Keeps evaluation reports by the number of steps that were complete when they were made."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / EVALUATIONS_FILE
        try:
            content = json.loads(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            content = {}
        self._reports: dict[int, dict[str, Any]] = {int(step): report for step, report in content.items()}

    def at(self, step: int) -> dict[str, Any] | None:
        """Return the report made after ``step`` steps, if any; 0 is the one before training."""
        return self._reports.get(step)

    def all(self) -> list[tuple[int, dict[str, Any]]]:
        """Return every report with its step, in order."""
        return sorted(self._reports.items())

    def add(self, step: int, report: dict[str, Any]) -> None:
        """Keep a report under ``step`` and write the file."""
        self._reports[step] = report
        self._write()

    def forget_after(self, step: int) -> None:
        """Drop reports of weights that a killed run lost."""
        self._reports = {known: report for known, report in self._reports.items() if known <= step}
        self._write()

    def _write(self) -> None:
        write_whole(self._path, json.dumps(self._reports, indent=1))


EPISODES_FILE = "episodes.txt"
NONFINITE_FILE = "nonfinite.jsonl"


def append_episodes(run_dir: Path, step: int, episodes: Sequence[str]) -> None:
    """Add transcripts of a step to ``episodes.txt``."""
    with (run_dir / EPISODES_FILE).open("a", encoding="utf-8") as file:
        for number, text in enumerate(episodes, start=1):
            file.write(f"===== step {step}, episode {number} =====\n{text.rstrip()}\n\n")


def append_nonfinite(run_dir: Path, step: int, call: str, ids: Sequence[str], stats: Mapping[str, Any]) -> None:
    """Add a skipped step with its sample ids to ``nonfinite.jsonl``. Values are written as text, because some of them
    are not numbers."""
    row = {"step": step, "call": call, "ids": list(ids), "stats": {key: str(value) for key, value in stats.items()}}
    with (run_dir / NONFINITE_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def write_graph_files(graph: DataFlowGraph, folder: Path) -> None:
    """Write ``graph.md``, a table and its mermaid source, and ``graph.dot`` into ``folder``."""
    text = f"```\n{graph.summary()}\n```\n\n```mermaid\n{graph.to_mermaid()}\n```\n"
    (folder / "graph.md").write_text(text, encoding="utf-8")
    (folder / "graph.dot").write_text(graph.to_dot(), encoding="utf-8")
