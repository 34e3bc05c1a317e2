"""What the page of recipes says of GPUs and templates is what the code says; its commands are
composed in ``test_commands.py``, its figures compared in ``test_pages.py``."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import yaml

from realhf.aws.scripts import write_scripts
from realhf.aws.tasks.loader import TEN, load_templates, phrasings
from realhf.base.hf_config import MEMORY_PARTS, estimate_size, trainer_memory
from realhf.launch import allocation
from realhf.launch.allocation import GIB, estimate_needs
from realhf.launch.build import build_experiment
from realhf.launch.checks import check_config
from realhf.launch.compose import compose_config
from tests.docs.commands import ROOT, commands_of
from tests.docs.test_commands import launched

PAGE = ROOT / "docs" / "recipes.md"
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936,
    "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
}  # fmt: skip
SHAPES = {
    "Qwen/Qwen3-0.6B": {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16}
    | QWEN3 | {"intermediate_size": 3072},
    "Qwen/Qwen3-4B": {"hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32}
    | QWEN3 | {"intermediate_size": 9728},
}  # fmt: skip
"""What the models' ``config.json`` say, as far as memory depends on it."""


def on_a_gpu() -> list[list[str]]:
    return [
        found
        for each in commands_of(PAGE)
        if (found := launched(each)) and "model=qwen3" in " ".join(found)
    ]


@pytest.mark.slow
def test_the_memory_plan_on_the_page_is_that_of_its_commands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def here(path: str) -> Any:
        return estimate_size(SHAPES[path])

    monkeypatch.setattr(allocation, "model_size", here)
    rows = []
    for arguments in on_a_gpu():
        composed = compose_config(arguments)
        check_config(composed.config)
        for need in estimate_needs(build_experiment(composed).spec, composed.config, {}, 1):
            if need.process.startswith("published by "):
                continue  # in host memory
            assert need.bytes is not None and need.device == 0
            name = need.path.partition("/")[2]
            part = "generation" if need.process.startswith("generation") else "trainer"
            cells = [*(need.bytes.get(part, 0) for part in MEMORY_PARTS), need.total]
            rows.append(
                f"| {name}, {part} | " + " | ".join(f"{each / GIB:.3g}" for each in cells) + " |"
            )
    assert len(rows) == 4 and [row for row in rows if row not in PAGE.read_text()] == []
    whole = trainer_memory(here("Qwen/Qwen3-4B"), "bfloat16")
    assert f"would take {(whole.loaded + whole.first_update) / GIB:.0f} GiB" in " ".join(
        PAGE.read_text().split()
    )


def test_the_counts_on_the_page_are_those_of_the_templates() -> None:
    text = PAGE.read_text()
    trained = load_templates(split="all_but_ten")
    for tier in ("warmup", "beginner", "intermediate", "advanced", "expert"):
        count = sum(template.tier == tier for template in trained)
        assert re.search(rf"^\| {tier} \| {count} \|", text, re.MULTILINE), (tier, count)
    assert f"{len(phrasings())} templates are worded" in text and len(TEN) == 10
    file = ROOT / "configs" / "model" / "smollm2_135m_all_tiers.yaml"
    config = yaml.safe_load(file.read_text())
    warm = config["warm_start"]
    every = config["warm_start"]["episodes_per_task"]
    demonstrated = len(write_scripts(1, 0, split="all_but_ten"))
    assert f"{demonstrated} templates x {every} = {demonstrated * every:,} episodes" in text
    assert f"{warm['train_steps']} steps x ({warm['batch_size']} episodes" in text
    episodes = 8 * config["dataset"]["train_bs_n_seqs"]
    assert f"{config['total_train_steps']} steps x {episodes} episodes" in text
    evaluation = config["evaluation"]
    last = evaluation["episodes_per_task"] * len(load_templates())
    interim = math.ceil(evaluation["episodes_per_task"] * evaluation["interim_share"])
    interim *= len(load_templates())
    assert f"2 x {interim} and {last} episodes" in text
    assert config["evaluation"]["every_steps"] * 2 == config["total_train_steps"], (
        "before, in the middle, at the end"
    )
