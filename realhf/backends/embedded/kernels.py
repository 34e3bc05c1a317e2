"""Linear layers computed by oneDNN, and layers with adapters and root-mean-square norms with few
passes over memory, forward and backward.

On processors that are not from Intel, MKL multiplies float32 half as fast as oneDNN (100 against
220 GFLOP/s on one core of an AMD EPYC), and PyTorch has no option to choose between the two. On
Intel processors MKL is faster, by a tenth in forward products and up to twice in those of the
gradients of weights (1.4 against 2.1 ms for 1,664 rows of 384 and 128), because it reads both
factors in any layout. oneDNN also keeps half a MB of code for every shape.

In a model of a million parameters the norms took a seventh of a train step. Autograd reads and
writes fourteen tensors of the size of the activations for a gradient that needs seven, and keeps
three of them for the backward pass where one is enough.
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

MIN_ROWS = 32
"""Minimum number of rows for ``onednn_linear``; for fewer, the call costs more than it saves."""
_LARGE_WEIGHT = 1 << 22
"""Minimum number of elements for a weight to count as large, such as the projection to the
vocabulary."""
_MIN_ROWS_LARGE = 4
"""Minimum number of rows for a large weight: multiplying 4 to 16 rows by a weight of 49,152 x 576
takes half to two thirds of MKL's time."""
_MIDDLE_WEIGHT = 3 << 18
"""Minimum number of elements of a weight for which oneDNN can be faster than MKL on Intel
processors."""
_MAX_ROWS_MIDDLE = 16
"""Number of rows from which MKL is used for such a weight on Intel processors: with a weight of
1,536 x 576, oneDNN is a quarter faster with 8 rows and as fast with 16."""
_MAX_ROWS_LARGE = 33
"""Number of rows from which MKL is used for a large weight on Intel processors: with a weight of
49,152 x 576, oneDNN is twice as fast with 8 rows, and a quarter faster with 32."""


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x`` (..., in) times the transpose of ``weight`` (out, in), plus ``bias``. All are
    float32 on the CPU, in any memory layout."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class OneDnnLinear(nn.Linear):
    """``nn.Linear`` that uses ``onednn_linear`` where that is faster. The result is the same up to
    rounding. There are no second derivatives. The weight must satisfy ``supports_onednn``."""

    def forward(self, input: Tensor) -> Tensor:
        """Map (..., in) to (..., out)."""
        few = math.prod(input.shape[:-1]) < MIN_ROWS
        if few or input.dtype != torch.float32 or not torch.backends.mkldnn.enabled:
            return F.linear(input, self.weight, self.bias)
        if not torch.is_grad_enabled():
            return onednn_linear(input, self.weight, self.bias)
        return _OneDnnLinearFunction.apply(input, self.weight, self.bias)


def use_onednn(model: nn.Module) -> int:
    """Convert plain float32 linear layers on the CPU to ``OneDnnLinear``, in place, if that trains
    faster; return their number. Parameters and their names stay the same."""
    layers = [
        module
        for module in model.modules()
        if type(module) is nn.Linear and trains_faster(module.weight)
    ]
    for module in layers:
        module.__class__ = OneDnnLinear
    return len(layers)


def onednn_row_range(weight: Tensor) -> range:
    """Return the numbers of rows for which ``onednn_linear`` is faster than MKL with this weight in
    a forward pass without gradients."""
    large = weight.numel() >= _LARGE_WEIGHT
    if not prefers_mkl():
        return range(_MIN_ROWS_LARGE if large else MIN_ROWS, sys.maxsize)
    if weight.numel() < _MIDDLE_WEIGHT:
        return range(0)
    return range(_MIN_ROWS_LARGE, _MAX_ROWS_LARGE if large else _MAX_ROWS_MIDDLE)


def trains_faster(weight: Tensor) -> bool:
    """Return whether ``onednn_linear`` supports this weight and trains faster than MKL, that is,
    with many rows and including the gradients."""
    return supports_onednn(weight) and not prefers_mkl()


def supports_onednn(weight: Tensor) -> bool:
    """Return whether ``onednn_linear`` supports this weight and oneDNN is enabled
    (``torch.backends.mkldnn``)."""
    plain = weight.device.type == "cpu" and weight.dtype == torch.float32
    return plain and _has_onednn() and bool(torch.backends.mkldnn.enabled)


@functools.cache
def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@functools.cache
def prefers_mkl() -> bool:
    """Return whether PyTorch has MKL and the processor is from Intel, the only vendor for which MKL
    is fully optimised."""
    try:
        return torch.backends.mkl.is_available() and "GenuineIntel" in Path(
            "/proc/cpuinfo"
        ).read_text(encoding="utf-8")
    except OSError:
        return False


