"""Results of the trajectory benchmark: medians, ratios with their range, goals, and a plot."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

KINDS = ("original", "sqlite", "memory")
PUSHES = ("plain", "list of 8", "gzip", "list of 8, gzip")
CODINGS = ("identity", "gzip")
WAIT = "longest wait of any request, ms"


@dataclass(frozen=True)
class Goal:
    """Goal for one row and server. ``least``: whether ``limit`` is a minimum instead of a maximum.
    ``ratio``: whether it applies to our value divided by the original's in the same repeat."""

    row: str
    server: str
    limit: float
    least: bool
    ratio: bool = False


def goals(depth: int) -> list[Goal]:
    """Return the goals for our server with this queue depth."""
    push = [
        Goal(f"push {way}: sequences/s", kind, 3, least=True, ratio=True)
        for kind in ("sqlite", "memory")
        for way in PUSHES
    ]
    pull = [
        Goal(f"pull {coding}: sequences/s", "sqlite", 10, least=True, ratio=True)
        for coding in CODINGS
    ]
    pull += [
        Goal(f"pull {coding}: p99 of a batch, ms", "sqlite", 25, least=False) for coding in CODINGS
    ]
    waits = [
        Goal(f"{depth} queued{more}: {WAIT}", kind, 20, least=False)
        for more in ("", ", minimums")
        for kind in ("sqlite", "memory")
    ]
    return (
        push
        + pull
        + waits
        + [
            Goal(f"{depth} queued: status-env p99, 64 environments, ms", "sqlite", 2, least=False),
            Goal("status-env p99 while pushing, ms", "sqlite", 15, least=False),
            Goal("memory of a queued group / its wire size", "memory", 1.2, least=False),
            Goal("memory of a queued group / its wire size", "sqlite", 1.2, least=False),
            Goal("binary push: trajectories/s", "sqlite", 20_000, least=True),
            Goal("binary pull: trajectories/s", "sqlite", 20_000, least=True),
            Goal(f"{depth} queued: restart after kill -9, s", "sqlite", 5, least=False),
        ]
    )


@dataclass
class Table:
    """Measured values by row and server, with one value per repeat."""

    values: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def add(self, row: str, server: str, value: float) -> None:
        """Add a value to a row and server."""
        self.values.setdefault(row, {}).setdefault(server, []).append(value)

    def median(self, row: str, server: str) -> float | None:
        """Return the median of a row and server; None if there are no values."""
        found = self._of(row, server)
        return statistics.median(found) if found else None

    def ratios(self, row: str, server: str) -> list[float]:
        """Return our values divided by the original's of the same repeat, sorted. If the original
        was measured only once, all our values are divided by that one."""
        ours = self._of(row, server)
        theirs = self._of(row, "original")
        theirs = theirs * len(ours) if len(theirs) == 1 else theirs
        return sorted(mine / other for mine, other in zip(ours, theirs, strict=False) if other)

    def _of(self, row: str, server: str) -> list[float]:
        return self.values.get(row, {}).get(server, [])

    def lines(self) -> list[str]:
        """Return one line per row: the median for each server, and our ratios to the original."""
        found = [
            f"{'median of the repeats':<56}{'original':>10}{'sqlite':>10}{'memory':>10}   "
            "sqlite / original           memory / original"
        ]
        for row in self.values:
            cells = "".join(f"{_short(self.median(row, kind)):>10}" for kind in KINDS)
            ratios = "".join(f"{_range(self.ratios(row, kind)):<28}" for kind in KINDS[1:])
            found.append(f"{row:<56}{cells}   {ratios}".rstrip())
        return found

    def verdicts(self, wanted: Sequence[Goal]) -> tuple[list[str], int]:
        """Return (one line for each measured goal, number of missed goals)."""
        found = []
        missed = 0
        for goal in wanted:
            measured = (
                self.ratios(goal.row, goal.server)
                if goal.ratio
                else self._of(goal.row, goal.server)
            )
            if not measured:
                continue
            value = statistics.median(measured)
            reached = value >= goal.limit if goal.least else value <= goal.limit
            missed += not reached
            times = " times the original" if goal.ratio else ""
            found.append(
                f"{'reached' if reached else 'MISSED':<8}{goal.row} ({goal.server}): "
                f"{_short(value)}{times}, "
                f"at {'least' if goal.least else 'most'} {goal.limit:g} asked"
            )
        return found, missed


def draw(table: Table, target: Path) -> None:
    """Write a plot of throughput and longest waits. Bars are medians, whiskers the range of the
    repeats."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rates = [row for row in table.values if row.endswith(": sequences/s")]
    waits = [row for row in table.values if row.endswith(WAIT)]
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(14, 4.5), width_ratios=(3, 2), layout="constrained"
    )
    _bars(left, table, rates, [row.removesuffix(": sequences/s") for row in rates])
    left.set_ylabel("sequences per second")
    left.legend()
    _bars(
        right, table, waits, [row.removesuffix(f": {WAIT}").replace(", ", ",\n") for row in waits]
    )
    right.set_ylabel(WAIT)
    for axes in (left, right):
        axes.set_yscale("log")
    figure.savefig(target, dpi=120)
    plt.close(figure)


def _bars(axes, table: Table, rows: Sequence[str], labels: Sequence[str]) -> None:  # type: ignore[no-untyped-def]
    colors = {"original": "#888888", "sqlite": "#1f77b4", "memory": "#9ecae1"}
    for shift, kind in enumerate(KINDS):
        places = [index for index, row in enumerate(rows) if table.median(row, kind) is not None]
        series = [table.values[rows[index]][kind] for index in places]
        middle = [statistics.median(values) for values in series]
        spread = [
            [mid - min(values) for mid, values in zip(middle, series, strict=True)],
            [max(values) - mid for mid, values in zip(middle, series, strict=True)],
        ]
        axes.bar(
            [place + (shift - 1) * 0.27 for place in places],
            middle,
            0.25,
            yerr=spread,
            capsize=2,
            label=kind,
            color=colors[kind],
        )
    axes.set_xticks(range(len(rows)), labels)


def _short(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _range(ratios: Sequence[float]) -> str:
    if not ratios:
        return ""
    middle, low, high = (
        f"{value:.0f}" if value >= 10 else f"{value:.2g}"
        for value in (statistics.median(ratios), ratios[0], ratios[-1])
    )
    return f"{middle} ({low} - {high})"
