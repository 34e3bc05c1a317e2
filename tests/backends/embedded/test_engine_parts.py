"""The parts of the embedded engine: sampling, the table of rows, copies of weights, norms."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from realhf.api.config import OptimizerConfig
from realhf.backends.embedded.decode_core import RowTable
from realhf.backends.embedded.kernels import FewPassNorm, use_few_pass_norms
from realhf.backends.embedded.sampling import stream_of, uniform_at
from realhf.backends.embedded.weight_copy import copy_weights
from realhf.backends.training.torch_engine import TorchEngine
from realhf.transport.weights import layout, pack


def test_numbers_are_uniform_and_independent_across_neighbouring_seeds_and_positions() -> None:
    streams = np.array([stream_of(seed) for seed in range(200)], dtype=np.uint64)
    table = uniform_at(streams[:, None], np.arange(200)[None])
    assert table.min() >= 0 and table.max() < 1
    counts = np.histogram(table, bins=64, range=(0, 1))[0]
    assert ((counts - 625) ** 2 / 625).sum() < 120  # chi-square, 63 degrees of freedom: p < 1e-5 beyond
    centred = table - 0.5
    for shifted in (centred[1:] * centred[:-1], centred[:, 1:] * centred[:, :-1], centred[1:, 1:] * centred[:-1, :-1]):
        assert abs(shifted.mean()) < 5 / 12 / np.sqrt(shifted.size)


def test_a_number_does_not_depend_on_its_company_and_seeds_may_be_any_integer() -> None:
    seeds = [0, 1, -1, 2**63, 2**64 - 1, 2**80 + 7]
    streams = np.array([stream_of(seed) for seed in seeds], dtype=np.uint64)
    alone = [uniform_at(streams[i : i + 1], np.array([7]))[0] for i in range(6)]
    assert uniform_at(streams, np.full(6, 7)).tolist() == alone
    assert stream_of(-1) == stream_of(2**64 - 1)
    assert len(set(alone)) == 5


@pytest.mark.parametrize("max_rows", [None, 12, 9])
def test_contents_follow_their_slot_through_random_turns(max_rows: int | None) -> None:
    rng = random.Random(0)
    table, rows = RowTable(max_rows), np.full(0, -1)
    content: dict[int, int] = {}
    busy: set[int] = set()
    for stamp in range(400):
        busy -= set(rng.sample(sorted(busy), rng.randrange(len(busy) + 1)))
        idle = sorted(set(content) - busy)
        gone = rng.sample(idle, rng.randrange(len(idle) + 1)) if rng.random() < 0.2 else []
        table.free(gone)
        content = {slot: mark for slot, mark in content.items() if slot not in gone}
        waiting = sorted(set(range(14)) - busy)
        batch = rng.sample(waiting, rng.randrange(min(5, len(waiting) + 1)))
        seats = table.seat(batch, busy)
        batch = batch[: len(seats)]
        assert max_rows is None or max(seats, default=0) < max_rows
        assert max_rows is not None or len(seats) == len(batch)
        content = {slot: content.get(slot, -1) for slot in table.slots}
        if len(rows) <= max(seats, default=-1):
            rows = np.concatenate([rows, np.full(max(seats) + 1 - len(rows), -1)])
            table.resize(len(rows), 4)
        for slot, row in zip(batch, seats, strict=True):
            assert table.row_of(slot) == row
            assert table.lengths[row] == (content[slot] >= 0)
            content[slot] = rows[row] = table.tokens[row, 0] = stamp
            table.lengths[row] = 1
        busy |= set(batch)
        if rng.random() < 0.5:
            source, target = table.compact({table.row_of(slot) for slot in busy})
            rows[target] = rows[source]
            assert sorted(table.row_of(slot) for slot in busy) == list(range(len(busy)))
        assert len(set(table.slots.values())) == len(table.slots)
        for slot, row in table.slots.items():
            assert rows[row] == table.tokens[row, 0] == content[slot] and table.lengths[row] == 1
        assert table.lengths.sum() == len(table.slots)


def test_the_slot_that_waits_longest_gives_its_row() -> None:
    table = RowTable(3)
    table.resize(3, 4)
    assert table.seat([10, 11, 12], ()) == [0, 1, 2]
    assert table.seat([10], ()) == [0]
    assert table.seat([13], busy={12}) == [1], "11 is idle, 10 was used since"
    assert sorted(table.slots) == [10, 12, 13]
    assert table.seat([14, 15], busy={10, 12, 13}) == []


def test_nobody_takes_tokens_that_were_forgotten() -> None:
    table = RowTable()
    table.seat([0, 1], ())
    table.resize(2, 32)
    text = np.arange(20)
    assert table.plan(0, text, {}).start == 0
    assert table.plan(1, text, {}).donor == 0
    table.forget_tokens()
    assert table.plan(1, text, {}).donor == 1 and table.plan(1, text, {}).start == 19


def test_persistent_buffers_travel_with_the_parameters(tiny_model: Any) -> None:
    def made(fill: int) -> Any:
        model = tiny_model()  # Its head is tied to the embedding.
        model.model.layers[0].mlp.register_buffer("scale", torch.full((3,), float(fill)))
        model.model.register_buffer("counted", torch.tensor([fill, fill]))
        model.model.register_buffer("scratch", torch.full((2,), float(fill)), persistent=False)
        return model

    engine, other = TorchEngine(made(7), None, optimizer=OptimizerConfig(), total_train_steps=1), made(0)
    with torch.no_grad():
        engine.model.model.embed_tokens.weight.add_(1.0)
    weights = engine.weights()
    assert "lm_head.weight" not in weights, "what is tied travels once"
    slots, size = layout(weights)
    pack(weights, slots, np.zeros(size, dtype=np.uint8))
    copy_weights(other, weights)
    for name, tensor in engine.model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name
    assert other.model.scratch.tolist() == [0.0, 0.0], "what no checkpoint holds stays"


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
