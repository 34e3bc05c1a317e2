"""A step's report as one flat map of numbers. Names: ``<call>/<figure>``, ``seconds/<call>``, ``buffer/...``, and
``staleness/...``, which the training call measures and the whole run is judged by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def flatten_step(
    *,
    wall_s: float,
    stats: Mapping[str, Mapping[str, Any]],
    times: Mapping[str, Mapping[str, float]],
    tokens: Mapping[str, int],
    buffer: Mapping[str, Any],
    source: Mapping[str, float],
    train_calls: Sequence[str],
) -> dict[str, float]:
    """``tokens[call]``: tokens a call took in. Tokens per second count what was generated, or without
    generation what was trained on, over the whole step."""
    metrics: dict[str, float] = {"step_seconds": wall_s}
    for call, values in stats.items():
        metrics |= {_name(call, name): float(value) for name, value in values.items() if _is_number(value)}
    for call, spent in times.items():
        metrics[f"seconds/{call}"] = spent["compute_s"]
        metrics[f"fetch_seconds/{call}"] = spent["fetch_s"]
        metrics[f"queue_seconds/{call}"] = spent["queue_s"]
    generated = sum(value for name, value in metrics.items() if name.endswith("/generated_tokens"))
    metrics["tokens"] = generated or float(sum(tokens.get(call, 0) for call in train_calls))
    metrics["tokens_per_second"] = metrics["tokens"] / wall_s if wall_s > 0 else 0.0
    metrics["buffer/resident"] = float(buffer.get("peak_resident", 0))
    metrics |= {f"source/{name}": float(value) for name, value in source.items() if _is_number(value)}
    return metrics


def _name(call: str, figure: str) -> str:
    return figure if figure.startswith("staleness/") else f"{call}/{figure}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
