"""The packages of the trackers themselves keep a killed and resumed run as one run, evaluations
included."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
PYTHON = ROOT / ".venv-trackers" / "bin" / "python"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (ROOT / ".venv-trackers" / ".installed").exists(),
        reason="make test-trackers installs them",
    ),
]


def call(folder: Path, module: str, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "WANDB_MODE": "offline", "TRACKIO_DIR": str(folder / "trackio")}
    environment |= {"MLFLOW_DISABLE_TELEMETRY": "true"}
    return subprocess.run(
        [str(PYTHON), "-m", f"tests.monitor.trackers.{module}", str(folder), *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def kept(tmp_path: Path, name: str) -> dict[str, Any]:
    """What a tracker has of a run that was killed after step 4 and went on from step 3 to 6."""
    folder = tmp_path / "grpo" / "trial"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("seed: 3\nppo: {group_size: 8}\n")
    assert call(folder, "resumed_run", name, "killed").returncode == 9
    done = call(folder, "resumed_run", name, "resumed")
    assert done.returncode == 0, done.stdout + done.stderr
    read = call(folder, "read_back", name)
    assert read.returncode == 0, read.stderr
    return json.loads(read.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_a_killed_and_resumed_run_is_one_run(tmp_path: Path, name: str) -> None:
    found = kept(tmp_path, name)
    assert len(set(found["runs"])) == 1
    assert {(step, value) for step, value in found["loss"]} == {
        (step, float(step)) for step in range(1, 7)
    }
    assert {(step, value) for step, value in found["evaluation"]} == {(2, 0.2), (5, 0.5)}
    assert "group_size" in json.dumps(found["config"]) and "seed" in found["config"]
    if name != "trackio":
        assert found["rollouts"] >= 3
        assert len(found["loss"]) == 6, "the step after the checkpoint was taken back"
        assert len(found["evaluation"]) == 2
    if name == "mlflow":
        assert found["rare"] == 1.0, (
            "where the last value was taken back, the one before is the latest"
        )
