"""Draws ``timeline.png`` from the trace files: what every process of a run did in its last steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from realhf.api.trace import ENV, GENERATE, KINDS, OTHER, REF, STEP, TRAIN, WAIT, WEIGHTS, kind_of
from realhf.monitor.plots import new_figure, save_figure
from realhf.monitor.trace_files import read_events
from realhf.monitor.trace_format import COMPLETE, INSTANT, place_of

BINS = 1200
WITHOUT_STEPS_US = 60_000_000
"""How much of a trace without a single step is shown, in microseconds."""

COLOURS = {
    GENERATE: "#3465a4",
    ENV: "#73a946",
    TRAIN: "#cc4b37",
    REF: "#e9a23b",
    WEIGHTS: "#75507b",
    WAIT: "#d8d8d8",
    OTHER: "#8d8d8d",
}

Span = tuple[int, int, str]
"""A span as (beginning, end, kind), times in microseconds."""


@dataclass
class Window:
    """Holds a stretch of time in microseconds since the epoch, and (time, step) of the train steps that end in it."""

    began: int
    ended: int
    steps: list[tuple[int, int]] = field(default_factory=list)


@dataclass
class Work:
    """Holds what one process did: for every kind, how many of its lines were busy with it, as a mean over each bin. Of
    nested spans the innermost counts."""

    busy: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def most(self) -> float:
        """The largest number of lines busy at once; waiting does not count as busy."""
        working = [bins for kind, bins in self.busy.items() if kind != WAIT]
        return float(np.max(np.sum(working, axis=0))) if working else 0.0


def last_steps(run_dir: Path, n_steps: int) -> Window | None:
    """Find the time of the last ``n_steps`` train steps; None when nothing was traced."""
    first, last = 0, 0
    steps: dict[int, int] = {}
    for event in read_events(run_dir):
        if event.ph in (COMPLETE, INSTANT):
            first = min(first or event.ts, event.ts)
            last = max(last, event.ts + (event.dur or 0))
        if event.ph == INSTANT and event.name == STEP and event.args:
            steps[event.ts] = int(event.args["step"])
    if last == 0:
        return None
    ends = sorted(steps.items())
    if not ends:
        return Window(max(first, last - WITHOUT_STEPS_US), last)
    began = ends[-n_steps - 1][0] if len(ends) > n_steps else first
    return Window(began, ends[-1][0], ends[-n_steps:])


def work_of(run_dir: Path, window: Window, n_bins: int = BINS) -> dict[str, Work]:
    """Return what every process did in the window, in the order of the trace."""
    processes: dict[int, str] = {}
    lines: dict[tuple[int, int], list[Span]] = {}
    for event in read_events(run_dir):
        if event.name == "process_name" and event.args:
            processes[event.pid] = str(event.args["name"])
        elif event.ph == COMPLETE:
            began, ended = max(event.ts, window.began), min(event.ts + (event.dur or 0), window.ended)
            if began < ended:
                lines.setdefault((event.pid, event.tid), []).append((began, ended, kind_of(event.name)))
    found = {pid: Work() for pid in processes}
    for (pid, _), spans in lines.items():
        work = found.setdefault(pid, Work())
        for span in innermost(spans):
            _spread(work, span, window, n_bins)
    named = {processes.get(pid, str(pid)): work for pid, work in found.items()}
    return {name: named[name] for name in sorted(named, key=lambda name: (place_of(name), name))}


def innermost(spans: Iterable[Span]) -> Iterator[Span]:
    """Yield the spans of one line without overlap: where one lies within another, the inner one."""
    open_spans: list[tuple[int, str]] = []
    now = 0
    for began, ended, kind in [*sorted(spans, key=lambda span: (span[0], -span[1])), (2**63, 2**63, "")]:
        while open_spans and open_spans[-1][0] <= began:
            end, inner = open_spans.pop()
            if end > now:
                yield now, end, inner
                now = end
        if open_spans and began > now:
            yield now, began, open_spans[-1][1]
        now = max(now, began)
        open_spans.append((ended, kind))


def _spread(work: Work, span: Span, window: Window, n_bins: int) -> None:
    """Add a span to the bins it touches, by the share of each that it fills."""
    began, ended, kind = span
    bins = work.busy.setdefault(kind, np.zeros(n_bins))
    scale = n_bins / (window.ended - window.began)
    left, right = (began - window.began) * scale, (ended - window.began) * scale
    first, last = int(left), min(int(right), n_bins - 1)
    if first == last:
        bins[first] += right - left
        return
    bins[first] += first + 1 - left
    bins[first + 1 : last] += 1.0
    bins[last] += right - last


def plot_timeline(run_dir: Path, path: Path, *, n_steps: int = 10) -> bool:
    """Plot one row per process, coloured by kind of work; the height is the share of its lines that are busy. Return
    False when there is nothing to draw."""
    window = last_steps(run_dir, n_steps)
    if window is None or window.began >= window.ended:
        return False
    rows = list(work_of(run_dir, window).items())
    fig = new_figure(12, 1.2 + 0.62 * len(rows))
    axes = fig.subplots()
    seconds = np.linspace(0, (window.ended - window.began) / 1e6, BINS, endpoint=False)
    for place, (_, work) in enumerate(rows):
        _draw_row(axes, seconds, len(rows) - 1 - place, work)
    for ended, step in window.steps:
        moment = (ended - window.began) / 1e6
        axes.axvline(moment, color="black", linewidth=0.5, alpha=0.5)
        axes.annotate(str(step), (moment, 1.0), xycoords=("data", "axes fraction"), ha="right", va="bottom", fontsize=7)
    axes.set_yticks([place + 0.4 for place in range(len(rows))], [_label(*row) for row in reversed(rows)], fontsize=8)
    axes.set(
        xlim=(0, (window.ended - window.began) / 1e6),
        ylim=(-0.1, len(rows)),
        xlabel="seconds; the ends of the steps are marked",
    )
    axes.spines[["top", "right"]].set_visible(False)
    _legend(fig, [work for _, work in rows])
    save_figure(fig, path)
    return True


def _draw_row(axes: Any, seconds: np.ndarray, base: float, work: Work) -> None:
    height = 0.8 / max(1.0, work.most)
    low = np.full(BINS, base)
    for kind in (*KINDS, OTHER):
        if kind in work.busy:
            high = np.minimum(low + height * work.busy[kind], base + 0.8)
            axes.fill_between(seconds, low, high, color=COLOURS[kind], step="post", linewidth=0)
            low = high


def _label(process: str, work: Work) -> str:
    most = round(work.most)
    return f"{process}\n({most} at once)" if most > 1 else process


def _legend(fig: Any, rows: Sequence[Work]) -> None:
    from matplotlib.patches import Patch

    seen = [kind for kind in (*KINDS, OTHER) if any(kind in work.busy for work in rows)]
    if seen:
        fig.legend(
            handles=[Patch(color=COLOURS[kind], label=kind) for kind in seen],
            loc="outside upper center",
            ncols=len(seen),
            fontsize=8,
            frameon=False,
        )
