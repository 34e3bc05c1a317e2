"""``mode=check trace=true``: a step of a run's own models on a pretended GPU, beside the plan."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from realhf.base.hf_config import MEMORY_PARTS
from realhf.launch.__main__ import main
from realhf.scheduler.gpus import visible_gpus

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(visible_gpus()), reason="a machine without a GPU is pretended"),
]
SHAPE = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 4096,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 512,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
MATRICES = 2 * [(256, 256), (128, 256), (128, 256), (256, 256), *3 * [(512, 256)]]
MATRIX_SIDES = [sum(shape) for shape in MATRICES]
PARAMETERS = sum(map(math.prod, MATRICES)) + 4096 * 256 + 5 * 256 + 4 * 64
"""Of that model."""
GIB = 1 << 30


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """A launch that trains a model whose folder has no weights."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "model.safetensors").touch()
    runs = tmp_path / "runs"
    return [
        *(f"actor.path={folder}", f"fileroot={runs}", "mode=check", "trace=true"),
        "rollout.sessions=8",
    ]


def table_of(printed: str) -> dict[str, dict[str, float]]:
    """The table of a trace: GiB by call and by part of the memory."""
    lines = iter(printed.partition("\ntrace: ")[2].splitlines()[1:])
    assert re.split(r"\s{2,}", next(lines).strip()) == [*MEMORY_PARTS, "in all"]
    rows: dict[str, dict[str, float]] = {}
    for line in lines:
        name, *cells = line.split()
        rows[name] = dict(zip([*MEMORY_PARTS, "in all"], map(float, cells), strict=True))
        if name == "plan":
            return rows
    raise AssertionError(printed)


def near(parameters: int, bytes_each: int) -> Any:
    return pytest.approx(parameters * bytes_each / GIB, abs=0.011)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("lora", [0, 4])
def test_a_step_is_traced_by_what_holds_the_memory(
    arguments: list[str], capsys: pytest.CaptureFixture[str], lora: int
) -> None:
    adapters = [f"actor.lora.rank={lora}"] if lora else []
    given = [
        "experiment=grpo",
        "env=countdown",
        "ppo.kl_loss_coef=0.1",
        "engine.name=embedded",
        "rollout.max_total_tokens=2048",
        *adapters,
    ]
    assert main([*given, *arguments]) == 0
    printed, noted = capsys.readouterr()
    assert "no GPU is visible here" in noted and "with machine=8xH100" in noted
    assert "in bfloat16" in printed, "as on a machine with a GPU"
    rows = table_of(printed)
    assert rows.keys() == {"actor_gen", "ref_inf", "actor_train", "plan"}
    train = rows["actor_train"]
    for row in rows.values():
        assert sum(row[part] for part in MEMORY_PARTS) == pytest.approx(row["in all"], abs=0.04)
    trained = 4 * sum(MATRIX_SIDES) if lora else PARAMETERS
    base = PARAMETERS if lora else 2 * PARAMETERS  # the reference has weights of its own
    assert train["weights"] == near(base, 2)
    assert train["masters"] == (0 if lora else near(PARAMETERS, 4))
    assert train["gradients"] == near(trained, 4) and train["moments"] == near(trained, 8)
    merged = sum(map(math.prod, MATRICES)) if lora else 0
    assert rows["actor_gen"]["copy"] == near(merged, 2) and train["copy"] == 0
    assert rows["actor_gen"]["keys, values"] > 0 == train["keys, values"]
    assert rows["ref_inf"]["gradients"] == 0 < train["activations"] and train["logits"] > 0
    for name, syncs in (("ref_inf", 1), ("actor_train", 29)):
        found = re.search(rf"{name}: (\d+) kernels and (\d+) waits .*in a micro-batch", printed)
        assert found and int(found[1]) > 100 and int(found[2]) <= syncs, printed
    assert ("fp32 products" in printed) == bool(lora)


def test_a_critic_has_its_own_memory(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["experiment=ppo", "env=countdown", "critic.path=actor", *arguments]) == 0
    rows = table_of(capsys.readouterr().out)
    assert rows["critic_train"]["moments"] == near(2 * PARAMETERS, 8), "the actor's as well"
    assert rows["critic_train"]["gradients"] == near(PARAMETERS, 4)
    assert rows["critic_train"]["logits"] < 0.02 < rows["actor_train"]["logits"]


def test_offloaded_moments_are_in_host_memory(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["experiment=grpo", "env=countdown", "ppo.kl_loss_coef=0", "engine.name=embedded"]
    # Micro-batches that single sequences would fill best; alone, they have no advantage.
    small = ["rollout.max_total_tokens=64", "mb_spec.max_tokens_per_mb=256", "ppo.group_size=8"]
    assert main([*given, *small, "actor.optimizer.offload=true", *arguments]) == 0
    printed = capsys.readouterr().out
    assert table_of(printed)["actor_train"]["moments"] == 0
    (traced,) = re.findall(r"^  host: ([\d.]+) of moments", printed, re.MULTILINE)
    (planned,) = re.findall(r"moments of model_worker/0 actor \(host\): .*= ([\d.]+)", printed)
    assert float(traced) == near(PARAMETERS, 8) and float(planned) == near(PARAMETERS, 8)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ("mode=run", "trace=true: only mode=check traces a step, not mode=run"),
        ("actor.path=builtin", "trace=true: actor.path=builtin takes little memory"),
        ("actor.path=owner/never-downloaded", "has no config.json here; .*`hf download owner/"),
    ],
)
def test_what_cannot_be_traced_is_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str], changed: str, told: str
) -> None:
    kept = [each for each in arguments if not changed.startswith(f"{each.partition('=')[0]}=")]
    assert main(["experiment=grpo", "env=countdown", *kept, changed]) == 2
    assert re.search(f"^config error: .*{told}", capsys.readouterr().err, re.MULTILINE)


