"""What a pretended device refuses, knows and counts."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from realhf.backends.pretended.device import (
    UNKNOWN,
    DevicesMixed,
    DtypesMixed,
    PretendedDevice,
    StepLimits,
    TooManySyncs,
    WideProduct,
)
from realhf.backends.pretended.pretending import pretend_gpu
from realhf.backends.pretended.tensor import CUDA

MIXTURES: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "sum": lambda here, host: here + host,
    "the other way round": lambda here, host: host.add_(here),
    "product": lambda here, host: here @ host,
    "where": lambda here, host: torch.where(here > 0, host, 0.0),
    "cat": lambda here, host: torch.cat([here, host]),
    "select": lambda here, host: here.index_select(0, host[0].long()),
    "index of the host": lambda here, host: host[here.long()],
    "single number of the device": lambda here, host: host * here[0, 0],
    "values put": lambda here, host: here.index_put_((here > 0,), host[0]),
    "equal": lambda here, host: torch.equal(here, host),
}


@pytest.mark.parametrize("kind", MIXTURES)
def test_tensors_of_two_devices_are_refused(gpu: PretendedDevice, kind: str) -> None:
    host = torch.ones(4, 4)
    with pytest.raises(DevicesMixed, match=r"cuda:0 .* of the CPU"):
        MIXTURES[kind](host.to(CUDA), host)


def test_what_cuda_takes_from_the_host_is_allowed(gpu: PretendedDevice) -> None:
    here = torch.ones(4, 4, device=CUDA)
    assert (here * torch.tensor(2.0)).device == CUDA
    assert here[torch.tensor([0, 2])].shape == (2, 4)
    assert here[torch.tensor([True, False, True, True])].shape == (3, 4)
    here.copy_(torch.zeros(4, 4))
    assert gpu.uploads.total() == 3 and not gpu.syncs


def test_factors_of_two_dtypes_are_refused(gpu: PretendedDevice) -> None:
    x = torch.ones(4, 4, device=CUDA)
    with pytest.raises(DtypesMixed, match=r"torch\.float32 and torch\.bfloat16"):
        x @ x.bfloat16()


def test_a_fused_optimizer_needs_its_numbers_of_steps_on_the_gpu(gpu: PretendedDevice) -> None:
    weight = nn.Parameter(torch.ones(4, device=CUDA))
    weight.grad = torch.ones(4, device=CUDA)
    adamw = torch.optim.AdamW([weight], fused=True)
    adamw.step()
    adamw.state[weight]["step"] = torch.zeros(())
    with pytest.raises(DevicesMixed, match=r"_fused_adamw_"):
        adamw.step()


def test_numpy_needs_a_copy_to_the_host(gpu: PretendedDevice) -> None:
    with pytest.raises(TypeError, match=r"Tensor\.cpu"):
        torch.ones(2, device=CUDA).numpy()


@pytest.mark.parametrize("how", ["mm", "linear", "batches"])
def test_products_of_fp32_are_refused_where_bf16_is_expected(
    gpu: PretendedDevice, how: str
) -> None:
    x = torch.ones(2, 4, 4, device=CUDA)
    narrow = x.bfloat16()
    multiply: Callable[[torch.Tensor], torch.Tensor] = {
        "mm": lambda t: t[0] @ t[1],
        "linear": lambda t: nn.functional.linear(t, t[0]),
        "batches": lambda t: t @ t,
    }[how]
    multiply(x)
    assert gpu.fp32_products.total() == 1
    with gpu.limit(StepLimits(fp32_products=False)):
        multiply(narrow)
        torch.mm(narrow[0], narrow[1], out_dtype=torch.float32)
        with pytest.raises(WideProduct, match=r"fp32 factors, .*4"):
            multiply(x)


WAITS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "copy to the host": lambda x: x.cpu(),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "copy into the host": lambda x: torch.zeros(3).copy_(x),
    "truth": lambda x: bool((x > 0).any()),
    "list": lambda x: x.tolist(),
    "equal": lambda x: torch.equal(x, x),
}


@pytest.mark.parametrize("kind", WAITS)
def test_each_wait_counts_and_one_too_many_is_refused(gpu: PretendedDevice, kind: str) -> None:
    decoder = nn.Identity()
    decoder.get_decoder = lambda: decoder  # type: ignore[assignment]
    gpu.watch(decoder)
    x = torch.ones(3, device=CUDA)
    with gpu.limit(StepLimits(syncs=2)):
        for _ in range(2):  # each micro-batch has its own account
            decoder(x)
            WAITS[kind](x)
            WAITS[kind](x)
        with pytest.raises(TooManySyncs, match="more than 2 waits"):
            WAITS[kind](x)


def test_unknown_numbers_read_as_documented(gpu: PretendedDevice) -> None:
    x = torch.randn(3).to(CUDA)
    assert x.sum().item() == UNKNOWN and bool((x > 0).all()) and int(x.argmax()) == 0


def test_few_integers_have_numbers(gpu: PretendedDevice) -> None:
    mask = torch.tensor([True, False, True], device=CUDA)
    ends = torch.tensor([3, 1, 4], device=CUDA).cumsum(0)
    assert ends.tolist() == [3, 4, 8] and int(mask.sum()) == 2
    assert torch.randn(3, device=CUDA)[mask].shape == (2,)
    ends[1:].add_(1)
    assert ends.tolist() == [3, 5, 9], "a view shares its numbers"
    ends[:1].copy_(torch.randn(3, device=CUDA).argmax())
    assert ends.tolist() == [0, 0, 0], "numbers that are not known any more"
    assert not mask.logical_not().logical_and_(mask).any()


def test_live_bytes_are_those_of_storages(gpu: PretendedDevice) -> None:
    x = torch.zeros(1 << 20, device=CUDA)
    view = x[5:]
    assert gpu.live_bytes == 4 << 20
    free, total = torch.cuda.mem_get_info(CUDA)
    assert total - free == 4 << 20
    del x
    assert gpu.live_bytes == 4 << 20, "the view keeps it"
    y = view * 2
    del view, y
    assert (
        gpu.live_bytes == 0
        and gpu.peak_bytes == (4 << 20) + (4 * ((1 << 20) - 5) + 511) // 512 * 512
    )


def test_what_is_alive_has_the_line_that_allocated_it(gpu: PretendedDevice) -> None:
    from realhf.algorithms.policy_loss import kl_estimate

    x = torch.zeros(1 << 10, device=CUDA)
    mark = gpu.mark()
    y = kl_estimate(x, x, "k2")
    (line,) = gpu.allocated_since(mark)
    assert re.fullmatch(r"realhf/algorithms/policy_loss\.py:\d+", line)
    assert gpu.allocated_since(mark)[line] == 4 << 10
    assert not gpu.allocated_since(mark, besides=[y[1:]])
    peak = gpu.peak_by_line
    assert peak.total() == gpu.peak_bytes and peak[line] < gpu.peak_bytes
    del y
    assert not gpu.allocated_since(mark) and gpu.peak_by_line == peak
    gpu.reset_peak()
    assert gpu.peak_by_line.total() == gpu.peak_bytes == gpu.live_bytes == 4 << 10


def test_what_a_micro_batch_leaves_is_counted_when_the_next_begins(gpu: PretendedDevice) -> None:
    decoder = nn.Identity()
    decoder.get_decoder = lambda: decoder  # type: ignore[assignment]
    handle = gpu.watch(decoder)
    x = torch.ones(256, device=CUDA)
    kept: list[torch.Tensor] = []
    for _ in range(3):
        decoder(x)
        kept.append(x * 2)
        x.sum()
    handle.remove()
    decoder(x)
    assert [left.total() for left in gpu.left] == [1 << 10, 1 << 10]
    assert len(gpu.micro_batches) == 3


REPEATED: dict[str, Callable[[torch.Tensor], object]] = {
    "new": lambda x: x + x,
    "in place": lambda x: x.add_(1.0),
    "several": lambda x: x.max(0),
    "view without a mark": lambda x: torch.ops.aten._unsafe_view(x, [3, 4]),
    "lists": lambda x: torch._foreach_add_([x, x], 1.0),
    "another dtype": lambda x: x.sum(dtype=torch.float64),
    "strides": lambda x: x.t().clone(),
    "options": lambda x: torch.cat([x, x], dim=1),
    "empty": lambda x: torch.nn.functional.linear(x, x[:0]),
}


@pytest.mark.parametrize("kind", REPEATED)
def test_a_remembered_result_is_that_of_the_kernel(gpu: PretendedDevice, kind: str) -> None:
    def describe(device: torch.device) -> list[tuple[object, ...]]:
        x = torch.ones(4, 3, device=device)
        result: Any = REPEATED[kind](x)
        several = result if isinstance(result, tuple) else [result]
        return [
            (y.shape, y.stride(), y.dtype, y.data_ptr() == x.data_ptr())
            for y in several
            if isinstance(y, torch.Tensor)
        ]

    expected = describe(torch.device("cpu"))
    assert describe(CUDA) == expected
    assert describe(CUDA) == expected, "by what is remembered"


def test_tied_weights_stay_one_tensor(gpu: PretendedDevice) -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    gpu.place(model)
    assert model[0].weight is model[1].weight and gpu.live_bytes == 512
    model(torch.ones(1, 4, device=CUDA)).sum().backward()
    assert model[0].weight.grad is not None and model[0].weight.grad.is_cuda


def test_threads_that_start_inside_use_the_device(gpu: PretendedDevice) -> None:
    devices: list[torch.device] = []

    def compute() -> None:
        devices.append(torch.zeros(1, device=CUDA).device)
        devices.append(torch.tensor([1], device=CUDA).device)

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    assert devices == [CUDA, CUDA]


def test_errors_name_the_line_of_the_product(gpu: PretendedDevice) -> None:
    from realhf.algorithms.policy_loss import kl_estimate

    with pytest.raises(DevicesMixed, match=r"at realhf/algorithms/policy_loss\.py:\d+$"):
        kl_estimate(torch.ones(3, device=CUDA), torch.ones(3), "k1")
    with pytest.raises(
        RuntimeError, match=r"broadcast .* at realhf/algorithms/policy_loss\.py:\d+$"
    ):
        kl_estimate(torch.ones(3, device=CUDA), torch.ones(4, device=CUDA), "k1")
    with pytest.raises(DtypesMixed):
        torch.ones(3, 3, device=CUDA) @ torch.ones(3, 3, device=CUDA).bfloat16()
    assert len(gpu.refused) == 3, "also what a trial of the product swallows"


def test_everything_is_as_before_afterwards() -> None:
    attend = nn.functional.scaled_dot_product_attention
    with pretend_gpu():
        assert nn.functional.scaled_dot_product_attention is not attend
    assert nn.functional.scaled_dot_product_attention is attend
    with pytest.raises(AssertionError, match="CUDA"):
        torch.cuda.get_device_properties(0)
