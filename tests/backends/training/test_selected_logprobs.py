"""Log-probabilities in chunks against log_softmax in double precision; no chunk size changes
anything, and memory grows with the chunk and not with the rows."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from realhf.backends.training import selected_logprobs as module
from realhf.backends.training.selected_logprobs import chunk_rows, selected_logprobs

VOCABULARY = 131
WIDTH = 24


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
    found, entropy = selected_logprobs(
        hidden, weight, ids, temperature, chunk, with_entropy=with_entropy
    )
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
    assert hidden.grad is not None and weight.grad is not None
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16


def test_frozen_factors_get_no_gradient() -> None:
    hidden, weight, ids = drawn(30)
    selected_logprobs(hidden, weight.detach(), ids)[0].sum().backward()
    assert hidden.grad is not None and weight.grad is None
    hidden.grad = None
    selected_logprobs(hidden.detach(), weight, ids)[0].sum().backward()
    assert hidden.grad is None and weight.grad is not None
    with torch.inference_mode():
        assert not selected_logprobs(hidden, weight, ids)[0].requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_a_frozen_head_the_gradient_is_that_of_log_softmax(dtype: torch.dtype) -> None:
    """It is computed on the way forward there, and once."""
    hidden, weight, ids = drawn(30)
    hidden = hidden.detach().to(dtype).requires_grad_()
    frozen = weight.detach().to(dtype)
    scale = torch.linspace(-2, 2, 30)
    bias = torch.linspace(-1, 1, len(weight))
    found, _ = selected_logprobs(
        hidden, frozen, ids, 0.7, 7, with_entropy=False, bias=bias, factor=1.3
    )
    (found * scale).sum().backward()
    exact = hidden.detach().double().requires_grad_()
    logits = 1.3 * (exact @ frozen.double().t() + bias) / 0.7
    wanted = torch.log_softmax(logits, -1).gather(-1, ids[:, None])[:, 0]
    (wanted * scale).sum().backward()
    assert hidden.grad is not None and exact.grad is not None
    torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)
    close = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(hidden.grad.double(), exact.grad, atol=close, rtol=close)


def test_a_temperature_that_cannot_be_is_refused() -> None:
    for bad in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="temperature"):
            selected_logprobs(*drawn(3), bad)


def test_chunks_are_bounded_by_bytes() -> None:
    """On a GPU they have thousands of rows, as far as its memory goes."""
    assert chunk_rows(49_152) == 256 and chunk_rows(10**9) == 1
    assert chunk_rows(151_936, 80 << 30) == 883 and chunk_rows(49_152, 80 << 30) == 2730
    assert (
        chunk_rows(151_936, 8 << 30) == (8 << 30) // 64 // (4 * 151_936) == 220
        and chunk_rows(49_152, 1 << 30) == 256
    )


class Counted:
    """The products with fp32 sums that were made."""

    def __init__(self) -> None:
        self.mm = 0
        self.columns: list[int] = []
        """Columns of the logits in each product that was added to a sum."""


@pytest.fixture
def gpu_products(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    """torch has these products for GPUs alone: here they are, for the CPU. A product of two bf16
    numbers is exact in fp32, so this is what a GPU computes but for the order of its sums."""
    count = Counted()
    library = torch.library.Library("aten", "IMPL")

    def mm(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
        assert a.dtype == b.dtype == torch.bfloat16 and dtype == torch.float32
        count.mm += 1
        return a.float() @ b.float()

    def addmm(total: Tensor, a: Tensor, b: Tensor, dtype: torch.dtype, *, out: Tensor) -> Tensor:
        assert total.data_ptr() == out.data_ptr() and dtype == out.dtype
        count.columns.append(a.shape[1])
        return out.copy_(total + a.float() @ b.float())

    library.impl("mm.dtype", mm, "CPU")
    library.impl("addmm.dtype_out", addmm, "CPU")
    monkeypatch.setattr(module, "supports_bf16_products", lambda device: True)
    yield count
    library._destroy()


@pytest.mark.parametrize("with_entropy", [True, False])
def test_bf16_products_give_the_logits_of_fp32_and_gradients_of_the_type_of_the_model(
    gpu_products: Counted, with_entropy: bool
) -> None:
    """And each part of the head's gradient is one product: one of its size in fp32 is never
    made."""
    hidden, weight, ids = drawn(200, torch.bfloat16)
    slope = torch.linspace(-1, 1, 200)
    found, entropy = selected_logprobs(hidden, weight, ids, 0.8, 64, with_entropy=with_entropy)
    expected, of_plain = plain(hidden, weight, ids, 0.8)
    torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=1e-5)
    total = (expected * slope).sum()
    if with_entropy:
        torch.testing.assert_close(entropy.double(), of_plain, atol=2e-5, rtol=1e-5)
        total = total + (of_plain * slope.flip(0)).sum()
    ((found * slope).sum() + (entropy * slope.flip(0)).sum()).backward()
    assert gpu_products.columns == [64, 64, 3], "aligned, 41 would fill the chunk"
    assert gpu_products.mm == 4 + 3, "logits twice, by rows and by columns"
    for grad, wanted in zip(
        (hidden.grad, weight.grad), torch.autograd.grad(total, (hidden, weight)), strict=True
    ):
        assert grad is not None and grad.dtype == torch.bfloat16
        off = (grad.double() - wanted.double()).norm() / wanted.double().norm()
        assert off < 4e-3, "as much as bf16 rounds"


@pytest.mark.parametrize(
    ("chunk", "columns"), [(198, [128, 3]), (100, [64, 64, 3]), (1, [64, 64, 3]), (200, [131])]
)
def test_the_columns_of_a_product_are_aligned(
    gpu_products: Counted, chunk: int, columns: list[int]
) -> None:
    hidden, weight, ids = drawn(200, torch.bfloat16)
    selected_logprobs(hidden, weight, ids, 1.0, chunk)[0].sum().backward()
    assert gpu_products.columns == columns


def test_bf16_products_of_a_head_that_does_more(gpu_products: Counted) -> None:
    hidden, weight, _ = drawn(40, torch.bfloat16)
    ids = torch.randint(0, VOCABULARY, (40, 3), generator=torch.Generator().manual_seed(4))
    bias = torch.linspace(-1, 1, VOCABULARY, dtype=torch.bfloat16).requires_grad_()
    low = torch.linspace(-1, 1, 80).reshape(40, 2).requires_grad_()
    up = torch.linspace(-1, 2, 2 * VOCABULARY).reshape(VOCABULARY, 2).requires_grad_()
    found = []
    for own in (hidden, hidden.detach().float().requires_grad_()):
        logprobs, entropy = selected_logprobs(
            own, weight, ids, 0.8, 16, bias=bias, factor=0.5, cap=20.0, adapter=(low, up)
        )
        total = logprobs.sum() + 0.1 * entropy.sum()
        grads = torch.autograd.grad(total, (own, weight, bias, low, up))
        found.append((logprobs, entropy, *grads))
    assert (gpu_products.mm, gpu_products.columns) == (3 + 3, [64, 64, 3])
    bounds = (1e-5, 1e-5, 6e-3, 6e-3, 6e-3, 1e-5, 1e-5)
    for grad, wanted, bound in zip(*found, bounds, strict=True):
        assert (grad.float() - wanted.float()).norm() <= bound * wanted.float().norm()


def test_a_device_without_such_products_computes_in_fp32_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert not module._test_bf16_products(torch.device("cpu"))
    assert (
        "are computed in fp32: torch cannot sum bf16 there (Could not run 'aten::mm.dtype'"
        in caplog.text
    )
    hidden, weight, _ = drawn(5, torch.bfloat16)
    assert not module._Products(hidden, weight).narrow


_PROGRAM = """
import sys, torch
from realhf.backends.training.selected_logprobs import selected_logprobs
torch.set_num_threads(1)
def step(rows, chunk):
    hidden = torch.randn(rows, 8, requires_grad=True)
    weight = torch.randn(40_000, 8, requires_grad=True)
    ids = torch.zeros(rows, dtype=torch.int64)
    logprobs, entropy = selected_logprobs(hidden, weight, ids, 0.9, chunk)
    (logprobs.sum() + entropy.sum()).backward()
