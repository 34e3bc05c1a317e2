"""Log of a run: metrics, events, transcripts and trackers during the run, and the summary at its
end.

Rows of metrics use the public names of ``realhf.monitor.metrics``.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from realhf.api.config import MonitorConfig
from realhf.api.environment import HELD_OUT
from realhf.api.experiment import EvaluationSpec
from realhf.api.trace import STEP, Tracer
from realhf.base.files import dangling_link_error, set_aside, write_atomic
from realhf.monitor.advisories import advise_run
from realhf.monitor.events import EventStream
from realhf.monitor.metrics import evaluation_metrics, public_names
from realhf.monitor.provenance import effective_options, read_provenance
from realhf.monitor.run_files import (
    EPISODES_FILE,
    EVALUATIONS_FILE,
    NONFINITE_FILE,
    Evaluations,
    append_episodes,
)
from realhf.monitor.summary import build_summary, write_summary
from realhf.monitor.trace import merge_traces
from realhf.monitor.trackers import TrackerStream

METRICS_FILE = "metrics.jsonl"


class ParsedMetrics(NamedTuple):
    """Content of a metrics file."""

    rows: list[dict[str, Any]]
    """Metric rows in order, with public names."""
    damaged: list[int]
    """Numbers, from 1, of the lines that are not valid rows."""


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return the metric rows of a run in order. They have public names even if an earlier version
    wrote the file."""
    return parse_metrics(run_dir).rows


def parse_metrics(run_dir: Path) -> ParsedMetrics:
    """Return the metric rows of a run, and the numbers of damaged lines. Raises OSError."""
    path = run_dir / METRICS_FILE
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        if path.is_symlink():
            raise dangling_link_error(path) from None
        return ParsedMetrics([], [])
    parsed = ParsedMetrics([], [])
    for number, line in enumerate(data.split(b"\n")[:-1], start=1):
        row = _parse_row(line) if line else {}
        if row:
            parsed.rows.append(public_names(row))
        elif line:
            parsed.damaged.append(number)
    return parsed


def _parse_row(line: bytes) -> dict[str, Any]:
    """Parse a line into a row, which contains the step and numbers; return {} if the line is not a
    valid row."""
    try:
        row = json.loads(line.decode())
    except (ValueError, RecursionError):
        return {}
    has_step = isinstance(row, dict) and type(row.get("step")) is int
    return (
        row if has_step and all(isinstance(value, (int, float)) for value in row.values()) else {}
    )


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
    """Flatten the report of a step into {name: number}, with the names that the calls use (see
    ``public_names``).

    wall_s: duration of the step in seconds. stats: statistics of each call. times: seconds of each
    call (compute_s, fetch_s, queue_s). tokens: number of input tokens of each call. Tokens per
    second are the generated tokens (if none were generated, the trained tokens) divided by the
    duration of the step.
    """
    metrics: dict[str, float] = {"step_seconds": wall_s}
    for call, values in stats.items():
        metrics |= {
            name if name.startswith("staleness/") else f"{call}/{name}": float(value)
            for name, value in values.items()
            if _is_number(value)
        }
    for call, spent in times.items():
        metrics[f"seconds/{call}"] = spent["compute_s"]
        metrics[f"fetch_seconds/{call}"] = spent["fetch_s"]
        metrics[f"queue_seconds/{call}"] = spent["queue_s"]
    generated = sum(value for name, value in metrics.items() if name.endswith("/generated_tokens"))
    metrics["tokens"] = generated or float(sum(tokens.get(call, 0) for call in train_calls))
    metrics["tokens_per_second"] = metrics["tokens"] / wall_s if wall_s > 0 else 0.0
    metrics["buffer/resident"] = float(buffer.get("peak_resident", 0))
    metrics |= {
        f"source/{name}": float(value) for name, value in source.items() if _is_number(value)
    }
    return metrics


