"""The compiled forward pass and sampling against those of torch."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import threading
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from realhf.api.config import GenConfig
from realhf.api.model import GenRequest
from realhf.backends.embedded import compiled_decoder
from realhf.backends.embedded.compiled_decoder import (
    CompiledDecoder,
    build_compiled_decoder,
    sample_rows,
)
from realhf.backends.embedded.compute_threads import find_libgomp
from realhf.backends.embedded.forward_pass import Decoding, FastDecoder, PrefillPiece
from realhf.backends.embedded.generation import EmbeddedGenerator
from realhf.backends.embedded.kv_cache import RowCache
from realhf.backends.embedded.sampling import sample_tokens, token_logprobs

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
VOCABULARY = 97
SHAPES = {
    "qwen3": Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, intermediate_size=48, head_dim=8, tie_word_embeddings=True,
    ),
    "grouped": Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=40, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, intermediate_size=100, head_dim=32, tie_word_embeddings=False,
    ),
    "wide": LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=819, num_hidden_layers=1, num_attention_heads=3,
        num_key_value_heads=1, intermediate_size=1700, head_dim=128, attention_bias=True,
        mlp_bias=True,
    ),
    "odd": Qwen2Config(
        vocab_size=VOCABULARY + 2, hidden_size=36, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=2, intermediate_size=50,
    ),
    "huge heads": LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, intermediate_size=16, head_dim=9000,
    ),
    "10": Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=33, num_hidden_layers=2, num_attention_heads=7,
        num_key_value_heads=1, intermediate_size=52, head_dim=10,
    ),
    "24": Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=96, head_dim=24,
    ),
    "llama": LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, num_attention_heads=1,
        num_key_value_heads=1, intermediate_size=48,
    ),
}  # fmt: skip


def build(shape: str) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(SHAPES[shape]).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return model


def decoder_of(model: Any, rows: int = 8) -> CompiledDecoder:
    cache = RowCache()
    cache.reserve(rows, 128)
    decoder = build_compiled_decoder(model, cache)
    assert decoder is not None
    return decoder


def fast_of(model: Any, rows: int = 8) -> FastDecoder:
    cache = RowCache()
    cache.reserve(rows, 128)
    return FastDecoder(model, cache)


def pieces(text: np.ndarray, *lengths: int) -> list[PrefillPiece]:
    return [PrefillPiece(row, 0, text[row, :length]) for row, length in enumerate(lengths)]


def decoding(text: np.ndarray, rows: list[int], positions: list[int]) -> Decoding:
    return Decoding(
        np.array(rows), text[rows, positions], np.array(positions, dtype=np.int64), text
    )


def random_text(rows: int = 8, common: int = 0) -> np.ndarray:
    text = np.random.default_rng(0).integers(0, VOCABULARY, size=(rows, 128))
    text[:, :common] = text[0, :common]
    return text


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("threads", [1, 2])
@torch.inference_mode()
def test_logits_equal_the_fast_decoders(shape: str, threads: int) -> None:
    """Pieces, decoding with and without idle rows between, both at once, on rows that share 40
    tokens or none."""
    model = build(shape)
    compiled = decoder_of(model)
    fast = fast_of(model)
    text = random_text(common=40)
    text[6:] = random_text()[::-1][:2]
    held = [57, 41, 60, 1, 44, 43, 70, 2]
    torch.set_num_threads(threads)
    try:
        for decoder in (compiled, fast):
            decoder.run(None, pieces(text, *held[:4]))
        plans = [
            ([], [(4, 44), (5, 43), (6, 70), (7, 2)]),
            ([0, 1, 2, 3, 4, 5, 6, 7], []),
            ([0, 2, 5], [(1, 7), (6, 1)]),
            ([2, 7], []),
            ([3], []),
        ]
        done = [*held[:4], 0, 0, 0, 0]
        for ready, joining in plans:
            step = decoding(text, ready, [done[row] for row in ready]) if ready else None
            joined = [
                PrefillPiece(row, done[row], text[row, done[row] : done[row] + n])
                for row, n in joining
            ]
            torch.testing.assert_close(
                compiled.run(step, joined), fast.run(step, joined), atol=1e-4, rtol=1e-4
            )
            for row in ready:
                done[row] += 1
            for row, n in joining:
                done[row] += n
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("shape", ["grouped", "odd", "qwen3", "10", "24"])
@torch.inference_mode()
def test_logits_do_not_depend_on_other_rows_nor_on_threads(
    shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(shape)
    text = random_text(common=40)
    positions = [50 + row for row in range(8)]
    together = decoder_of(model)
    together.run(None, pieces(text, *positions))
    expected = together.run(decoding(text, [*range(8)], positions), [])
    alone = decoder_of(model)
    for row in range(8):
        cut = 7 + row
        alone.run(None, [PrefillPiece(row, 0, text[row, :cut])])
        alone.run(None, [PrefillPiece(row, cut, text[row, cut : positions[row]])])
        logits = alone.run(decoding(text, [row], [positions[row]]), [])
        assert torch.equal(logits[0], expected[row])
    torch.set_num_threads(2)
    try:
        for cached_bytes in (compiled_decoder._CACHED_BYTES, 0):
            monkeypatch.setattr(compiled_decoder, "_CACHED_BYTES", cached_bytes)
            threaded = decoder_of(model)
            threaded.run(None, pieces(text, *positions))
            assert torch.equal(threaded.run(decoding(text, [*range(8)], positions), []), expected)
    finally:
        torch.set_num_threads(1)


@torch.inference_mode()
def test_long_pieces_of_large_models_are_left_to_the_fast_decoder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others and the decoded rows keep their places, and do not depend on the long ones."""
    monkeypatch.setattr(compiled_decoder, "_LONG_PIECE", 30)
    monkeypatch.setattr(compiled_decoder, "_CACHED_BYTES", 0)
    model = build("grouped")
    text = random_text()
    both = [PrefillPiece(row, 0, text[row, :n]) for row, n in ((1, 50), (2, 30), (3, 31), (4, 9))]
    decoder = decoder_of(model)
    fast = fast_of(model)
    for each in (decoder, fast):
        each.run(None, pieces(text, 20))
    logits = decoder.run(decoding(text, [0], [20]), both)
    for index, expected in ((1, fast.run(None, both[:1])), (3, fast.run(None, both[2:3]))):
        assert torch.equal(logits[index], expected[0])
    others = decoder.run(decoding(text, [0], [20]), both[1::2])
    assert torch.equal(logits[[0, 2, 4]], others)
    step = decoding(text, [1, 2, 3, 4], [50, 30, 31, 9])
    fast.run(None, both)
    torch.testing.assert_close(decoder.run(step, []), fast.run(step, []), atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_without_a_team_large_models_are_left_to_the_fast_decoder(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiled_decoder, "_CACHED_BYTES", 0)
    monkeypatch.setattr(compiled_decoder, "_find_team", lambda: None)
    model = build("grouped")
    prefill = pieces(random_text(), 20)
    decoder = decoder_of(model)
    alone = decoder.run(None, prefill)
    compiled_decoder._warn_once.cache_clear()
    torch.set_num_threads(2)
    try:
        assert torch.equal(decoder.run(None, prefill), fast_of(model).run(None, prefill))
        decoder.run(None, prefill)
    finally:
        torch.set_num_threads(1)
    [record] = caplog.records
    assert "one thread" in record.getMessage()
    torch.testing.assert_close(decoder.run(None, prefill), alone, atol=0, rtol=0)


@pytest.mark.slow
def test_torchs_team_is_found_next_to_another_openmp_library() -> None:
    """Two loaded copies of libgomp are told apart by what torch is linked to."""
    if find_libgomp() is None:
        pytest.skip("torch does not use libgomp, or there is more than one")
    code = """if True:
        import ctypes, shutil, sys
        import torch
        from realhf.backends.embedded.compiled_decoder import _find_team
        from realhf.backends.embedded.compute_threads import find_libgomp
        own = find_libgomp()
        other = sys.argv[1] + "/libgomp-other.so"
        shutil.copy(own._name, other)
        ctypes.CDLL(other)
        assert find_libgomp() is None
        address = ctypes.cast(own.GOMP_parallel, ctypes.c_void_p).value
        assert _find_team().parallel == address
    """
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-c", code, folder], check=True)


@torch.inference_mode()
def test_new_weights_and_a_grown_cache_are_seen() -> None:
    model = build("grouped")
    decoder = decoder_of(model)
    text = random_text()
    piece = PrefillPiece(0, 0, text[0, :20])
    up = model.model.layers[0].mlp.up_proj
    for change in ("copied", "replaced", "moved"):
        if change == "copied":
            up.weight.mul_(1.5)
        elif change == "replaced":
            up.weight = torch.nn.Parameter(up.weight * 1.5)
        else:
            up.weight.data = up.weight * 1.5
        expected = model(torch.from_numpy(text[:1, :20])).logits[0, -1]
        torch.testing.assert_close(
            decoder.run(None, [piece])[0], expected, atol=2e-5, rtol=2e-5, msg=change
        )
    decoder._cache.reserve(40, 300)
    expected = model(torch.from_numpy(text[:1, :21])).logits[0, -1]
    logits = decoder.run(decoding(text, [0], [20]), [])
    torch.testing.assert_close(logits[0], expected, atol=2e-5, rtol=2e-5)


@torch.inference_mode()
def test_parameters_that_it_cannot_read_are_left_to_the_fast_decoder() -> None:
    model = build("grouped")
    decoder = decoder_of(model)
    piece = PrefillPiece(0, 0, random_text()[0, :20])
    before = decoder.run(None, [piece])
    up = model.model.layers[0].mlp.up_proj
    up.weight.data = up.weight.t().contiguous().t()
    torch.testing.assert_close(decoder.run(None, [piece]), before, atol=2e-5, rtol=2e-5)
    assert build_compiled_decoder(model, RowCache()) is None
    assert build_compiled_decoder(build("grouped").bfloat16(), RowCache()) is None


@pytest.mark.parametrize("rows", [0, 10])
@torch.inference_mode()
def test_a_weight_of_another_shape_is_not_read(rows: int) -> None:
    model = build("grouped")
    decoder = decoder_of(model)
    up = model.model.layers[0].mlp.up_proj
    up.weight.data = up.weight[:rows].clone()
    with pytest.raises(RuntimeError, match="size"):
        decoder.run(None, [PrefillPiece(0, 0, random_text()[0, :20])])


@pytest.mark.parametrize("token", [-1, VOCABULARY, 10**9])
@torch.inference_mode()
def test_a_token_outside_the_vocabulary_is_an_error(token: int) -> None:
    decoder = decoder_of(build("grouped"))
    text = random_text()
    text[0, 9] = token
    with pytest.raises(IndexError, match=f"token {token} at row 0"):
        decoder.run(None, pieces(text, 20))
    with pytest.raises(IndexError, match=f"token {token} at row 0"):
        decoder.run(decoding(text, [0], [9]), [])


@pytest.mark.parametrize("place", [(8, 0), (-1, 0), (0, 120)])
@torch.inference_mode()
def test_a_place_outside_the_cache_is_an_error(place: tuple[int, int]) -> None:
    decoder = decoder_of(build("grouped"))
    with pytest.raises(IndexError, match="the cache of 8 rows and 128 columns"):
        decoder.run(None, [PrefillPiece(*place, random_text()[0, :20])])


@torch.inference_mode()
def test_torchs_default_dtype_does_not_matter() -> None:
    decoder = decoder_of(build("grouped"))
    prefill = pieces(random_text(), 20)
    expected = decoder.run(None, prefill)
    torch.set_default_dtype(torch.bfloat16)
    try:
        logits = decoder.run(None, prefill)
    finally:
        torch.set_default_dtype(torch.float32)
    assert logits.dtype == torch.float32 and torch.equal(logits, expected)


@pytest.mark.parametrize("cached_bytes", [compiled_decoder._CACHED_BYTES, 0])
@torch.inference_mode()
def test_a_team_may_have_fewer_threads_than_asked_for(
    cached_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With OMP_DYNAMIC, OMP_THREAD_LIMIT or nesting."""
    monkeypatch.setattr(compiled_decoder, "_CACHED_BYTES", cached_bytes)
    decoder = decoder_of(build("grouped"))
    if decoder._team is None:
        pytest.skip("torch does not use libgomp, or there is more than one")
    libgomp = find_libgomp()
    assert libgomp is not None
    text = random_text()
    decoder.run(None, pieces(text, *([40] * 8)))
    step = decoding(text, [*range(8)], [40] * 8)
    expected = decoder.run(step, [])
    torch.set_num_threads(4)
    dynamic = libgomp.omp_get_dynamic()
    libgomp.omp_set_dynamic(1)
    try:
        assert torch.equal(decoder.run(step, []), expected)
    finally:
        libgomp.omp_set_dynamic(dynamic)
        torch.set_num_threads(1)


@torch.inference_mode()
def test_a_model_with_other_logits_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    model = build("grouped")
    model.model.layers[0].input_layernorm.forward = lambda x: 2 * x
    compiled_decoder._warn_once.cache_clear()
    assert build_compiled_decoder(model, RowCache()) is None
    assert build_compiled_decoder(model, RowCache()) is None
    [record] = caplog.records
    assert "differ" in record.getMessage()


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.9])
def test_sampling_equals_torchs(temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(3000, 131, generator=generator)
    logits[7, :130] = float("-inf")
    uniform = torch.rand(3000, generator=generator, dtype=torch.float64)
    uniform[7], uniform[8], uniform[9] = 0.999999999, 0.0, 1 - 2.0**-53
    config = GenConfig(temperature=temperature)
    kept = logits.clone()
    sampled = sample_rows(logits, uniform.numpy(), temperature)
    assert sampled is not None and torch.equal(kept, logits)
    tokens, logprobs = sampled
    expected, _ = sample_tokens(logits, uniform, config)
    # A draw that lies on the border of two tokens up to rounding may fall to either of them.
    assert (tokens != expected.numpy()).mean() < 1e-3
    assert tokens[7] == 130 and logprobs[7] == 0
    torch.testing.assert_close(
        torch.from_numpy(logprobs),
        token_logprobs(logits, torch.from_numpy(tokens), config),
        atol=2e-6,
        rtol=1e-5,
    )


def test_sampling_needs_no_stack() -> None:
    logits = torch.zeros(1, 200_000)
    size = threading.stack_size(256 << 10)
    try:
        sampled: list[Any] = []
        thread = threading.Thread(
            target=lambda: sampled.append(sample_rows(logits, np.array([0.5]), 1.0))
        )
        thread.start()
    finally:
        threading.stack_size(size)
    thread.join()
    assert sampled[0][0].tolist() == [100_000]


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_have_no_finite_logprob(broken: float) -> None:
    logits = torch.zeros(2, 131)
    logits[1, 77] = broken
    sampled = sample_rows(logits, np.array([0.5, 0.5]), 1.0)
    assert sampled is not None
    assert np.isfinite(sampled[1]).tolist() == [True, False]


def test_generation_takes_it_and_goes_on_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    requests = [GenRequest(slot, [5, 6, 7 + slot], seed=slot) for slot in range(6)]
    config = GenConfig(max_new_tokens=20)

    def sampled() -> tuple[Any, list[Any]]:
        engine = EmbeddedGenerator(build("grouped"))
        outputs = engine.generate(requests, config, stop_ids=(), seed=0)
        decoder = engine.core._forward()
        if isinstance(decoder, CompiledDecoder):
            assert len(decoder._workspace)
            engine.core.release()
            assert not len(decoder._workspace)
        return decoder, outputs

    decoder, outputs = sampled()
    assert isinstance(decoder, CompiledDecoder)
    compiled_decoder._warn_once.cache_clear()
    monkeypatch.setattr(compiled_decoder, "_load", lambda: "there is no C compiler")
    decoder, others = sampled()
    assert isinstance(decoder, FastDecoder)
    assert "there is no C compiler" in caplog.text
    assert [o.token_ids for o in outputs] == [o.token_ids for o in others]
    for output, other in zip(outputs, others, strict=True):
        np.testing.assert_allclose(output.logprobs, other.logprobs, atol=2e-5)
