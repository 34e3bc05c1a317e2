"""What happens when a loss or a gradient is not finite: skip, write down, stop after several in a row."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch

from realhf.api.model import CallContext, TrainResult
from realhf.api.sample import SequenceSample


class NonFiniteError(RuntimeError):
    """Too many train steps in a row had a loss or gradient that is not finite."""


class NonFiniteGuard:
    """Counts skipped train steps in a row; raises NonFiniteError at ``limit``."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.in_a_row = 0

    def observe(self, role: str, sample: SequenceSample, result: TrainResult, context: CallContext) -> None:
        """Call after every optimizer step. A skipped one writes
        ``nonfinite/step-<step>-<role>.json`` into the run folder."""
        if not result.skipped:
            self.in_a_row = 0
            return
        self.in_a_row += 1
        path = context.run_dir / "nonfinite" / f"step-{context.step}-{role}.json"
        _dump(path, role, sample, result, context)
        if self.in_a_row >= self._limit:
            raise NonFiniteError(
                f"{role}: loss or gradient not finite in {self.in_a_row} updates in a row; samples in {path}"
            )


def _dump(path: Path, role: str, sample: SequenceSample, result: TrainResult, context: CallContext) -> None:
    record = {
        "step": context.step,
        "role": role,
        "sample_ids": list(sample.ids),
        "loss": _number(result.stats.get("loss", math.nan)),
        "grad_norm": _number(result.grad_norm),
        "keys": {key: _statistics(sample[key]) for key in sorted(sample.keys)},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1))


def _statistics(tensor: torch.Tensor) -> dict[str, float | str | None]:
    values = tensor.double()
    finite = values[torch.isfinite(values)]
    if not len(finite):
        return {"n": float(values.numel()), "not_finite": float(values.numel())}
    return {
        "n": float(values.numel()),
        "not_finite": float(values.numel() - len(finite)),
        "min": float(finite.min()),
        "max": float(finite.max()),
        "mean": float(finite.mean()),
    }


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
