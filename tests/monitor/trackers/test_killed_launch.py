"""A launch that is killed with all its processes and started again is one run to W&B and to MLflow,
evaluations included: the packages themselves wrote what is read back here."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.monitor.trackers.test_real_trackers import PYTHON, ROOT, call
from tests.process_family import gone, kill_all

STEPS = 24
CHECKPOINT = 4
KILLED_AFTER = 6
"""The run is killed when so many steps are complete, and goes on from the last checkpoint
before."""
PATIENCE_S = 400.0
OPTIONS = (
    *(
        "experiment=grpo",
        "env=countdown",
        "actor.path=builtin_tiny",
        "experiment_name=grpo",
        "trial_name=killed",
    ),
    *(
        "dataset.train_bs_n_seqs=2",
        "ppo.group_size=2",
        "rollout.sessions=4",
        "gen.max_new_tokens=8",
    ),
    *(
        "rollout.max_total_tokens=900",
        "torch_threads=1",
        f"total_train_steps={STEPS}",
        "monitor.progress=false",
    ),
    *(
        "evaluation.episodes_per_task=1",
        "evaluation.greedy_episodes_per_task=0",
        "evaluation.templates=2",
    ),
    *(
        "evaluation.every_steps=8",
        f"exp_ctrl.ckpt_freq_steps={CHECKPOINT}",
        "monitor.trackers=[wandb,mlflow]",
    ),
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2 * PATIENCE_S),
    pytest.mark.skipif(
        not (ROOT / ".venv-trackers" / ".installed").exists(),
        reason="make test-trackers installs them",
    ),
]


@contextmanager
def launched(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The launcher; at the end of the block it is killed with all that it started."""
    with (folder / "log").open("ab") as log:
        launcher = subprocess.Popen(
            [str(PYTHON), "-m", "realhf.launch", *OPTIONS, f"fileroot={folder}"],
            cwd=ROOT,
            env={
                **os.environ,
                "WANDB_MODE": "offline",
                "MLFLOW_DISABLE_TELEMETRY": "true",
                "OMP_NUM_THREADS": "1",
            },
            stdout=log,
            stderr=log,
        )
    try:
        yield launcher
    finally:
        processes = kill_all(launcher.pid) if launcher.poll() is None else []
        launcher.wait()
        assert gone(processes, 60.0)


def rows(run: Path) -> dict[int, dict[str, Any]]:
    with suppress(FileNotFoundError, ValueError):
        found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        return {row["step"]: row for row in found}
    return {}


def test_a_killed_and_resumed_launch_is_one_run(tmp_path: Path) -> None:
    run = tmp_path / "grpo" / "killed"
    end = time.monotonic() + PATIENCE_S
    with launched(tmp_path) as launcher:
        while len(rows(run)) < KILLED_AFTER:
            said = (tmp_path / "log").read_text("utf-8", "replace")[-2000:]
            assert launcher.poll() is None and time.monotonic() < end, (
                f"the run does not get on: {said}"
            )
            time.sleep(0.05)
    assert len(rows(run)) < STEPS, "it was killed too late to be a test"
    with launched(tmp_path) as again:
        assert again.wait(PATIENCE_S) == 0, (tmp_path / "log").read_text("utf-8", "replace")[-2000:]

    losses = {step: row["policy/loss"] for step, row in rows(run).items()}
    reports = json.loads((run / "evaluations.json").read_text())
    success = {
        int(step): report["sampled"]["overall"]["success"] for step, report in reports.items()
    }
    assert set(losses) == set(range(1, STEPS + 1)) and set(success) == {0, 8, 16, 24}
    for name in ("wandb", "mlflow"):
        read = call(run, "read_back", name)
        assert read.returncode == 0, read.stderr
        found = json.loads(read.stdout.splitlines()[-1])
        assert len(set(found["runs"])) == 1, name
        assert found.get("status", "FINISHED") == "FINISHED"
        for kept, wanted in ((found["loss"], losses), (found["evaluation"], success)):
            assert dict(map(tuple, kept)) == pytest.approx(wanted), name
            assert len(kept) == len(wanted), f"{name} has a step twice: {kept}"
        assert "group_size" in json.dumps(found["config"]) and found["rollouts"] >= 1, name
