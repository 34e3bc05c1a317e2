"""Kernels: what a bf16 step is made of, one by one, compared with exact arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.gpu_hour.models import choose_device
from benchmarks.gpu_hour.recording import Check, CheckFailed, Recorder, Setting
from benchmarks.harness.gpu_figures import timed
from realhf.backends.training.device_use import peak_of
from realhf.backends.training.selected_logprobs import selected_logprobs, supports_bf16_products
from realhf.backends.training.varlen_attention import find_kernel
from realhf.base.tensor_digest import digest_tensors

_HEAD_SIZES = (64, 128)
"""Sizes of attention heads of most models."""
_SLOW = 0.3
"""Fraction of the data sheet's rate below which a product is reported as a failure: the GPU is
shared, throttled, or another one than its name says."""
_MAX_LOGPROB_ERROR = 2e-4
_MAX_GRADIENT_ERROR = 5e-3


def check_kernels(record: Recorder, setting: Setting) -> None:
    """Check the kernels of this device."""
    device = choose_device(setting)
    with record.check("a bf16 product", needed=True) as check:
        _check_product(check, device)
    name = "bf16 products with fp32 results"
    if setting.cuda:
        with record.check(name) as check:
            if not supports_bf16_products(device):
                raise CheckFailed("torch.mm(out_dtype=torch.float32) is missing or inexact here")
            check.say("exact to fp32 sums")
    else:
        record.skip_on_cpu(name, "torch has torch.mm(out_dtype=...) on CUDA only")
    for size in _HEAD_SIZES:
        name = f"attention without padding, {size}"
        if setting.cuda:
            with record.check(name) as check:
                _check_attention(check, device, size)
        else:
            record.skip_on_cpu(name, "torch has the kernel on CUDA only")
    with record.check("logits and log-probabilities") as check:
        _check_head(check, device, rows=512 if setting.cuda else 32)
    with record.check("digests") as check:
        _check_digests(check, device)
    if setting.cuda:
        with record.check("copies between host and GPU") as check:
            _check_copies(check, device)
    else:
        record.skip_on_cpu("copies between host and GPU", "there is no other memory")


def _check_product(check: Check, device: torch.device) -> None:
    size = 8192 if device.type == "cuda" else 256
    one = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    product = timed(lambda: one @ one, rounds=10, warm_up=3, finish=lambda: _finish(device))
    rate = product.rate(2.0 * size**3)
    error = _relative_error((one @ one)[:64], one[:64].double() @ one.double())
    known = peak_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    sheet = f" of {known / 1e12:.0f} on its data sheet" if known else ""
    check.say(
        f"{rate / 1e12:.3g} TFLOP/s{sheet}, relative error {error:.1e}",
        rate_tflops=rate / 1e12,
        relative_error=error,
        **({"sheet_tflops": known / 1e12} if known else {}),
    )
    if not error < 1e-2:
        raise CheckFailed(f"a bf16 product of {size} is off by {error:.1e}")
    if known and rate < _SLOW * known:
        raise CheckFailed(
            f"{rate / 1e12:.0f} TFLOP/s, {known / 1e12:.0f} on the data sheet: is another program "
            "on this GPU, or is it throttled (nvidia-smi -q -d PERFORMANCE)?"
        )


def _check_attention(check: Check, device: torch.device, size: int) -> None:
    kernel, reason = find_kernel(device, torch.bfloat16, (size,))
    if kernel is None:
        raise CheckFailed(reason)
    check.say("outputs and gradients are those of dense attention in fp32, also with a window")


def _check_head(check: Check, device: torch.device, rows: int) -> None:
    """Log-probabilities of a whole vocabulary in bf16 and their gradients, beside fp64."""
    vocabulary = 151_936 if device.type == "cuda" else 8_000
    width = 256
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, width, generator=g).to(device, torch.bfloat16).requires_grad_()
    weight = 0.3 * torch.randn(vocabulary, width, generator=g)
    weight = weight.to(device, torch.bfloat16).requires_grad_()
    ids = torch.randint(0, vocabulary, (rows,), generator=g).to(device)
    found = selected_logprobs(hidden, weight, ids, with_entropy=False)[0]
    found.sum().backward()
    logits = hidden.double() @ weight.double().T
    exact = logits.log_softmax(-1).gather(1, ids[:, None])[:, 0]
    wanted = torch.autograd.grad(exact.sum(), (hidden, weight))
    rounded = logits.to(torch.bfloat16).float().log_softmax(-1).gather(1, ids[:, None])[:, 0]
    error = float((found.double() - exact).abs().max())
    of_bf16 = float((rounded.double() - exact).abs().mean())
    assert hidden.grad is not None and weight.grad is not None
    gradients = max(
        _relative_error(ours, theirs)
        for ours, theirs in zip((hidden.grad, weight.grad), wanted, strict=True)
    )
    check.say(
        f"off by at most {error:.1e} and gradients by {gradients:.1e}; logits in bf16 would be off "
        f"by {of_bf16:.1e} on average",
        largest_error=error,
        gradient_error=gradients,
        mean_error_of_bf16_logits=of_bf16,
    )
    if not error < _MAX_LOGPROB_ERROR or not gradients < _MAX_GRADIENT_ERROR:
        raise CheckFailed(
            f"log-probabilities are off by {error:.1e} (at most {_MAX_LOGPROB_ERROR:g}), gradients "
            f"by {gradients:.1e} (at most {_MAX_GRADIENT_ERROR:g})"
        )


def _check_digests(check: Check, device: torch.device) -> None:
    """Digests of tensors on the device, beside those of the same tensors on the host; and a changed
    bit must change them."""
    g = torch.Generator().manual_seed(1)
    tensors = {
        f"{dtype}": torch.randn(3_001, 1_027, generator=g).to(dtype)
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    }
    here = {name: tensor.to(device) for name, tensor in tensors.items()}
    ours = digest_tensors(here)
    if ours != digest_tensors(tensors):
        raise CheckFailed(f"digests on {device.type} differ from those of the host")
    for tensor in here.values():
        tensor[-1, -1] += 1
    if any(digest == ours[name] for name, digest in digest_tensors(here).items()):
        raise CheckFailed("a changed number left a digest as it was")
    big = torch.empty(1 << (28 if device.type == "cuda" else 20), dtype=torch.bfloat16)
    big = big.fill_(1.5).to(device)
    seconds = timed(lambda: digest_tensors({"big": big}), rounds=3, finish=lambda: _finish(device))
    rate = seconds.rate(big.nbytes)
    check.say(f"as on the host, {rate / 1e9:.3g} GB/s", rate_gb_per_s=rate / 1e9)


def _check_copies(check: Check, device: torch.device) -> None:
    size = 1 << 29
    there = torch.empty(size, dtype=torch.uint8, device=device)
    rates = {}
    for name, pinned in (("pageable", False), ("pinned", True)):
        here = torch.empty(size, dtype=torch.uint8, pin_memory=pinned).fill_(1)
        finish = lambda: _finish(device)
        up = timed(lambda here=here: there.copy_(here), rounds=3, finish=finish)
        down = timed(lambda here=here: here.copy_(there), rounds=3, finish=finish)
        rates[f"{name}_up_gb_per_s"] = up.rate(size) / 1e9
        rates[f"{name}_down_gb_per_s"] = down.rate(size) / 1e9
    check.say(
        ", ".join(f"{name.removesuffix('_gb_per_s')} {rate:.1f}" for name, rate in rates.items())
        + " GB/s",
        **rates,
    )


def _relative_error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
