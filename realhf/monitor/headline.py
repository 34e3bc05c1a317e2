"""Finds the few metrics that a person looks for among all metrics of a step, by their public names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
STEP_TIME, CALL_TIME, PART_TIME = "time/step", "time/", "time/part/"
_NO_CALLS = ("step", "episode", "fetch", "queue", "part")
"""What stands behind ``time/`` and is no call."""


def call_times(row: Row) -> dict[str, float]:
    """Return the seconds that each model function call of a step computed."""
    found = {name.removeprefix(CALL_TIME): value for name, value in row.items() if name.startswith(CALL_TIME)}
    return {call: value for call, value in found.items() if call.partition("/")[0] not in _NO_CALLS}


def part_seconds(row: Row, part: str) -> float:
    """Return the seconds of a step that all calls together spent with ``part``: generation, environment, rollouts."""
    return sum(value for name, value in row.items() if name.startswith(PART_TIME) and name.endswith(f"/{part}"))


def time_split(row: Row) -> dict[str, float]:
    """Return the seconds of a step by what took them: environment, generation, every other call by its name, and the
    rest."""
    split: dict[str, float] = {}
    for name, seconds in call_times(row).items():
        environment = row.get(f"{PART_TIME}{name}/environment")
        generation = row.get(f"{PART_TIME}{name}/generation")
        if environment is None or generation is None:
            split[name] = seconds
        else:
            split |= {"environment": environment, "generation": generation}
    split["other"] = max(0.0, row.get(STEP_TIME, 0.0) - sum(split.values()))
    return split


def total(rows: Sequence[Row], name: str) -> float:
    """Sum a metric over the steps; a step without it counts as 0."""
    return sum(row.get(name, 0.0) for row in rows)


def mean(rows: Sequence[Row], name: str) -> float | None:
    """Average a metric over the steps that have it; None if no step has it."""
    values = [row[name] for row in rows if name in row]
    return sum(values) / len(values) if values else None
