"""The folder of a model is read before anything starts: its chat template and the length of its context."""

import json

import pytest
import torch
from safetensors.torch import save_file

from realhf.api.chat_template import unread_variables
from realhf.api.config import ConfigError, ModelConfig
from realhf.backends.builtin_policy import CHAT_TEMPLATE
from realhf.backends.training.tokenizer_loading import ModelLoadError, check_context
from realhf.launch import checks
from realhf.launch.build import build_experiment
from realhf.launch.checks import BUILTIN_PATHS, BUILTIN_VARIABLES, check_config, model_problems
from realhf.launch.compose import compose_config

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
    assert not unread_variables(CHAT_TEMPLATE, BUILTIN_VARIABLES)


def test_episodes_longer_than_the_context_are_refused(tmp_path):
    assert problems(folder_of(tmp_path), total=4096) == []
    [problem] = problems(folder_of(tmp_path), total=4097)
    assert problem == f"rollout.max_total_tokens=4097: the context of {tmp_path} holds 4096 tokens"
    windowed = {"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"]}
    assert problems(folder_of(tmp_path, **windowed), total=4096) == [], "a window is no bound"


@pytest.mark.parametrize("option", ["={enable_thinking:false}", ".enable_thinking=false"])
def test_variables_can_be_set_on_the_command_line(option):
    given = ["experiment=grpo_aws", "actor.path=owner/name", f"actor.chat_template_kwargs{option}"]
    spec = build_experiment(compose_config(given)).spec
    assert spec.models["actor"].chat_template_kwargs == {"enable_thinking": False}


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
        ({"layer_types": ["full_attention", "linear_attention"]}, LAYERS.format("linear_attention")),
        ({"layers_block_type": ["attention", "mamba"]}, LAYERS.format("mamba")),
        ({"text_config": {"layer_types": ["chunked_attention"]}}, LAYERS.format("chunked_attention")),
        ({"model_type": "mamba2", "state_size": 64}, "it has state-space or linear layers ('mamba2' with state_size)"),
        ({"model_type": "rwkv"}, "it has state-space or linear layers ('rwkv')"),
        ({"model_type": "bloom"}, "'bloom' tells positions by ALiBi"),
        ({"attention_types": [[["global", "local"], 12]]}, "attention_types gives its layers a window"),
        ({"attention_layers": ["global", "local"]}, "attention_layers gives its layers a window"),
        ({"keep_window_size": 2048}, "keep_window_size gives its layers a window"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "'t5' is an encoder with a decoder"),
        ({"architectures": ["BertForMaskedLM"]}, "BertForMaskedLM is not a causal language model"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "its weights are quantized (mxfp4); save them in float32"),
        ({"hidden_size": 30, "num_attention_heads": 6, "rope_theta": 1e4}, "its attention heads are 5 wide"),
    ],
)
def test_a_model_that_is_no_dense_decoder_is_refused_by_name(tmp_path, config, problem):
    [found] = problems(folder_of(tmp_path, **config))
    assert found.startswith(f"actor.path={tmp_path}: {problem}")


def test_mistakes_in_a_folder_end_the_check(tmp_path):
    """What is written in config.json comes from others: whatever it is, it is answered with a line."""
    odd = {"layer_types": [3, []], "architectures": 4, "rope_parameters": 7, "vocab_size": "x", "head_dim": [1]}
    odd |= {"max_position_embeddings": "many", "quantization_config": [1], "model_type": 5, "hidden_size": None}
    texts = [json.dumps(odd), json.dumps({"text_config": 3, **odd}), json.dumps({"text_config": odd})]
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
    assert problem.endswith("holds 512 tokens (its rotary embedding, longrope, changes for longer texts)")
    assert problems(str(tmp_path), total=512) == []


def test_tokenizer_and_weights_must_have_the_vocabulary_of_the_model(tmp_path):
    folder = folder_of(tmp_path, vocab_size=4)
    words = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 3, "content": "<end>"}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(words))
    save_file({"model.embed_tokens.weight": torch.zeros(4, 2)}, tmp_path / "model.safetensors")
    assert problems(folder) == []
    words["added_tokens"] = [{"id": 4, "content": "<end>"}]
    (tmp_path / "tokenizer.json").write_text(json.dumps(words))
    assert problems(folder) == [f"actor.path={folder}: the tokenizer has the id 4, the model's vocabulary 4 tokens"]
    folder_of(tmp_path, vocab_size=5)
    assert problems(folder) == [f"actor.path={folder}: the checkpoint embeds 4 tokens, config.json says vocab_size=5"]
    for broken in (b"", b"\xff" * 9, (2).to_bytes(8, "little") + b"{]", (8).to_bytes(8, "little") + b'{"a": 1}'):
        (tmp_path / "model.safetensors").write_bytes(broken)
        assert problems(folder) == []


def test_the_folder_of_the_pretrained_model_is_no_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = compose_config(["experiment=grpo_aws", "model=smollm2_135m"]).config.actor.path
    assert problems(path) == [f"actor.path={path}: no such folder; `make model` makes it"]
    (tmp_path / path).mkdir(parents=True)
    folder_of(tmp_path / path)
    assert problems(path) == []


@pytest.fixture
def with_gpu(monkeypatch, tmp_path):
    """A machine that shows a GPU, and the folder of its commands."""
    monkeypatch.setattr(checks, "visible_gpus", lambda: ("0",))
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


@pytest.mark.slow
def test_vllm_samples_the_tokens_of_a_pretrained_model_on_a_gpu(with_gpu):
    """Where the options name no engine. The embedded one is slow there, which is said where vLLM cannot be taken."""
    given = ["experiment=grpo_aws", "actor.path=owner/name"]
    composed = compose_config(given)
    assert composed.config.engine.name == "embedded"
    (warning,) = composed.warnings
    assert "copies all keys and values" in warning and "which is not here (engine.vllm_executable=vllm)" in warning
    (with_gpu / "vllm").touch(mode=0o755)
    composed = compose_config([*given, "engine.gpu_memory_utilization=0.4"])
    check_config(composed.config)
    assert (composed.config.engine.name, composed.config.rpc.connect_timeout_s) == ("vllm", 600.0)
    assert (
        not composed.warnings
        and compose_config([*given, "rpc.connect_timeout_s=30"]).config.rpc.connect_timeout_s == 30
    )
    assert build_experiment(composed).spec.models["actor"].engine.name == "vllm"
    for own in ("engine.name=embedded", "engine.kv_cache_gib=2"):
        composed = compose_config([*given, own])
        assert composed.config.engine.name == "embedded" and not composed.warnings
    assert compose_config(["experiment=grpo_aws"]).config.engine.name == "embedded", "the built-in policy is small"
    composed = compose_config([*given, "actor.workers=[0,1]", "actor.backend=ddp", "actor.parallel.dp=2"])
    assert composed.config.engine.name == "embedded" and "in asynchronous experiments only" in composed.warnings[0]
    streamed = build_experiment(compose_config(["experiment=grpo_stream_http", "actor.path=owner/name"])).spec
    assert streamed.models["actor"].engine.name == "embedded", "nothing is sampled"


def test_without_a_gpu_the_embedded_engine_samples(with_gpu, monkeypatch):
    monkeypatch.setattr(checks, "visible_gpus", lambda: ())
    (with_gpu / "vllm").touch(mode=0o755)
    composed = compose_config(["experiment=grpo_aws", "actor.path=owner/name"])
    assert composed.config.engine.name == "embedded" and not composed.warnings
