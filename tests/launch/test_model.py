"""The folder of a model is read before anything starts: its chat template and the length of its
context."""

import json
from dataclasses import asdict

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from realhf.api.chat_template import find_unread_variables
from realhf.api.config import ConfigError, GenConfig, LoraConfig, ModelConfig
from realhf.api.experiment import RolloutOptions
from realhf.backends.builtin_policy import CHAT_TEMPLATE
from realhf.backends.training.tokenizer_loading import ModelLoadError, check_context
from realhf.launch import checks
from realhf.launch.__main__ import main
from realhf.launch.build import build_experiment
from realhf.launch.checks import (
    BUILTIN_PATHS,
    BUILTIN_VARIABLES,
    adapter_problems,
    check_config,
    model_problems,
)
from realhf.launch.compose import compose_config
from realhf.rollout.interface import EnvRolloutInterface
from realhf.rollout.player import make_agent

TEMPLATE = "{{ messages }}{% if enable_thinking %}<think>{% endif %}"


def folder_of(path, template=TEMPLATE, **config):
    (path / "config.json").write_text(json.dumps({"max_position_embeddings": 4096, **config}))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return str(path)


def problems(path, total=1024, **kwargs):
    return list(model_problems("actor", ModelConfig(path=path, chat_template_kwargs=kwargs), total))


def test_the_template_must_exist_and_read_the_variables(tmp_path):
    assert problems(folder_of(tmp_path), enable_thinking=False) == []
    assert "does not read enable_thinkin" in problems(folder_of(tmp_path), enable_thinkin=False)[0]
    assert "no chat template" in problems(folder_of(tmp_path, None))[0]
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    assert problems(str(tmp_path), enable_thinking=True) == []
    for path in BUILTIN_PATHS:
        assert problems(path, show_tools=True) == []
        assert "does not read enable_thinking (it reads" in problems(path, enable_thinking=True)[0]
    assert not find_unread_variables(CHAT_TEMPLATE, BUILTIN_VARIABLES)


def test_episodes_longer_than_the_context_are_refused(tmp_path):
    assert problems(folder_of(tmp_path), total=4096) == []
    [problem] = problems(folder_of(tmp_path), total=4097)
    assert (
        problem == f"rollout.max_total_tokens=4097: the context length of {tmp_path} is 4096 tokens"
    )
    windowed = {"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"]}
    assert problems(folder_of(tmp_path, **windowed), total=4096) == [], "a window is no bound"


@pytest.mark.slow
@pytest.mark.parametrize("option", ["={enable_thinking:false}", ".enable_thinking=false"])
def test_variables_can_be_set_on_the_command_line(option):
    given = ["experiment=grpo_aws", "actor.path=owner/name", f"actor.chat_template_kwargs{option}"]
    spec = build_experiment(compose_config(given)).spec
    assert spec.models["actor"].chat_template_kwargs == {"enable_thinking": False}


@pytest.mark.slow
@pytest.mark.parametrize("experiment", ["grpo_aws", "grpo_aws_async", "sft_aws"])
def test_the_qwen3_configuration_does_not_think_anywhere(experiment):
    spec = build_experiment(compose_config([f"experiment={experiment}", "model=qwen3_0_6b"])).spec
    assert spec.models["actor"].chat_template_kwargs == {"enable_thinking": False}
    if spec.source.dataset_args is not None:
        assert spec.source.dataset_args["chat_template_kwargs"] == {"enable_thinking": False}


def test_rollout_workers_refuse_a_context_that_is_too_short(tmp_path):
    folder_of(tmp_path, model_type="llama")
    check_context(str(tmp_path), "actor", 4096)
    with pytest.raises(ModelLoadError, match="holds 4096 tokens"):
        check_context(str(tmp_path), "actor", 4097)


