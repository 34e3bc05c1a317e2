"""The embedded engine against plain full forward passes and transformers ``generate``."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from realhf.api.config import GenConfig
from realhf.api.model import GenOutput, GenRequest
from realhf.backends.embedded.attention import row_decode_attention
from realhf.backends.embedded.generation import EmbeddedGenerator
from realhf.backends.embedded.kv_cache import RowCache
from realhf.backends.embedded.memory import cache_bytes, token_bytes

ARCHITECTURES = ["qwen3", "llama", "qwen2", "gpt2"]


def full_forward_logprobs(
    model: Any, prefix: list[int], tokens: list[int], temperature: float
) -> torch.Tensor:
    full = torch.tensor(prefix + tokens)
    with torch.no_grad():
        logits = model(input_ids=full[None]).logits[0].double() / temperature
    log_p = logits - logits.exp().sum(-1, keepdim=True).log()
    return log_p[len(prefix) - 1 : -1].gather(1, full[len(prefix) :, None])[:, 0]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logprobs_equal_full_forward_over_turns_with_kept_caches(
    tiny_model: Any, architecture: str
) -> None:
    model = tiny_model(architecture)
    rng = random.Random(1)
    engine = EmbeddedGenerator(model)
    common = [rng.randrange(97) for _ in range(20)]
    texts = {
        slot: common + [rng.randrange(97) for _ in range(rng.randrange(0, 30))] for slot in range(9)
    }
    texts[3] = list(texts[2])
    for turn in range(4):
        if turn == 2:
            engine.free([5])
            texts[5] = [rng.randrange(97) for _ in range(7)]
        live = [slot for slot in texts if rng.random() < 0.8]
        rng.shuffle(live)
        requests = [GenRequest(slot, texts[slot]) for slot in live]
        config = GenConfig(max_new_tokens=14, temperature=0.7)
        outputs = engine.generate(requests, config, stop_ids=range(12), seed=turn)
        assert len({len(o.token_ids) for o in outputs}) > 1, "rows must end at different steps"
        for slot, out in zip(live, outputs, strict=True):
            expected = full_forward_logprobs(model, texts[slot], out.token_ids, 0.7)
            torch.testing.assert_close(
                torch.tensor(out.logprobs).double(), expected, atol=1e-4, rtol=0
            )
            texts[slot] += out.token_ids + [rng.randrange(97) for _ in range(rng.randrange(1, 9))]
    assert engine.core.reused_tokens > 2 * engine.core.computed_tokens


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_equals_transformers_generate(tiny_model: Any, architecture: str) -> None:
    model = tiny_model(architecture)
    rng = random.Random(2)
    prompts = [[rng.randrange(3, 97) for _ in range(n)] for n in (1, 5, 17, 30)]
    requests = [GenRequest(i, p) for i, p in enumerate(prompts)]
    outputs = EmbeddedGenerator(model).generate(
        requests, GenConfig(max_new_tokens=20, temperature=0), stop_ids=[2], seed=0
    )
    for prompt, out in zip(prompts, outputs, strict=True):
        ids = torch.tensor([prompt])
        expected = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=20,
            eos_token_id=2,
            pad_token_id=0,
        )
        assert out.token_ids == expected[0, len(prompt) :].tolist()
        assert out.finish_reason == ("stop" if out.token_ids[-1] == 2 else "length")


def _run(engine: EmbeddedGenerator, prompts: list[list[int]], **options: Any) -> list[GenOutput]:
    seed = options.pop("seed", 0)
    stop_ids = options.pop("stop_ids", ())
    requests = [GenRequest(i, p) for i, p in enumerate(prompts)]
    return engine.generate(requests, GenConfig(**options), stop_ids=stop_ids, seed=seed)


@pytest.mark.slow
def test_same_seed_same_tokens_and_another_seed_differs(tiny_model: Any) -> None:
    prompts = [[5, 6, 7], [8, 9]]
    first = _run(EmbeddedGenerator(tiny_model()), prompts, max_new_tokens=30, seed=3)
    assert _run(EmbeddedGenerator(tiny_model()), prompts, max_new_tokens=30, seed=3) == first
    assert _run(EmbeddedGenerator(tiny_model()), prompts, max_new_tokens=30, seed=4) != first


@pytest.mark.slow
def test_kept_cache_and_fresh_engine_draw_the_same_tokens(tiny_model: Any) -> None:
    kept = EmbeddedGenerator(tiny_model())
    first = _run(kept, [[5, 6, 7]], max_new_tokens=5)[0]
    longer = [[5, 6, 7, *first.token_ids, 11, 12]]
    again = _run(kept, longer, max_new_tokens=8, seed=9)[0]
    fresh = _run(EmbeddedGenerator(tiny_model()), longer, max_new_tokens=8, seed=9)[0]
    assert again.token_ids == fresh.token_ids
    assert kept.core.reused_tokens == 3 + 5 - 1


def test_changed_prefix_is_recomputed_from_the_difference(tiny_model: Any) -> None:
    model = tiny_model()
    engine = EmbeddedGenerator(model)
    _run(engine, [list(range(3, 23))], max_new_tokens=3)
    edited = [*range(3, 13), 50, *range(14, 23)]
    out = _run(engine, [edited], max_new_tokens=3)[0]
    assert engine.core.reused_tokens == 10
    expected = full_forward_logprobs(model, edited, out.token_ids, 1.0)
    torch.testing.assert_close(torch.tensor(out.logprobs).double(), expected, atol=1e-4, rtol=0)


def test_group_prompt_is_computed_once(tiny_model: Any) -> None:
    engine = EmbeddedGenerator(tiny_model())
    prompt = list(range(3, 63))
    _run(engine, [prompt] * 8, max_new_tokens=2)
    assert engine.core.computed_tokens == 60 + 7


def test_freed_slots_are_computed_again(tiny_model: Any) -> None:
    engine = EmbeddedGenerator(tiny_model())
    _run(engine, [list(range(3, 33))], max_new_tokens=2)
    engine.free()
    _run(engine, [list(range(3, 33))], max_new_tokens=2)
    assert engine.core.reused_tokens == 0


@pytest.mark.slow
def test_sampling_follows_the_distribution(tiny_model: Any) -> None:
    """4,000 draws of one next token: every frequency within five standard errors of its
    probability."""
    model = tiny_model()
    n = 4000
    outputs = _run(
        EmbeddedGenerator(model), [[7, 8, 9]] * n, max_new_tokens=1, temperature=1.5, seed=1
    )
    with torch.no_grad():
        p = (model(input_ids=torch.tensor([[7, 8, 9]])).logits[0, -1] / 1.5).softmax(-1)
    counts = torch.bincount(torch.tensor([o.token_ids[0] for o in outputs]), minlength=97)
    error = (counts / n - p).abs() / (p * (1 - p) / n).sqrt().clamp(min=1e-4)
    assert float(error.max()) < 5


@pytest.mark.slow
def test_truncation_limits_what_is_drawn_and_keeps_reported_probabilities(tiny_model: Any) -> None:
    model = tiny_model()
    with torch.no_grad():
        p = model(input_ids=torch.tensor([[7, 8, 9]])).logits[0, -1].softmax(-1)
    order = p.argsort(descending=True)
    nucleus = int((p[order].cumsum(0) < 0.6).sum()) + 1
    for options, allowed in (({"top_k": 3}, order[:3]), ({"top_p": 0.6}, order[:nucleus])):
        outputs = _run(EmbeddedGenerator(model), [[7, 8, 9]] * 400, max_new_tokens=1, **options)
        drawn = {o.token_ids[0] for o in outputs}
        assert drawn == set(allowed.tolist())
        for out in outputs[:20]:
            assert out.logprobs[0] == pytest.approx(float(p[out.token_ids[0]].log()), abs=1e-5)


def test_min_new_tokens_holds_back_stop_ids(tiny_model: Any) -> None:
    everything = list(range(97))
    out = _run(
        EmbeddedGenerator(tiny_model()), [[5]], max_new_tokens=9, stop_ids=everything[:90], seed=2
    )[0]
    assert len(out.token_ids) < 4
    held = _run(
        EmbeddedGenerator(tiny_model()),
        [[5]],
        max_new_tokens=9,
        min_new_tokens=4,
        stop_ids=everything[:90],
        seed=2,
    )[0]
    assert all(t >= 90 for t in held.token_ids[:4]) and len(held.token_ids) > 4


def test_context_limit_ends_a_row(tiny_model: Any) -> None:
    model = tiny_model()
    assert EmbeddedGenerator(model).context_limit == 192
    outputs = _run(EmbeddedGenerator(model), [[5] * 190, [5] * 192, [5]], max_new_tokens=6)
    assert [len(o.token_ids) for o in outputs] == [2, 0, 6]
    assert [o.finish_reason for o in outputs] == ["length"] * 3


def test_version_is_stamped_on_tokens(tiny_model: Any) -> None:
    out = EmbeddedGenerator(tiny_model(), version=lambda: 7).generate(
        [GenRequest(0, [5])], GenConfig(max_new_tokens=3), stop_ids=(), seed=0
    )[0]
    assert out.versions == [7, 7, 7]


def test_bad_requests_are_named(tiny_model: Any) -> None:
    engine = EmbeddedGenerator(tiny_model())
    with pytest.raises(ValueError, match="slot 4 has no tokens"):
        engine.generate([GenRequest(4, [])], GenConfig(), stop_ids=(), seed=0)
    with pytest.raises(ValueError, match="two requests"):
        engine.generate([GenRequest(4, [1]), GenRequest(4, [2])], GenConfig(), stop_ids=(), seed=0)
    for options, name in (
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"min_new_tokens": 99}, "min_new_tokens"),
    ):
        with pytest.raises(ValueError, match=name):
            _run(engine, [[5]], **options)


def test_broken_weights_raise_and_leave_no_rows_behind(tiny_model: Any) -> None:
    model = tiny_model()
    engine = EmbeddedGenerator(model)
    good = model.get_input_embeddings().weight.detach().clone()
    model.get_input_embeddings().weight.data.fill_(float("nan"))
    with pytest.raises(FloatingPointError):
        _run(engine, [[5, 6]], max_new_tokens=2)
    model.get_input_embeddings().weight.data.copy_(good)
    out = _run(engine, [[5, 6]], max_new_tokens=2)[0]
    assert engine.core.reused_tokens == 0
    expected = full_forward_logprobs(model, [5, 6], out.token_ids, 1.0)
    torch.testing.assert_close(torch.tensor(out.logprobs).double(), expected, atol=1e-4, rtol=0)


def test_decode_attention_equals_the_library_kernel() -> None:
    g = torch.Generator().manual_seed(0)
    query = torch.randn(3, 4, 1, 8, generator=g)
    key, value = (torch.randn(3, 2, 11, 8, generator=g)[:, :, :7] for _ in range(2))
    closed = torch.rand(3, 1, 1, 7, generator=g) < 0.4
    closed[..., 0] = False
    mask = torch.zeros(3, 1, 1, 7).masked_fill(closed, float("-inf"))
    got, _ = row_decode_attention(torch.nn.Module(), query, key, value, mask, scaling=0.3)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1), attn_mask=mask, scale=0.3
    )
    torch.testing.assert_close(got, expected.transpose(1, 2), atol=1e-6, rtol=1e-5)


@pytest.mark.slow
def test_chunks_give_the_greedy_turn_of_one_call(tiny_model: Any) -> None:
    model = tiny_model("qwen3")
    prefix = [5, 9, 11, 4]
    whole = EmbeddedGenerator(model).generate(
        [GenRequest(0, prefix)], GenConfig(max_new_tokens=11, temperature=0.0), stop_ids=[], seed=0
    )[0]
    engine = EmbeddedGenerator(model)
    config = GenConfig(max_new_tokens=11, temperature=0.0, new_tokens_per_chunk=4)
    tokens: list[int] = []
    reasons = []
    while reasons[-1:] != ["length"]:
        part = engine.generate(
            [GenRequest(0, prefix + tokens, len(tokens))], config, stop_ids=[], seed=0
        )[0]
        tokens += part.token_ids
        reasons.append(part.finish_reason)
    assert tokens == whole.token_ids
    assert reasons == ["interrupted", "interrupted", "length"]


def test_a_minimum_holds_across_chunks(tiny_model: Any) -> None:
    model = tiny_model("qwen3")
    every = list(range(model.config.vocab_size - 1))
    config = GenConfig(max_new_tokens=6, min_new_tokens=3, new_tokens_per_chunk=2)
    engine = EmbeddedGenerator(model)
    first = engine.generate([GenRequest(0, [5, 6])], config, stop_ids=every, seed=1)[0]
    assert first.finish_reason == "interrupted" and len(first.token_ids) == 2
    rest = engine.generate(
        [GenRequest(0, [5, 6, *first.token_ids], 2)], config, stop_ids=every, seed=1
    )[0]
    assert len(rest.token_ids) == 2
    assert rest.token_ids[0] == model.config.vocab_size - 1


@pytest.mark.slow
def test_a_seeded_sequence_keeps_its_tokens_in_any_company_and_in_chunks(tiny_model: Any) -> None:
    prompts = [[5, 6, 7], [8, 9], [5, 6, 11, 12], [40]]
    config = GenConfig(max_new_tokens=12)
    requests = [GenRequest(i, p, seed=100 + i) for i, p in enumerate(prompts)]
    together = EmbeddedGenerator(tiny_model()).generate(requests, config, stop_ids=[2], seed=1)
    for request, expected in zip(requests, together, strict=True):
        alone = EmbeddedGenerator(tiny_model()).generate([request], config, stop_ids=[2], seed=2)[0]
        assert alone.token_ids == expected.token_ids
    first = together[0]
    rest = EmbeddedGenerator(tiny_model()).generate(
        [GenRequest(7, prompts[0] + first.token_ids[:5], 5, seed=100)], config, stop_ids=[2], seed=3
    )[0]
    assert first.token_ids[:5] + rest.token_ids == first.token_ids
    same_prompt = [GenRequest(i, prompts[0], seed=i) for i in range(8)]
    drawn = EmbeddedGenerator(tiny_model()).generate(same_prompt, config, stop_ids=[2], seed=1)
    assert len({tuple(o.token_ids) for o in drawn}) == 8


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["qwen3", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_a_bound_on_the_cache_makes_requests_wait_and_changes_no_token(
    tiny_model: Any, architecture: str
) -> None:
    """More requests than rows; longer ones than before; one that alone is more than the bound."""
    model = tiny_model(architecture)
    one = token_bytes(model.config, model.dtype) * 64
    asked = [GenRequest(slot, [5 + slot, 6, 7] * (1 + slot % 3), seed=slot) for slot in range(7)]
    long = [GenRequest(slot, [9 + slot] * 80, seed=slot) for slot in range(5)]

    def generated(engine: EmbeddedGenerator, requests: list[GenRequest]) -> list[list[int]]:
        outputs = engine.generate(requests, GenConfig(max_new_tokens=9), stop_ids=(), seed=1)
        assert [output.finish_reason for output in outputs] == ["length"] * len(requests)
        return [output.token_ids for output in outputs]

    free = EmbeddedGenerator(model)
    expected = [generated(free, requests) for requests in (asked, long)]
    for most in (3 * one, 5 * one, one // 2):
        bound = EmbeddedGenerator(model, max_bytes=lambda most=most: most)
        for requests, tokens in ((asked, expected[0]), (long, expected[1]), (asked, expected[0])):
            assert generated(bound, requests) == tokens
            assert 0 < bound.core.kv_bytes <= max(most, 2 * one), "one row there always is"


def test_the_size_of_a_cache_is_an_option_or_a_share_of_what_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine that has a GPU for itself used to take more than there is."""
    cpu = torch.device("cpu")
    second = torch.device("cuda", 1)
    for shared in (True, False):
        assert (
            cache_bytes(0.5, cpu, shared=shared)
            == cache_bytes(0.5, second, shared=shared)
            == 1 << 29
        )
    assert cache_bytes(None, cpu, shared=True) is None, "without a GPU it takes what it needs"
    of = {second: ((1000, 5000), 700, 300)}  # It asks about no other device, such as the first.
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: of[device][0])
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: of[device][1])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: of[device][2])
    assert (
        cache_bytes(None, second, shared=True) == 700
        and cache_bytes(None, second, shared=False) == 1120
    )
    assert cache_bytes(None, second, shared=True, reserved_bytes=4400) == 300, (
        "a trainer has no gradients and moments yet"
    )
    assert cache_bytes(None, second, shared=True, reserved_bytes=6000) == 0


