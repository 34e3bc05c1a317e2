"""Display of a run in progress: a live panel on a terminal, lines of text elsewhere.

For an asynchronous run, both show staleness, occupancy, admission and failures, even between steps.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from realhf.base import process_clock
from realhf.base.text import escape_controls
from realhf.monitor.metrics import success_by_group
from realhf.monitor.summary import (
    HELD_OUT_ROWS,
    STEP_TIME,
    describe_rows,
    flatten_rollouts,
    rollout_labels,
    rollout_metrics,
    time_split,
)

_BAR = 24
_STEP_METRICS = {
    "reward/mean": "reward",
    "success/overall": "success",
    "policy/loss": "loss",
    "mismatch/kl": "mismatch_kl",
}
_SPEED = "throughput/tokens_per_second"
_ROLLOUT_COLUMNS = 6
_STEP_LINE_S = 2.0
"""Minimum seconds between two lines about steps, if there is no live panel."""
_BETWEEN_LINE_S = 30.0
"""Seconds without any line after which the progress of the current step is printed, if there is no
live panel."""


def make_display(title: str, *, live: bool, console: Console | None = None) -> Display:
    """Return a live display if ``live`` is set and the console is a terminal, else a display that
    prints lines."""
    console = console or Console()
    return LiveDisplay(console, title) if live and console.is_terminal else Display(console)


class Display:
    """Display of events (``realhf.monitor.events``) as lines of text.

    If steps are quick, it prints only one every ``_STEP_LINE_S`` seconds and the last one.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = time.monotonic()
        self._last_step_line = float("-inf")
        self._last_line = process_clock.now()

    def show(self, event: Mapping[str, Any]) -> None:
        """Print a line for the event. Some kinds of events are printed only at intervals."""
        if event["kind"] == "phase":
            self.print_line(event["text"])
        elif event["kind"] == "warning":
            self.print_line(f"warning: {event['text']}")
        elif event["kind"] == "step":
            self._show_step(event)
        elif event["kind"] == "evaluation":
            self.print_line(evaluation_line(event))
        elif event["kind"] in _BETWEEN and process_clock.now() - self._last_line >= _BETWEEN_LINE_S:
            self.print_line(_BETWEEN[event["kind"]](event))

    def _show_step(self, event: Mapping[str, Any]) -> None:
        now = time.monotonic()
        if now - self._last_step_line >= _STEP_LINE_S or event["step"] == event["total"]:
            self._last_step_line = now
            self.print_line(step_line(event))

    def print_line(self, text: str) -> None:
        """Print ``text``, preceded by the seconds since the start."""
        self._last_line = process_clock.now()
        stamp = f"{time.monotonic() - self._began:7.1f} s  "
        # The text may contain output of programs that the policy has written.
        line = escape_controls(text, colours=False)
        self._console.print(Text(stamp, style="dim").append(line), soft_wrap=True)

    def close(self) -> None:
        """Restore the terminal."""


class LiveDisplay(Display):
    """Display as a panel that is redrawn in place. It shows progress, metrics, the division of
    time, and the current calls."""

    def __init__(self, console: Console, title: str) -> None:
        super().__init__(console)
        self._title = title
        self._first_step: tuple[int, float] | None = None
        self._step: Mapping[str, Any] | None = None
        self._activity: Mapping[str, Any] = {}
        self._rollouts: dict[str, Any] = {}
        self._phase = ""
        self._live = Live(
            console=console, get_renderable=self._render, refresh_per_second=4, transient=True
        )
        self._live.start()

    def show(self, event: Mapping[str, Any]) -> None:
        """Update the panel with an event. Warnings, evaluations and some other kinds are printed as
        lines above it."""
        if event["kind"] == "activity":
            self._activity = event
        elif event["kind"] == "phase":
            self._phase = escape_controls(event["text"], colours=False)
        elif event["kind"] == "step":
            self._phase = ""
            self._first_step = self._first_step or (event["step"], time.monotonic())
            self._step = event
            self._rollouts |= rollout_metrics(event["metrics"])
        elif event["kind"] == "rollouts":
            self._rollouts |= flatten_rollouts(event)
        elif event["kind"] == "progress":
            self._phase = escape_controls(progress_line(event), colours=False)
        else:
            if event["kind"] == "evaluation":
                self._phase = ""
            super().show(event)

    def close(self) -> None:
        """Stop redrawing and restore the terminal."""
        self._live.stop()

    def _render(self) -> Group:
        elapsed = time.monotonic() - self._began
        head = Text.assemble((self._title, "bold"), f"   {_format_duration(elapsed)}")
        if self._step is None:
            return Group(head, Text(self._phase, style="cyan"), *_rollout_tables(self._rollouts))
        return Group(
            head,
            self._progress(self._step),
            self._metrics_table(self._step["metrics"]),
            *_rollout_tables(self._rollouts),
            _time_split_table(self._step["metrics"]),
            self._activity_line(),
        )

    def _progress(self, event: Mapping[str, Any]) -> Table:
        row = Table.grid(padding=(0, 1))
        row.add_row(
            f"step {event['step']}/{event['total']}",
            ProgressBar(total=event["total"], completed=event["step"], width=40),
            f"ETA {self._eta(event)}",
        )
        return row

    def _eta(self, event: Mapping[str, Any]) -> str:
        assert self._first_step is not None
        done = event["step"] - self._first_step[0]
        per_step = (
            (time.monotonic() - self._first_step[1]) / done
            if done
            else event["metrics"].get(STEP_TIME, 0)
        )
        return _format_duration(per_step * (event["total"] - event["step"]))

    def _metrics_table(self, metrics: Mapping[str, Any]) -> Table:
        table = Table.grid(padding=(0, 3))
        entries = [(label, metrics.get(name)) for name, label in _STEP_METRICS.items()]
        entries += [(group, value) for group, value in success_by_group(metrics).items()]
        entries += [("tokens/s", metrics.get(_SPEED))]
        table.add_row(
            *[
                Text.assemble((f"{escape_controls(name)} ", "dim"), (_format_number(value), "bold"))
                for name, value in entries
                if value is not None
            ]
        )
        return table

    def _activity_line(self) -> Text:
        calls = escape_controls(", ".join(self._activity.get("calls", []))) or "-"
        buffer = f"{self._activity.get('resident', 0)}/{self._activity.get('capacity', 0)}"
        phase = f"   {self._phase}" if self._phase else ""
        return Text.assemble(
            ("running ", "dim"), calls, ("   buffer ", "dim"), buffer, ("   samples", "dim"), phase
        )


