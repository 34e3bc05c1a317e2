"""Writes what a run writes for people while it goes on: events, metrics, texts, summary."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from realhf.api.config import MonitorConfig
from realhf.api.environment import HELD_OUT
from realhf.api.experiment import EvaluationSpec
from realhf.api.trace import STEP, NoTrace, Tracer
from realhf.monitor.advisories.advise import as_json
from realhf.monitor.advisories.of_run import advise_run
from realhf.monitor.events import EventStream
from realhf.monitor.metrics.renaming import evaluation_metrics
from realhf.monitor.metrics_log import MetricsLog
from realhf.monitor.provenance import effective_options, read_provenance
from realhf.monitor.run_files import EPISODES_FILE, NONFINITE_FILE, Evaluations, append_episodes, append_nonfinite
from realhf.monitor.summary import build_summary, write_summary
from realhf.monitor.trace import merge_traces


class RunLog:
    """Writes what a run reports, opened at ``completed_steps`` (0: a fresh start); what a killed run wrote after that
    is dropped. ``tracer`` marks the end of every step in the master's trace; ``evaluation`` says which split is
    evaluated."""

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
        self._run_dir, self._events, self._total = run_dir, events, total_steps
        self._tracer = tracer or NoTrace()
        self._split = str(evaluation.args.get("split", HELD_OUT)) if evaluation else HELD_OUT
        self._told_every = config.episodes_every_steps
        self.evaluations = Evaluations(run_dir)
        self.evaluations.forget_after(completed_steps if completed_steps else -1)
        self._metrics = MetricsLog(
            run_dir,
            config,
            completed_steps=completed_steps,
            warn=lambda text: events.emit("warning", text=text),
            evaluations=[(step, evaluation_metrics(report, self._split)) for step, report in self.evaluations.all()],
        )
        if completed_steps == 0:
            for file in (EPISODES_FILE, NONFINITE_FILE):
                (run_dir / file).unlink(missing_ok=True)

    def step(self, step: int, metrics: Mapping[str, float], episodes: Sequence[str]) -> None:
        """Record a finished step, counted from 1, with the transcripts sampled from it."""
        self._tracer.instant(STEP, step=step)
        self._metrics.write(step, metrics)
        if episodes:
            append_episodes(self._run_dir, step, episodes)
            if step == 1 or (self._told_every and step % self._told_every == 0):
                self._metrics.trackers.rollouts(step, episodes)
        self._events.emit("step", step=step, total=self._total, metrics=metrics)

    def skipped(self, step: int, call: str, ids: Sequence[str], stats: Mapping[str, Any]) -> None:
        """Record a step whose update was left out because loss or gradient was not finite."""
        append_nonfinite(self._run_dir, step, call, ids, stats)
        self._events.emit(
            "warning",
            text=f"step {step}: {call} skipped its update, loss or gradient was not "
            f"finite; sample ids in {NONFINITE_FILE}",
        )

    def evaluation(self, step: int, report: dict[str, Any]) -> None:
        """Record a held-out evaluation after ``step`` steps."""
        self.evaluations.add(step, report)
        self._metrics.trackers.metrics(step, evaluation_metrics(report, self._split))
        when = "before training" if step == 0 else f"after step {step}"
        versions = {int(entry.get("version", step)) for groups in report.values() for entry in groups.values()}
        if versions != {step}:
            when += f", with the weights of version {', '.join(map(str, sorted(versions)))}"
        self._events.emit("evaluation", when=when, report=report)

    def phase(self, text: str) -> None:
        """Announce what the run does now, outside of steps."""
        self._events.emit("phase", text=text)

    def finish(self, *, wall_seconds: float, train_calls: Sequence[str]) -> dict[str, Any]:
        """Write ``summary.json`` and ``trace.json``; return the summary."""
        rows = self._metrics.rows
        last = rows[-1]["step"] if rows else 0
        summary = build_summary(
            rows,
            self.evaluations.at(0),
            self.evaluations.at(last) if last else None,
            wall_seconds=wall_seconds,
            train_calls=train_calls,
        )
        advisories = advise_run(
            self._run_dir, rows, self.evaluations.all(), effective_options(read_provenance(self._run_dir))
        )
        summary["advisories"] = [as_json(advisory) for advisory in advisories]
        write_summary(summary, self._run_dir)
        try:
            merge_traces(self._run_dir)
        except OSError as error:  # the run is over and saved: a full disk must not make it fail
            self._events.emit("warning", text=f"no trace: {error}")
        return summary

    def close(self, *, failed: bool = False) -> None:
        """Close the trackers, which may wait for them; ``failed``: the run ended early."""
        self._metrics.close(failed=failed)

    async def leave(self, kind: object, *_: object) -> None:
        """Close as the end of an ``async with`` block does, without holding up the event loop."""
        await asyncio.to_thread(self.close, failed=kind is not None)
