"""What a folder must be before it trains: whole, dense, without a look at later tokens; and its
value head."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    BertLMHeadModel,
    MambaConfig,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
)

from realhf.api.config import AsyncConfig, EngineConfig, OptimizerConfig
from realhf.api.experiment import ModelSpec
from realhf.api.model import ForwardOutputs
from realhf.api.sample import MicroBatchSpec, SequenceSample
from realhf.api.trace import Tracer
from realhf.backends.parallel.fsdp import build_without_memory
from realhf.backends.streaming_engines import make_streaming_generator
from realhf.backends.training.torch_backend import (
    VALUE_HEAD_FILE,
    ModelLoadError,
    TorchBackend,
    ValueModel,
    load_causal_lm,
)
from realhf.backends.training.torch_engine import TorchEngine


@pytest.fixture
def folder(tiny_model: Any, tmp_path: Path) -> Path:
    tiny_model("llama").save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_a_checkpoint_that_lacks_tensors_is_refused(folder: Path) -> None:
    """They were filled with random numbers, and training went on as if they had been learnt."""
    assert load_causal_lm(str(folder), "actor", torch.float32).dtype is torch.float32
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ModelLoadError, match=r"actor.path=.* lacks model.layers.1.mlp.up_proj.weight, and 0"
    ):
        load_causal_lm(str(folder), "actor", torch.float32)


def test_a_checkpoint_of_another_architecture_or_vocabulary_is_refused(folder: Path) -> None:
    config = AutoConfig.from_pretrained(folder)
    config.vocab_size += 1
    config.save_pretrained(folder)
    with pytest.raises(
        ModelLoadError,
        match=r"lm_head.weight of the checkpoint has the shape \(97, 32\), in Llama.* 1 ",
    ):
        load_causal_lm(str(folder), "actor", torch.float32)
    text = (folder / "config.json").read_text().replace("LlamaForCausalLM", "GPT2LMHeadModel")
    (folder / "config.json").write_text(
        text.replace('"model_type": "llama"', '"model_type": "gpt2"')
    )
    with pytest.raises(
        ModelLoadError, match=r"the checkpoint of a GPT2LMHeadModel lacks .*, and \d+ others"
    ):
        load_causal_lm(str(folder), "actor", torch.float32)


@pytest.mark.slow
def test_a_model_that_finds_no_memory_is_named_with_what_to_set(folder: Path) -> None:
    """Its embedding of 32 terabytes is really not there."""
    config = AutoConfig.from_pretrained(folder)
    config.vocab_size = 1 << 38
    config.save_pretrained(folder)
    spec = ModelSpec("actor", str(folder), trainable=True, optimizer=OptimizerConfig())
    with pytest.raises(
        RuntimeError, match=rf"^out of memory for actor.path={folder} on the device cpu: "
    ) as said:
        TorchBackend("cpu").build(spec, seed=1, total_train_steps=1)
    assert "actor.dtype=bfloat16 (it is float32), or actor.backend=fsdp2" in str(said.value)


def test_a_checkpoint_whose_logits_are_no_numbers_is_refused(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ModelLoadError, match=r"actor.path=.*: its logits are not finite; the checkpoint is damaged"
    ):
        load_causal_lm(str(folder), "actor", torch.float32)


def test_what_is_no_dense_decoder_is_refused(tmp_path: Path) -> None:
    MambaConfig(vocab_size=97, hidden_size=8, num_hidden_layers=1).save_pretrained(
        tmp_path / "mamba"
    )
    with pytest.raises(ModelLoadError, match="state-space or linear layers"):
        load_causal_lm(str(tmp_path / "mamba"), "actor", torch.float32)
    shape = {"vocab_size": 97, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    BertLMHeadModel(BertConfig(**shape, intermediate_size=8)).save_pretrained(tmp_path / "bert")
    with pytest.raises(
        ModelLoadError, match="BertLMHeadModel looks at later tokens, so it cannot generate"
    ):
        load_causal_lm(str(tmp_path / "bert"), "actor", torch.float32)


def test_a_mixture_of_experts_is_loaded_for_training_only_where_it_was_accepted(
    tmp_path: Path,
) -> None:
    """A hub id is looked at when it is loaded: by the trainer, and by each engine that samples."""
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "head_dim": 4,
    }
    shape = {"vocab_size": 97, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Qwen3MoeConfig(
        **shape, **experts, num_key_value_heads=2, eos_token_id=2, bos_token_id=1
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    spec = ModelSpec("actor", str(tmp_path))
    options: Any = {
        "log": tmp_path / "log",
        "timeout_s": 1.0,
        "tracer": Tracer(),
        "on_death": print,
    }
    with pytest.raises(ModelLoadError, match=r"routed to 4 experts.*set actor\.experts=true"):
        TorchBackend("cpu").build(spec, seed=0, total_train_steps=1)
    with pytest.raises(ModelLoadError, match="routed to 4 experts"):
        build_without_memory(
            str(tmp_path), "actor", torch.device("cpu"), torch.float32, experts=False
        )
    with (
        pytest.raises(ModelLoadError, match="routed to 4 experts"),
        make_streaming_generator(spec, AsyncConfig(), **options),
    ):
        pass
    served = replace(spec, experts=True, engine=EngineConfig(name="vllm"))
    with pytest.raises(
        ModelLoadError, match="vLLM cannot be updated with the weights of its 4 experts"
    ):
        make_streaming_generator(served, AsyncConfig(), **options).__enter__()
    assert (
        load_causal_lm(str(tmp_path), "actor", torch.float32, experts=True).config.num_experts == 4
    )


@pytest.mark.slow
def test_only_a_critic_may_lack_the_projection_to_the_vocabulary(
    tiny_model: Any, tmp_path: Path
) -> None:
    tiny_model("llama").get_decoder().save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=r"lacks lm_head.weight, and 0 others"):
        load_causal_lm(str(tmp_path), "actor", torch.float32)
    model = load_causal_lm(str(tmp_path), "critic", torch.float32, with_head=False)
    assert torch.equal(model.model.norm.weight, tiny_model("llama").model.norm.weight)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"lacks model.norm.weight, and 0 others"):
        load_causal_lm(str(tmp_path), "critic", torch.float32, with_head=False)


SPEC = MicroBatchSpec()
GROUPS = [[9, 5], [7]]


def values(engine: TorchEngine, sample: SequenceSample) -> Tensor:
    return engine.forward(sample, lambda outputs, _: outputs.values(), mb_spec=SPEC)


def towards_three(outputs: ForwardOutputs, part: SequenceSample) -> tuple[Tensor, dict[str, float]]:
    return (outputs.values()[outputs.place] - 3).square().mean(), {}


def learn(engine: TorchEngine, sample: SequenceSample, steps: int) -> list[float]:
    return [
        engine.train_batch(sample, towards_three, mb_spec=SPEC).stats["loss"] for _ in range(steps)
    ]


@pytest.fixture
def actor_folder(tmp_path: Path, tiny_model: Any) -> Path:
    """A language model's folder, as the actor's first weights are."""
    from tokenizers import Tokenizer, models

    tiny_model("llama").save_pretrained(tmp_path / "policy")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE())).save_pretrained(
        tmp_path / "policy"
    )
    return tmp_path / "policy"


def critic(path: Path, dtype: str = "float32", **more: Any) -> TorchEngine:
    spec = ModelSpec(
        "critic",
        str(path),
        trainable=True,
        head="value",
        dtype=dtype,
        optimizer=OptimizerConfig(lr=3e-2),
        **more,
    )
    return TorchBackend("cpu").build(spec, seed=1, total_train_steps=20)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_starts_at_nothing_and_learns(
    actor_folder: Path, ragged_sample: Any, dtype: str
) -> None:
    """The head is at 0, the body is that of the language model, and both learn."""
    engine = critic(actor_folder, dtype, gradient_checkpointing=dtype == "bfloat16")
    sample = ragged_sample(GROUPS)
    assert not bool(values(engine, sample).any())
    body = dict(AutoModelForCausalLM.from_pretrained(actor_folder).get_decoder().named_parameters())
    own = dict(engine.model.get_decoder().named_parameters())
    assert body.keys() == own.keys() and all(
        torch.equal(own[name].float(), body[name].to(own[name].dtype).float()) for name in body
    )
    losses = learn(engine, sample, 6)
    assert losses[-1] < losses[0] / 2
    assert all(
        not torch.equal(own[name].float(), body[name].to(own[name].dtype).float())
        for name in ("norm.weight",)
    )
    assert values(engine, sample).dtype == torch.float32


@pytest.mark.slow
def test_what_was_exported_is_a_critic_to_start_from(
    actor_folder: Path, ragged_sample: Any, tmp_path: Path
) -> None:
    """Body and head; a head that fits no such body is refused by name."""
    engine = critic(actor_folder)
    sample = ragged_sample(GROUPS)
    learn(engine, sample, 2)
    engine.export_hf(tmp_path / "critic")
    again = critic(tmp_path / "critic")
    assert torch.equal(values(again, sample), values(engine, sample)) and bool(
        values(again, sample).any()
    )
    for wrong in (
        {"weight": torch.zeros(1, 7), "bias": torch.zeros(1)},
        {"weight": torch.zeros(1, 32)},
    ):
        save_file(wrong, tmp_path / "critic" / VALUE_HEAD_FILE)
        with pytest.raises(
            ModelLoadError, match=r"critic.path=.*critic: its value head does not load"
        ):
            critic(tmp_path / "critic")


@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", "gpt2"])
def test_the_value_is_a_product_with_the_last_hidden_state(
    tiny_model: Any, ragged_sample: Any, architecture: str
) -> None:
    """Of the state in which each token was sampled: the position before it."""
    model = ValueModel(tiny_model(architecture))
    sample = ragged_sample(GROUPS)
    with torch.no_grad():
        model.value_head.weight.normal_(generator=torch.Generator().manual_seed(2))
        model.value_head.bias.fill_(0.5)
    engine = TorchEngine(model, None)
    start = 0
    shift = 0
    found = values(engine, sample)
    for length in [n for group in GROUPS for n in group]:
        ids, wanted = (
            sample[key][start : start + length] for key in ("packed_input_ids", "loss_mask")
        )
        with torch.no_grad():
            hidden = model.get_decoder()(input_ids=ids[None]).last_hidden_state[0, :-1]
        expected = hidden.double() @ model.value_head.weight[0].double() + 0.5
        expected = torch.where(wanted[1:].bool(), expected, 0.0).float()
        torch.testing.assert_close(
            found[shift : shift + length - 1], expected, atol=1e-4, rtol=1e-4
        )
        start = start + length
        shift = shift + length - 1


def test_a_head_of_another_kind_is_refused(actor_folder: Path) -> None:
    with pytest.raises(ValueError, match=r"critic.head 'score' is not one"):
        TorchBackend("cpu").build(
            ModelSpec("critic", str(actor_folder), head="score"), seed=1, total_train_steps=1
        )
