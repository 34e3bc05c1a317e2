"""The forward pass without modules against the modules: logits, shared prefixes, and where it steps back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from realhf.api.config import BuiltinModelConfig
from realhf.backends.builtin_policy import build_model
from realhf.backends.embedded.attention import RowBlock, block_attention, row_blocks, row_decode_attention
from realhf.backends.embedded.forward_pass import Decoding, FastDecoder, ModulePass, Piece, fast_decoder
from realhf.backends.embedded.kv_cache import RowCache


def filled(columns: int = 128) -> RowCache:
    cache = RowCache()
    cache.reserve(6, columns)
    return cache


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "qwen2"])
@torch.inference_mode()
def test_logits_equal_the_modules_for_mixed_passes(tiny_model: Any, architecture: str) -> None:
    """Rows 1 to 4 share 70 tokens, 5 does not; pieces of all sizes join while others decode."""
    model, rng = tiny_model(architecture), np.random.default_rng(0)
    text = rng.integers(0, 97, size=(6, 120))
    text[1:5, :70] = text[1, :70]
    cache, other = filled(), filled()
    fast = fast_decoder(model, cache)
    assert fast is not None
    slow, held = ModulePass(model, other, 192), [0] * 6
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
        pieces = [Piece(row, held[row], text[row, held[row] : held[row] + n]) for row, n in joining]
        got, expected = fast.run(decoding, pieces), slow.run(decoding, pieces)
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
    decoder, piece = FastDecoder(model, filled()), Piece(0, 0, np.arange(5))
    layer = model.model.layers[0].mlp.up_proj
    layer.weight.mul_(1.5)
    torch.testing.assert_close(decoder.run(None, [piece])[0], model(torch.arange(5)[None]).logits[0, -1])
    layer.weight = torch.nn.Parameter(layer.weight * 1.5)
    torch.testing.assert_close(decoder.run(None, [piece])[0], model(torch.arange(5)[None]).logits[0, -1])


@torch.inference_mode()
def test_the_builtin_policy_takes_it_and_what_it_does_not_know_goes_through_the_modules(tiny_model: Any) -> None:
    builtin = BuiltinModelConfig(vocab_size=512, num_layers=2)
    assert fast_decoder(build_model(builtin, 512, 3, 0, seed=1).eval(), filled()) is not None
    assert fast_decoder(tiny_model("gpt2"), filled()) is None
    hooked = tiny_model()
    hooked.model.layers[0].register_forward_hook(lambda *_: None)
    assert fast_decoder(hooked, filled()) is None
    adapted = tiny_model()
    adapted.model.layers[1].mlp.up_proj = torch.nn.Sequential(adapted.model.layers[1].mlp.up_proj)
    assert fast_decoder(adapted, filled()) is None
    rescaled = tiny_model()
    rescaled.model.layers[0].input_layernorm.forward = lambda x: 2 * x
    assert fast_decoder(rescaled, filled()) is None, "its logits are not those of the module"


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
            assert block.shared == 0 or (block.shared >= 64 and positions[members].min() >= block.shared)
            assert (tokens[rows[members], : block.shared] == tokens[block.leader, : block.shared]).all()


def test_a_group_with_one_prompt_is_one_block() -> None:
    tokens = np.random.default_rng(2).integers(0, 50, size=(16, 300))
    tokens[:8, :200], tokens[8:, :150] = tokens[0, :200], tokens[8, :150]
    blocks = row_blocks(tokens, np.arange(16), np.arange(220, 236))
    assert [(block.first, block.end, block.shared) for block in blocks] == [(0, 8, 200), (8, 16, 150)]


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
        query[:, :, None], keys[2:6].repeat_interleave(2, 1), values[2:6].repeat_interleave(2, 1), mask, scale=0.3
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
        None, query[:, :, None], keys.repeat_interleave(2, 1), values.repeat_interleave(2, 1), mask, scaling=1.0
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


@torch.inference_mode()
def test_deep_models_in_bfloat16_keep_the_fast_pass(tiny_model: Any, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    builtin = BuiltinModelConfig(vocab_size=256, hidden_size=64, num_layers=24, num_heads=2, intermediate_size=96)
    model = build_model(builtin, 256, 3, 0, seed=1).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.mul_(3)
    assert fast_decoder(model.bfloat16(), filled()) is not None and not caplog.records
    wrong = build_model(builtin, 256, 3, 0, seed=1).eval().bfloat16()
    for layer in wrong.model.layers:
        layer.self_attn.forward = _without_attention
    assert fast_decoder(wrong, filled()) is None
    [record] = caplog.records
    assert record.levelname == "WARNING" and "differ" in record.getMessage()


def _without_attention(hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
    return torch.zeros_like(hidden_states), None