LAYERS = "it has layers of the type {}, whose state is not keys and values for each token"


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (
            {"layer_types": ["full_attention", "linear_attention"]},
            LAYERS.format("linear_attention"),
        ),
        ({"layers_block_type": ["attention", "mamba"]}, LAYERS.format("mamba")),
        (
            {"text_config": {"layer_types": ["chunked_attention"]}},
            LAYERS.format("chunked_attention"),
        ),
        (
            {"model_type": "mamba2", "state_size": 64},
            "it has state-space or linear layers ('mamba2' with state_size)",
        ),
        ({"model_type": "rwkv"}, "it has state-space or linear layers ('rwkv')"),
        ({"model_type": "bloom"}, "'bloom' tells positions by ALiBi"),
        (
            {"attention_types": [[["global", "local"], 12]]},
            "attention_types gives its layers a window",
        ),
        ({"attention_layers": ["global", "local"]}, "attention_layers gives its layers a window"),
        ({"keep_window_size": 2048}, "keep_window_size gives its layers a window"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "'t5' is an encoder with a decoder"),
        ({"architectures": ["BertForMaskedLM"]}, "BertForMaskedLM is not a causal language model"),
        (
            {"quantization_config": {"quant_method": "mxfp4"}},
            "its weights are quantized (mxfp4); save them in float32",
        ),
        (
            {"hidden_size": 30, "num_attention_heads": 6, "rope_theta": 1e4},
            "its attention heads are 5 wide",
        ),
    ],
)
def test_a_model_that_is_no_dense_decoder_is_refused_by_name(tmp_path, config, problem):
    [found] = problems(folder_of(tmp_path, **config))
    assert found.startswith(f"actor.path={tmp_path}: {problem}")


MIXTURES = {
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "mixtral": {"num_local_experts": 8},
    "deepseek_v3": {"n_routed_experts": 8},
    "ernie4_5_moe": {"moe_num_experts": 8},
    "gpt_oss": {"num_local_experts": 8},
}


@pytest.mark.parametrize("kind", MIXTURES)
def test_a_mixture_of_experts_is_refused_until_somebody_accepts_what_is_missing(kind, tmp_path):
    described = AutoConfig.for_model(
        kind, hidden_size=32, num_attention_heads=4, **MIXTURES[kind]
    ).to_dict()
    path = folder_of(tmp_path, **{**described, "quantization_config": None})
    [found] = problems(path)
    assert found.startswith(
        f"actor.path={path}: its tokens are routed to 8 experts, and neither is the auxiliary loss"
    )
    assert found.endswith("take a dense model, or set actor.experts=true to train it without them")
    assert [*model_problems("actor", ModelConfig(path=path, experts=True), 1024)] == []
    [served] = model_problems("critic", ModelConfig(path=path), 1024)
    assert "critic.experts=true" in served


