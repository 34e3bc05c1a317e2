"""Ten asynchronous steps whose tokens come from a real vLLM server, started and ended by the
run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(800)

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = (
    "model=builtin_tiny",
    "builtin.vocab_size=400",
    "builtin.hidden_size=64",
    "warm_start.episodes_per_task=1",
    "warm_start.train_steps=3",
    "env.pool_size=4",
    "env.tiers=[warmup]",
    "dataset.train_bs_n_seqs=2",
    "ppo.group_size=2",
    "ppo.entropy_coef=0.05",
    "actor.optimizer.lr=0.01",
    "gen.max_new_tokens=12",
    "rollout.max_turns=2",
    "rollout.max_total_tokens=640",
    "evaluation.episodes_per_task=0",
    "evaluation.greedy_episodes_per_task=0",
    "torch_threads=1",
    "monitor.trackers=[]",
    "monitor.progress=false",
    "total_train_steps=10",
    "engine.name=vllm",
    "engine.vllm_executable=.venv-vllm/bin/vllm",
    "rpc.connect_timeout_s=400",
)


def test_ten_steps(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "realhf.launch",
        "experiment=grpo_aws_async",
        f"fileroot={tmp_path}",
        "trial_name=default",
        *OPTIONS,
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=700, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = (tmp_path / "grpo_aws_async" / "default" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["step"] for row in rows] == list(range(1, 11))
    assert max(row["staleness/max"] for row in rows) <= 1
    fresh = [row for row in rows if row["staleness/max"] == 0]
    assert fresh and all(row["mismatch/abs_max"] < 1e-3 for row in fresh)
    assert rows[-1]["admission/version"] >= 9 and rows[-1]["rollouts/failed"] == 0
