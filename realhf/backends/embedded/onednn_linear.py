"""Computes the products of linear layers with oneDNN, forward and backward.

On processors that MKL does not favour it multiplies float32 half as fast as oneDNN (100 against 220 GFLOP/s on one core
of an AMD EPYC), and PyTorch offers no switch between the two.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

LEAST_ROWS = 32
"""Least number of rows worth the call; for fewer it costs more than it saves."""
_LARGE, _LEAST_OF_LARGE = 1 << 22, 4
"""A weight with that many elements, as the projection to the vocabulary of a real model, is worth it from four rows on:
a product of 4 to 16 rows with one of 49,152 x 576 takes half to two thirds of MKL's time."""


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply ``x`` (..., in) by the transpose of ``weight`` (out, in); float32 on the CPU, in any layout."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Map (..., in) to (..., out) with ``product`` if it is worth it; needs a weight that suits it. It has no second
    derivatives."""
    if x.dtype != torch.float32 or math.prod(x.shape[:-1]) < LEAST_ROWS:
        return F.linear(x, weight, bias)
    if not torch.is_grad_enabled():
        return product(x, weight, bias)
    return _Product.apply(x, weight, bias)


class OneDnnLinear(nn.Linear):
    """Computes what ``nn.Linear`` computes, up to rounding. It has no second derivatives."""

    def forward(self, input: Tensor) -> Tensor:
        """Map (..., in) to (..., out)."""
        return linear(input, self.weight, self.bias)


def use_onednn(model: nn.Module) -> int:
    """Turn the plain float32 layers on the CPU into ``OneDnnLinear``, in place; return how many. Parameters and their
    names stay."""
    found = [module for module in model.modules() if type(module) is nn.Linear and suits(module.weight)]
    for module in found:
        module.__class__ = OneDnnLinear
    return len(found)


def least_rows(weight: Tensor) -> int:
    """Return the number of rows from which on ``product`` is faster than MKL for this weight, without a gradient."""
    return _LEAST_OF_LARGE if weight.numel() >= _LARGE else LEAST_ROWS


def suits(weight: Tensor) -> bool:
    """Return whether ``product`` accepts this weight."""
    plain = weight.device.type == "cpu" and weight.dtype == torch.float32
    return plain and torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        of_x = product(grad, weight.t()) if ctx.needs_input_grad[0] else None
        rows = grad.reshape(-1, grad.shape[-1])
        of_weight = of_bias = None
        if ctx.needs_input_grad[1]:
            of_weight = product(rows.t(), x.reshape(-1, x.shape[-1]).t())
        if ctx.needs_input_grad[2]:
            of_bias = rows.sum(0)
        return of_x, of_weight, of_bias