@pytest.mark.slow
def test_only_a_mixture_can_be_accepted_as_one(tmp_path, capsys):
    layers = {"ffn_config": {"moe_num_experts": 4}}
    assert len(problems(folder_of(tmp_path, **layers))) == 1
    assert "routed to 64 experts" in problems(folder_of(tmp_path, num_experts=[1, 64]))[0]
    dense = ({"num_experts": 1}, {"n_routed_experts": None}, {"is_moe": False, "num_experts": 8})
    for config in dense:
        path = folder_of(tmp_path, model_type="llama", **config)
        assert problems(path) == []
        for name in (path, "builtin"):
            [found] = model_problems("actor", ModelConfig(path=name, experts=True), 1024)
            assert (
                found
                == f"actor.path={name}: it has no experts, so actor.experts=true does nothing; "
                f"remove it"
            )
    folder_of(tmp_path, model_type="qwen3_moe", num_experts=8)
    (tmp_path / "model.safetensors").write_bytes(b"")
    given = [
        "experiment=grpo",
        "env=countdown",
        "mode=check",
        f"actor.path={tmp_path}",
        f"fileroot={tmp_path}",
    ]
    vllm = ("actor.experts=true", "engine.name=vllm", "engine.vllm_url=http://127.0.0.1:1")
    for options, cause in (
        ((), "routed to 8 experts"),
        (vllm, "vLLM keeps a tensor for each expert"),
    ):
        assert main([*given, *options]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith("config error: actor.") and cause in line
    shapes = {
        f"model.layers.0.{name}.weight": torch.ones(2, 2)
        for name in ("attn.q_proj", "mlp.experts.0.up_proj")
    }
    save_file(shapes, tmp_path / "model.safetensors")
    lora = ModelConfig(path=str(tmp_path), lora=LoraConfig(rank=2, targets=["q_proj", "up_proj"]))
    [found] = [line for line in adapter_problems("actor", lora) if "targets" in line]
    assert "is called 'up_proj' (there are q_proj)" in found


@pytest.mark.slow
def test_mistakes_in_a_folder_end_the_check(tmp_path):
    """What is written in config.json comes from others: whatever it is, it is answered with a
    line."""
    odd = {
        "layer_types": [3, []],
        "architectures": 4,
        "rope_parameters": 7,
        "vocab_size": "x",
        "head_dim": [1],
    }
    odd |= {
        "max_position_embeddings": "many",
        "quantization_config": [1],
        "model_type": 5,
        "hidden_size": None,
    }
    texts = [
        json.dumps(odd),
        json.dumps({"text_config": 3, **odd}),
        json.dumps({"text_config": odd}),
    ]
    for text in ("", "[]", "{", *texts):
        folder_of(tmp_path)
        (tmp_path / "config.json").write_text(text)
        (tmp_path / "tokenizer.json").write_text(text)
        assert all("\n" not in problem for problem in problems(str(tmp_path)))
    (tmp_path / "tokenizer.json").unlink()
    folder_of(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    assert problems(str(tmp_path)) == [f"actor.path={tmp_path}: config.json describes no model"]
    folder_of(tmp_path, layer_types=["linear_attention"])
    with pytest.raises(ConfigError, match="layers of the type linear_attention"):
        check_config(compose_config(["experiment=grpo_aws", f"actor.path={tmp_path}"]).config)


def test_a_text_that_turns_its_tokens_otherwise_when_longer_is_no_context(tmp_path):
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 512}
    [problem] = problems(folder_of(tmp_path, rope_scaling=rope), total=513)
    assert problem.endswith(
        "is 512 tokens (its rotary embedding, longrope, changes for longer texts)"
    )
    assert problems(str(tmp_path), total=512) == []


def test_tokenizer_and_weights_must_have_the_vocabulary_of_the_model(tmp_path):
    folder = folder_of(tmp_path, vocab_size=4)
    words = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 3, "content": "<end>"}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(words))
    save_file({"model.embed_tokens.weight": torch.zeros(4, 2)}, tmp_path / "model.safetensors")
    assert problems(folder) == []
    words["added_tokens"] = [{"id": 4, "content": "<end>"}]
    (tmp_path / "tokenizer.json").write_text(json.dumps(words))
    assert problems(folder) == [
        f"actor.path={folder}: the tokenizer has the id 4, the model's vocabulary 4 tokens"
    ]
    folder_of(tmp_path, vocab_size=5)
    assert problems(folder) == [
        f"actor.path={folder}: the checkpoint has embeddings of 4 tokens, but config.json has vocab_size=5"
    ]
    for broken in (
        b"",
        b"\xff" * 9,
        (2).to_bytes(8, "little") + b"{]",
        (8).to_bytes(8, "little") + b'{"a": 1}',
    ):
        (tmp_path / "model.safetensors").write_bytes(broken)
        assert problems(folder) == []


@pytest.mark.slow
def test_the_folder_of_the_pretrained_model_is_no_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = compose_config(["experiment=grpo_aws", "model=smollm2_135m"]).config.actor.path
    assert problems(path) == [f"actor.path={path}: no such folder; run `make model` to create it"]
    (tmp_path / path).mkdir(parents=True)
    folder_of(tmp_path / path)
    assert problems(path) == []


def misfits(path, *targets, rank=8, backend="torch"):
    return list(
        adapter_problems(
            "actor",
            ModelConfig(path=path, backend=backend, lora=LoraConfig(rank, targets=[*targets])),
        )
    )


@pytest.fixture(autouse=True)
def with_peft(monkeypatch):
    monkeypatch.setattr(checks, "find_spec", lambda name: object())


def test_targets_are_looked_for_in_the_heads_of_the_files(tmp_path):
    """Names of matrices in numbered blocks, whole or their ends; embeddings, heads, norms and
    biases are none."""
    matrix = torch.zeros(2, 2)
    vector = torch.zeros(2)
    tensors = {
        "model.embed_tokens.weight": matrix,
        "lm_head.weight": matrix.clone(),
        "model.layers.0.self_attn.q_proj.weight": matrix.clone(),
        "model.layers.0.self_attn.q_proj.bias": vector,
        "model.layers.0.norm.weight": vector.clone(),
    }
    save_file(tensors, tmp_path / "model-1.safetensors")
    save_file(
        {"model.layers.1.mlp.up_proj.weight": matrix.clone()}, tmp_path / "model-2.safetensors"
    )
    path = str(tmp_path)
    assert misfits(path) == misfits(path, "q_proj", "mlp.up_proj", "layers.1.mlp.up_proj") == []
    for target in ("lm_head", "norm", "embed_tokens", "proj", "mlp.q_proj"):
        [problem] = misfits(path, "q_proj", target)
        assert problem == (
            f"actor.lora.targets: no linear layer of the blocks of {path} is called '{target}' "
            "(there are q_proj, up_proj)"
        )
    (tmp_path / "model-1.safetensors").write_bytes(b"\xff" * 100)
    (tmp_path / "model-2.safetensors").write_bytes(b"")
    assert misfits(path, "anything") == [], "the engine says it where files do not"


