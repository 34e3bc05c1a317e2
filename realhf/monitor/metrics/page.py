"""Writes ``docs/metrics.md``: every metric with its unit and its meaning, from the tables of names."""

from __future__ import annotations

from realhf.monitor.metrics.names import SECTIONS, Section

_HEAD = """# Metrics

Every step of a run adds a row to `metrics.jsonl` in the run folder: one JSON map of names and numbers, with `step`,
which counts from 1. The same names stand in the live display, `report.html` and the trackers. Synchronous
and asynchronous runs use one scheme; a name is absent where a run has nothing to report under it. A number that is not
finite is written as `NaN` or `Infinity`.

`<..>` stands for what differs: a group of tasks, a kind of failure, a model function call. A fraction lies between 0
and 1. `python -m realhf.monitor.metrics` prints this page; how to add a metric is said in
[extend/metric.md](extend/metric.md).
"""


def page() -> str:
    """Return the page as Markdown."""
    return "\n".join([_HEAD, *[_section(section) for section in SECTIONS]])


def _section(section: Section) -> str:
    rows = [f"| `{metric.name}` | {metric.unit} | {metric.meaning} |" for metric in section.metrics]
    return "\n".join([f"## {section.title}", section.says, "", "| name | unit | meaning |", "|---|---|---|", *rows, ""])