def step_line(event: Mapping[str, Any]) -> str:
    """Format the metrics of a step as one line."""
    metrics = event["metrics"]
    parts = [f"step {event['step']}/{event['total']}"]
    for name, label in _STEP_METRICS.items():
        if (value := metrics.get(name)) is not None:
            parts.append(f"{label} {_format_number(value)}")
    groups = success_by_group(metrics)
    if groups:
        parts.append(
            "(" + ", ".join(f"{group} {value:.0%}" for group, value in groups.items()) + ")"
        )
    if (speed := metrics.get(_SPEED)) is not None:
        parts.append(f"{speed:.0f} tokens/s")
    split = ", ".join(
        f"{name} {seconds:.1f}" for name, seconds in time_split(metrics).items() if seconds >= 0.05
    )
    if STEP_TIME in metrics:
        parts.append(f"{metrics[STEP_TIME]:.1f} s" + (f" ({split})" if split else ""))
    if "buffer/resident" in metrics:
        parts.append(f"buffer {metrics['buffer/resident']:.0f}")
    parts += [f"{label} {text}" for label, text in rollout_labels(metrics)]
    return "  ".join(parts)


def rollouts_line(event: Mapping[str, Any]) -> str:
    """Format the rollout metrics between two steps as one line."""
    return "  ".join(
        [
            "rollouts:",
            *[f"{label} {text}" for label, text in rollout_labels(flatten_rollouts(event))],
        ]
    )


def progress_line(event: Mapping[str, Any]) -> str:
    """Format the progress of a call that plays episodes as one line."""
    return f"{event['call']}: {event['over']} of {event['wanted']} episodes"


_BETWEEN = {"rollouts": rollouts_line, "progress": progress_line}


def evaluation_line(event: Mapping[str, Any]) -> str:
    """Format the held-out results of an evaluation as one line: the success of episodes, or the
    loss and accuracy on rows of a file."""
    parts = [f"held-out, {event['when']}:"]
    for kind, entries in event["report"].items():
        if kind == HELD_OUT_ROWS:
            parts.append(describe_rows(entries["overall"]))
            continue
        shares = {
            name: f"{entry['success']:.1%}" if entry["episodes"] else "-"
            for name, entry in entries.items()
        }
        groups = ", ".join(f"{name} {share}" for name, share in shares.items())
        failed = (
            f", {entries['overall']['failed']} failed" if entries["overall"].get("failed") else ""
        )
        parts.append(f"{kind} {groups} ({entries['overall']['episodes']} episodes{failed})")
    return "  ".join(parts)


def _rollout_tables(metrics: Mapping[str, Any]) -> list[Table]:
    """Return tables of the rollout metrics, with up to ``_ROLLOUT_COLUMNS`` metrics in a row."""
    labels = rollout_labels(metrics)
    tables = []
    for start in range(0, len(labels), _ROLLOUT_COLUMNS):
        table = Table.grid(padding=(0, 3))
        table.add_row(
            *[
                Text.assemble(
                    (f"{label} ", "dim"), (text, "bold red" if label == "failed" else "bold")
                )
                for label, text in labels[start : start + _ROLLOUT_COLUMNS]
            ]
        )
        tables.append(table)
    return tables


def _time_split_table(metrics: Mapping[str, Any]) -> Table:
    table = Table.grid(padding=(0, 1))
    split = {name: seconds for name, seconds in time_split(metrics).items() if seconds > 0.005}
    whole = sum(split.values()) or 1.0
    for name, seconds in sorted(split.items(), key=lambda item: -item[1]):
        share = seconds / whole
        table.add_row(
            Text(name, style="dim"),
            "█" * max(1, round(_BAR * share)),
            f"{seconds:.2f} s  {share:.0%}",
        )
    return table


def _format_number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if abs(value) < 1 else f"{value:.4g}"


def _format_duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return (
        f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
        if minutes >= 60
        else f"{minutes}:{rest:02d}"
    )
