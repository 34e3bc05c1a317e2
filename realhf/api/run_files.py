"""The files of a run folder: who writes each, how, and what becomes of it when a run begins anew in the same folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

Written = Literal["whole", "appended", "folder"]


class RunFile(NamedTuple):
    """``name`` may be a pattern. ``written``: replaced when complete, appended to, or a folder that its writer looks
    after. ``kept``: whether it stays when the run begins anew (``recover_mode=disabled``); everything that a run has
    learned or recorded goes, lest two histories be read as one."""

    name: str
    writer: str
    written: Written
    kept: bool = False


RUN_FILES = (
    RunFile("config.yaml", "launcher, master", "whole"),
    RunFile("provenance.json", "launcher, master", "whole"),
    RunFile("plan.json", "launcher", "whole"),
    RunFile(".lock", "launcher", "whole", kept=True),
    RunFile(".keys-*", "launcher", "whole", kept=True),
    RunFile("note.json", "python -m realhf.view note", "whole", kept=True),
    RunFile("logs", "every process", "folder"),
    RunFile("warm_start-*", "master of the warm start", "folder", kept=True),
    RunFile("placements.jsonl", "launcher", "appended"),
    RunFile("deaths.jsonl", "launcher", "appended"),
    RunFile("graph.md", "master", "whole"),
    RunFile("graph.dot", "master", "whole"),
    RunFile("metrics.jsonl", "master", "appended"),
    RunFile("evaluations.json", "master", "whole"),
    RunFile("summary.json", "master", "whole"),
    RunFile("episodes.txt", "master", "appended"),
    RunFile("nonfinite.jsonl", "master", "appended"),
    RunFile("report.html", "master", "whole"),
    RunFile("trace", "every process", "folder"),
    RunFile("trace.json", "master", "whole"),
    RunFile("rollouts", "model workers, rollout workers", "folder"),
    RunFile("tensorboard", "master", "folder"),
    RunFile("trackers.json", "master", "whole"),
    RunFile("wandb", "master", "folder"),
    RunFile("mlflow", "master", "folder"),
    RunFile("checkpoints", "model workers, master", "folder"),
    RunFile("policy", "model worker", "folder"),
    RunFile("journal", "master", "folder"),
    RunFile("stream", "model workers", "folder"),
    RunFile("weights", "model workers", "folder"),
    RunFile("weights.jsonl", "master", "appended"),
    RunFile("trajectory", "trajectory server", "folder"),
)
"""All of them. What is not in the table belongs to somebody else and is left alone."""


def removable(run_dir: Path) -> Iterator[Path]:
    """Yield what is there of a run and goes when it begins anew, halves of files that a killed process left with it."""
    for file in RUN_FILES:
        if not file.kept:
            for pattern in (file.name, f"{file.name}.partial", f".{file.name}.*.tmp"):
                yield from run_dir.glob(pattern)


def unknown_files(run_dir: Path) -> list[str]:
    """Names in a run folder that the table does not have."""
    return sorted(path.name for path in run_dir.iterdir() if not any(path.match(file.name) for file in RUN_FILES))
