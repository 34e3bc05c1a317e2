"""A decoder with a value head in the engine: built, trained, saved, loaded, exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from realhf.api.config import OptimizerConfig
from realhf.api.experiment import ModelSpec
from realhf.api.model import ForwardOutputs
from realhf.api.sample import MicroBatchSpec, SequenceSample
from realhf.backends.training.tokenizer_loading import ModelLoadError
from realhf.backends.training.torch_backend import TorchBackend
from realhf.backends.training.torch_engine import TorchEngine
from realhf.backends.training.value_head import HEAD_FILE, ValueModel

SPEC = MicroBatchSpec()
GROUPS = [[9, 5], [7]]


def values(engine: TorchEngine, sample: SequenceSample) -> Tensor:
    return engine.forward(sample, lambda outputs, _: outputs.values(), mb_spec=SPEC)


def towards_three(outputs: ForwardOutputs, part: SequenceSample) -> tuple[Tensor, dict[str, float]]:
    return (outputs.values()[outputs.place] - 3).square().mean(), {}


def learn(engine: TorchEngine, sample: SequenceSample, steps: int) -> list[float]:
    return [engine.train_batch(sample, towards_three, mb_spec=SPEC).stats["loss"] for _ in range(steps)]


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Any) -> Path:
    """A language model's folder, as the actor's first weights are."""
    from tokenizers import Tokenizer, models

    tiny_model("llama").save_pretrained(tmp_path / "policy")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE())).save_pretrained(tmp_path / "policy")
    return tmp_path / "policy"


def critic(path: Path, dtype: str = "float32", **more: Any) -> TorchEngine:
    spec = ModelSpec(
        "critic", str(path), trainable=True, head="value", dtype=dtype, optimizer=OptimizerConfig(lr=3e-2), **more
    )
    return TorchBackend("cpu").build(spec, seed=1, total_train_steps=20)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_starts_at_nothing_and_learns(folder: Path, ragged_sample: Any, dtype: str) -> None:
    """The head is at 0, the body is that of the language model, and both learn."""
    engine, sample = critic(folder, dtype, gradient_checkpointing=dtype == "bfloat16"), ragged_sample(GROUPS)
    assert not bool(values(engine, sample).any())
    body = dict(AutoModelForCausalLM.from_pretrained(folder).get_decoder().named_parameters())
    own = dict(engine.model.get_decoder().named_parameters())
    assert body.keys() == own.keys() and all(
        torch.equal(own[name].float(), body[name].to(own[name].dtype).float()) for name in body
    )
    losses = learn(engine, sample, 6)
    assert losses[-1] < losses[0] / 2
    assert all(not torch.equal(own[name].float(), body[name].to(own[name].dtype).float()) for name in ("norm.weight",))
    assert values(engine, sample).dtype == torch.float32


def test_it_goes_on_from_a_checkpoint_to_the_bit(folder: Path, ragged_sample: Any, tmp_path: Path) -> None:
    engine, sample = critic(folder), ragged_sample(GROUPS)
    learn(engine, sample, 2)
    engine.save_checkpoint(tmp_path / "checkpoint")
    expected = learn(engine, sample, 2)
    resumed = critic(folder)
    resumed.load_checkpoint(tmp_path / "checkpoint")
    assert learn(resumed, sample, 2) == expected
    assert torch.equal(values(resumed, sample), values(engine, sample))


def test_what_was_exported_is_a_critic_to_start_from(folder: Path, ragged_sample: Any, tmp_path: Path) -> None:
    """Body and head; a head that fits no such body is refused by name."""
    engine, sample = critic(folder), ragged_sample(GROUPS)
    learn(engine, sample, 2)
    engine.export_hf(tmp_path / "critic")
    again = critic(tmp_path / "critic")
    assert torch.equal(values(again, sample), values(engine, sample)) and bool(values(again, sample).any())
    for wrong in ({"weight": torch.zeros(1, 7), "bias": torch.zeros(1)}, {"weight": torch.zeros(1, 32)}):
        save_file(wrong, tmp_path / "critic" / HEAD_FILE)
        with pytest.raises(ModelLoadError, match=r"critic.path=.*critic: its value head does not load"):
            critic(tmp_path / "critic")


@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", "gpt2"])
def test_the_value_is_a_product_with_the_last_hidden_state(
    tiny_model: Any, ragged_sample: Any, architecture: str
) -> None:
    """Of the state in which each token was sampled: the position before it."""
    model, sample = ValueModel(tiny_model(architecture)), ragged_sample(GROUPS)
    with torch.no_grad():
        model.value_head.weight.normal_(generator=torch.Generator().manual_seed(2))
        model.value_head.bias.fill_(0.5)
    engine, start, shift = TorchEngine(model, None), 0, 0
    found = values(engine, sample)
    for length in [n for group in GROUPS for n in group]:
        ids, wanted = (sample[key][start : start + length] for key in ("packed_input_ids", "loss_mask"))
        with torch.no_grad():
            hidden = model.get_decoder()(input_ids=ids[None]).last_hidden_state[0, :-1]
        expected = hidden.double() @ model.value_head.weight[0].double() + 0.5
        expected = torch.where(wanted[1:].bool(), expected, 0.0).float()
        torch.testing.assert_close(found[shift : shift + length - 1], expected, atol=1e-4, rtol=1e-4)
        start, shift = start + length, shift + length - 1


def test_it_gives_no_log_probabilities_and_does_not_generate(folder: Path, ragged_sample: Any) -> None:
    engine = critic(folder)
    with pytest.raises(ValueError, match="value head"):
        engine.logprobs(ragged_sample(GROUPS), temperature=1.0, mb_spec=SPEC)
    with pytest.raises(ValueError, match="value head"):
        engine.generator()
    with pytest.raises(ValueError, match=r"critic.head 'score' is not one"):
        TorchBackend("cpu").build(ModelSpec("critic", str(folder), head="score"), seed=1, total_train_steps=1)
