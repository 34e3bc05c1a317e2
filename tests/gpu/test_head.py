"""Log-probabilities of a large vocabulary: bf16 products with fp32 sums, in bounded memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from realhf.backends.training import selected_logprobs as module
from realhf.backends.training.selected_logprobs import selected_logprobs
from realhf.base.hf_config import GPU_CHUNK_BYTES

VOCABULARY = 50_021
WIDTH = 64


def drawn(device: torch.device, dtype: torch.dtype, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, WIDTH, generator=g).to(device, dtype).requires_grad_()
    weight = (0.5 * torch.randn(VOCABULARY, WIDTH, generator=g)).to(device, dtype).requires_grad_()
    return hidden, weight, torch.randint(0, VOCABULARY, (rows,), generator=g).to(device)


@pytest.mark.cuda_only
def test_the_products_of_this_gpu_are_used(device: torch.device) -> None:
    """A fall back to fp32 would be several times as slow, and is a warning only."""
    assert module.supports_bf16_products(device)
    hidden, weight, _ = drawn(device, torch.bfloat16, 3)
    assert module._Products(hidden, weight).narrow
    assert not module._Products(hidden.float(), weight.float()).narrow


@pytest.mark.parametrize("chunk", [None, 37], ids=["one chunk", "four"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_are_those_of_fp64(
    device: torch.device, dtype: torch.dtype, chunk: int | None
) -> None:
    hidden, weight, ids = drawn(device, dtype, 120)
    found, entropy = selected_logprobs(hidden, weight, ids, 0.8, chunk)
    (found + 0.1 * entropy).sum().backward()
    log_p = (hidden.double() @ weight.double().T / 0.8).log_softmax(-1)
    expected = log_p.gather(1, ids[:, None])[:, 0]
    of_plain = -(log_p.exp() * log_p).sum(-1)
    torch.testing.assert_close(found.double(), expected, atol=2e-4, rtol=1e-5)
    torch.testing.assert_close(entropy.double(), of_plain, atol=1e-3, rtol=1e-4)
    wanted = torch.autograd.grad((expected + 0.1 * of_plain).sum(), (hidden, weight))
    for grad, right in zip((hidden.grad, weight.grad), wanted, strict=True):
        assert grad is not None and grad.dtype == dtype
        off = (grad.double() - right.double()).norm() / right.double().norm()
        assert off < (1e-4 if dtype == torch.float32 else 5e-3)


@pytest.mark.cuda_only
def test_memory_is_that_of_a_chunk_and_one_gradient_of_the_head(device: torch.device) -> None:
    rows = 20_000
    hidden, weight, ids = drawn(device, torch.bfloat16, rows)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    selected_logprobs(hidden, weight, ids, with_entropy=False)[0].sum().backward()
    used = torch.cuda.max_memory_allocated(device) - before
    assert 4 * rows * VOCABULARY > 3 * GPU_CHUNK_BYTES, "it would be more at once"
    assert used < 2.1 * GPU_CHUNK_BYTES + 2 * weight.numel() + (64 << 20), (
        "and what the library works in"
    )
