"""Proves merged weights: each element is the sum of base and adapters, rounded once to the type of the weights.

Rounding a sum is off by at most half the distance of neighbouring numbers, wherever the number lies, so whatever is
further off was computed wrongly, however small the adapters are beside the weights that they stand by.
"""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK = 1 << 20
"""Elements that are looked at together."""
_CLOSELY = 4096
"""Elements of a chunk that differ, of which so many, evenly spread, are computed again in fp64: of a wrong merge most
differ, of a right one those between two numbers."""


def worst_element(merged: Tensor, base: Tensor, up: Tensor, down: Tensor, scale: float) -> tuple[float, float]:
    """Compare ``merged`` with ``base`` + ``scale`` * ``up`` @ ``down``; (out, in) each, of one type, and (out, rank)
    and (rank, in). Return how far the worst element is off, as a multiple of what rounding allows (1 and less is
    right), and as a multiple of what the adapters add there. Not a number counts as infinitely wrong."""
    rows = max(1, _CHUNK // max(1, merged.shape[1]))
    found = [(0.0, 0.0)]
    for first in range(0, len(merged), rows):
        part = slice(first, first + rows)
        found.append(_worst(merged[part], base[part], up[part].float(), down.float(), scale))
    return max(found)


def _worst(merged: Tensor, base: Tensor, up: Tensor, down: Tensor, scale: float) -> tuple[float, float]:
    again = base.float().addmm(up, down, alpha=scale).to(merged.dtype)
    differs = (merged != again).nonzero()
    if not len(differs):
        return 0.0, 0.0
    row, column = differs[:: -(-len(differs) // _CLOSELY)].unbind(1)
    terms = scale * up.double()[row] * down.double()[:, column].T
    added, start = terms.sum(1), base[row, column].double()
    wanted = start + added
    off = (merged[row, column].double() - wanted).abs()
    # One rounding to the type of the weights, two of sums in fp32, and those of the product of the adapters.
    allowed = _half_step(wanted, merged.dtype) + 2 * _half_step(wanted, torch.float32)
    allowed += (len(down) + 2) * torch.finfo(torch.float32).eps * terms.abs().sum(1)
    times = torch.nan_to_num(off / allowed, nan=float("inf"))
    worst = int(times.argmax())
    return float(times[worst]), float(off[worst] / added[worst].abs().clamp(min=1e-300))


def _half_step(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return half the distance of neighbouring numbers of ``dtype`` at ``x`` f64 (n,)."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(x.abs().clamp(min=info.smallest_normal))
    return torch.ldexp(torch.full_like(x, info.eps / 4), exponent)
