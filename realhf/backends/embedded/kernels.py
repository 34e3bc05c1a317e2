"""Computes linear layers with oneDNN, and those with adapters and root-mean-square norms with few
passes over memory, forward and backward.

On processors that MKL does not favour it multiplies float32 half as fast as oneDNN (100 against 220
GFLOP/s on one core of an AMD EPYC), and PyTorch offers no switch between the two. On those of Intel
MKL is the faster one, by a tenth in forward products and up to twice in those of the gradients of
weights (1.4 against 2.1 ms for 1,664 rows of 384 and 128), since it reads both factors as they lie;
and oneDNN keeps half a MB of code for every shape that it has met.

In a model of a million parameters the norms took a seventh of a train step: autograd goes through
fourteen tensors of the size of the activations to differentiate what takes seven by hand, and keeps
three of them where one will do.
"""

from __future__ import annotations

import copy
import functools
import math
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

LEAST_ROWS = 32
"""Least number of rows worth the call; for fewer it costs more than it saves."""
_LARGE = 1 << 22
_LEAST_OF_LARGE = 4
"""A weight with that many elements, as the projection to the vocabulary of a real model, is worth
it from four rows on: a product of 4 to 16 rows with one of 49,152 x 576 takes half to two thirds of
MKL's time."""
_MIDDLE = 3 << 18
_MOST_OF_MIDDLE = 16
_MOST_OF_LARGE = 33
"""On processors that MKL favours: a weight of 1,536 x 576 is read a quarter faster by oneDNN with 8
rows and as fast with 16; one of 49,152 x 576 twice as fast with 8, a quarter with 32."""


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply ``x`` (..., in) by the transpose of ``weight`` (out, in); float32 on the CPU, in any
    layout."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class OneDnnLinear(nn.Linear):
    """Computes what ``nn.Linear`` computes, up to rounding, with ``product`` where it is worth it;
    its weight must suit that. It has no second derivatives."""

    def forward(self, input: Tensor) -> Tensor:
        """Map (..., in) to (..., out)."""
        few = math.prod(input.shape[:-1]) < LEAST_ROWS
        if few or input.dtype != torch.float32 or not torch.backends.mkldnn.enabled:
            return F.linear(input, self.weight, self.bias)
        if not torch.is_grad_enabled():
            return product(input, self.weight, self.bias)
        return _Product.apply(input, self.weight, self.bias)


def use_onednn(model: nn.Module) -> int:
    """Turn the plain float32 layers on the CPU into ``OneDnnLinear``, in place, where that trains
    faster; return how many. Parameters and their names stay."""
    found = [
        module
        for module in model.modules()
        if type(module) is nn.Linear and trains_faster(module.weight)
    ]
    for module in found:
        module.__class__ = OneDnnLinear
    return len(found)


def rows_of_product(weight: Tensor) -> range:
    """Return the numbers of rows for which ``product`` is faster than MKL with this weight, without
    a gradient."""
    large = weight.numel() >= _LARGE
    if not favoured_by_mkl():
        return range(_LEAST_OF_LARGE if large else LEAST_ROWS, sys.maxsize)
    if weight.numel() < _MIDDLE:
        return range(0)
    return range(_LEAST_OF_LARGE, _MOST_OF_LARGE if large else _MOST_OF_MIDDLE)


def trains_faster(weight: Tensor) -> bool:
    """Return whether ``product`` accepts this weight and is the faster one with many rows and for
    gradients."""
    return suits(weight) and not favoured_by_mkl()


def suits(weight: Tensor) -> bool:
    """Return whether ``product`` accepts this weight, and oneDNN is not switched off
    (``torch.backends.mkldnn``)."""
    plain = weight.device.type == "cpu" and weight.dtype == torch.float32
    return plain and _has_onednn() and bool(torch.backends.mkldnn.enabled)


@functools.cache
def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@functools.cache
def favoured_by_mkl() -> bool:
    """Return whether PyTorch has MKL, on a processor of Intel, whose instructions it uses to the
    full."""
    try:
        return torch.backends.mkl.is_available() and "GenuineIntel" in Path(
            "/proc/cpuinfo"
        ).read_text(encoding="utf-8")
    except OSError:
        return False


def _owned(fresh: Tensor) -> Tensor:
    """Return ``fresh``, which nothing else holds, as a tensor that is no view of another one.
    Products of inputs with more than two dimensions are views of a matrix, and autograd refuses to
    change a view from a custom function in place, as models do that clamp or scale a projection."""
    return torch.ops.aten._unsafe_view(fresh, fresh.shape) if fresh._is_view() else fresh


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _owned(product(x, weight, bias))

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


