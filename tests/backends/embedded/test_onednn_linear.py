"""Products by oneDNN: the same numbers and gradients as ``nn.Linear``, and the same parameters."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from realhf.backends.embedded import kernels
from realhf.backends.embedded.kernels import (
    LEAST_ROWS,
    OneDnnLinear,
    product,
    rows_of_product,
    suits,
    trains_faster,
    use_onednn,
)


@pytest.fixture(autouse=True)
def processor_of_another_maker(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one of Intel the layers would stay as they are."""
    monkeypatch.setattr(kernels, "favoured_by_mkl", lambda: False)


def pair(features: int, out: int, bias: bool) -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(features + out)
    plain = nn.Linear(features, out, bias=bias)
    wide = copy.deepcopy(plain)
    assert use_onednn(wide) == 1
    assert type(wide) is OneDnnLinear
    return plain, wide


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(LEAST_ROWS, 48), (3, 40, 48), (1, 2, 48), (0, 48)])
def test_values_and_gradients_are_those_of_the_plain_layer(shape: tuple[int, ...], bias: bool):
    plain, wide = pair(48, 80, bias)
    inputs = [torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2)]
    outputs = [layer(x) for layer, x in zip((plain, wide), inputs, strict=True)]
    weigh = torch.randn(outputs[0].shape, generator=torch.Generator().manual_seed(2))
    for output in outputs:
        (output * weigh).sum().backward()
    torch.testing.assert_close(outputs[1], outputs[0])
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad)
    for mine, theirs in zip(wide.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-5)


def test_a_view_with_strides_of_its_own_is_no_trouble():
    plain, wide = pair(48, 80, True)
    x = torch.randn(48, 2 * LEAST_ROWS).t()[::2]
    torch.testing.assert_close(wide(x), plain(x))
    wide(x.clone().requires_grad_()).t().square().sum().backward()
    plain(x.clone().requires_grad_()).t().square().sum().backward()
    torch.testing.assert_close(wide.weight.grad, plain.weight.grad, rtol=1e-4, atol=1e-4)


def test_frozen_weights_pass_gradients_on():
    _, wide = pair(48, 80, False)
    wide.requires_grad_(False)
    x = torch.randn(LEAST_ROWS, 48, requires_grad=True)
    wide(x).sum().backward()
    assert x.grad is not None
    assert wide.weight.grad is None


def test_other_precisions_and_other_layers_stay_as_they_are():
    class Special(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(8, 8, dtype=torch.bfloat16), Special(8, 8), nn.Linear(8, 8))
    names = list(model.state_dict())
    assert use_onednn(model) == 1
    assert [type(layer) for layer in model] == [nn.Linear, Special, OneDnnLinear]
    assert list(model.state_dict()) == names
    assert use_onednn(model) == 0


def test_a_tied_weight_gets_both_gradients():
    _, wide = pair(48, 80, False)
    table = nn.Embedding(80, 48)
    wide.weight = table.weight
    ids = torch.arange(LEAST_ROWS)
    wide(table(ids)).sum().backward()
    expected = torch.zeros(80, 48)
    expected += table.weight.detach()[ids].sum(0)
    expected[ids] += table.weight.detach().sum(0)
    torch.testing.assert_close(table.weight.grad, expected, rtol=1e-4, atol=1e-4)


def test_a_large_weight_is_worth_it_from_a_few_rows_on() -> None:
    large, small = torch.empty(1 << 16, 64), torch.empty(1 << 10, 64)
    assert rows_of_product(large)[0] == 4 and rows_of_product(small)[0] == LEAST_ROWS
    weight, rows = torch.randn(1 << 16, 64, generator=torch.Generator().manual_seed(0)), torch.ones(5, 64)
    assert suits(weight)
    torch.testing.assert_close(product(rows, weight), rows @ weight.t())


def test_on_a_processor_that_mkl_favours_layers_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Except for few rows of a large weight, where reading it takes the time."""
    monkeypatch.setattr(kernels, "favoured_by_mkl", lambda: True)
    large, small = torch.empty(1 << 16, 64), torch.empty(1 << 10, 64)
    assert use_onednn(nn.Linear(8, 8)) == 0 and not trains_faster(large)
    assert suits(large) and 8 in rows_of_product(large) and 2048 not in rows_of_product(large)
    assert not rows_of_product(small)
