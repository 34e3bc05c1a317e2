"""Training, skipping, checkpoints and export of the single-process engine; what it says where
memory is short."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GPTNeoConfig, OPTConfig

from realhf.api.config import GenConfig, LRSchedule, OptimizerConfig
from realhf.api.experiment import ModelSpec
from realhf.api.model import ForwardOutputs, GenRequest, TrainResult
from realhf.api.sample import MicroBatchSpec, SequenceSample
from realhf.backends.embedded.memory import Heap, explain_pass_oom
from realhf.backends.training.optimizer import PolicyOptimizer, compute_learning_rate
from realhf.backends.training.torch_backend import (
    ModelLoadError,
    TorchBackend,
    check_chat_template,
    load_causal_lm,
)
from realhf.backends.training.torch_engine import TorchEngine
from tests.backends.conftest import VOCABULARY

GROUPS = [[20, 5], [11], [30, 8, 8], [3]]
OPTIMIZER = OptimizerConfig(
    lr=1e-2, warmup_steps_proportion=0.2, lr_scheduler_type=LRSchedule.cosine
)


def engine_of(model: Any, **options: Any) -> TorchEngine:
    return TorchEngine(model, None, optimizer=OPTIMIZER, total_train_steps=10, **options)


def mean_nll(outputs: ForwardOutputs, part: SequenceSample) -> tuple[Tensor, dict[str, float]]:
    logprobs, _ = outputs.logprobs()
    return -logprobs.sum() / 100, {
        "nll_sum": -float(logprobs.detach().sum()),
        "low_max": -float(logprobs.detach().min()),
    }


def train(
    engine: TorchEngine, sample: SequenceSample, spec: MicroBatchSpec | None = None
) -> TrainResult:
    result = engine.train_batch(sample, mean_nll, mb_spec=spec or MicroBatchSpec())
    engine.version += 1
    return result


def weights(engine: TorchEngine) -> Tensor:
    return torch.cat([p.detach().reshape(-1).float() for p in engine.model.parameters()])


def moments(engine: TorchEngine) -> dict[str, Tensor]:
    return engine._optimizer.tensors({p: name for name, p in engine.model.named_parameters()})


@pytest.mark.slow
def test_training_lowers_the_loss_and_repeats_bit_identically(
    tiny_model: Any, ragged_sample: Any
) -> None:
    first = engine_of(tiny_model())
    second = engine_of(tiny_model())
    losses = [
        [train(e, ragged_sample(GROUPS)).stats["loss"] for _ in range(6)] for e in (first, second)
    ]
    assert losses[0] == losses[1] and losses[0][-1] < losses[0][0] - 0.5
    assert torch.equal(weights(first), weights(second))


@pytest.mark.slow
def test_gradients_of_several_passes_make_the_step_of_one_batch(
    tiny_model: Any, ragged_sample: Any
) -> None:
    """Passes add up until ``step``, which takes its own options, and drops the gradients whatever
    comes of them."""
    sample = ragged_sample(GROUPS)
    constant = OptimizerConfig(lr=3e-3, warmup_steps_proportion=0.0, beta2=0.9)
    whole, parts = (
        TorchEngine(tiny_model(), None, optimizer=options) for options in (constant, OPTIMIZER)
    )
    halves = [sample.select_ids([0, 1]), sample.select_ids([2, 3])]
    for step in range(3):
        expected = whole.train_batch(sample, mean_nll, mb_spec=MicroBatchSpec())
        whole.version += 1
        norms = [
            parts.accumulate(part, mean_nll, mb_spec=MicroBatchSpec()).grad_norm for part in halves
        ]
        made = parts.step(constant)
        assert made.grad_norm == norms[-1] == pytest.approx(expected.grad_norm, rel=1e-5)
        assert made.stats["lr"] == 3e-3 and parts.version == step + 1
        torch.testing.assert_close(weights(parts), weights(whole), rtol=1e-5, atol=1e-6)
    before = weights(parts)
    parts.accumulate(sample, mean_nll, mb_spec=MicroBatchSpec())
    parts.forget_gradients()
    assert parts.step(constant).grad_norm == 0.0 and torch.equal(weights(parts), before)
    with pytest.raises(ValueError, match=r"optimizer\.offload"):
        parts.step(OptimizerConfig(offload=True))


@pytest.mark.slow
def test_a_pass_that_fails_leaves_the_gradients_of_those_before(
    tiny_model: Any, ragged_sample: Any
) -> None:
    """Of three micro-batches the second raises, or gives no number: the first had been added by
    then."""
    sample = ragged_sample(GROUPS)
    spec = MicroBatchSpec(n_mbs=3)
    constant = OptimizerConfig(lr=3e-3, warmup_steps_proportion=0.0)
    whole, engine = (TorchEngine(tiny_model(), None, optimizer=constant) for _ in range(2))
    whole.accumulate(sample, mean_nll, mb_spec=spec)
    for earlier in (False, True):
        for wrong in (math.nan, None):
            seen: list[int] = []

            def failing(*args: Any, seen: list[int] = seen, wrong: float | None = wrong) -> Any:
                seen.append(1)
                if len(seen) == 2 and wrong is None:
                    raise ValueError("of the second")
                loss, stats = mean_nll(*args)
                return loss * (wrong if wrong is not None and len(seen) == 2 else 1.0), stats

            if wrong is None:
                with pytest.raises(ValueError, match="of the second"):
                    engine.accumulate(sample, failing, mb_spec=spec)
            else:
                assert engine.accumulate(sample, failing, mb_spec=spec).skipped
            assert len(seen) >= 2
        if not earlier:
            engine.accumulate(sample, mean_nll, mb_spec=spec)
    assert engine.step(constant).grad_norm == whole.step(constant).grad_norm > 0
    assert torch.equal(weights(engine), weights(whole))


@pytest.mark.slow
def test_one_step_equals_an_independent_adamw(tiny_model: Any, ragged_sample: Any) -> None:
    engine = engine_of(tiny_model())
    sample = ragged_sample(GROUPS)
    model = tiny_model()
    result = train(engine, sample)
    start = 0
    loss = torch.zeros(())
    for length in [n for group in GROUPS for n in group]:
        ids, wanted = (sample[k][start : start + length] for k in ("packed_input_ids", "loss_mask"))
        log_p = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
        loss = loss - log_p.gather(1, ids[1:, None])[:, 0][wanted[1:]].sum() / 100
        start += length
    loss.backward()
    grads = [p.grad for p in model.parameters()]
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in grads))
    assert result.grad_norm == pytest.approx(norm, rel=1e-4)
    rate = 1e-2 * 1 / 2  # first of two warm-up steps
    assert result.stats["lr"] == pytest.approx(rate)
    with torch.no_grad():
        for p, g in zip(model.parameters(), grads, strict=True):
            g = g * min(1.0, 1.0 / norm)
            p.mul_(1 - rate * (0.05 if p.ndim > 1 else 0.0))
            p.sub_(rate * g / (g.abs() + 1e-5))
    expected = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    assert float((weights(engine) - expected).abs().median()) < 1e-6
    torch.testing.assert_close(weights(engine), expected, atol=2e-4, rtol=0)


@pytest.mark.slow
def test_microbatches_and_gradient_checkpointing_change_nothing(
    tiny_model: Any, ragged_sample: Any
) -> None:
    sample = ragged_sample(GROUPS)
    whole = train(engine_of(tiny_model()), sample)
    for engine, spec in (
        (engine_of(tiny_model()), MicroBatchSpec(n_mbs=3, max_tokens_per_mb=48)),
        (engine_of(tiny_model(), gradient_checkpointing=True), MicroBatchSpec()),
    ):
        other = train(engine, sample, spec)
        assert other.stats["loss"] == pytest.approx(whole.stats["loss"], rel=1e-5)
        assert other.stats["nll_sum"] == pytest.approx(whole.stats["nll_sum"], rel=1e-5)
        assert other.stats["low_max"] == pytest.approx(whole.stats["low_max"], rel=1e-4)
        assert other.grad_norm == pytest.approx(whole.grad_norm, rel=1e-4)


@pytest.mark.slow
def test_checkpointing_leaves_dropout_off(ragged_sample: Any) -> None:
    """OPT keeps probabilities as plain numbers of its modules, GPT-Neo reads them from the
    configuration at every pass; the configuration keeps them for the export."""
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "intermediate_size": 48,
    }
    shape |= {"bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 64}
    opt = OPTConfig(
        **shape, num_hidden_layers=2, num_attention_heads=4, ffn_dim=48, word_embed_proj_dim=32
    )
    neo = GPTNeoConfig(**shape, attention_types=[[["global"], 2]], attention_dropout=0.5)
    for config, name in ((opt, "dropout"), (neo, "attention_dropout")):
        chance = getattr(config, name)
        seen = []

        def loss(outputs: ForwardOutputs, part: SequenceSample) -> tuple[Tensor, dict[str, float]]:
            logprobs, _ = outputs.logprobs()
            seen.append(logprobs.detach().clone())  # noqa: B023
            return logprobs.sum(), {}

        engine = engine_of(AutoModelForCausalLM.from_config(config), gradient_checkpointing=True)
        scores = engine.logprobs(ragged_sample(GROUPS), temperature=1.0, mb_spec=MicroBatchSpec())
        engine.train_batch(ragged_sample(GROUPS), loss, mb_spec=MicroBatchSpec())
        torch.testing.assert_close(seen[0], scores, atol=1e-5, rtol=0)
        assert chance > 0 and getattr(engine.model.config, name) == chance


@pytest.mark.slow
@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_non_finite_updates_are_skipped(tiny_model: Any, ragged_sample: Any, where: str) -> None:
    engine = engine_of(tiny_model())
    sample = ragged_sample(GROUPS)
    train(engine, sample)
    before = weights(engine)
    state = str(moments(engine))

    def broken(outputs: ForwardOutputs, part: SequenceSample) -> tuple[Tensor, dict[str, float]]:
        logprobs, _ = outputs.logprobs()
        if where == "loss":
            return logprobs.sum() * math.nan, {}
        # Finite value, infinite slope at 0.
        return (logprobs - logprobs.detach()).abs().sqrt().sum() + logprobs.sum(), {}

    result = engine.train_batch(sample, broken, mb_spec=MicroBatchSpec(n_mbs=2))
    assert result.skipped and not math.isfinite(result.grad_norm)
    assert torch.equal(weights(engine), before) and str(moments(engine)) == state
    assert not train(engine, sample).skipped


def test_nothing_trainable_changes_nothing(tiny_model: Any, ragged_sample: Any) -> None:
    engine = engine_of(tiny_model())
    sample = ragged_sample(GROUPS)
    blank = SequenceSample.from_tensors(
        sample.ids,
        {
            "packed_input_ids": sample["packed_input_ids"],
            "loss_mask": torch.zeros_like(sample["loss_mask"]),
        },
        {k: sample.seqlens[k] for k in ("packed_input_ids", "loss_mask")},
    )
    before = weights(engine)
    result = train(engine, blank)
    assert not result.skipped and result.grad_norm == 0 and torch.equal(weights(engine), before)


@pytest.mark.slow
def test_update_frees_the_generation_rows(tiny_model: Any, ragged_sample: Any) -> None:
    engine = engine_of(tiny_model())
    request = [GenRequest(0, list(range(3, 40)))]
    engine.generator().generate(request, GenConfig(max_new_tokens=2), stop_ids=(), seed=0)
    train(engine, ragged_sample(GROUPS))
    out = engine.generator().generate(request, GenConfig(max_new_tokens=2), stop_ids=(), seed=0)[0]
    assert engine.generator().core.reused_tokens == 0 and out.versions == [1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checkpoint_continues_bit_identically(
    tiny_model: Any, ragged_sample: Any, tmp_path: Path, dtype: torch.dtype
) -> None:
    engine = engine_of(tiny_model().to(dtype))
    sample = ragged_sample(GROUPS)
    for _ in range(3):
        train(engine, sample)
    engine.save_checkpoint(tmp_path / "c")
    other = engine_of(tiny_model().to(dtype))
    other.load_checkpoint(tmp_path / "c")
    assert other.version == 3
    for _ in range(3):
        assert train(engine, sample).stats == train(other, sample).stats
    assert torch.equal(weights(engine), weights(other))
    with pytest.raises(FileNotFoundError, match="nowhere"):
        other.load_checkpoint(tmp_path / "nowhere")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "engine.pt").touch()
    with pytest.raises(
        ValueError, match=r"old was written by an earlier version.*recover_mode=disabled"
    ):
        other.load_checkpoint(tmp_path / "old")


@pytest.mark.slow
def test_the_checkpoint_of_another_model_is_refused_in_one_line(
    tiny_model: Any, ragged_sample: Any, tmp_path: Path
) -> None:
    engine = engine_of(tiny_model())
    folder = tmp_path / "c"
    train(engine, ragged_sample(GROUPS))
    engine.save_checkpoint(folder)
    for other, said in (
        (tiny_model("gpt2"), "it has weights/"),
        (tiny_model("qwen3", 192, 90), "has shape"),
    ):
        with pytest.raises(
            ValueError, match=rf"{folder} .*{said}.*actor.path.*recover_mode=disabled"
        ) as caught:
            engine_of(other).load_checkpoint(folder)
        assert "\n" not in str(caught.value)


def test_bf16_keeps_updates_too_small_for_its_own_digits(
    tiny_model: Any, ragged_sample: Any
) -> None:
    config = OptimizerConfig(lr=1e-5, weight_decay=0.0, warmup_steps_proportion=0.0)
    engine = TorchEngine(tiny_model().bfloat16(), None, optimizer=config, total_train_steps=100)
    masters = [m.clone() for m in engine._optimizer._masters]
    train(engine, ragged_sample(GROUPS))
    moved = [
        float((m - old).abs().max())
        for m, old in zip(engine._optimizer._masters, masters, strict=True)
    ]
    assert max(moved) == pytest.approx(1e-5, rel=0.2)


def test_gradients_of_narrow_weights_add_up_in_fp32() -> None:
    """A sum of ones in bf16 would stay at 256."""
    layer = torch.nn.Linear(3, 2).bfloat16()
    optimizer = PolicyOptimizer(layer, OptimizerConfig(), 1)
    for _ in range(1000):
        torch.stack([parameter.sum() for parameter in layer.parameters()]).sum().backward()
        assert all(p.grad is None for p in layer.parameters()), "it is in memory once"
    assert optimizer.gradient_norm() == pytest.approx(1000 * math.sqrt(8))
    optimizer.zero_grad()
    assert optimizer.gradient_norm() == 0


@pytest.mark.slow
def test_export_loads(tiny_model: Any, ragged_sample: Any, tmp_path: Path) -> None:
    engine = engine_of(tiny_model())
    train(engine, ragged_sample(GROUPS))
    engine.export_hf(tmp_path / "policy")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    got = torch.cat([p.detach().reshape(-1) for p in loaded.parameters()])
    assert torch.equal(got, weights(engine))


def test_frozen_engine_scores_and_refuses_to_train(tiny_model: Any, ragged_sample: Any) -> None:
    engine = TorchEngine(tiny_model(), None)
    sample = ragged_sample(GROUPS)
    logprobs = engine.logprobs(sample, temperature=1.0, mb_spec=MicroBatchSpec())
    assert not logprobs.requires_grad and not logprobs.is_inference()
    with pytest.raises(RuntimeError, match="without an optimizer"):
        train(engine, sample)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (LRSchedule.constant, [0.5, 1.0, 1.0, 1.0, 1.0]),
        (LRSchedule.linear, [0.5, 1.0, 1.0, 0.5, 0.0]),
        (LRSchedule.cosine, [0.5, 1.0, 1.0, 0.5, 0.0]),
    ],
)
def test_learning_rate(kind: LRSchedule, expected: list[float]) -> None:
    config = OptimizerConfig(lr=1.0, warmup_steps_proportion=0.2, lr_scheduler_type=kind)
    assert [compute_learning_rate(config, v, 10) for v in (0, 1, 2, 6, 10)] == pytest.approx(
        expected
    )


def test_missing_model_is_one_line(tmp_path: Path) -> None:
    for path in (str(tmp_path / "none"), "./none", "a/b/c"):
        with pytest.raises(ModelLoadError, match=r"actor.path=.*no such folder") as caught:
            TorchBackend("cpu").build(ModelSpec("actor", path), seed=1, total_train_steps=1)
        assert "\n" not in str(caught.value)


def test_not_a_causal_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(ModelLoadError, match="'vit' is not a causal language model"):
        load_causal_lm(str(tmp_path), "actor", torch.float32)


def test_chat_template_check() -> None:
    class FakeTokenizer:
        chat_template = None

    with pytest.raises(ModelLoadError, match="no chat template"):
        check_chat_template(FakeTokenizer(), "somewhere")


@pytest.mark.slow
def test_training_gets_the_memory_of_keys_and_values(tiny_model: Any, ragged_sample: Any) -> None:
    engine = engine_of(tiny_model())
    held = []
    requests = [GenRequest(slot, [5 + slot] * 40) for slot in range(6)]

    def play() -> list[list[int]]:
        outputs = engine.generator().generate(
            requests, GenConfig(max_new_tokens=5), stop_ids=(), seed=3
        )
        return [output.token_ids for output in outputs]

    def loss(outputs: ForwardOutputs, part: SequenceSample) -> tuple[Tensor, dict[str, float]]:
        held.append(engine.generator().core.kv_bytes)
        return mean_nll(outputs, part)[0] * 0, {}

    tokens = play()
    filled = engine.generator().core.kv_bytes
    assert filled > 0
    engine.train_batch(ragged_sample(GROUPS), loss, mb_spec=MicroBatchSpec(n_mbs=2))
    assert held == [0, 0]
    play()
    engine.release_generation()
    assert engine.generator().core.kv_bytes == 0, "the pass of another role wants it, too"
    engine.generator().generate(requests[:1], GenConfig(max_new_tokens=1), stop_ids=(), seed=3)
    assert engine.generator().core.kv_bytes == filled, "it comes back in one piece"
    with torch.no_grad():
        for p, old in zip(engine.model.parameters(), tiny_model().parameters(), strict=True):
            p.copy_(old)
    assert play() == tokens


CPU_SHORTAGE = (
    "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."
)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory.\nmore"),
        RuntimeError(CPU_SHORTAGE),
        MemoryError(),
    ],
    ids=repr,
)
def test_out_of_memory_names_what_where_and_which_option(
    tiny_model: Any, ragged_sample: Any, error: Exception
) -> None:
    engine = TorchEngine(tiny_model(), None, optimizer=OptimizerConfig(), total_train_steps=1)
    sample = ragged_sample(GROUPS)
    spec = MicroBatchSpec(1, 64)

    def starved(outputs: ForwardOutputs, part: Any) -> Any:
        raise error

    for call in (engine.train_batch, engine.forward):
        with pytest.raises(
            RuntimeError, match=r"micro-batch of \d+ positions in \d rows: lower mb_spec"
        ) as caught:
            call(sample, starved, mb_spec=spec)
        assert "(it is 64)" in str(caught.value) and "gradient_checkpointing" in str(caught.value)
        assert "\n" not in str(caught.value)
    result = engine.train_batch(
        sample, lambda outputs, _: (outputs.logprobs()[0].sum(), {}), mb_spec=spec
    )
    assert not result.skipped, "the engine goes on"


def test_an_update_without_memory_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Any, ragged_sample: Any
) -> None:
    """The first one makes the moments; what it said used to be torch's line alone."""
    engine = TorchEngine(tiny_model(), None, optimizer=OptimizerConfig(), total_train_steps=1)
    assert engine._optimizer is not None
    monkeypatch.setattr(engine._optimizer._adamw, "step", lambda: torch.empty(1 << 46))
    mean = lambda outputs, _: (outputs.logprobs()[0].mean(), {})
    with pytest.raises(
        RuntimeError, match=r"the update of actor, whose moments take .* GiB: set actor.lora"
    ) as said:
        engine.train_batch(ragged_sample(GROUPS), mean, mb_spec=MicroBatchSpec())
    assert "actor.backend=fsdp2" in str(said.value) and "offload" not in str(said.value), (
        "which is for a GPU"
    )


