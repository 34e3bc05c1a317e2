"""Writes ``report.html``, one file about a run that can be sent around: metrics, pictures, tables, configuration.

python -m realhf.monitor.report RUN_DIR       # of any run, also of one that goes on or was killed
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from realhf.base.files.whole_file import write_whole
from realhf.monitor import report_html as html
from realhf.monitor.advisories.of_run import advise_run
from realhf.monitor.deaths import deaths
from realhf.monitor.headline import STEP_TIME, Row
from realhf.monitor.host_lanes import HostLanes
from realhf.monitor.metrics.renaming import success_by_group
from realhf.monitor.metrics_log import read_metrics
from realhf.monitor.pictures import ASYNC, LEARNING, TIME, TIMELINE, draw_pictures
from realhf.monitor.plots import staleness_bound
from realhf.monitor.provenance import LAUNCH, effective_options, launches, read_provenance
from realhf.monitor.rollout_metrics import is_asynchronous, rollout_summary
from realhf.monitor.run_files import NONFINITE_FILE, Evaluations
from realhf.monitor.timeline import plot_timeline
from realhf.monitor.trace import merge_traces
from realhf.monitor.trace_format import TRACE_FILE

REPORT_FILE = "report.html"
STEPS_SHOWN = 30
COLUMNS = (
    "reward/mean",
    "success/overall",
    "policy/loss",
    "policy/entropy",
    "length/mean",
    "length/truncated",
    "mismatch/kl",
    "staleness/mean",
    "staleness/max",
    "generation/occupancy",
    "training/occupancy",
    "throughput/tokens_per_second",
    STEP_TIME,
)
PICTURES = (
    (ASYNC, "Asynchronous"),
    (TIMELINE, "Who did what, last steps"),
    (TIME, "Where the time goes"),
    ("graph.png", "Dataflow"),
)


def write_report(run_dir: Path) -> Path:
    """Write ``report.html`` from the files of a run and return its path; parts whose files are missing are left out."""
    rows, summary = read_metrics(run_dir), _json(run_dir / "summary.json")
    title = "/".join(run_dir.resolve().parts[-2:])
    parts = [
        html.heading(title, 1),
        html.paragraph(_state(rows, summary)),
        *_picture(run_dir / LEARNING, "Learning"),
        *_advisories(run_dir, rows),
        *_held_out(Evaluations(run_dir)),
        *_overview(rows, summary),
        *_rollouts(run_dir, rows),
        *_hosts(run_dir),
        *_deaths(run_dir),
        *[part for file, name in PICTURES for part in _picture(run_dir / file, name)],
        *_steps(rows),
        *_trace(run_dir),
        *_origin(run_dir),
    ]
    path = run_dir / REPORT_FILE
    write_whole(path, html.page(title, parts))
    return path


def _state(rows: Sequence[Row], summary: dict[str, Any]) -> str:
    steps = max((int(row["step"]) for row in rows), default=0)
    if summary.get("steps") == steps:
        return f"Steps: {steps}, in {summary['wall_seconds']:.0f} s, finished"
    return f"Steps so far: {steps}; this run goes on or was stopped"


def _overview(rows: Sequence[Row], summary: dict[str, Any]) -> list[str]:
    if not rows:
        return []
    first, last = rows[0], rows[-1]
    table = [[name, html.number(first.get(name)), html.number(last.get(name))] for name in COLUMNS if name in last]
    seconds = [
        [name.removesuffix("_seconds"), f"{summary[name]:.1f} s"]
        for name in ("wall_seconds", "generation_seconds", "env_seconds", "train_seconds")
        if name in summary
    ]
    return [
        html.heading("Figures"),
        html.table(["", "first step", "last step"], table),
        *([html.table(["total time", ""], seconds)] if seconds else []),
    ]


def _advisories(run_dir: Path, rows: Sequence[Row]) -> list[str]:
    """Say what seems wrong with the run, the gravest first."""
    found = advise_run(
        run_dir, rows, Evaluations(run_dir).all(), staleness_bound(run_dir), effective_options(read_provenance(run_dir))
    )
    table = [[one.severity, str(one.since), one.text, one.advice] for one in found]
    columns = ["severity", "since step", "what", "what one may do"]
    return [html.heading("Advisories"), html.sentences(columns, table)] if table else []


def _held_out(evaluations: Evaluations) -> list[str]:
    table = [
        [
            str(step),
            kind,
            name,
            f"{100 * entry['success']:.1f} %",
            f"[{100 * entry['low']:.0f}, {100 * entry['high']:.0f}]" if "low" in entry and "high" in entry else "",
            str(int(entry["episodes"])),
        ]
        for step, report in evaluations.all()
        for kind, entries in report.items()
        for name, entry in entries.items()
    ]
    columns = ["after step", "sampling", "group", "success", "95 % interval", "episodes"]
    return [html.heading("Held-out success"), html.table(columns, table)] if table else []


def _rollouts(run_dir: Path, rows: Sequence[Row]) -> list[str]:
    """Describe staleness, occupancy, admission and failures of an asynchronous run."""
    if not is_asynchronous(rows):
        return []
    whole = rollout_summary(rows)
    bound = staleness_bound(run_dir)
    table = [
        [name.replace("_", " "), html.number(value)] for name, value in whole.items() if not isinstance(value, dict)
    ]
    if bound is not None:
        table.insert(2, ["staleness bound", html.number(bound)])
    kinds = sorted({*whole["failed"], *whole["retried"]})
    failures = [
        [kind, html.number(whole["failed"].get(kind, 0.0)), html.number(whole["retried"].get(kind, 0.0))]
        for kind in kinds
    ]
    return [
        html.heading("Rollouts"),
        html.table(["", "whole run"], table),
        html.table(["failures", "failed", "retried"], failures) if failures else html.paragraph("No failures."),
    ]


def _hosts(run_dir: Path) -> list[str]:
    """Say what ran on each host of a run over several, and when hosts were lost."""
    hosts = HostLanes(run_dir)
    lost = [(host, f"{datetime.fromtimestamp(at / 1e6, UTC):%H:%M:%S} UTC, {why}") for at, host, why in hosts.lost]
    table = [
        [name, ", ".join(hosts.processes(name)), "; ".join(told for host, told in lost if host == name)]
        for name in hosts.hosts
    ]
    return [html.heading("Hosts"), html.sentences(["host", "processes", "lost"], table)] if table else []


def _deaths(run_dir: Path) -> list[str]:
    """Say which workers ended before the run did."""
    table = [
        [f"{datetime.fromtimestamp(death.at, UTC):%H:%M:%S} UTC", death.process, death.why, death.then]
        for death in deaths(run_dir)
    ]
    heading = html.heading("Workers that ended before the run")
    return [heading, html.sentences(["when", "worker", "why", "then"], table)] if table else []


def _picture(path: Path, name: str) -> list[str]:
    return [html.heading(name), html.picture(path.read_bytes(), name)] if path.is_file() else []


def _steps(rows: Sequence[Row]) -> list[str]:
    shown = rows[-STEPS_SHOWN:]
    names = [name for name in COLUMNS if any(name in row for row in shown)]
    groups = sorted({group for row in shown for group in success_by_group(row)})
    table = [
        [
            str(row["step"]),
            *[html.number(row.get(name)) for name in names],
            *[html.number(success_by_group(row).get(group)) for group in groups],
        ]
        for row in shown
    ]
    return [html.heading("Steps"), html.table(["step", *names, *groups], table)] if table else []


def _trace(run_dir: Path) -> list[str]:
    if not (run_dir / TRACE_FILE).is_file():
        return []
    return [
        html.heading("Trace"),
        html.paragraph(
            f"{TRACE_FILE} in the run folder holds every piece of work of every process. Open "
            "https://ui.perfetto.dev or chrome://tracing and drop the file there; it stays on your machine."
        ),
    ]


def _origin(run_dir: Path) -> list[str]:
    """Describe where the run came from: command line, versions, configuration."""
    provenance = read_provenance(run_dir) or {}
    parts = [html.heading("Origin")]
    if provenance:
        parts.append(html.text(shlex.join([*LAUNCH, *map(str, provenance.get("arguments", []))])))
        for entry in launches(run_dir)[1:]:
            changed = ", ".join(f"{name}: {before} -> {now}" for name, (before, now) in entry["changed"].items())
            parts.append(
                html.text(f"Gone on after step {entry['completed_steps']}, {changed or 'with the same options'}")
            )
        parts.append(html.folded("Versions", json.dumps(provenance, indent=1)))
    for file in ("config.yaml", NONFINITE_FILE):
        if (run_dir / file).is_file():
            parts.append(html.folded(file, (run_dir / file).read_text(encoding="utf-8")))
    return parts if len(parts) > 1 else []


def _json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def main() -> int:
    """Draw the pictures and write the report of the run folder named on the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path)
    run_dir = parser.parse_args().run_dir
    rows = read_metrics(run_dir)
    if not rows:
        print(f"error: no steps in {run_dir}", file=sys.stderr)
        return 1
    draw_pictures(run_dir, rows, Evaluations(run_dir))
    plot_timeline(run_dir, run_dir / TIMELINE)
    merge_traces(run_dir)
    print(write_report(run_dir))
    return 0


if __name__ == "__main__":
    sys.exit(main())