def test_the_layers_of_the_built_in_policy_are_known():
    assert misfits("builtin", "q_proj", "mlp.down_proj") == []
    assert (
        "(there are down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj)"
        in misfits("builtin", "fc1")[0]
    )


def test_a_backend_that_trains_all_weights_and_a_missing_package_are_refused(monkeypatch):
    assert misfits("builtin", backend="ddp") == []
    assert "backend fsdp2 cuts a model" in misfits("builtin", backend="fsdp2")[0]
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    assert "pip install -e '" in misfits("builtin")[0]
    assert misfits("builtin", rank=0) == []


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("experiment", "options", "said"),
    [
        (
            "grpo",
            ["actor.lora.alpha=8"],
            "actor.lora.alpha has no effect in experiment grpo: there are no adapters",
        ),
        (
            "grpo",
            ["actor.lora.rank=2", "actor.lora.dropout=0.1"],
            "would differ from the one that sampled",
        ),
        ("ppo", ["critic.lora.rank=2"], "a critic trains all its weights"),
        ("grpo", ["actor.lora.rank=-1"], "must be at least 0"),
        (
            "grpo",
            ["actor.lora.rank=2", "actor.compile=true"],
            "blocks with adapters are not compiled",
        ),
        (
            "grpo",
            ["actor.compile=true", "actor.backend=fsdp2", "actor.workers=[0,1]"],
            "does not compile them",
        ),
    ],
)
def test_options_without_sense_are_refused(experiment, options, said):
    with pytest.raises(ConfigError, match=said):
        composed = compose_config([f"experiment={experiment}", "env=countdown", *options])
        check_config(composed.config)
        build_experiment(composed)


@pytest.mark.slow
def test_with_adapters_the_reference_is_the_base_of_the_actor():
    """Warm starts train all weights; dropout is for supervised training."""
    options = ["env=countdown", "actor.lora.rank=2"]
    spec = build_experiment(compose_config(["experiment=grpo", *options])).spec
    assert spec.models["actor"].lora == LoraConfig(2) and spec.models["ref"].base_of == "actor"
    assert all(model.lora is None for before in spec.before for model in before.models.values())
    taught = build_experiment(
        compose_config(["experiment=sft", *options, "actor.lora.dropout=0.1"])
    ).spec
    assert taught.models["actor"].lora == LoraConfig(2, dropout=0.1)
    plain = build_experiment(compose_config(["experiment=grpo", "env=countdown"])).spec
    assert plain.models["actor"].lora is None and plain.models["ref"].base_of == ""


@pytest.mark.slow
@pytest.mark.parametrize("experiment", ["grpo_aws", "grpo_aws_async", "reinforce_aws"])
def test_a_cut_distribution_is_refused_with_the_reason(capsys, experiment):
    options = ["gen.top_p=0.9", "gen.top_k=20", "gen.min_new_tokens=2"]
    assert main([f"experiment={experiment}", "mode=check", *options]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [sum(option in line for line in lines) for option in options] == [1, 1, 1]
    assert len(lines) == 3 and all("log-probabilities" in line for line in lines)


def test_rollouts_for_training_refuse_it_too_and_evaluation_does_not():
    gen = asdict(GenConfig(top_p=0.9))
    interface = EnvRolloutInterface(environment="aws", group_size=2, sessions=2, gen=gen)
    with pytest.raises(ValueError, match=r"gen.top_p=0.9.*whole distribution"):
        interface.generate(None, None, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="training samples from the whole"):
        make_agent(
            "",
            None,
            "",
            RolloutOptions.from_args(
                {"environment": "aws", "group_size": 2, "sessions": 2, "gen": gen}
            ),
        )  # type: ignore[arg-type]
    assert GenConfig(temperature=0.3, max_new_tokens=9).truncating_options() == []


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "float8"])
def test_a_dtype_that_cannot_be_trained_is_refused(capsys, dtype):
    assert main(["experiment=grpo_aws", "mode=check", f"actor.dtype={dtype}"]) == 2
    assert f"actor.dtype={dtype}: unknown (known: float32, bfloat16)" in capsys.readouterr().err
