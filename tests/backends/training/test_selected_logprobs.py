"""Log-probabilities in chunks against log_softmax in double precision; no chunk size changes anything, and memory grows
with the chunk and not with the rows."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from realhf.backends.training.selected_logprobs import chunk_rows, selected_logprobs

VOCABULARY, WIDTH = 131, 24


def drawn(rows: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, WIDTH, generator=g).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=g).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, VOCABULARY, (rows,), generator=g)


def plain(hidden: Tensor, weight: Tensor, ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    log_p = (hidden.double() @ weight.double().T / temperature).log_softmax(-1)
    return log_p.gather(1, ids[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.slow
@given(st.integers(0, 90), st.integers(1, 100), st.sampled_from([0.3, 1.0, 2.5]), st.booleans())
@settings(max_examples=40, deadline=None)
def test_values_and_gradients_equal_log_softmax_whatever_the_chunk(
    rows: int, chunk: int, temperature: float, with_entropy: bool
) -> None:
    hidden, weight, ids = drawn(rows)
    slope = torch.linspace(-1, 1, rows)
    found, entropy = selected_logprobs(hidden, weight, ids, temperature, chunk, with_entropy=with_entropy)
    assert found.dtype == entropy.dtype == torch.float32 and bool((found <= 0).all())
    ((found * slope).sum() + (entropy * slope.flip(0)).sum()).backward()
    expected, of_plain = plain(hidden, weight, ids, temperature)
    torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=1e-5)
    total = (expected * slope).sum()
    if with_entropy:
        torch.testing.assert_close(entropy.double(), of_plain, atol=2e-5, rtol=1e-5)
        total = total + (of_plain * slope.flip(0)).sum()
    else:
        assert not entropy.any()
    of_hidden, of_weight = torch.autograd.grad(total, (hidden, weight))
    assert hidden.grad is not None and weight.grad is not None
    torch.testing.assert_close(hidden.grad, of_hidden, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(weight.grad, of_weight, atol=5e-5, rtol=1e-4)


def test_bf16_factors_are_multiplied_in_fp32() -> None:
    """The result is that of the rounded factors, and rounds nothing itself."""
    hidden, weight, ids = drawn(40, torch.bfloat16)
    found, entropy = selected_logprobs(hidden, weight, ids, 0.8, 16)
    expected, of_plain = plain(hidden, weight, ids, 0.8)
    torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(entropy.double(), of_plain, atol=2e-5, rtol=1e-5)
    found.sum().backward()
    assert hidden.grad is not None and hidden.grad.dtype == torch.bfloat16 == weight.grad.dtype  # type: ignore[union-attr]


def test_frozen_factors_get_no_gradient() -> None:
    hidden, weight, ids = drawn(30)
    selected_logprobs(hidden, weight.detach(), ids)[0].sum().backward()
    assert hidden.grad is not None and weight.grad is None
    hidden.grad = None
    selected_logprobs(hidden.detach(), weight, ids)[0].sum().backward()
    assert hidden.grad is None and weight.grad is not None
    with torch.inference_mode():
        assert not selected_logprobs(hidden, weight, ids)[0].requires_grad


def test_a_temperature_that_cannot_be_is_refused() -> None:
    for bad in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="temperature"):
            selected_logprobs(*drawn(3), bad)


def test_chunks_are_bounded_by_bytes() -> None:
    assert chunk_rows(49_152) == 256 and chunk_rows(10**9) == 1


_PROGRAM = """
import sys, torch
from realhf.backends.training.selected_logprobs import selected_logprobs
torch.set_num_threads(1)
def step(rows, chunk):
    hidden = torch.randn(rows, 8, requires_grad=True)
    weight = torch.randn(40_000, 8, requires_grad=True)
    logprobs, entropy = selected_logprobs(hidden, weight, torch.zeros(rows, dtype=torch.int64), 0.9, chunk)
    (logprobs.sum() + entropy.sum()).backward()
def peak_kb():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
step(40, 8)
before = peak_kb()
step(int(sys.argv[1]), int(sys.argv[2]))
print(peak_kb() - before)
"""


@pytest.mark.slow
def test_memory_grows_with_the_chunk_and_not_with_the_rows() -> None:
    """Logits of 640 rows would be 102 MB; of a chunk of 160 rows, 26 MB."""

    def growth_mb(rows: int, chunk: int) -> float:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM, str(rows), str(chunk)], capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        return int(done.stdout) / 1024

    assert growth_mb(640, 8) < 20
    assert growth_mb(160, 160) > 35
