"""Computes root-mean-square norms and their gradients with few passes over memory.

In a model of a million parameters the norms took a seventh of a train step: autograd goes through fourteen tensors of
the size of the activations to differentiate what takes seven by hand, and keeps three of them where one will do.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_TOLERANCE = 1e-5


class FewPassNorm(nn.Module):
    """Computes what the RMS norms of transformers compute, up to rounding: ``weight`` times the input over its root
    mean square. It has no second derivatives."""

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
    """Turn the plain float32 RMS norms on the CPU into ``FewPassNorm``, in place; return how many. Parameters and their
    names stay."""
    found = [module for module in model.modules() if _plain(module)]
    for module in found:
        module.__class__ = FewPassNorm
    return len(found)


@torch.no_grad()
def _plain(module: nn.Module) -> bool:
    """Return whether a module is an RMS norm without anything else, which a copy of it is asked by one computation: its
    own weight may be cut over ranks, or not be read yet."""
    weight = getattr(module, "weight", None)
    if not type(module).__name__.endswith("RMSNorm") or not hasattr(module, "variance_epsilon"):
        return False
    if set(module._parameters) != {"weight"} or module._modules or not isinstance(weight, nn.Parameter):
        return False
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or weight.ndim != 1:
        return False
    if module._forward_hooks or module._forward_pre_hooks:
        return False
    x, own = torch.linspace(-2.0, 3.0, 2 * len(weight)).view(2, -1), torch.linspace(0.5, 1.5, len(weight))
    trial = copy.copy(module)
    trial.__dict__["_parameters"] = {"weight": nn.Parameter(own)}
    expected = F.rms_norm(x, own.shape, own, float(module.variance_epsilon))  # type: ignore[arg-type]
    return bool(torch.allclose(trial(x), expected, rtol=_TOLERANCE, atol=_TOLERANCE))
