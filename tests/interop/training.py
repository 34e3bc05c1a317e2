"""Trains five steps on an environment of others, from the command line, as a person would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STEPS = 5
LIMIT_S = 500
TINY = (
    "experiment=grpo",
    "actor.path=builtin_tiny",
    f"total_train_steps={STEPS}",
    "dataset.train_bs_n_seqs=2",
    "ppo.group_size=2",
    "rollout.sessions=4",
    "gen.max_new_tokens=8",
    "evaluation.episodes_per_task=1",
    "evaluation.greedy_episodes_per_task=0",
    "evaluation.templates=1",
    "monitor.trackers=[]",
    "recover_mode=disabled",
    "torch_threads=1",
)


def trained(
    folder: Path,
    *arguments: str,
    python: Path | str = sys.executable,
    variables: Mapping[str, str] | None = None,
) -> list[dict]:
    """Run an experiment under ``python`` and return the metrics of its steps."""
    command = [
        str(python),
        "-m",
        "realhf.launch",
        *TINY,
        *arguments,
        f"fileroot={folder}",
        "trial_name=default",
        "experiment_name=e",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **(variables or {})}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    rows = (folder / "e" / "default" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(row) for row in rows]
