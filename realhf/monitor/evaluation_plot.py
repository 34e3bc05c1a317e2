"""Success of several agents by tier, as bars with their 95 % intervals."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def plot_success(reports: Mapping[str, Mapping[str, Any]], title: str, path: Path) -> None:
    """``reports``: agent name to {group: {"success": {value, low, high, n}}}; writes a PNG."""
    from matplotlib.figure import Figure

    groups = list(dict.fromkeys(group for report in reports.values() for group in report))
    figure = Figure(figsize=(1.6 + 1.3 * len(groups), 3.6), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(reports)
    for number, (agent, report) in enumerate(reports.items()):
        shown = [(place, report[group]["success"]) for place, group in enumerate(groups)
                 if report.get(group, {}).get("success")]  # fmt: skip
        values = [100 * rate["value"] for _, rate in shown]
        errors = [[100 * max(0.0, rate["value"] - rate["low"]) for _, rate in shown],
                  [100 * max(0.0, rate["high"] - rate["value"]) for _, rate in shown]]  # fmt: skip
        places = [place + (number - (len(reports) - 1) / 2) * width for place, _ in shown]
        axes.bar(places, values, width * 0.92, yerr=errors, capsize=2, label=agent, error_kw={"lw": 1})
    axes.set_xticks(range(len(groups)), groups)
    axes.set_ylim(0, 105)
    axes.set_ylabel("episodes solved, %")
    axes.set_title(title, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=len(reports))
    figure.savefig(path, dpi=130)
