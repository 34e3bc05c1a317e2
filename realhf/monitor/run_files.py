"""Text files of a run that people read: sampled episodes, and the samples of steps that were skipped."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

EPISODES_FILE = "episodes.txt"
NONFINITE_FILE = "nonfinite.jsonl"


def append_episodes(run_dir: Path, step: int, episodes: Sequence[str]) -> None:
    """Add transcripts of a step to ``episodes.txt``."""
    with (run_dir / EPISODES_FILE).open("a", encoding="utf-8") as file:
        for number, text in enumerate(episodes, start=1):
            file.write(f"===== step {step}, episode {number} =====\n{text.rstrip()}\n\n")


def append_nonfinite(run_dir: Path, step: int, call: str, ids: Sequence[str], stats: Mapping[str, Any]) -> None:
    """Add a skipped step with its sample ids to ``nonfinite.jsonl``. Figures are written as text: some of
    them are not numbers."""
    row = {"step": step, "call": call, "ids": list(ids), "stats": {key: str(value) for key, value in stats.items()}}
    with (run_dir / NONFINITE_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
