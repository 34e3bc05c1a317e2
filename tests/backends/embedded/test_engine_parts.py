"""The parts of the embedded engine: sampling, the table of rows, copies of weights, norms and
products, and the forward pass without modules against the modules."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from realhf.api.config import BuiltinModelConfig, OptimizerConfig
from realhf.backends.builtin_policy import build_model
from realhf.backends.embedded import kernels
from realhf.backends.embedded.attention import (
    RowBlock,
    block_attention,
    row_blocks,
    row_decode_attention,
)
from realhf.backends.embedded.decode_core import RowTable
from realhf.backends.embedded.forward_pass import (
    Decoding,
    FastDecoder,
    ModulePass,
    PrefillPiece,
    build_fast_decoder,
)
from realhf.backends.embedded.kernels import (
    MIN_ROWS,
    FewPassNorm,
    OneDnnLinear,
    onednn_linear,
    onednn_row_range,
    supports_onednn,
    trains_faster,
    use_few_pass_norms,
    use_onednn,
)
from realhf.backends.embedded.kv_cache import RowCache
from realhf.backends.embedded.sampling import seed_stream, uniform_at
from realhf.backends.embedded.weight_copy import copy_weights
from realhf.backends.training.torch_engine import TorchEngine
from realhf.transport.weights import compute_layout, pack


def test_numbers_are_uniform_and_independent_across_neighbouring_seeds_and_positions() -> None:
    streams = np.array([seed_stream(seed) for seed in range(200)], dtype=np.uint64)
    table = uniform_at(streams[:, None], np.arange(200)[None])
    assert table.min() >= 0 and table.max() < 1
    counts = np.histogram(table, bins=64, range=(0, 1))[0]
    assert (
        (counts - 625) ** 2 / 625
    ).sum() < 120  # chi-square, 63 degrees of freedom: p < 1e-5 beyond
    centred = table - 0.5
    for shifted in (
        centred[1:] * centred[:-1],
        centred[:, 1:] * centred[:, :-1],
        centred[1:, 1:] * centred[:-1, :-1],
    ):
        assert abs(shifted.mean()) < 5 / 12 / np.sqrt(shifted.size)


def test_a_number_does_not_depend_on_its_company_and_seeds_may_be_any_integer() -> None:
    seeds = [0, 1, -1, 2**63, 2**64 - 1, 2**80 + 7]
    streams = np.array([seed_stream(seed) for seed in seeds], dtype=np.uint64)
    alone = [uniform_at(streams[i : i + 1], np.array([7]))[0] for i in range(6)]
    assert uniform_at(streams, np.full(6, 7)).tolist() == alone
    assert seed_stream(-1) == seed_stream(2**64 - 1)
    assert len(set(alone)) == 5


@pytest.mark.parametrize("max_rows", [None, 12, 9])
def test_contents_follow_their_slot_through_random_turns(max_rows: int | None) -> None:
    rng = random.Random(0)
    table = RowTable(max_rows)
    rows = np.full(0, -1)
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
        seats = table.assign_rows(batch, busy)
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
    assert table.assign_rows([10, 11, 12], ()) == [0, 1, 2]
    assert table.assign_rows([10], ()) == [0]
    assert table.assign_rows([13], busy={12}) == [1], "11 is idle, 10 was used since"
    assert sorted(table.slots) == [10, 12, 13]
    assert table.assign_rows([14, 15], busy={10, 12, 13}) == []


def test_nobody_takes_tokens_that_were_forgotten() -> None:
    table = RowTable()
    table.assign_rows([0, 1], ())
    table.resize(2, 32)
    text = np.arange(20)
    assert table.plan(0, text, {}).start == 0
    assert table.plan(1, text, {}).donor == 0
    table.forget_tokens()
    assert table.plan(1, text, {}).donor == 1 and table.plan(1, text, {}).start == 19


@pytest.mark.slow
def test_persistent_buffers_travel_with_the_parameters(tiny_model: Any) -> None:
    def made(fill: int) -> Any:
        model = tiny_model()  # Its head is tied to the embedding.
        model.model.layers[0].mlp.register_buffer("scale", torch.full((3,), float(fill)))
        model.model.register_buffer("counted", torch.tensor([fill, fill]))
        model.model.register_buffer("scratch", torch.full((2,), float(fill)), persistent=False)
        return model

    engine = TorchEngine(made(7), None, optimizer=OptimizerConfig(), total_train_steps=1)
    other = made(0)
    with torch.no_grad():
        engine.model.model.embed_tokens.weight.add_(1.0)
    weights = engine.weights()
    assert "lm_head.weight" not in weights, "what is tied travels once"
    slots, size = compute_layout(weights)
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
        expected = outcome(norm(12), x, grad)
        module = norm(12)
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


@pytest.fixture(autouse=True)
def processor_of_another_maker(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one of Intel the layers would stay as they are."""
    monkeypatch.setattr(kernels, "prefers_mkl", lambda: False)


