"""What speaks against adapters is said before any process starts: no package, backend, layer, or sense."""

import pytest
import torch
from safetensors.torch import save_file

from realhf.api.config import ConfigError, LoraConfig, ModelConfig
from realhf.launch import checks
from realhf.launch.build import build_experiment
from realhf.launch.checks import adapter_problems, check_config
from realhf.launch.compose import compose_config


def problems(path, *targets, rank=8, backend="torch"):
    return list(
        adapter_problems("actor", ModelConfig(path=path, backend=backend, lora=LoraConfig(rank, targets=[*targets])))
    )


@pytest.fixture(autouse=True)
def with_peft(monkeypatch):
    monkeypatch.setattr(checks, "find_spec", lambda name: object())


def test_targets_are_looked_for_in_the_heads_of_the_files(tmp_path):
    """Names of matrices in numbered blocks, whole or their ends; embeddings, heads, norms and biases are none."""
    matrix, vector = torch.zeros(2, 2), torch.zeros(2)
    tensors = {
        "model.embed_tokens.weight": matrix,
        "lm_head.weight": matrix.clone(),
        "model.layers.0.self_attn.q_proj.weight": matrix.clone(),
        "model.layers.0.self_attn.q_proj.bias": vector,
        "model.layers.0.norm.weight": vector.clone(),
    }
    save_file(tensors, tmp_path / "model-1.safetensors")
    save_file({"model.layers.1.mlp.up_proj.weight": matrix.clone()}, tmp_path / "model-2.safetensors")
    path = str(tmp_path)
    assert problems(path) == problems(path, "q_proj", "mlp.up_proj", "layers.1.mlp.up_proj") == []
    for target in ("lm_head", "norm", "embed_tokens", "proj", "mlp.q_proj"):
        [problem] = problems(path, "q_proj", target)
        assert problem == (
            f"actor.lora.targets: no linear layer of the blocks of {path} is called '{target}' "
            "(there are q_proj, up_proj)"
        )
    (tmp_path / "model-1.safetensors").write_bytes(b"\xff" * 100)
    (tmp_path / "model-2.safetensors").write_bytes(b"")
    assert problems(path, "anything") == [], "the engine says it where files do not"


def test_the_layers_of_the_built_in_policy_are_known():
    assert problems("builtin", "q_proj", "mlp.down_proj") == []
    assert "(there are down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj)" in problems("builtin", "fc1")[0]


def test_a_backend_that_trains_all_weights_and_a_missing_package_are_refused(monkeypatch):
    assert problems("builtin", backend="ddp") == []
    assert "backend fsdp2 cuts a model" in problems("builtin", backend="fsdp2")[0]
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    assert "pip install -e '" in problems("builtin")[0]
    assert problems("builtin", rank=0) == []


@pytest.mark.parametrize(
    ("experiment", "options", "said"),
    [
        ("grpo", ["actor.lora.alpha=8"], "actor.lora.alpha has no effect in experiment grpo: there are no adapters"),
        ("grpo", ["actor.lora.rank=2", "actor.lora.dropout=0.1"], "must be the one that sampled"),
        ("ppo", ["critic.lora.rank=2"], "a critic trains all its weights"),
        ("grpo", ["actor.lora.rank=-1"], "must be at least 0"),
        ("grpo", ["actor.lora.rank=2", "actor.compile=true"], "blocks with adapters are not compiled"),
        ("grpo", ["actor.compile=true", "actor.backend=fsdp2", "actor.workers=[0,1]"], "does not compile them"),
    ],
)
def test_options_without_sense_are_refused(experiment, options, said):
    with pytest.raises(ConfigError, match=said):
        composed = compose_config([f"experiment={experiment}", "env=countdown", *options])
        check_config(composed.config)
        build_experiment(composed)


def test_with_adapters_the_reference_is_the_base_of_the_actor():
    """Warm starts train all weights; dropout is for supervised training."""
    options = ["env=countdown", "actor.lora.rank=2"]
    spec = build_experiment(compose_config(["experiment=grpo", *options])).spec
    assert spec.models["actor"].lora == LoraConfig(2) and spec.models["ref"].base_of == "actor"
    assert all(model.lora is None for before in spec.before for model in before.models.values())
    taught = build_experiment(compose_config(["experiment=sft", *options, "actor.lora.dropout=0.1"])).spec
    assert taught.models["actor"].lora == LoraConfig(2, dropout=0.1)
    plain = build_experiment(compose_config(["experiment=grpo", "env=countdown"])).spec
    assert plain.models["actor"].lora is None and plain.models["ref"].base_of == ""
