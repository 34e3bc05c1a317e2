"""Finds the runs in the folders that were named on the command line."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from realhf.monitor.run_log import METRICS_FILE
from realhf.view.folder_state import is_run
from realhf.view.run import Run

MOST_RUNS = 500
MOST_DEPTH = 4
_INNER = frozenset({"checkpoints", "logs", "policy", "rollouts", "tensorboard", "trace", "wandb", "mlflow"})
"""Folders of a run in which no further run lies."""


class RunList:
    """Keeps the runs in the order in which they were found, so that the number of a run stays its own."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = [Path(os.path.abspath(folder)) for folder in folders]
        self._runs: dict[Path, Run] = {}
        self._left_off: list[Path] = []
        self._lock = threading.Lock()

    def refresh(self) -> list[Run]:
        """Look for runs that were added, and return all, at most ``MOST_RUNS``: where there are more, those that were
        written to last. A folder that was named and holds none counts as one, so that the page can say what is wrong
        with it."""
        with self._lock:
            fresh: dict[Path, str] = {}
            for folder in self._folders:
                found = [folder] if is_run(folder) else list(_below(folder, MOST_DEPTH))
                for path in found or [folder]:
                    if path not in self._runs:
                        fresh.setdefault(path, _name(folder, path))
            room = MOST_RUNS - len(self._runs)
            newest = set(sorted(fresh, key=_written, reverse=True)[:room] if len(fresh) > room else fresh)
            self._runs |= {path: Run(path, name) for path, name in fresh.items() if path in newest}
            self._left_off = [path for path in fresh if path not in newest]
            return list(self._runs.values())

    def left_off(self) -> list[Path]:
        """Return the folders of the runs that are not listed, because there are more than ``MOST_RUNS``."""
        with self._lock:
            return list(self._left_off)

    def get(self, number: int) -> Run | None:
        """Return the run with this number; None if there is none."""
        with self._lock:
            runs = list(self._runs.values())
        return runs[number] if 0 <= number < len(runs) else None


def _below(folder: Path, depth: int) -> Iterator[Path]:
    try:
        inner = sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    except OSError:
        return
    for path in inner:
        if path.name in _INNER or path.name.startswith("."):
            continue
        if is_run(path):
            yield path
        elif depth > 1:
            yield from _below(path, depth - 1)


def _written(run: Path) -> float:
    """Return when a run wrote its last step, or began; 0 for one that has vanished."""
    for path in (run / METRICS_FILE, run):
        with suppress(OSError):
            return path.stat().st_mtime
    return 0.0


def _name(folder: Path, path: Path) -> str:
    if path == folder:
        return "/".join(path.parts[-2:]) if len(path.parts) > 2 else path.name
    return path.relative_to(folder).as_posix()
