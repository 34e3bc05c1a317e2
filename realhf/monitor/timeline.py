"""Draws ``timeline.png`` from the trace files: what every process of a run did in its last steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from realhf.api.trace import ENV, GENERATE, KINDS, OTHER, REF, STEP, TRAIN, WAIT, WEIGHTS, kind_of
from realhf.monitor.host_lanes import HostLanes
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


def work_of(run_dir: Path, window: Window, n_bins: int = BINS) -> dict[tuple[str, str], Work]:
    """Return what every process did in the window, by host and process, in the order of both. A process that was on
    two hosts has a row on each; the host is "" in a run on one machine."""
    hosts = HostLanes(run_dir)
    processes: dict[int, str] = {}
    lines: dict[tuple[int, int], list[Span]] = {}
    for event in read_events(run_dir):
        if event.name == "process_name" and event.args:
            processes[event.pid] = str(event.args["name"])
        elif event.ph == COMPLETE:
            began, ended = max(event.ts, window.began), min(event.ts + (event.dur or 0), window.ended)
            if began < ended:
                lines.setdefault((event.pid, event.tid), []).append((began, ended, kind_of(event.name)))
    found = {(hosts.at(name, window.ended), name): Work() for name in processes.values()}
    for (pid, _), spans in lines.items():
        name = processes.get(pid, str(pid))
        for span in innermost(spans):
            _spread(found.setdefault((hosts.at(name, span[0]), name), Work()), span, window, n_bins)
    order = {host: place for place, host in enumerate(hosts.hosts)}
    rows = sorted(found, key=lambda row: (order.get(row[0], -1), place_of(row[1]), row[1]))
    return {row: found[row] for row in rows}


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
    """Plot one row per process, coloured by kind of work; the height is the share of its lines that are busy. In a run
    over several hosts the rows of a host lie together in a band of its own, with a mark where it was lost. Return False
    when there is nothing to draw."""
    window = last_steps(run_dir, n_steps)
    if window is None or window.began >= window.ended:
        return False
    rows = list(work_of(run_dir, window).items())
    fig = new_figure(12, 1.2 + 0.62 * len(rows))
    axes = fig.subplots()
    seconds = np.linspace(0, (window.ended - window.began) / 1e6, BINS, endpoint=False)
    _draw_hosts(axes, HostLanes(run_dir), [host for (host, _), _ in rows], window)
    for place, (_, work) in enumerate(rows):
        _draw_row(axes, seconds, len(rows) - 1 - place, work)
    for ended, step in window.steps:
        moment = (ended - window.began) / 1e6
        axes.axvline(moment, color="black", linewidth=0.5, alpha=0.5)
        axes.annotate(str(step), (moment, 1.0), xycoords=("data", "axes fraction"), ha="right", va="bottom", fontsize=7)
    labels = [_label(process, work) for (_, process), work in reversed(rows)]
    axes.set_yticks([place + 0.4 for place in range(len(rows))], labels, fontsize=8)
    axes.set(
        xlim=(0, (window.ended - window.began) / 1e6),
        ylim=(-0.1, len(rows)),
        xlabel="seconds; the ends of the steps are marked",
    )
    axes.spines[["top", "right"]].set_visible(False)
    _legend(fig, [work for _, work in rows])
    save_figure(fig, path)
    return True


def _draw_hosts(axes: Any, hosts: HostLanes, rows: Sequence[str], window: Window) -> None:
    """Draw a band behind the rows of each host, its name beside it, and a red mark where it was lost."""
    for number, host in enumerate(hosts.hosts):
        places = [len(rows) - 1 - place for place, name in enumerate(rows) if name == host]
        if not places:
            continue
        low, high = min(places) - 0.1, max(places) + 0.9
        axes.axhspan(low, high, color="#f3f3f3" if number % 2 == 0 else "#e3ebf3", zorder=-1)
        spot = (1.005, (low + high) / 2)
        axes.annotate(host, spot, xycoords=("axes fraction", "data"), va="center", fontsize=8, rotation=-90)
        for moment, name, _ in hosts.lost:
            if name == host and window.began <= moment <= window.ended:
                axes.vlines((moment - window.began) / 1e6, low, high, color="#cc0000", linewidth=2)


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