def pair(features: int, out: int, bias: bool) -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(features + out)
    plain = nn.Linear(features, out, bias=bias)
    wide = copy.deepcopy(plain)
    assert use_onednn(wide) == 1
    assert type(wide) is OneDnnLinear
    return plain, wide


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(MIN_ROWS, 48), (3, 40, 48), (1, 2, 48), (0, 48)])
def test_values_and_gradients_are_those_of_the_plain_layer(shape: tuple[int, ...], bias: bool):
    plain, wide = pair(48, 80, bias)
    inputs = [
        torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_()
        for _ in range(2)
    ]
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
    x = torch.randn(48, 2 * MIN_ROWS).t()[::2]
    torch.testing.assert_close(wide(x), plain(x))
    wide(x.clone().requires_grad_()).t().square().sum().backward()
    plain(x.clone().requires_grad_()).t().square().sum().backward()
    torch.testing.assert_close(wide.weight.grad, plain.weight.grad, rtol=1e-4, atol=1e-4)


def test_frozen_weights_pass_gradients_on():
    _, wide = pair(48, 80, False)
    wide.requires_grad_(False)
    x = torch.randn(MIN_ROWS, 48, requires_grad=True)
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
    ids = torch.arange(MIN_ROWS)
    wide(table(ids)).sum().backward()
    expected = torch.zeros(80, 48)
    expected += table.weight.detach()[ids].sum(0)
    expected[ids] += table.weight.detach().sum(0)
    torch.testing.assert_close(table.weight.grad, expected, rtol=1e-4, atol=1e-4)


def test_a_large_weight_is_worth_it_from_a_few_rows_on() -> None:
    large = torch.empty(1 << 16, 64)
    small = torch.empty(1 << 10, 64)
    assert onednn_row_range(large)[0] == 4 and onednn_row_range(small)[0] == MIN_ROWS
    weight = torch.randn(1 << 16, 64, generator=torch.Generator().manual_seed(0))
    rows = torch.ones(5, 64)
    assert supports_onednn(weight)
    torch.testing.assert_close(onednn_linear(rows, weight), rows @ weight.t())


