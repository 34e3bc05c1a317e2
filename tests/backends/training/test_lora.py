"""Adapters train in place of the weights they stand beside; everybody else sees a plain model with
them merged."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from realhf.api.calls import TRIAL_CHANGE, TRIAL_RESTORE, Probe
from realhf.api.config import GenConfig, LoraConfig, OptimizerConfig
from realhf.api.model import ForwardOutputs, GenRequest
from realhf.api.sample import MicroBatchSpec, SequenceSample
from realhf.backends.embedded import kernels
from realhf.backends.training import lora
from realhf.backends.training.torch_engine import TorchEngine
from realhf.base.installation import install_command
from realhf.dataflow.model_host import check_digests, stored_weights, write_digests
from realhf.dataflow.weight_proof import WeightTrial

# Each test process collects this file, and one runs it: peft is imported by what is run.
ABSENT = pytest.mark.skipif(
    importlib.util.find_spec("peft") is None, reason="adapters need the extra lora"
)
pytestmark = [pytest.mark.slow, ABSENT]

GROUPS = [[20, 5], [11], [30, 8, 8], [3]]
SPEC = MicroBatchSpec()


def engine_of(model: Any, *, rank: int = 4, alpha: float = 8.0, **options: Any) -> TorchEngine:
    torch.manual_seed(5)
    chosen = LoraConfig(rank, alpha, options.pop("targets", []), options.pop("dropout", 0.0))
    optimizer = OptimizerConfig(lr=2e-2)
    return TorchEngine(
        model, None, optimizer=optimizer, total_train_steps=10, lora=chosen, **options
    )


def mean_nll(outputs: ForwardOutputs, part: SequenceSample) -> tuple[Tensor, dict[str, float]]:
    logprobs, _ = outputs.logprobs()
    return -logprobs.sum() / 100, {}


def train(engine: TorchEngine, sample: SequenceSample, steps: int = 1) -> list[float]:
    losses = []
    for _ in range(steps):
        losses.append(engine.train_batch(sample, mean_nll, mb_spec=SPEC).stats["loss"])
        engine.version += 1
    return losses


def scores(engine: Any, sample: SequenceSample) -> Tensor:
    return engine.logprobs(sample, temperature=1.0, mb_spec=SPEC)


def plain_engine(weights: dict[str, Tensor], model: Any) -> TorchEngine:
    """An engine of the same architecture, without adapters, that holds these weights."""
    model.load_state_dict(weights, strict=False)
    return TorchEngine(model, None)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("architecture", ["qwen3", "llama", "qwen2", "gpt2"])
def test_only_adapters_train_and_what_is_published_is_the_model_with_them(
    tiny_model: Any, ragged_sample: Any, architecture: str
) -> None:
    """Losses fall, base weights keep their bits, and a plain model with the published weights
    scores and samples as the one with adapters does. GPT-2 keeps its weights the other way
    round."""
    sample = ragged_sample(GROUPS)
    engine = engine_of(tiny_model(architecture))
    before = {
        name: tensor.clone() for name, tensor in tiny_model(architecture).state_dict().items()
    }
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.weights().items())
    losses = train(engine, sample, 5)
    assert losses[-1] < losses[0] - 0.2
    published = engine.weights()
    assert published.keys() == plain_engine({}, tiny_model(architecture)).weights().keys()
    moved = {name for name, tensor in published.items() if not torch.equal(tensor, before[name])}
    assert engine.adapters is not None and moved == engine.adapters.names
    held = {
        name.replace(".base_layer", ""): tensor for name, tensor in engine.stored_weights().items()
    }
    assert all(torch.equal(held[name], before[name]) for name in published), (
        "the base has not moved by a bit"
    )
    other = plain_engine(published, tiny_model(architecture))
    torch.testing.assert_close(scores(engine, sample), scores(other, sample), atol=2e-4, rtol=1e-4)
    request = [GenRequest(0, [3, 4, 5], seed=1)]
    both = [
        e.generator().generate(request, GenConfig(max_new_tokens=8), stop_ids=(), seed=0)
        for e in (engine, other)
    ]
    assert both[0][0].token_ids == both[1][0].token_ids


def test_a_generator_that_was_asked_for_before_a_train_step_samples_with_its_weights(
    tiny_model: Any, ragged_sample: Any
) -> None:
    """Merged weights are given up for a train step and made again before the next token."""
    engine = engine_of(tiny_model())
    generator = engine.generator()
    config = GenConfig(max_new_tokens=4)
    request = [GenRequest(0, [3, 4, 5], seed=1)]
    first = generator.generate(request, config, stop_ids=(), seed=0)[0]
    train(engine, ragged_sample(GROUPS), 4)
    second = generator.generate(request, config, stop_ids=(), seed=0)[0]
    assert first.logprobs != second.logprobs
    found = scores(engine, _sequence([3, 4, 5, *second.token_ids]))[2:]
    torch.testing.assert_close(torch.tensor(second.logprobs), found, atol=1e-3, rtol=1e-3)


def _sequence(ids: list[int]) -> SequenceSample:
    return SequenceSample.from_tensors(
        ["s"], {"packed_input_ids": torch.tensor(ids)}, {"packed_input_ids": [[len(ids)]]}
    )


def test_the_reference_is_the_model_with_its_adapters_off(
    tiny_model: Any, ragged_sample: Any
) -> None:
    """It scores as the model did before it trained, to the bit, without weights of its own, and
    adapters train on."""
    sample = ragged_sample(GROUPS)
    engine = engine_of(tiny_model())
    reference = engine.base()
    first = scores(engine, sample)
    train(engine, sample, 3)
    trained = scores(engine, sample)
    assert torch.equal(scores(reference, sample), first) and not torch.equal(trained, first)
    assert torch.equal(scores(engine, sample), trained)
    reference.version = 7
    assert engine.version == 3
    assert train(engine, sample, 2)[-1] < float(-first.sum() / 100)
    with pytest.raises(RuntimeError, match="does not generate"):
        reference.generator()
    with pytest.raises(RuntimeError, match="no adapters"):
        TorchEngine(tiny_model(), None).base()


def test_training_goes_on_bit_identically_from_a_checkpoint_of_adapters(
    tiny_model: Any, ragged_sample: Any, tmp_path: Path
) -> None:
    """The checkpoint has adapters and moments and no base; digests are of what is restored to the
    bit."""
    sample = ragged_sample(GROUPS)
    engine = engine_of(tiny_model())
    train(engine, sample, 2)
    engine.save_checkpoint(tmp_path / "a")
    write_digests(tmp_path / "a", engine, stored_weights(engine))
    assert not (tmp_path / "a" / "model.safetensors").exists()
    expected = train(engine, sample, 2)
    torch.manual_seed(99)
    other = engine_of(tiny_model())
    other.load_checkpoint(tmp_path / "a")
    check_digests(tmp_path / "a", other)
    assert other.version == 2 and train(other, sample, 2) == expected
    assert all(
        torch.equal(a, b)
        for a, b in zip(engine.weights().values(), other.weights().values(), strict=True)
    )
    wrong = tiny_model()
    with torch.no_grad():
        wrong.model.norm.weight.mul_(1.01)
    strange = engine_of(wrong)
    strange.load_checkpoint(tmp_path / "a")
    with pytest.raises(ValueError, match=r"model\.norm\.weight was saved with digest"):
        check_digests(tmp_path / "a", strange)


def test_a_checkpoint_of_other_adapters_or_of_none_is_refused(
    tiny_model: Any, ragged_sample: Any, tmp_path: Path
) -> None:
    """Neither another rank nor another alpha nor other layers go on silently, and neither does
    training of all weights from adapters or the other way round."""
    engine = engine_of(tiny_model())
    train(engine, ragged_sample(GROUPS))
    engine.save_checkpoint(tmp_path / "adapters")
    whole = TorchEngine(tiny_model(), None, optimizer=OptimizerConfig(), total_train_steps=1)
    whole.save_checkpoint(tmp_path / "whole")
    for options, said in (
        ({"rank": 8}, "r=4, here it is 8"),
        ({"alpha": 16.0}, "lora_alpha=8, here it is 16"),
        ({"targets": ["q_proj"]}, r"target_modules=.*here it is \['q_proj'\]"),
    ):
        with pytest.raises(ValueError, match=said):
            engine_of(tiny_model(), **options).load_checkpoint(tmp_path / "adapters")
    with pytest.raises(ValueError, match="adapters trained there and all weights train here"):
        whole.load_checkpoint(tmp_path / "adapters")
    with pytest.raises(ValueError, match="all weights trained there and adapters train here"):
        engine.load_checkpoint(tmp_path / "whole")
    (tmp_path / "adapters" / "adapter" / "adapter_model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ValueError, match="not a safetensors file"):
        engine.load_checkpoint(tmp_path / "adapters")


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2"])
def test_the_export_loads_in_transformers_and_its_adapter_in_peft(
    tiny_model: Any, ragged_sample: Any, tmp_path: Path, architecture: str
) -> None:
    """The merged folder is a plain model; base and adapter folder together are the same one."""
    import peft

    sample = ragged_sample(GROUPS)
    tiny_model(architecture).save_pretrained(tmp_path / "base")
    engine = engine_of(tiny_model(architecture), path=str(tmp_path / "base"))
    train(engine, sample, 4)
    engine.export_hf(tmp_path / "out")
    ids = torch.tensor([[3, 9, 27, 81, 4]])
    alone = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    adapted = peft.PeftModel.from_pretrained(base, str(tmp_path / "out" / "adapter")).eval()
    with torch.no_grad():
        wanted = engine.model(ids).logits
        torch.testing.assert_close(alone(ids).logits, wanted, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(adapted(ids).logits, wanted, atol=1e-5, rtol=1e-5)
        with adapted.disable_adapter():
            assert float((adapted(ids).logits - wanted).abs().max()) > 0.05
    said = json.loads((tmp_path / "out" / "adapter" / "adapter_config.json").read_text())
    assert (
        said["base_model_name_or_path"] == str(tmp_path / "base") and said["inference_mode"] is True
    )
    assert said["peft_type"] == "LORA" and said["lora_alpha"] == 8


def test_targets_choose_layers_and_one_that_means_none_is_refused(tiny_model: Any) -> None:
    engine = engine_of(tiny_model(), targets=["self_attn.q_proj", "down_proj"])
    assert engine.adapters is not None
    assert engine.adapters.names == {
        f"model.layers.{i}.{name}.weight"
        for i in (0, 1)
        for name in ("self_attn.q_proj", "mlp.down_proj")
    }
    for target in ("lm_head", "proj", "embed_tokens", "c_attn"):
        with pytest.raises(
            ValueError, match=rf"called '{target}' \(there are down_proj, .*, q_proj"
        ):
            engine_of(tiny_model(), targets=["q_proj", target])


def test_the_self_test_changes_adapters_and_restores_them_to_the_bit(
    tiny_model: Any, ragged_sample: Any
) -> None:
    """The trainer scores a probe with its adapters, and so tells whether the merged weights that an
    engine got are those: the change reaches both, and so does the way back."""
    engine = engine_of(tiny_model())
    trial = WeightTrial()
    train(engine, ragged_sample(GROUPS), 2)
    tensors = engine.weights()
    first = {name: tensor.clone() for name, tensor in tensors.items()}
    own = {name: tensor.clone() for name, tensor in engine.stored_weights().items()}
    assert engine.adapters is not None
    trial.step(TRIAL_CHANGE, engine, tensors, [])
    changed = {name for name in first if not torch.equal(tensors[name], first[name])}
    # Norms that are 1 everywhere.
    same = {name for name in trial.names if len(first[name].unique()) == 1}
    assert changed == {*trial.names} - same
    assert changed & engine.adapters.names and changed - engine.adapters.names
    probe = Probe([3, 4, 5, 6, 7], [0.0, 0.0])
    other = plain_engine(tensors, tiny_model())
    expected = scores(other, _sequence(probe.token_ids))[-2:].tolist()
    before, after = trial.step(TRIAL_RESTORE, engine, tensors, [probe])
    assert before[0] == pytest.approx(expected, abs=1e-2) and before != after
    assert all(torch.equal(tensors[name], first[name]) for name in first)
    assert all(torch.equal(tensor, own[name]) for name, tensor in engine.stored_weights().items())


def test_adapters_that_do_not_reach_the_merged_weights_are_found(
    tiny_model: Any, ragged_sample: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A merge that loses adapters, or counts them wrongly, is found when the engine is made and at
    every update."""
    engine = engine_of(tiny_model())
    train(engine, ragged_sample(GROUPS), 3)
    right = lora.LoraAdapters._compute_merged
    for wrong in (
        lambda self, name: self._base[name] + 0.0,
        lambda self, name: 2 * right(self, name) - self._base[name],
    ):
        monkeypatch.setattr(lora.LoraAdapters, "_compute_merged", wrong)
        engine.adapters.drop_merged()  # type: ignore[union-attr]
        for _ in range(2):
            with pytest.raises(lora.MergeDiffers, match="merged weights are not those"):
                engine.weights()
        with pytest.raises(lora.MergeDiffers):
            engine_of(tiny_model())
    monkeypatch.undo()
    engine.adapters.drop_merged()  # type: ignore[union-attr]
    assert engine.weights()


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_hundredth_too_much_of_an_adapter_is_found_and_right_merges_of_any_size_pass(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, architecture: str
) -> None:
    """A fifth of what the adapters add could be missing. Rounding to bf16 is often larger than the
    whole adapter, and still no reason to believe a merge that is not rounded from the right sum."""
    engine = engine_of(tiny_model(architecture).to(dtype))
    adapters = engine.adapters
    right = lora.LoraAdapters._compute_merged
    assert adapters is not None
    draw = torch.Generator().manual_seed(1)
    first = next(name for name in adapters.tensors() if "lora_B" in name)

    def wrong(self: Any, name: str) -> Tensor:
        """Only one layer, and only by a hundredth."""
        base = self._base[name].float()
        layer = first.removeprefix("base_model.model.").partition(".lora_B")[0]
        return base + (1.01 if name == layer else 1.0) * (right(self, name) - base)

    for size in (1e-4, 1e-2, 1.0):
        with torch.no_grad():
            for name, tensor in adapters.tensors().items():
                if "lora_B" in name:
                    tensor.copy_(size * torch.randn(tensor.shape, generator=draw))
        adapters.drop_merged()
        assert adapters.merged_model() is not None
        monkeypatch.setattr(lora.LoraAdapters, "_compute_merged", wrong)
        adapters.drop_merged()
        if dtype == torch.float32 or size > 1e-3:
            with pytest.raises(
                lora.MergeDiffers, match=r"0.*weight is .* times as far off as rounding to"
            ):
                adapters.merged_model()
        monkeypatch.undo()


