"""Whole runs of every architecture that is promised, tied and untied, in fp32 and bf16, synchronous
and asynchronous.

What a single engine does is tried in ``tests/backends/test_architectures.py``; here processes train
together.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from realhf.backends.builtin_policy import SPECIAL_TOKENS, train_tokenizer
from tests.backends.architectures import KINDS, MISMATCH, configs, kind_name, save_model

POSITIONS = 2048
STEPS = 2
DEADLINE_S = 900.0
VOCABULARY = len(SPECIAL_TOKENS) + 256
CONFIGS = configs(VOCABULARY, POSITIONS, window=64, end=len(SPECIAL_TOKENS) - 1)
NAMES = ("llama", "qwen2", "qwen3", "gemma3", "mistral", "gpt2", "phi3", "olmo2", "gpt_oss")
OPTIONS = (
    "env=countdown",
    f"total_train_steps={STEPS}",
    "dataset.train_bs_n_seqs=2",
    "ppo.group_size=2",
    "ppo.entropy_coef=0.05",
    "actor.optimizer.lr=0.01",
    "rollout.sessions=4",
    "gen.max_new_tokens=8",
    "rollout.max_total_tokens=900",
    "evaluation.episodes_per_task=0",
    "monitor.trackers=[]",
    "monitor.progress=false",
    "torch_threads=1",
)
EXPERIMENTS = {"synchronous": "grpo", "asynchronous": "grpo_async"}
ON_POLICY = ("async_rl.max_head_offpolicyness=0",)
"""Log-probabilities of sampled tokens are then those of the weights that train."""

pytestmark = [pytest.mark.slow, pytest.mark.architecture_run, pytest.mark.timeout(DEADLINE_S + 60)]


@pytest.fixture
def policy(name: str, kind: tuple[bool, torch.dtype], tmp_path: Path) -> Path:
    folder = tmp_path / "policy"
    save_model(CONFIGS[name], kind[0], folder)
    train_tokenizer((), VOCABULARY, POSITIONS).save_pretrained(folder)
    return folder


def trained(policy: Path, root: Path, mode: str, dtype: torch.dtype) -> list[dict[str, Any]]:
    """Run the experiment and return the metrics of its steps."""
    command = [
        sys.executable,
        "-m",
        "realhf.launch",
        f"experiment={EXPERIMENTS[mode]}",
        f"actor.path={policy}",
    ]
    command += [
        f"actor.dtype={str(dtype).removeprefix('torch.')}",
        f"actor.experts={'num_local_experts' in (policy / 'config.json').read_text()}",
        f"fileroot={root}",
        "trial_name=default",
        "experiment_name=run",
        *OPTIONS,
    ]
    command += ON_POLICY if mode == "asynchronous" else ()
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    return [
        json.loads(line)
        for line in (root / "run" / "default" / "metrics.jsonl").read_text().splitlines()
    ]


@pytest.mark.parametrize("mode", EXPERIMENTS)
@pytest.mark.parametrize("kind", KINDS, ids=kind_name)
@pytest.mark.parametrize("name", NAMES)
def test_a_run_trains_and_its_policy_loads_elsewhere(
    name: str, kind: tuple[bool, torch.dtype], mode: str, policy: Path, tmp_path: Path
) -> None:
    rows = trained(policy, tmp_path, mode, kind[1])
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for row in rows:
        assert (
            math.isfinite(row["policy/loss"])
            and row["policy/grad_norm"] > 0
            and row["policy/updates"] == 1
        )
        assert row["mismatch/abs_max"] < MISMATCH[kind[1]]
    made = tmp_path / "run" / "default" / "policy"
    before, after = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (policy, made)
    )
    weights = dict(before.named_parameters())
    assert {key for key, _ in after.named_parameters()} == {*weights}
    assert any(not torch.equal(tensor, weights[key]) for key, tensor in after.named_parameters()), (
        "the run trained"
    )
    assert (after.get_output_embeddings().weight is after.get_input_embeddings().weight) == kind[0]
    ids = torch.tensor([AutoTokenizer.from_pretrained(made)("a word")["input_ids"]])
    with torch.no_grad():
        assert torch.isfinite(after(ids).logits).all()