def peak_kb():
    lines = open("/proc/self/status")
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
step(40, 8)
before = peak_kb()
step(int(sys.argv[1]), int(sys.argv[2]))
print(peak_kb() - before)
"""


@pytest.mark.nightly
@pytest.mark.slow
def test_memory_grows_with_the_chunk_and_not_with_the_rows() -> None:
    """Logits of 640 rows would be 102 MB; of a chunk of 160 rows, 26 MB."""

    def growth_mb(rows: int, chunk: int) -> float:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM, str(rows), str(chunk)],
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        return int(done.stdout) / 1024

    assert growth_mb(640, 8) < 20
    assert growth_mb(160, 160) > 35


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("cap", [None, 5.0])
def test_several_ids_of_a_row_and_a_product_beside_the_heads(width: int, cap: float | None) -> None:
    """As of an adapter on the head: values and all gradients, of the product's factors too, in
    float64."""
    hidden, weight, _ = drawn(37)
    g = torch.Generator().manual_seed(width)
    beside = torch.randn(37, 4, generator=g).requires_grad_()
    up = torch.randn(VOCABULARY, 4, generator=g).requires_grad_()
    ids = torch.randint(0, VOCABULARY, (37, width), generator=g)
    slope = torch.randn(37, width, generator=g)
    of = torch.randn(37, generator=g)
    found, entropy = selected_logprobs(hidden, weight, ids, 0.7, 16, cap=cap, adapter=(beside, up))
    ((found * slope).sum() + (entropy * of).sum()).backward()
    logits = hidden.double() @ weight.double().T + beside.double() @ up.double().T
    log_p = ((logits if cap is None else cap * (logits / cap).tanh()) / 0.7).log_softmax(-1)
    expected = log_p.gather(1, ids)
    of_plain = -(log_p.exp() * log_p).sum(-1)
    torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=1e-5)
    factors = (hidden, weight, beside, up)
    for factor, wanted in zip(
        factors,
        torch.autograd.grad((expected * slope).sum() + (of_plain * of).sum(), factors),
        strict=True,
    ):
        assert factor.grad is not None
        torch.testing.assert_close(factor.grad, wanted, atol=1e-4, rtol=1e-4)
