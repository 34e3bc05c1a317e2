"""Holds what an advisory is and what it is judged by: the rows of a run, read without trust in what they hold."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Row = Mapping[str, Any]
Filter = dict[str, str | float]
INFO, WARNING, CRITICAL = "info", "warning", "critical"
SEVERITIES = (CRITICAL, WARNING, INFO)
RECENT = 5
"""So many steps at the end of a run say how it is now."""
LEAST = 10
"""A run is compared with its own beginning from so many steps on."""
LASTING = 3
"""A condition that may hold by chance counts when it has held for so many steps."""


@dataclass(frozen=True)
class Advisory:
    """Says what seems wrong with a run.

    ``severity`` is one of ``SEVERITIES``; ``text`` a sentence with the figures; ``since`` the step since which it is
    so; ``filter`` finds the rollouts that show it, by the fields of the viewer's table ({} where none do); ``advice``
    is what one may do about it, with the options.
    """

    id: str
    severity: str
    text: str
    since: int
    advice: str
    filter: Filter = field(default_factory=dict)


@dataclass(frozen=True)
class Evidence:
    """Holds what rules judge: rows of metrics in order, index lines of rollouts (``template``, ``group``, ``failure``,
    ``step``, ``split``), evaluation reports by step, and the bound on staleness where there is one."""

    rows: Sequence[Row]
    index: Sequence[Mapping[str, Any]] = ()
    evaluations: Sequence[tuple[int, Mapping[str, Any]]] = ()
    staleness_bound: float | None = None

    @property
    def recent(self) -> Sequence[Row]:
        """The last steps."""
        return self.rows[-RECENT:]

    @property
    def early(self) -> Sequence[Row]:
        """The first steps; none in a run that is too short to be compared with its beginning."""
        return self.rows[:RECENT] if len(self.rows) >= LEAST else ()


def number(row: Row, name: str) -> float | None:
    """Return a value that is a number, NaN and infinities included; None for anything else."""
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:  # an integer beyond all floats
        return math.inf if value > 0 else -math.inf


def finite(rows: Sequence[Row], name: str) -> list[float]:
    """Return the finite values of a metric, in order."""
    found = [number(row, name) for row in rows]
    return [value for value in found if value is not None and math.isfinite(value)]


def mean(rows: Sequence[Row], name: str) -> float | None:
    """Average the finite values of a metric; None without one."""
    values = finite(rows, name)
    return statistics.fmean(values) if values else None


def median(rows: Sequence[Row], name: str) -> float | None:
    """Return the median of the finite values of a metric; None without one."""
    values = finite(rows, name)
    return statistics.median(values) if values else None


def step_of(row: Row) -> int:
    """Return the step of a row, 0 where it says none."""
    found = number(row, "step")
    return int(found) if found is not None and math.isfinite(found) else 0


def lasting(rows: Sequence[Row], holds: Callable[[Row], bool | None], least: int = LASTING) -> int | None:
    """Return the step since which a condition holds without a break up to the end; None where it does not hold now or
    has not for ``least`` steps. Rows of which ``holds`` says None count for nothing."""
    since, count = 0, 0
    for row in reversed(rows):
        found = holds(row)
        if found is None:
            continue
        if not found:
            break
        since, count = step_of(row), count + 1
    return since if count >= least else None


def above(name: str, limit: float) -> Callable[[Row], bool | None]:
    """Make a condition: the metric is above a limit."""
    return lambda row: None if (value := number(row, name)) is None else value > limit


def below(name: str, limit: float) -> Callable[[Row], bool | None]:
    """Make a condition: the metric is below a limit."""
    return lambda row: None if (value := number(row, name)) is None else value < limit


def is_equal(name: str, wanted: float) -> Callable[[Row], bool | None]:
    """Make a condition: the metric has this value."""
    return lambda row: None if (value := number(row, name)) is None else value == wanted


def both(*conditions: Callable[[Row], bool | None]) -> Callable[[Row], bool | None]:
    """Make a condition: all hold. None where one of them says nothing."""

    def holds(row: Row) -> bool | None:
        found = [condition(row) for condition in conditions]
        return None if None in found else all(found)

    return holds