def test_on_a_processor_that_mkl_favours_layers_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Except for few rows of a large weight, where reading it takes the time."""
    monkeypatch.setattr(kernels, "prefers_mkl", lambda: True)
    large = torch.empty(1 << 16, 64)
    small = torch.empty(1 << 10, 64)
    assert use_onednn(nn.Linear(8, 8)) == 0 and not trains_faster(large)
    assert (
        supports_onednn(large)
        and 8 in onednn_row_range(large)
        and 2048 not in onednn_row_range(large)
    )
    assert not onednn_row_range(small)


def filled(columns: int = 128) -> RowCache:
    cache = RowCache()
    cache.reserve(6, columns)
    return cache


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "qwen2"])
@torch.inference_mode()
def test_logits_equal_the_modules_for_mixed_passes(tiny_model: Any, architecture: str) -> None:
    """Rows 1 to 4 share 70 tokens, 5 does not; pieces of all sizes join while others decode."""
    model = tiny_model(architecture)
    rng = np.random.default_rng(0)
    text = rng.integers(0, 97, size=(6, 120))
    text[1:5, :70] = text[1, :70]
    cache = filled()
    other = filled()
    fast = build_fast_decoder(model, cache)
    assert fast is not None
    slow = ModulePass(model, other, 192)
    held = [0] * 6
    plans = [
        ([], [(1, 75), (5, 3)]),
        ([1, 5], [(2, 71), (3, 80)]),
        ([1, 2, 3, 5], [(4, 90), (0, 1)]),
        ([0, 1, 2, 3, 4, 5], []),
        ([1, 2, 4], [(0, 2), (5, 1)]),
        ([1, 3, 4], []),
    ]
    for ready, joining in plans:
        rows = np.array(ready, dtype=np.int64)
        positions = np.array([held[row] for row in ready], dtype=np.int64)
        decoding = Decoding(rows, text[rows, positions], positions, text) if ready else None
        pieces = [
            PrefillPiece(row, held[row], text[row, held[row] : held[row] + n]) for row, n in joining
        ]
        got = fast.run(decoding, pieces)
        expected = slow.run(decoding, pieces)
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
        for row in ready:
            held[row] += 1
        for row, n in joining:
            held[row] += n
    for row, n in enumerate(held):
        whole = model(input_ids=torch.from_numpy(text[row : row + 1, : n + 1])).logits[0, -1]
        one = Decoding(np.array([row]), text[[row], [n]], np.array([n]), text)
        torch.testing.assert_close(fast.run(one, [])[0], whole, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_weights_copied_in_place_or_replaced_are_seen(tiny_model: Any) -> None:
    model = tiny_model()
    decoder = FastDecoder(model, filled())
    piece = PrefillPiece(0, 0, np.arange(5))
    layer = model.model.layers[0].mlp.up_proj
    layer.weight.mul_(1.5)
    torch.testing.assert_close(
        decoder.run(None, [piece])[0], model(torch.arange(5)[None]).logits[0, -1]
    )
    layer.weight = torch.nn.Parameter(layer.weight * 1.5)
    torch.testing.assert_close(
        decoder.run(None, [piece])[0], model(torch.arange(5)[None]).logits[0, -1]
    )


@pytest.mark.slow
@torch.inference_mode()
def test_the_builtin_policy_takes_it_and_what_it_does_not_know_goes_through_the_modules(
    tiny_model: Any,
) -> None:
    builtin = BuiltinModelConfig(vocab_size=512, num_layers=2)
    assert build_fast_decoder(build_model(builtin, 512, 3, 0, seed=1).eval(), filled()) is not None
    assert build_fast_decoder(tiny_model("gpt2"), filled()) is None
    hooked = tiny_model()
    hooked.model.layers[0].register_forward_hook(lambda *_: None)
    assert build_fast_decoder(hooked, filled()) is None
    adapted = tiny_model()
    adapted.model.layers[1].mlp.up_proj = torch.nn.Sequential(adapted.model.layers[1].mlp.up_proj)
    assert build_fast_decoder(adapted, filled()) is None
    rescaled = tiny_model()
    rescaled.model.layers[0].input_layernorm.forward = lambda x: 2 * x
    assert build_fast_decoder(rescaled, filled()) is None, "its logits are not those of the module"


def test_blocks_cover_the_rows_and_share_only_what_is_common() -> None:
    rng = np.random.default_rng(1)
    for _ in range(200):
        tokens = rng.integers(0, 3, size=(24, 200))
        for first in range(0, 24, 6):
            tokens[first : first + int(rng.integers(1, 7)), : rng.integers(0, 150)] = 1
        rows = np.sort(rng.choice(24, size=int(rng.integers(1, 25)), replace=False))
        positions = rng.integers(0, 200, size=len(rows))
        blocks = row_blocks(tokens, rows, positions)
        covered = [row for block in blocks for row in rows if block.first <= row < block.end]
        assert covered == rows.tolist()
        for block in blocks:
            members = [i for i, row in enumerate(rows) if block.first <= row < block.end]
            assert block.width == positions[members].max() + 1
            assert block.shared == 0 or (
                block.shared >= 64 and positions[members].min() >= block.shared
            )
            assert (
                tokens[rows[members], : block.shared] == tokens[block.leader, : block.shared]
            ).all()


def test_a_group_with_one_prompt_is_one_block() -> None:
    tokens = np.random.default_rng(2).integers(0, 50, size=(16, 300))
    tokens[:8, :200], tokens[8:, :150] = tokens[0, :200], tokens[8, :150]
    blocks = row_blocks(tokens, np.arange(16), np.arange(220, 236))
    assert [(block.first, block.end, block.shared) for block in blocks] == [
        (0, 8, 200),
        (8, 16, 150),
    ]


@pytest.mark.parametrize("shared", [0, 64])
def test_block_attention_equals_the_library_kernel(shared: int) -> None:
    g = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(7, 2, 96, 8, generator=g) for _ in range(2))
    keys[2:6, :, :shared], values[2:6, :, :shared] = keys[2, :, :shared], values[2, :, :shared]
    query = torch.randn(4, 4, 8, generator=g)
    closed = torch.arange(96) > torch.tensor([70, 80, 64, 75])[:, None, None, None]
    mask = torch.zeros(4, 1, 1, 96).masked_fill(closed, float("-inf"))
    got = block_attention(query, keys, values, mask, RowBlock(2, 6, 2, shared, 81), 0.3)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query[:, :, None],
        keys[2:6].repeat_interleave(2, 1),
        values[2:6].repeat_interleave(2, 1),
        mask,
        scale=0.3,
    )
    torch.testing.assert_close(got, expected.reshape(4, -1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shared", [0, 64])
def test_scores_of_a_short_type_are_not_rounded(shared: int) -> None:
    """Scores around 30, where bfloat16 has steps of 0.125."""
    g = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(4, 2, 96, 8, generator=g).bfloat16() for _ in range(2))
    keys[:, :, :shared], values[:, :, :shared] = keys[0, :, :shared], values[0, :, :shared]
    query = (4 * torch.randn(4, 4, 8, generator=g)).bfloat16()
    mask = torch.zeros(4, 1, 1, 96).bfloat16()
    got = block_attention(query, keys, values, mask, RowBlock(0, 4, 0, shared, 96), 1.0)
    row = row_decode_attention(
        None,
        query[:, :, None],
        keys.repeat_interleave(2, 1),
        values.repeat_interleave(2, 1),
        mask,
        scaling=1.0,
    )[0]
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.double()[:, :, None],
        keys.double().repeat_interleave(2, 1),
        values.double().repeat_interleave(2, 1),
        scale=1.0,
    ).reshape(4, -1)
    assert got.dtype == torch.bfloat16
    for found in (got, row.reshape(4, -1)):
        assert float((found.double() - expected).abs().max()) < 0.02


@pytest.mark.slow
@torch.inference_mode()
def test_deep_models_in_bfloat16_keep_the_fast_pass(
    tiny_model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    builtin = BuiltinModelConfig(
        vocab_size=256, hidden_size=64, num_layers=24, num_heads=2, intermediate_size=96
    )
    model = build_model(builtin, 256, 3, 0, seed=1).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.mul_(3)
    assert build_fast_decoder(model.bfloat16(), filled()) is not None and not caplog.records
    wrong = build_model(builtin, 256, 3, 0, seed=1).eval().bfloat16()
    for layer in wrong.model.layers:
        layer.self_attn.forward = _without_attention
    assert build_fast_decoder(wrong, filled()) is None
    [record] = caplog.records
    assert record.levelname == "WARNING" and "differ" in record.getMessage()


def _without_attention(hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
    return torch.zeros_like(hidden_states), None
