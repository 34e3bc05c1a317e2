"""Says what a folder is: a run that goes on, ended or was stopped, or something else."""

from __future__ import annotations

import json
import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LOCKS = Path("/proc/locks")
_FRESH_S = 90.0
"""A run whose lock cannot be seen, such as one on another host, counts as going on while it wrote this recently."""
_LARGEST_FILE = 16 * 2**20
MARKS = ("config.yaml", "metrics.jsonl", "provenance.json")
GONE, FOREIGN, STARTING, RUNNING, FINISHED, STOPPED = "gone", "foreign", "starting", "running", "finished", "stopped"


@dataclass(frozen=True)
class FolderState:
    """Holds a word and a sentence about a folder."""

    kind: str
    text: str


def is_run(folder: Path) -> bool:
    """Return whether a folder has a file that only runs have."""
    return any(is_plain_file(folder / name) for name in MARKS)


def state_of(folder: Path, steps: int, last_written: float | None) -> FolderState:
    """Describe a folder in which ``steps`` steps are complete and whose newest file was written at ``last_written``
    (seconds since the epoch; None: nothing is there)."""
    try:
        about = folder.stat()
    except OSError as error:
        return FolderState(GONE, f"{folder} cannot be read ({error.strerror}): it was moved or deleted.")
    if not stat.S_ISDIR(about.st_mode):
        return FolderState(FOREIGN, f"{folder} is not a folder.")
    if not is_run(folder):
        return FolderState(FOREIGN, f"{folder} is not a run: it has none of {', '.join(MARKS)}.")
    if is_locked(folder / ".lock"):
        if steps == 0:
            return FolderState(STARTING, "The run has started; no step is complete yet.")
        return FolderState(RUNNING, f"The run goes on: {_steps(steps)} complete.")
    summary = read_json(folder / "summary.json")
    if isinstance(summary, dict) and summary.get("steps") == steps:
        return finished(steps)
    age = None if last_written is None else time.time() - last_written
    if age is not None and abs(age) < _FRESH_S:
        return FolderState(RUNNING, f"{_steps(steps)} complete; last written {max(0.0, age):.0f} s ago.")
    when = "" if age is None else " Its files bear a time that is yet to come." if age < 0 else _written(age)
    return FolderState(STOPPED, f"The run was stopped after {_steps(steps)}, before its end.{when}")


def finished(steps: int) -> FolderState:
    """Describe a run that has ended after ``steps`` steps."""
    return FolderState(FINISHED, f"The run has ended after {_steps(steps)}.")


def is_locked(path: Path) -> bool:
    """Return whether a process of this machine holds a lock on a file, without asking for the lock itself."""
    try:
        inode = path.stat().st_ino
        table = _LOCKS.read_text("ascii", "replace")
    except OSError:
        return False
    return any(line.split()[5:6] and line.split()[5].rpartition(":")[2] == str(inode) for line in table.splitlines())


def is_plain_file(path: Path) -> bool:
    """Return whether a path leads to a plain file."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (OSError, ValueError):
        return False


def read_text(path: Path) -> str:
    """Return the text of a plain file of bounded size; "" for anything else."""
    if not is_plain_file(path):
        return ""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size > _LARGEST_FILE:
                return ""
            return file.read(_LARGEST_FILE).decode("utf-8", "replace")
    except OSError:
        return ""


def read_json(path: Path) -> Any:
    """Return the content of a JSON file; None when there is none or it cannot be understood."""
    try:
        return json.loads(read_text(path) or "null")
    except (ValueError, RecursionError):
        return None


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


def _written(age: float) -> str:
    return f" Its files were last written {_ago(age)} ago."


def _ago(seconds: float) -> str:
    for unit, length in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} seconds"
