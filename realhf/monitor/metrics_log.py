"""Flattens the report of a step into numbers and writes them: ``metrics.jsonl``, TensorBoard and, if asked for, wandb.

The names of a row are those of ``realhf.monitor.metrics``. TensorBoard files are written without torch.
"""

from __future__ import annotations

import json
import math
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from realhf.api.config import MonitorConfig
from realhf.monitor.metrics.renaming import public_names

METRICS_FILE = "metrics.jsonl"
WANDB_ID_FILE = "wandb_id"


class MetricsLog:
    """Keeps one flat map of numbers per step. Opened at ``completed_steps``, it drops what a killed run wrote after its
    last checkpoint, so that every step is in the file once."""

    def __init__(self, run_dir: Path, config: MonitorConfig, *, completed_steps: int, run_name: str) -> None:
        self._path = run_dir / METRICS_FILE
        self.rows = [row for row in read_metrics(run_dir) if row["step"] <= completed_steps]
        _rewrite(self._path, self.rows)
        self._tensorboard = (
            TensorBoardWriter(run_dir / "tensorboard", completed_steps + 1) if config.tensorboard else None
        )
        self._wandb = _start_wandb(run_dir, run_name, resumed=completed_steps > 0) if config.wandb else None

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the metrics of a step to ``rows``, ``metrics.jsonl`` and the other outputs that are on."""
        row = {"step": step, **metrics}
        self.rows.append(row)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        if self._tensorboard:
            self._tensorboard.write(step, metrics)
        if self._wandb:
            self._wandb.log(dict(metrics), step=step)

    def note(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write metrics that do not come with every step, to TensorBoard and wandb only."""
        if self._tensorboard:
            self._tensorboard.write(step, metrics)
        if self._wandb:
            self._wandb.log(dict(metrics), step=step)

    def close(self) -> None:
        """Close TensorBoard and wandb if they are on."""
        if self._tensorboard:
            self._tensorboard.close()
        if self._wandb:
            self._wandb.finish()


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return every whole line of the metrics file of a run, in order, by public names, also of a run that was made
    before there were any; a torn last line is left out."""
    try:
        text = (run_dir / METRICS_FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    return [public_names(json.loads(line)) for line in text.split("\n")[:-1] if line]


def _rewrite(path: Path, rows: list[dict[str, Any]]) -> None:
    partial = path.with_suffix(".tmp")
    partial.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    os.replace(partial, path)


def _start_wandb(run_dir: Path, run_name: str, *, resumed: bool) -> Any:
    """Start or continue the run in wandb; its id stays in the run folder, so that a resumed run is the same run
    there."""
    try:
        import wandb  # type: ignore[import-not-found]
    except ImportError:
        raise RuntimeError("monitor.wandb=true, but wandb is not installed: pip install 'realhf[wandb]'") from None
    known = run_dir / WANDB_ID_FILE
    if not resumed or not known.is_file():
        known.write_text(uuid.uuid4().hex, encoding="utf-8")
    return wandb.init(
        dir=str(run_dir), name=run_name, project="realhf", id=known.read_text(encoding="utf-8").strip(), resume="allow"
    )


class TensorBoardWriter:
    """Writes the scalars of a run to ``folder``. ``first_step``: TensorBoard drops later points of an earlier,
    interrupted run when it reads the file."""

    def __init__(self, folder: Path, first_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[attr-defined]
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(folder))
        self._writer.add_event(
            Event(wall_time=time.time(), step=first_step, session_log=SessionLog(status=SessionLog.START))
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the finite values of a step and flush."""
        from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[attr-defined]
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[attr-defined]

        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        values = [Summary.Value(tag=name, simple_value=value) for name, value in finite.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


def flatten_step(
    *,
    wall_s: float,
    stats: Mapping[str, Mapping[str, Any]],
    times: Mapping[str, Mapping[str, float]],
    tokens: Mapping[str, int],
    buffer: Mapping[str, Any],
    source: Mapping[str, float],
    train_calls: Sequence[str],
) -> dict[str, float]:
    """Flatten the report of a step into {name: number}, by the names of the calls; ``public_names`` comes next.

    ``tokens[call]`` is the number of tokens a call took in. Tokens per second count over the whole step what was
    generated, or what was trained on where nothing was generated.
    """
    metrics: dict[str, float] = {"step_seconds": wall_s}
    for call, values in stats.items():
        metrics |= {_name(call, name): float(value) for name, value in values.items() if _is_number(value)}
    for call, spent in times.items():
        metrics[f"seconds/{call}"] = spent["compute_s"]
        metrics[f"fetch_seconds/{call}"] = spent["fetch_s"]
        metrics[f"queue_seconds/{call}"] = spent["queue_s"]
    generated = sum(value for name, value in metrics.items() if name.endswith("/generated_tokens"))
    metrics["tokens"] = generated or float(sum(tokens.get(call, 0) for call in train_calls))
    metrics["tokens_per_second"] = metrics["tokens"] / wall_s if wall_s > 0 else 0.0
    metrics["buffer/resident"] = float(buffer.get("peak_resident", 0))
    metrics |= {f"source/{name}": float(value) for name, value in source.items() if _is_number(value)}
    return metrics


def _name(call: str, name: str) -> str:
    return name if name.startswith("staleness/") else f"{call}/{name}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
