"""Writes the dataflow graph of a run as files: ``graph.md`` (table and mermaid), ``graph.dot`` and ``graph.png``."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from realhf.api.graph import DataFlowGraph

Place = tuple[float, float]
COLUMN_INCHES, ROW_INCHES = 3.6, 1.5


def graph_text(graph: DataFlowGraph) -> str:
    """Return the table of the graph and its mermaid source, as markdown."""
    return f"```\n{graph.summary()}\n```\n\n```mermaid\n{graph.to_mermaid()}\n```\n"


def write_graph_files(graph: DataFlowGraph, folder: Path) -> None:
    """Write ``graph.md``, ``graph.dot`` and ``graph.png`` into ``folder``."""
    (folder / "graph.md").write_text(graph_text(graph), encoding="utf-8")
    (folder / "graph.dot").write_text(graph.to_dot(), encoding="utf-8")
    draw_graph(graph, folder / "graph.png")


def draw_graph(graph: DataFlowGraph, path: Path) -> None:
    """Draw the calls as boxes, one column per level of the graph, and the keys at arrows between them."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    levels = [["dataset"], *graph.topological_levels()]
    places = {
        name: (column, (len(level) - 1) / 2 - row)
        for column, level in enumerate(levels)
        for row, name in enumerate(level)
    }
    rows = max(map(len, levels)) + 1
    fig = Figure(figsize=(COLUMN_INCHES * len(levels), ROW_INCHES * rows), layout="constrained")
    FigureCanvasAgg(fig)
    axes = fig.subplots()
    axes.axis("off")
    axes.set(xlim=(-0.5, len(levels) - 0.5), ylim=(-rows / 2, rows / 2))
    for (source, target), keys in _edges(graph).items():
        _arrow(axes, places[source], places[target], keys, places.values())
    for name, (x, y) in places.items():
        label = name if name == "dataset" else f"{name}\n{graph[name].model_role}: {graph[name].interface}"
        axes.text(
            x,
            y,
            label,
            ha="center",
            va="center",
            fontsize=10,
            zorder=3,
            bbox={"boxstyle": "round,pad=0.5", "facecolor": "#e8f0fe", "edgecolor": "#3465a4"},
        )
    fig.savefig(path, dpi=110)


def _edges(graph: DataFlowGraph) -> dict[tuple[str, str], list[str]]:
    edges: dict[tuple[str, str], list[str]] = {}
    for name in (name for level in graph.topological_levels() for name in level):
        if not graph.inputs(name):
            edges["dataset", name] = ["metadata"]
        for key in graph.inputs(name):
            for source in graph.producers(key):
                edges.setdefault((source if source in _names(graph) else "dataset", name), []).append(key)
    return edges


def _names(graph: DataFlowGraph) -> set[str]:
    return {name for level in graph.topological_levels() for name in level}


def _arrow(axes: Any, start: Place, end: Place, keys: list[str], others: Collection[Place]) -> None:
    span = end[0] - start[0]
    bend = 0.3 if any(_between(place, start, end) for place in others) else 0.0
    axes.annotate(
        "",
        end,
        start,
        zorder=1,
        arrowprops={
            "arrowstyle": "-|>",
            "color": "#777777",
            "shrinkA": 62,
            "shrinkB": 68,
            "connectionstyle": f"arc3,rad={bend}",
        },
    )
    # The middle of the arc lies rad / 2 of its length to the side, measured on paper.
    aside = bend / 2 * span * COLUMN_INCHES / ROW_INCHES
    shown = keys if len(keys) <= 4 else [*keys[:3], f"and {len(keys) - 3} more"]
    axes.text(
        (start[0] + end[0]) / 2,
        (start[1] + end[1]) / 2 - aside,
        "\n".join(shown),
        fontsize=7,
        color="#444444",
        ha="center",
        va="center",
        zorder=2,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
    )


def _between(place: Place, start: Place, end: Place) -> bool:
    """Return whether a box at ``place`` would cover the straight line from ``start`` to ``end``."""
    if not start[0] < place[0] < end[0]:
        return False
    share = (place[0] - start[0]) / (end[0] - start[0])
    return abs(start[1] + share * (end[1] - start[1]) - place[1]) < 0.3
