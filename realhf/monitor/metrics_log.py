"""Flattens the report of a step into numbers and writes them: ``metrics.jsonl``, and the trackers that are asked for.

The names of a row are those of ``realhf.monitor.metrics``.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from realhf.api.config import MonitorConfig
from realhf.base.files.whole_file import write_whole
from realhf.monitor.metrics.renaming import public_names
from realhf.monitor.trackers.stream import TrackerStream

METRICS_FILE = "metrics.jsonl"
_log = logging.getLogger(__name__)


class MetricsLog:
    """Keeps one flat map of numbers per step. Opened at ``completed_steps``, it drops what a killed run wrote after its
    last checkpoint, so that every step is in the file once."""

    def __init__(
        self,
        run_dir: Path,
        config: MonitorConfig,
        *,
        completed_steps: int,
        warn: Callable[[str], None] = _log.warning,
        evaluations: Sequence[tuple[int, Mapping[str, float]]] = (),
    ) -> None:
        self._path = run_dir / METRICS_FILE
        self.rows = [row for row in read_metrics(run_dir) if row["step"] <= completed_steps]
        write_whole(self._path, "".join(json.dumps(row) + "\n" for row in self.rows))
        past = [(row["step"], {name: row[name] for name in row if name != "step"}) for row in self.rows]
        self.trackers = TrackerStream(
            run_dir, config.trackers, completed_steps=completed_steps, warn=warn, past=[*past, *evaluations]
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the metrics of a step to ``rows``, ``metrics.jsonl`` and the trackers."""
        row = {"step": step, **metrics}
        self.rows.append(row)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        self.trackers.metrics(step, metrics)

    def close(self, *, failed: bool = False) -> None:
        """Close the trackers, which may take a while; ``failed``: the run ended early."""
        self.trackers.close(failed=failed)


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return every whole line of the metrics file of a run, in order, by public names, also of a run that was made
    before there were any; a torn last line is left out."""
    try:
        text = (run_dir / METRICS_FILE).read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [public_names(json.loads(line)) for line in text.split("\n")[:-1] if line]


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
