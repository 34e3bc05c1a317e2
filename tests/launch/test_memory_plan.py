"""What the processes of a run will keep in memory is told before any of them starts."""

import json

import psutil
import pytest

from realhf.launch import allocation
from realhf.launch.__main__ import main
from realhf.launch.allocation import GIB, Need, memory_lines, needs_of, shortages
from realhf.launch.build import build_experiment
from realhf.launch.compose import compose_config

LARGE = {"vocab_size": 151936, "hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32}
LARGE |= {"num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 9728, "tie_word_embeddings": True}
PARAMETERS = 4.02e9
"""Of Qwen3-4B, whose configuration that is."""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", **LARGE}))
    return tmp_path


def needs(*arguments, gpus=None, there=0):
    composed = compose_config(arguments)
    built = build_experiment(composed)
    return {(need.process, need.role): need for need in needs_of(built.spec, built.config, gpus or {}, there)}


def test_each_process_has_a_plan_by_role(folder):
    given = (
        "experiment=grpo_aws_async",
        f"actor.path={folder}",
        "actor.dtype=bfloat16",
        "rollout.max_total_tokens=1000",
    )
    found = needs(*given, "env.pool_size=10", gpus={"model_worker/0": 0, "generation/0": 1}, there=2)
    assert {key: need.device for key, need in found.items()} == {
        ("model_worker/0", "actor"): 0,
        ("model_worker/0", "ref"): 0,
        ("generation/0", "actor"): 1,
    }
    weights, gradients, moments, passes, kept = found["model_worker/0", "actor"].bytes or ()
    assert [weights, gradients, moments] == pytest.approx([6 * PARAMETERS, 4 * PARAMETERS, 8 * PARAMETERS], rel=0.01)
    assert passes > GIB and kept == 0
    assert (found["model_worker/0", "ref"].bytes or ())[0] == pytest.approx(2 * PARAMETERS, rel=0.01)
    tokens = (found["generation/0", "actor"].bytes or ())[4]
    assert tokens == 10 * 1000 * 2 * 36 * 8 * 128 * 2, "ten episodes of 1,000 tokens, keys and values, 36 layers, bf16"
    adapters = needs(*given, "actor.lora.rank=16")
    assert adapters["model_worker/0", "actor"].total < found["model_worker/0", "actor"].total / 2
    assert adapters["model_worker/0", "ref"].total == 0, "it is the actor without its adapters"
    assert {need.device for need in adapters.values()} == {None}


def test_a_plan_that_does_not_fit_is_told_at_the_check(folder, monkeypatch, capsys):
    """A model too large used to end as 'killed by SIGKILL', after minutes."""
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "model.safetensors").write_bytes(b"")
    (folder / "tokenizer_config.json").write_text("{}")
    free = {None: 8 * GIB}
    monkeypatch.setattr("realhf.launch.build.free_bytes", lambda there: free)
    arguments = ["experiment=grpo_aws", f"actor.path={folder}", f"fileroot={folder / 'runs'}", "mode=check"]
    assert main(arguments) == 0
    said, warned = capsys.readouterr()
    assert "model_worker/0 actor (host): 15 " in said and ", 8.00 free" in said
    assert "this machine has 8.0 GiB free, and this run is estimated to take" in warned and "actor.lora.rank" in warned
    assert main(["experiment=grpo_aws", "mode=check", f"fileroot={folder / 'runs'}"]) == 0
    assert not capsys.readouterr().err


def test_what_is_not_known_is_said():
    unknown = Need("model_worker/0", "actor", "owner/name", None, None)
    lines = [*memory_lines([unknown], {})]
    assert "the size of owner/name is not known" in lines[1] and [*shortages([unknown], {})] == []
    assert [*memory_lines([], {})] == []


def test_free_memory_is_that_of_the_container(monkeypatch):
    for left, free in ((1 << 20, 1 << 20), (1 << 62, psutil.virtual_memory().total), (None, None)):
        monkeypatch.setattr(allocation, "memory_left", lambda left=left: left)
        assert 0 < (allocation.free_bytes(0)[None] or 0) <= (free or psutil.virtual_memory().total)