@pytest.mark.parametrize(
    "said", ["CUDA error: out of memory\nmore", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when"]
)
def test_what_a_gpu_says_outside_of_the_pool_is_a_shortage(said: str) -> None:
    """The libraries of a GPU allocate by themselves, and their errors are of no type of their
    own."""
    with (
        pytest.raises(RuntimeError, match=r"lower mb_spec.max_tokens_per_mb .*\(CUDA error"),
        explain_pass_oom(1, 1, 9),
    ):
        raise RuntimeError(said)


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match=r"^shapes differ$"), explain_pass_oom(1, 1, None):
        raise RuntimeError("shapes differ")
    with pytest.raises(RuntimeError, match="which means 4096"), explain_pass_oom(1, 1, None):
        raise MemoryError


def test_memory_of_passes_is_kept_until_holes_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has more than the largest pass left it with gives back what is free, and
    begins anew."""
    passes = [
        (50, 100),
        (40, 90),
        (50, 105),
        (60, 200),
        (50, 205),
        (60, 250),
        (50, 250),
        (50, 255),
        (51, 400),
    ]
    heap, mib, trimmed = Heap(), iter([held for _, held in passes]), list[int]()
    monkeypatch.setattr(heap, "_trim", trimmed.append)
    monkeypatch.setattr(heap, "_use", lambda: SimpleNamespace(fordblks=1 << 30))
    monkeypatch.setattr(
        psutil.Process, "memory_info", lambda self: SimpleNamespace(rss=next(mib) << 20)
    )
    found = []
    for positions, _ in passes:
        heap.trim_after_pass(positions)
        found.append(len(trimmed))
    assert found == [0, 0, 0, 0, 0, 1, 1, 1, 1], (
        "a larger pass needs more, and after giving back each is the largest"
    )
    monkeypatch.setattr(heap, "_use", lambda: SimpleNamespace(fordblks=1 << 20))
    heap.trim()
    assert len(trimmed) == 1, "what is small may stay"


def test_freed_memory_goes_back_to_the_system() -> None:
    """Freed blocks below one that stays in use remain in the heap until they are given back."""
    heap = Heap()
    library = ctypes.CDLL(None)
    own = psutil.Process()
    if heap._use is None or heap._trim is None:
        pytest.skip("this C library gives nothing back")
    library.malloc.restype = ctypes.c_void_p
    library.malloc.argtypes = [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    blocks = [library.malloc(100_000) for _ in range(800)]
    pin = library.malloc(100_000)
    for block in blocks:
        ctypes.memset(block, 1, 100_000)
        library.free(block)
    before = own.memory_info().rss
    heap.trim()
    assert before - own.memory_info().rss > 60_000_000
    library.free(pin)


def test_without_such_a_library_nothing_happens() -> None:
    heap = Heap()
    heap._trim = None
    heap.trim_after_pass(1)
    heap.trim()