def adapted_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scale: float
) -> Tensor:
    """Multiply ``x`` (..., in) by the transpose of ``weight`` (out, in) + ``scale`` ``up``
    ``down``, (out, rank) and (rank, in), all of them float32 on the CPU, without the sum;
    ``weight`` and ``bias`` are frozen. What the adapter adds goes where the product of the weight
    is, forward and backward: as autograd does it, a tensor of the size of the output is written
    three times more. There are no second derivatives."""
    return _Adapted.apply(x, weight, bias, down, up, scale)


class _Adapted(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        down: Tensor,
        up: Tensor,
        scale: float,
    ) -> Tensor:
        x = x.contiguous()
        rows = x.view(-1, x.shape[-1])
        low = rows @ down.t()
        ctx.save_for_backward(rows, weight, down, up, low)
        ctx.scale = scale
        fast = len(rows) >= LEAST_ROWS and trains_faster(weight)
        multiplied = product(x, weight, bias) if fast else F.linear(x, weight, bias)
        multiplied.view(-1, len(weight)).addmm_(low, up.t(), alpha=scale)
        return _owned(multiplied)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, down, up, low = ctx.saved_tensors
        (grad,) = grads
        slope = grad.reshape(-1, grad.shape[-1])
        of_low = (slope @ up).mul_(ctx.scale)
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = product(slope, weight.t()) if trains_faster(weight) else slope @ weight
            of_x = of_x.addmm_(of_low, down).view(*grad.shape[:-1], weight.shape[1])
        of_down = of_low.t() @ rows if ctx.needs_input_grad[3] else None
        of_up = (slope.t() @ low).mul_(ctx.scale) if ctx.needs_input_grad[4] else None
        return of_x, None, None, of_down, of_up, None


_TOLERANCE = 1e-5


class FewPassNorm(nn.Module):
    """Computes what the RMS norms of transformers compute, up to rounding: ``weight`` times the
    input over its root mean square. It has no second derivatives."""

    weight: nn.Parameter
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map (..., width) to the same shape."""
        weight = self.weight
        if hidden_states.dtype != torch.float32:
            normed = F.rms_norm(hidden_states.float(), weight.shape, None, self.variance_epsilon)
            return weight * normed.to(hidden_states.dtype)
        if not torch.is_grad_enabled():
            return F.rms_norm(hidden_states, weight.shape, weight, self.variance_epsilon)
        return _Norm.apply(hidden_states, weight, self.variance_epsilon)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (grad,) = grads
        x, weight, scale = ctx.saved_tensors
        width = x.shape[-1]
        normed = x * scale
        slope = grad * normed
        of_weight = slope.reshape(-1, width).sum(0) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, of_weight, None
        along = torch.mv(slope.reshape(-1, width), weight).view(scale.shape)
        of_x = torch.mul(grad, weight, out=slope.resize_(grad.shape))
        return of_x.addcmul_(normed, along, value=-1.0 / width).mul_(scale), of_weight, None


def use_few_pass_norms(model: nn.Module) -> int:
    """Turn the plain float32 RMS norms on the CPU into ``FewPassNorm``, in place; return how many.
    Parameters and their names stay."""
    found = [module for module in model.modules() if _plain(module)]
    for module in found:
        module.__class__ = FewPassNorm
    return len(found)


@torch.no_grad()
def _plain(module: nn.Module) -> bool:
    """Return whether a module is an RMS norm without anything else, which a copy of it is asked by
    one computation: its own weight may be cut over ranks, or not be read yet."""
    weight = getattr(module, "weight", None)
    if not type(module).__name__.endswith("RMSNorm") or not hasattr(module, "variance_epsilon"):
        return False
    if (
        set(module._parameters) != {"weight"}
        or module._modules
        or not isinstance(weight, nn.Parameter)
    ):
        return False
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or weight.ndim != 1:
        return False
    if module._forward_hooks or module._forward_pre_hooks:
        return False
    x = torch.linspace(-2.0, 3.0, 2 * len(weight)).view(2, -1)
    own = torch.linspace(0.5, 1.5, len(weight))
    trial = copy.copy(module)
    trial.__dict__["_parameters"] = {"weight": nn.Parameter(own)}
    expected = F.rms_norm(x, own.shape, own, float(module.variance_epsilon))  # type: ignore[arg-type]
    return bool(torch.allclose(trial(x), expected, rtol=_TOLERANCE, atol=_TOLERANCE))
