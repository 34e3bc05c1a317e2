"""Moments that rest elsewhere between steps change no bit of what is trained, and are there a piece at a time."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from realhf.api.config import OptimizerConfig
from realhf.backends.execution import resting_moments
from realhf.backends.execution.resting_moments import HostMemory
from realhf.backends.training.optimizer import PolicyOptimizer

SHAPES = [(16, 8), (8, 16), (4,), (32, 4), (4,), (64,)]


class Elsewhere:
    """A memory of its own on the CPU: what lies there is not-a-number to whoever computes with it unfetched."""

    def __init__(self) -> None:
        self.values: dict[int, Tensor] = {}
        self.out = self.most_out = 0

    def place_for(self, tensor: Tensor) -> Tensor:
        held = torch.full_like(tensor, float("nan"))
        self.values[id(held)] = tensor.clone()
        return held

    def fetched(self, held: Tensor, device: torch.device) -> Tensor:
        self.out += held.numel()
        self.most_out = max(self.most_out, self.out)
        return self.values[id(held)].to(device, copy=True)

    def store(self, held: Tensor, tensor: Tensor) -> None:
        self.out -= held.numel()
        self.values[id(held)] = tensor.clone()


def module_of(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(1)
    return nn.ParameterList([nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES])


def trained(optimizer: PolicyOptimizer, module: nn.Module, steps: range) -> list[Tensor]:
    """Some steps; the fifth parameter has no gradient in the first of them."""
    for step in steps:
        torch.manual_seed(step)
        optimizer.zero_grad()
        for number, parameter in enumerate(module.parameters()):
            gradient = torch.randn(parameter.shape).to(parameter.dtype)
            if step or number != 4:
                parameter.grad = gradient
        optimizer.accumulate()
        optimizer.step(step, optimizer.gradient_norm())
    return [parameter.detach().clone() for parameter in module.parameters()]


def pair(dtype: torch.dtype = torch.float32, memory: Any = None) -> tuple[PolicyOptimizer, nn.Module]:
    module = module_of(dtype)
    return PolicyOptimizer(module, OptimizerConfig(lr=1e-2, offload=memory is not None), 10, memory=memory), module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_bit_differs_and_one_piece_is_there_at_a_time(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resting_moments.RestingMoments.__init__, "__defaults__", (2 * 4 * 200,))
    memory = Elsewhere()
    resting, plain = pair(dtype, memory), pair(dtype)
    for one, other in zip(trained(*resting, range(4)), trained(*plain, range(4)), strict=True):
        assert torch.equal(one, other)
    assert memory.out == 0 and 0 < memory.most_out <= 2 * 200


def test_saved_moments_are_read_with_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was loaded rests before the first step, and a state goes from a plain optimizer to a resting one."""
    plain, module = pair()
    trained(plain, module, range(2))
    state, weights = copy.deepcopy(plain.state_dict()), [p.detach().clone() for p in module.parameters()]
    expected = trained(plain, module, range(2, 4))
    memory = Elsewhere()
    resting, again = pair(memory=memory)
    with torch.no_grad():
        for parameter, saved in zip(again.parameters(), weights, strict=True):
            parameter.copy_(saved)
    resting.load_state_dict(state)
    names = {p: str(number) for number, p in enumerate(again.parameters())}
    held = resting.tensors(names)
    assert len(memory.values) == 2 * len(SHAPES) and held["exp_avg/0"].isnan().all()
    assert all(torch.equal(a, b) for a, b in zip(trained(resting, again, range(2, 4)), expected, strict=True))
    resting.begin_moments(again.parameters())  # type: ignore[arg-type]
    assert resting.tensors(names)["exp_avg_sq/0"].isnan().all()


def test_the_device_holds_the_moments_of_one_parameter_while_a_state_is_made_or_read() -> None:
    """All of them were there at once, so a run that fits by offloading did not fit when it was continued."""
    resting, module = pair(memory=(memory := Elsewhere()))
    trained(resting, module, range(1))
    saved, most = copy.deepcopy(resting.state_dict()), 0
    for moments in saved["adamw"]["state"].values():
        moments["exp_avg"], moments["exp_avg_sq"] = (torch.ones(moments["exp_avg"].shape) for _ in "ab")
    names = {p: str(number) for number, p in enumerate(module.parameters())}
    place = memory.place_for

    def watched(tensor: Tensor) -> Tensor:
        nonlocal most
        moments = [t for name, t in resting.tensors(names).items() if name.startswith("exp_avg")]
        most = max(most, sum(t.numel() for t in moments if not t.isnan().any()))
        return place(tensor)

    memory.place_for = watched  # type: ignore[method-assign]
    resting.load_state_dict(saved)
    assert most == 0 and all(t.isnan().all() for n, t in resting.tensors(names).items() if n.startswith("exp_avg"))
    resting.begin_moments(module.parameters())  # type: ignore[arg-type]
    assert 0 < most <= 2 * 128, "two moments of the largest parameter"


def test_the_memory_of_the_host_is_refused_where_it_is_that_of_the_device() -> None:
    with pytest.raises(ValueError, match="has no effect on the device cpu"):
        PolicyOptimizer(module_of(), OptimizerConfig(offload=True), 1)
    assert HostMemory(torch.device("cuda", 0))