def _list_steps(steps: Sequence[int]) -> str:
    numbers = ", ".join(map(str, steps[:8])) + (", ..." if len(steps) > 8 else "")
    return f"{len(steps)} steps: {numbers}" if len(steps) > 1 else f"step {numbers}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class RunLog:
    """Writer of a run's reports.

    completed_steps: number of completed steps; 0 for a fresh start. Later rows, which a killed run
    has written, are dropped, so that ``metrics.jsonl`` contains each step only once. tracer: tracer
    that marks the end of every step in the master's trace. evaluation: specification that
    determines the name of the evaluated split.

    Rows are not kept in memory. The summary reads the file again, and a warning is emitted about
    steps without rows. A row that cannot be written ends the run with an OSError.
    """

    def __init__(
        self,
        run_dir: Path,
        config: MonitorConfig,
        events: EventStream,
        *,
        completed_steps: int,
        total_steps: int,
        tracer: Tracer | None = None,
        evaluation: EvaluationSpec | None = None,
    ) -> None:
        self._run_dir = run_dir
        self._events = events
        self._total = total_steps
        self._tracer = tracer or Tracer()
        self._split = str(evaluation.args.get("split", HELD_OUT)) if evaluation else HELD_OUT
        self._rollouts_every = config.episodes_every_steps
        if completed_steps and not os.path.lexists(run_dir / EVALUATIONS_FILE):
            self._warn(
                f"{run_dir / EVALUATIONS_FILE} is missing: the run continues without the earlier "
                "evaluations"
            )
        self.evaluations = Evaluations(run_dir, self._warn)
        self._initial_step = self._last = completed_steps
        rows = self._read_complete_rows(completed_steps)
        self.evaluations.drop_after(completed_steps if completed_steps else -1)
        write_atomic(run_dir / METRICS_FILE, "".join(json.dumps(row) + "\n" for row in rows))
        past = [(row["step"], {name: row[name] for name in row if name != "step"}) for row in rows]
        past += [
            (step, evaluation_metrics(report, self._split))
            for step, report in self.evaluations.all()
        ]
        self._trackers = TrackerStream(
            run_dir,
            config.trackers,
            completed_steps=completed_steps,
            warn=self._warn,
            past=past,
        )
        if completed_steps == 0:
            for file in (EPISODES_FILE, NONFINITE_FILE):
                (run_dir / file).unlink(missing_ok=True)

    def _warn(self, text: str) -> None:
        self._events.emit("warning", text=text)

    def _read_complete_rows(self, completed_steps: int) -> list[dict[str, Any]]:
        """Return the rows of the completed steps, and warn about missing or damaged rows.

        A copy of a damaged file is kept. Raises OSError.
        """
        path = self._run_dir / METRICS_FILE
        parsed = parse_metrics(self._run_dir)
        rows = [row for row in parsed.rows if row["step"] <= completed_steps]
        missing = sorted(set(range(1, completed_steps + 1)) - {row["step"] for row in rows})
        new_path = set_aside(path) if parsed.damaged else None
        if new_path is not None:
            lines = ", ".join(map(str, parsed.damaged[:8])) + (
                ", ..." if len(parsed.damaged) > 8 else ""
            )
            self._warn(
                f"{path} is damaged in line {lines} and was renamed to {new_path.name}; the run continues "
                "without these lines"
            )
        elif missing:
            self._warn(f"{path} lacks {_list_steps(missing)}; the run continues without them")
        return rows

    def record_step(self, step: int, metrics: Mapping[str, float], episodes: Sequence[str]) -> None:
        """Record the metrics of a finished step, counted from 1, and some transcripts of its
        episodes."""
        self._tracer.instant(STEP, step=step)
        self._last = step
        self._write_row({"step": step, **metrics})
        self._trackers.metrics(step, metrics)
        if episodes:
            append_episodes(self._run_dir, step, episodes)
            if step == 1 or (self._rollouts_every and step % self._rollouts_every == 0):
                self._trackers.rollouts(step, episodes)
        self._events.emit("step", step=step, total=self._total, metrics=metrics)

    def _write_row(self, row: Mapping[str, Any]) -> None:
        """Append a row to the metrics file; if that fails, no part of it is written. Raises
        OSError."""
        path = self._run_dir / METRICS_FILE
        with path.open("ab", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            line = json.dumps(row).encode() + b"\n"
            written = 0
            try:
                while written < len(line):
                    written += file.write(line[written:]) or 0
            except OSError as error:
                file.truncate(end)  # a partial row would corrupt the next one
                error.filename = error.filename or str(path)
                raise

    def _read_all_rows(self) -> list[dict[str, Any]]:
        """Return the rows of all steps, and warn about steps of this process that have no rows."""
        rows = read_metrics(self._run_dir)
        missing = sorted(
            set(range(self._initial_step + 1, self._last + 1)) - {row["step"] for row in rows}
        )
        if missing:
            self._warn(
                f"the rows of {_list_steps(missing)} are lost: {self._run_dir / METRICS_FILE} was "
                f"changed during the "
                "run, or they are not numbers; the summary goes without them"
            )
        return rows

    def record_skipped(
        self, step: int, call: str, ids: Sequence[str], stats: Mapping[str, Any]
    ) -> None:
        """Record a step whose update was skipped because the loss or gradient was not finite."""
        texts = {key: str(value) for key, value in stats.items()}  # JSON has no NaN or infinity
        with (self._run_dir / NONFINITE_FILE).open("a", encoding="utf-8") as file:
            file.write(
                json.dumps({"step": step, "call": call, "ids": list(ids), "stats": texts}) + "\n"
            )
        self._events.emit(
            "warning",
            text=f"step {step}: {call} skipped its update, loss or gradient was not "
            f"finite; sample ids in {NONFINITE_FILE}",
        )

    def record_evaluation(self, step: int, report: dict[str, Any]) -> None:
        """Record a held-out evaluation after ``step`` steps."""
        self.evaluations.add(step, report)
        self._trackers.metrics(step, evaluation_metrics(report, self._split))
        when = "before training" if step == 0 else f"after step {step}"
        versions = {
            int(entry.get("version", step))
            for groups in report.values()
            for entry in groups.values()
        }
        if versions != {step}:
            when += f", with the weights of version {', '.join(map(str, sorted(versions)))}"
        self._events.emit("evaluation", when=when, report=report)

    def announce(self, text: str) -> None:
        """Emit an event that tells the display what the run does outside of steps."""
        self._events.emit("phase", text=text)

    def finish(
        self,
        *,
        wall_seconds: float,
        train_calls: Sequence[str],
        best: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Write ``summary.json`` and ``trace.json``, and return the summary.

        wall_seconds: seconds since the launch. best: record of the policy that was kept as the
        best.
        """
        rows = self._read_all_rows()
        last = max(self._last, rows[-1]["step"] if rows else 0)
        summary = build_summary(
            rows,
            self.evaluations.report_at(0),
            self.evaluations.report_at(last) if last else None,
            wall_seconds=wall_seconds,
            train_calls=train_calls,
        )
        advisories = advise_run(
            self._run_dir,
            rows,
            self.evaluations.all(),
            effective_options(read_provenance(self._run_dir)),
        )
        summary["advisories"] = [asdict(advisory) for advisory in advisories]
        if best is not None:
            summary["best_policy"] = {
                name: value for name, value in best.items() if name != "report"
            }
        write_summary(summary, self._run_dir)
        try:
            merge_traces(self._run_dir)
        except (
            OSError
        ) as error:  # the run has ended and is saved: a full disk must not make it fail
            self._events.emit("warning", text=f"no trace: {error}")
        return summary

    def close(self, *, failed: bool = False) -> None:
        """Close the trackers, which may block until they have sent their data. failed: whether the
        run ended early."""
        self._trackers.close(failed=failed)

    async def close_async(self, kind: object, *_: object) -> None:
        """Close the trackers without blocking the event loop. The arguments are those of
        ``__aexit__``."""
        await asyncio.to_thread(self.close, failed=kind is not None)