def test_bf16_weights_have_fp32_adapters_and_checkpointed_activations_change_nothing(
    tiny_model: Any, ragged_sample: Any
) -> None:
    sample = ragged_sample(GROUPS)
    narrow = engine_of(tiny_model().to(torch.bfloat16))
    assert narrow.adapters is not None and {
        t.dtype for t in narrow.adapters.tensors().values()
    } == {torch.float32}
    losses = train(narrow, sample, 4)
    assert losses[-1] < losses[0] - 0.1
    assert {tensor.dtype for tensor in narrow.weights().values()} == {torch.bfloat16}
    one = engine_of(tiny_model())
    other = engine_of(tiny_model(), gradient_checkpointing=True)
    assert train(other, sample, 3) == pytest.approx(train(one, sample, 3), abs=1e-6)


def test_dropout_is_for_train_steps_only(tiny_model: Any, ragged_sample: Any) -> None:
    sample = ragged_sample(GROUPS)
    engine = engine_of(tiny_model(), dropout=0.5)
    sure = engine_of(tiny_model())
    # The first step moves an adapter from 0, where dropping shows nothing.
    (
        train(engine, sample),
        train(sure, sample),
    )
    assert train(engine, sample) != pytest.approx(train(sure, sample), abs=1e-6)
    assert torch.equal(scores(engine, sample), scores(engine, sample))