def _without_view(tensor: Tensor) -> Tensor:
    """Return ``tensor`` (which must have no other references) as a tensor that is not a view.
    Products of inputs with more than two dimensions are views of a matrix, and autograd forbids
    in-place changes to a view returned by a custom function. Models that clamp or scale a
    projection make such changes."""
    return torch.ops.aten._unsafe_view(tensor, tensor.shape) if tensor._is_view() else tensor


class _OneDnnLinearFunction(torch.autograd.Function):
    """Autograd function of ``onednn_linear``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _without_view(onednn_linear(x, weight, bias))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        grad_x = onednn_linear(grad, weight.t()) if ctx.needs_input_grad[0] else None
        rows = grad.reshape(-1, grad.shape[-1])
        grad_weight = grad_bias = None
        if ctx.needs_input_grad[1]:
            grad_weight = onednn_linear(rows.t(), x.reshape(-1, x.shape[-1]).t())
        if ctx.needs_input_grad[2]:
            grad_bias = rows.sum(0)
        return grad_x, grad_weight, grad_bias


def lora_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scale: float
) -> Tensor:
    """Return ``x`` (..., in) times the transpose of ``weight`` (out, in) + ``scale`` * ``up`` @
    ``down``, without computing that sum, plus ``bias``.

    ``up`` is (out, rank), ``down`` (rank, in); all are float32 on the CPU. ``weight`` and ``bias``
    are frozen. The product of the adapter is added in place to that of the weight, forward and
    backward; autograd would write a tensor of the size of the output three more times. There are no
    second derivatives.
    """
    return _LoraLinearFunction.apply(x, weight, bias, down, up, scale)


class _LoraLinearFunction(torch.autograd.Function):
    """Autograd function of ``lora_linear``."""

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
        fast = len(rows) >= MIN_ROWS and trains_faster(weight)
        output = onednn_linear(x, weight, bias) if fast else F.linear(x, weight, bias)
        output.view(-1, len(weight)).addmm_(low, up.t(), alpha=scale)
        return _without_view(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, down, up, low = ctx.saved_tensors
        (grad,) = grads
        slope = grad.reshape(-1, grad.shape[-1])
        grad_low = (slope @ up).mul_(ctx.scale)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = onednn_linear(slope, weight.t()) if trains_faster(weight) else slope @ weight
            grad_x = grad_x.addmm_(grad_low, down).view(*grad.shape[:-1], weight.shape[1])
        grad_down = grad_low.t() @ rows if ctx.needs_input_grad[3] else None
        grad_up = (slope.t() @ low).mul_(ctx.scale) if ctx.needs_input_grad[4] else None
        return grad_x, None, None, grad_down, grad_up, None


_TOLERANCE = 1e-5
"""Maximum relative and absolute difference from a norm that ``FewPassNorm`` replaces."""


class FewPassNorm(nn.Module):
    """transformers RMS norm with few passes over memory: ``weight`` times the input divided by its
    root mean square. The result is the same up to rounding. There are no second derivatives."""

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
        return _RmsNormFunction.apply(hidden_states, weight, self.variance_epsilon)


class _RmsNormFunction(torch.autograd.Function):
    """Autograd function of ``FewPassNorm``."""

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
        grad_weight = slope.reshape(-1, width).sum(0) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, grad_weight, None
        along = torch.mv(slope.reshape(-1, width), weight).view(scale.shape)
        grad_x = torch.mul(grad, weight, out=slope.resize_(grad.shape))
        return grad_x.addcmul_(normed, along, value=-1.0 / width).mul_(scale), grad_weight, None


def use_few_pass_norms(model: nn.Module) -> int:
    """Convert plain float32 RMS norms on the CPU to ``FewPassNorm``, in place; return their number.
    Parameters and their names stay the same."""
    norms = [module for module in model.modules() if _is_plain_rms_norm(module)]
    for module in norms:
        module.__class__ = FewPassNorm
    return len(norms)


@torch.no_grad()
def _is_plain_rms_norm(module: nn.Module) -> bool:
    """Return whether a module computes exactly an RMS norm. A copy with its own weight is tested on
    one input, because the module's weight may be sharded over ranks or not loaded yet."""
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
    copied = copy.copy(module)
    copied.__dict__["_parameters"] = {"weight": nn.Parameter(own)}
    expected = F.rms_norm(x, own.shape, own, float(module.variance_epsilon))  # type: ignore[arg-type]
    return bool(torch.allclose(copied(x), expected, rtol=_TOLERANCE, atol=_TOLERANCE))
