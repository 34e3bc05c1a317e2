"""Norms with few passes over memory: they compute what the model's own compute, and leave others alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from realhf.backends.embedded.kernels import FewPassNorm, use_few_pass_norms


def norm(width: int) -> nn.Sequential:
    """A norm of the Llama family, with weights that are not 1."""
    made = nn.Sequential(LlamaRMSNorm(width, eps=1e-3))
    made[0].weight.data.copy_(torch.linspace(0.5, 2.0, width))
    return made


def outcome(module: nn.Module, x: Tensor, grad: Tensor) -> list[Tensor]:
    """Output, gradient of the input, gradients of the weights."""
    x = x.clone().requires_grad_()
    out = module(x)
    out.backward(grad)
    return [out.detach(), x.grad, *(p.grad for p in module.parameters())]  # type: ignore[list-item]


def test_values_and_gradients_are_those_of_the_model() -> None:
    g = torch.Generator().manual_seed(0)
    for shape in ((2, 5, 12), (2, 3, 4, 12), (1, 12)):
        x, grad = (torch.randn(shape, generator=g) for _ in range(2))
        expected, module = outcome(norm(12), x, grad), norm(12)
        assert use_few_pass_norms(module) == 1 and type(module[0]) is FewPassNorm
        for found, wanted in zip(outcome(module, x, grad), expected, strict=True):
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
        with torch.no_grad():
            torch.testing.assert_close(module(x), expected[0], atol=1e-5, rtol=1e-5)
    module = norm(12).requires_grad_(False)
    use_few_pass_norms(module)
    torch.testing.assert_close(outcome(module, x, grad)[1], expected[1], atol=1e-5, rtol=1e-5)


def test_norms_that_compute_something_else_stay() -> None:
    """Gemma adds 1 to its weight; a hook may do anything; a short type has roundings of its own."""
    assert use_few_pass_norms(Gemma3RMSNorm(8)) == use_few_pass_norms(nn.LayerNorm(8)) == 0
    hooked = norm(8)
    hooked[0].register_forward_hook(lambda _module, _given, out: out + 1)
    assert use_few_pass_norms(hooked) == use_few_pass_norms(norm(8).bfloat16()) == 0

    class TwiceRMSNorm(LlamaRMSNorm):
        def forward(self, hidden_states: Tensor) -> Tensor:
            return 2 * super().forward(hidden_states)

    assert use_few_pass_norms(nn.Sequential(TwiceRMSNorm(8))) == 0
