"""Chooses the tasks that ``make test`` validates: ``python -m tests.aws.validation.task_sample``
prints their numbers.

Validating all tasks takes a large part of the suite's time, so ``make test`` plays a sample, which
the id of the commit draws, and every task whose YAML entry changed within the last ``COMMITS``
commits or is not committed yet. When code that plays or judges tasks changed in them, or git cannot
tell, it plays all; ``make validate`` always does.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from realhf.aws.tasks.loader import load_templates

ROOT = Path(__file__).resolve().parents[3]
COMMITS = 20
"""How far back a change counts as recent."""
SAMPLE_SIZE = 25
"""How many of the other tasks are drawn."""
TASK_FOLDER = "realhf/aws/tasks/"
JUDGING_CODE = ("constraints.txt", "realhf/aws/", "realhf/env/containment/")
"""What takes part in the verdict of every task; ``constraints.txt`` names the simulator's version."""
OTHER_CODE = ("realhf/aws/client/", "realhf/aws/playground/", "realhf/aws/training/")
"""Folders below ``JUDGING_CODE`` that validation does not run."""


def choose_tasks(root: Path, task_ids: Sequence[int]) -> list[int]:
    """Return which of these tasks to validate, in their order: all of them where git knows too
    little."""
    try:
        base = _git(root, "rev-parse", "--verify", f"HEAD~{COMMITS}").strip()
        commit = _git(root, "rev-parse", "HEAD").strip()
        changed = _git(root, "diff", "--name-only", "--no-renames", base).splitlines()
        changed += _git(root, "ls-files", "--others", "--exclude-standard").splitlines()
        edited = _edited_tasks(root, base, changed)
    except (OSError, subprocess.SubprocessError, yaml.YAMLError):
        return [*task_ids]
    if any(_judges(path) for path in changed):
        return [*task_ids]
    drawn = random.Random(commit).sample(sorted(task_ids), min(SAMPLE_SIZE, len(task_ids)))
    return [task_id for task_id in task_ids if task_id in edited or task_id in drawn]


def _judges(path: str) -> bool:
    """Return whether a file takes part in the verdict of every task."""
    return path.startswith(JUDGING_CODE) and not (path.startswith(OTHER_CODE) or _holds_tasks(path))


def _holds_tasks(path: str) -> bool:
    return (
        path.startswith(TASK_FOLDER)
        and path.endswith(".yaml")
        and not path.endswith("phrasings.yaml")
    )


def _edited_tasks(root: Path, base: str, changed: Sequence[str]) -> set[int]:
    """Return the tasks whose entries are not what they were at ``base``."""
    edited = set()
    for path in filter(_holds_tasks, changed):
        file = root / path
        existed = bool(_git(root, "ls-tree", "--name-only", base, "--", path).strip())
        before = _entries(_git(root, "show", f"{base}:{path}")) if existed else {}
        after = _entries(file.read_text(encoding="utf-8")) if file.exists() else {}
        edited |= {task_id for task_id, entry in after.items() if before.get(task_id) != entry}
    return edited


def _entries(text: str) -> dict[int, Any]:
    return {entry["task_id"]: entry for entry in yaml.load(text, Loader=yaml.CSafeLoader) or []}


def _git(root: Path, *words: str) -> str:
    """Return the output of a command of git. Raises SubprocessError when it fails, OSError without
    git."""
    command = ["git", "-C", str(root), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def main() -> int:
    """Print the arguments for ``validate``: nothing for all tasks, else ``--ids`` and their
    numbers."""
    task_ids = [template.task_id for template in load_templates()]
    chosen = choose_tasks(ROOT, task_ids)
    if len(chosen) < len(task_ids):
        print("--ids", *chosen)
    return 0


if __name__ == "__main__":
    sys.exit(main())
