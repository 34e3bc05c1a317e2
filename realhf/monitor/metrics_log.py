"""Metrics of every step: ``metrics.jsonl``, TensorBoard and, if asked for, wandb."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from realhf.api.config import MonitorConfig
from realhf.monitor.tensorboard import TensorBoardWriter

METRICS_FILE = "metrics.jsonl"
WANDB_ID_FILE = "wandb_id"


class MetricsLog:
    """One flat map of numbers per step. Opened at ``completed_steps``, it drops what a killed run wrote
    after its last checkpoint, so that every step stands in the file once."""

    def __init__(self, run_dir: Path, config: MonitorConfig, *, completed_steps: int, run_name: str) -> None:
        self._path = run_dir / METRICS_FILE
        self.rows = [row for row in read_metrics(run_dir) if row["step"] <= completed_steps]
        _rewrite(self._path, self.rows)
        self._tensorboard = (
            TensorBoardWriter(run_dir / "tensorboard", completed_steps + 1) if config.tensorboard else None
        )
        self._wandb = _start_wandb(run_dir, run_name, resumed=completed_steps > 0) if config.wandb else None

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        row = {"step": step, **metrics}
        self.rows.append(row)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        if self._tensorboard:
            self._tensorboard.write(step, metrics)
        if self._wandb:
            self._wandb.log(dict(metrics), step=step)

    def note(self, step: int, figures: Mapping[str, float]) -> None:
        """Figures that do not come with every step, for TensorBoard and wandb only."""
        if self._tensorboard:
            self._tensorboard.write(step, figures)
        if self._wandb:
            self._wandb.log(dict(figures), step=step)

    def close(self) -> None:
        if self._tensorboard:
            self._tensorboard.close()
        if self._wandb:
            self._wandb.finish()


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Every whole line of the metrics file, in order; a torn last line is left out."""
    try:
        text = (run_dir / METRICS_FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.split("\n")[:-1] if line]


def _rewrite(path: Path, rows: list[dict[str, Any]]) -> None:
    partial = path.with_suffix(".tmp")
    partial.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    os.replace(partial, path)


def _start_wandb(run_dir: Path, run_name: str, *, resumed: bool) -> Any:
    """A run that goes on is the same run there: its id stays in the run folder."""
    try:
        import wandb  # type: ignore[import-not-found]
    except ImportError:
        raise RuntimeError("monitor.wandb=true, but wandb is not installed: pip install 'realhf[wandb]'") from None
    known = run_dir / WANDB_ID_FILE
    if not resumed or not known.is_file():
        known.write_text(uuid.uuid4().hex, encoding="utf-8")
    return wandb.init(dir=str(run_dir), name=run_name, project="realhf", id=known.read_text(encoding="utf-8").strip(),
                      resume="allow")