QWEN3 = {
    "small": {"hidden_size": 512, "num_hidden_layers": 3, "intermediate_size": 1536}
    | {"num_attention_heads": 8},
    "0.6B": {"hidden_size": 1024, "num_hidden_layers": 28, "intermediate_size": 3072}
    | {"num_attention_heads": 16},
    "8B": {"hidden_size": 4096, "num_hidden_layers": 36, "intermediate_size": 12_288}
    | {"num_attention_heads": 32},
    "4B": {"hidden_size": 2560, "num_hidden_layers": 36, "intermediate_size": 9728}
    | {"num_attention_heads": 32},
}
"""Shapes whose plan is compared with a trace; but for the first, whole models of that name."""
WHOLE = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936}
CASES = [
    pytest.param(model, checkpointing, lora, marks=[pytest.mark.nightly] * (model != "small"))
    for model in ("small", "0.6B", "4B")
    for checkpointing in (False, True)
    for lora in (0, 32)
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("model", "checkpointing", "lora"), CASES)
def test_the_plan_is_within_five_per_cent_of_the_trace(
    arguments: list[str],
    capsys: pytest.CaptureFixture[str],
    model: str,
    checkpointing: bool,
    lora: int,
) -> None:
    file = Path(arguments[0].partition("=")[2]) / "config.json"
    file.write_text(json.dumps(SHAPE | WHOLE | QWEN3[model]))
    options = [f"actor.gradient_checkpointing={str(checkpointing).lower()}"]
    options += [f"actor.lora.rank={lora}"] if lora else []
    options += ["mb_spec.max_tokens_per_mb=4096", "rollout.max_total_tokens=1024"]
    given = ["experiment=grpo_async", "env=countdown", "ppo.kl_loss_coef=0", *options]
    assert main([*given, "ppo.use_decoupled_loss=false", "machine=2xB200", *arguments]) == 0
    rows = table_of(capsys.readouterr().out)
    assert rows["plan"]["in all"] == pytest.approx(peak_of(rows), rel=0.05), rows
    assert (rows["actor_publish"]["copy"] > 0) == bool(lora), "adapters are merged"


def peak_of(rows: dict[str, dict[str, float]]) -> float:
    return max(row["in all"] for name, row in rows.items() if name != "plan")


@pytest.mark.parametrize(
    ("model", "checkpointing"),
    [
        pytest.param("small", True),
        *(
            pytest.param(model, checkpointing, marks=pytest.mark.nightly)
            for model in ("0.6B", "8B")
            for checkpointing in (False, True)
        ),
    ],
)
def test_a_sharded_trainer_is_traced_with_what_it_has_whole(
    arguments: list[str], capsys: pytest.CaptureFixture[str], model: str, checkpointing: bool
) -> None:
    shape = SHAPE | WHOLE | QWEN3[model] | {"tie_word_embeddings": model != "8B"}
    (Path(arguments[0].partition("=")[2]) / "config.json").write_text(json.dumps(shape))
    options = [f"actor.gradient_checkpointing={str(checkpointing).lower()}"]
    options += ["mb_spec.max_tokens_per_mb=4096", "rollout.max_total_tokens=1024"]
    options += ["actor.workers=[0,1]", "actor.backend=fsdp2", "machine=4xB200"]
    given = ["experiment=grpo_async", "env=countdown", "ppo.kl_loss_coef=0", *options]
    assert main([*given, "ppo.use_decoupled_loss=false", *arguments]) == 0
    printed = capsys.readouterr().out
    rows = table_of(printed)
    plan = rows["plan"]
    train = rows["actor_train"]
    publish = rows["actor_publish"]
    assert printed.count("\ntrace: ") == 1, "both workers do the same"
    assert plan["in all"] == pytest.approx(peak_of(rows), rel=0.05), rows
    assert train["weights"] == pytest.approx(publish["copy"] / 2, rel=0.02, abs=0.011)
    assert train["moments"] == pytest.approx(4 * train["weights"], rel=0.02, abs=0.03)
    # Without checkpointing, the peak may come when fewer weights are whole than at most.
    assert 0.6 * plan["unsharded"] < train["unsharded"] < 1.05 * plan["unsharded"] + 0.011
    assert train["copy"] == 0
    assert publish["unsharded"] == 0


@pytest.mark.parametrize("model", ["small", pytest.param("8B", marks=pytest.mark.nightly)])
def test_a_sharded_trainer_scores_without_the_weights_that_it_has_published(
    arguments: list[str], capsys: pytest.CaptureFixture[str], model: str
) -> None:
    shape = SHAPE | WHOLE | QWEN3[model] | {"tie_word_embeddings": False}
    (Path(arguments[0].partition("=")[2]) / "config.json").write_text(json.dumps(shape))
    options = ["mb_spec.max_tokens_per_mb=4096", "rollout.max_total_tokens=1024"]
    options += ["actor.workers=[0,1,2,3]", "actor.backend=fsdp2", "machine=8xB200"]
    options += ["actor.gradient_checkpointing=true"]
    given = ["experiment=grpo_async", "env=countdown", "ppo.kl_loss_coef=0", *options]
    assert main([*given, "ppo.use_decoupled_loss=true", *arguments]) == 0
    rows = table_of(capsys.readouterr().out)
    assert [*rows] == ["actor_publish", "actor_inf", "actor_train", "plan"], "as in every step"
    assert rows["actor_publish"]["copy"] > rows["actor_inf"]["unsharded"] > 0
    assert rows["actor_inf"]["copy"] == rows["actor_train"]["copy"] == 0
    assert rows["plan"]["in all"] > 0.98 * peak_of(rows), rows
