"""Writes ``report.html``: the page over a run in one file, which opens without a server and can be sent around."""

from __future__ import annotations

import base64
import math
from pathlib import Path
from typing import Any

from realhf.base.files.whole_file import write_whole
from realhf.view.folder_state import finished, read_json
from realhf.view.page import one_file
from realhf.view.run import PARTS, Run

REPORT_FILE = "report.html"
MOST_STEPS = 5_000
MOST_SPANS = 20_000
MOST_ROLLOUTS = 20_000
ROLLOUT_BYTES = 6 * 2**20
"""How much of the conversations and tokens is in a report, as JSON; about a fifth of it in the file."""


def write_report(run_dir: Path, rollout_bytes: int = ROLLOUT_BYTES) -> Path:
    """Write ``report.html`` from the files of a run and return its path. Of long runs it holds every so many steps, and
    the last spans and rollouts. Raises OSError."""
    run = Run(run_dir, "/".join(run_dir.resolve().parts[-2:]))
    path = run_dir / REPORT_FILE
    write_whole(path, one_file(run.name, _finite(_answers(run, rollout_bytes))))
    return path


def _answers(run: Run, rollout_bytes: int) -> dict[str, Any]:
    """Return what a server would answer about the run, by path."""
    about = {"number": 0, **run.described(), "folder": run.folder.name}
    summary = read_json(run.folder / "summary.json")
    if isinstance(summary, dict) and summary.get("steps") == about["steps"]:  # its launcher may still hold the lock
        ended = finished(about["steps"])
        about |= {"state": ended.kind, "text": ended.text}
    metrics, every = _thinned(run.metrics.columns(0, 0))
    if every > 1:
        about["text"] += f" This report has one of every {every} steps."
    table, details = run.rollouts.extract(MOST_ROLLOUTS, rollout_bytes)
    own = "/api/runs/0"
    return {
        "/api/runs": {"follow": False, "runs": [about], "left_off": 0, "one_left_off": ""},
        "/api/changes": {"seen": "", "runs": {"0": dict.fromkeys(PARTS, "kept")}, "states": {"0": about}},
        f"{own}/metrics": metrics,
        f"{own}/evaluations": run.evaluations(),
        f"{own}/advisories": run.advisories(),
        f"{own}/about": run.about(),
        f"{own}/spans": base64.b64encode(run.spans.packed(0, 0, MOST_SPANS)).decode(),
        f"{own}/rollouts": base64.b64encode(table).decode(),
        f"{own}/rollout": details,
    }


def _thinned(metrics: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Return columns with at most ``MOST_STEPS`` steps, the last one among them, and of how many steps there is one."""
    steps = metrics["steps"]
    every = max(1, math.ceil(len(steps) / MOST_STEPS))
    chosen = slice((len(steps) - 1) % every, None, every) if steps else slice(None)
    columns = {name: values[chosen] for name, values in metrics["columns"].items()}
    return metrics | {"steps": steps[chosen], "columns": columns}, every


def _finite(value: Any) -> Any:
    """Return a value that JSON without extensions can hold."""
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