@pytest.mark.parametrize("onednn", [False, True])
def test_what_trains_is_what_peft_computes(
    tiny_model: Any, ragged_sample: Any, monkeypatch: pytest.MonkeyPatch, onednn: bool
) -> None:
    """The layers compute their adapters with fewer passes over memory than those of peft, whose own
    they are below."""
    monkeypatch.setattr(kernels, "prefers_mkl", lambda: not onednn)
    few = engine_of(tiny_model(), dropout=0.0)
    monkeypatch.setattr(lora, "_few_pass_class", lambda kind: kind)
    usual = engine_of(tiny_model(), dropout=0.0)
    layers = [
        type(layer).__name__
        for engine in (few, usual)
        for layer in engine.adapters._layers.values()
    ]  # type: ignore[union-attr]
    assert layers.count("FewPassAdapter") == layers.count("Linear") > 0
    sample = ragged_sample(GROUPS)
    for found, wanted in zip(train(few, sample, 4), train(usual, sample, 4), strict=True):
        assert found == pytest.approx(wanted, rel=1e-5)
    for name, tensor in usual.adapters.tensors().items():  # type: ignore[union-attr]
        torch.testing.assert_close(few.adapters.tensors()[name], tensor, atol=2e-4, rtol=1e-3)  # type: ignore[union-attr]


def test_a_model_may_change_what_an_adapted_layer_returns_in_place() -> None:
    """As OLMo clamps its projections; and a layer may have nothing to multiply, as an expert that
    no token chose."""
    weight = torch.randn(5, 4)
    down = torch.randn(2, 4, requires_grad=True)
    up = torch.randn(5, 2, requires_grad=True)
    for rows in (3, 0):
        x = torch.randn(2, rows, 4, requires_grad=True)
        found = kernels.lora_linear(x, weight, None, down, up, 0.5)
        expected = torch.nn.functional.linear(x, weight + 0.5 * up @ down)
        torch.testing.assert_close(found, expected)
        of_found = torch.autograd.grad(found.clamp_(-1, 1).square().sum(), [x, down, up])
        of_expected = torch.autograd.grad(expected.clamp(-1, 1).square().sum(), [x, down, up])
        for own, theirs in zip(of_found, of_expected, strict=True):
            torch.testing.assert_close(own, theirs)


def test_without_peft_the_error_says_what_to_install(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(Exception, match=re.escape(install_command("lora"))):
        lora._peft()