def test_a_cache_that_finds_no_memory_says_what_to_lower(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nmore")

    engine = EmbeddedGenerator(tiny_model(), max_bytes=lambda: 1 << 30)
    request = [GenRequest(0, [5, 6, 7])]
    with monkeypatch.context() as patch:
        patch.setattr(RowCache, "reserve", short)
        with pytest.raises(
            RuntimeError, match=r"1 rows of 7 tokens: lower engine.kv_cache_gib \(1 GiB now\)"
        ):
            engine.generate(request, GenConfig(max_new_tokens=4), stop_ids=(), seed=1)
    (output,) = engine.generate(request, GenConfig(max_new_tokens=4), stop_ids=(), seed=1)
    assert len(output.token_ids) == 4, "the engine goes on"


@pytest.mark.slow
def test_a_first_step_that_finds_no_memory_says_what_to_lower() -> None:
    """A cache is allocated by the first pass, whose errors used to name nothing. The memory that is
    asked for here, a terabyte for the keys alone, is really not there."""
    heads = {
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 1 << 16,
        "hidden_size": 8,
    }
    sizes = {
        "vocab_size": 97,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "max_position_embeddings": 1 << 23,
    }
    engine = EmbeddedGenerator(LlamaForCausalLM(LlamaConfig(**heads, **sizes)))
    request = [GenRequest(0, [5, 6, 7])]
    with pytest.raises(
        RuntimeError, match=r"in a step of generation with keys and values of 1 rows of 4\d+ "
    ) as said:
        engine.generate(request, GenConfig(max_new_tokens=4_000_000), stop_ids=(), seed=1)
    assert "lower engine.kv_cache_gib (not set) or rollout.max_total_tokens" in str(said.value)
    (output,) = engine.generate(request, GenConfig(max_new_tokens=4), stop_ids=(), seed=1)
    assert len(output.token_ids) == 4, "the engine goes on"
