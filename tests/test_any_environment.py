"""Whole runs on environments that are no AWS, from the command line: registered ones, and a file of one's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from realhf.launch.__main__ import main

TINY = (
    "model=builtin_tiny",
    "total_train_steps=2",
    "dataset.train_bs_n_seqs=2",
    "ppo.group_size=2",
    "rollout.sessions=4",
    "gen.max_new_tokens=8",
    "rollout.max_total_tokens=900",
    "evaluation.episodes_per_task=1",
    "evaluation.greedy_episodes_per_task=0",
    "evaluation.templates=2",
    "monitor.tensorboard=false",
    "recover_mode=disabled",
    "torch_threads=1",
)
EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "your_environment.py"


def trained(tmp_path: Path, *arguments: str) -> list[dict]:
    """Run an experiment and return the metrics of its steps."""
    assert main([*arguments, *TINY, f"fileroot={tmp_path}", "experiment_name=e"]) == 0
    lines = (tmp_path / "e" / "default" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.slow
def test_an_environment_that_ships_is_trained_on_after_a_warm_start(tmp_path: Path) -> None:
    rows = trained(tmp_path, "experiment=grpo", "env=countdown")
    assert len(rows) == 2 and all(row["actor_train/n_tokens"] > 0 for row in rows)


@pytest.mark.slow
def test_a_file_of_ones_own_is_trained_on_untrained_and_asynchronously(tmp_path: Path) -> None:
    rows = trained(tmp_path, "experiment=grpo_async", f"env.path={EXAMPLE}:Lock", "actor.path=builtin_tiny")
    assert len(rows) == 2 and all(row["actor_train/n_tokens"] > 0 for row in rows)
