"""Finds the few metrics that a person looks for among all metrics of a step.

Metrics of a model function call are named ``<call>/<metric>``, those of the step itself by the metric alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def metric(row: Row, name: str) -> float | None:
    """Return the value called ``name``, of the step or of the first call that has one; None if there is none."""
    if name in row:
        return row[name]
    return next((value for key, value in row.items() if key.partition("/")[2] == name), None)


def success_by_group(row: Row) -> dict[str, float]:
    """Return {group: success} of the episodes of a step."""
    found = {}
    for key, value in row.items():
        parts = key.split("/")
        if len(parts) >= 2 and parts[-2] == "success":
            found[parts[-1]] = value
    return found


def time_split(row: Row) -> dict[str, float]:
    """Return the seconds of a step by what took them: environment, generation, every other call by its name, and the
    rest."""
    calls = {key.removeprefix("seconds/"): value for key, value in row.items() if key.startswith("seconds/")}
    split: dict[str, float] = {}
    for name, seconds in calls.items():
        environment, generation = row.get(f"{name}/env_seconds"), row.get(f"{name}/generation_seconds")
        if environment is None or generation is None:
            split[name] = seconds
        else:
            split |= {"environment": environment, "generation": generation}
    split["other"] = max(0.0, row.get("step_seconds", 0.0) - sum(split.values()))
    return split


def total(rows: Sequence[Row], name: str) -> float:
    """Sum a metric over the steps; a step without it counts as 0."""
    return sum(metric(row, name) or 0.0 for row in rows)


def mean(rows: Sequence[Row], name: str) -> float | None:
    """Average a metric over the steps that have it; None if no step has it."""
    values = [value for row in rows if (value := metric(row, name)) is not None]
    return sum(values) / len(values) if values else None
