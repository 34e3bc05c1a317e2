"""A real master and two real worker processes: tensors stay on the workers, a death is named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one master saw in two steps, and in a third whose reference's worker was killed."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.dataflow.toy_master", str(tmp_path_factory.mktemp("toy"))],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.nightly
def test_no_tensor_reaches_the_master(answer: dict[str, Any]) -> None:
    assert answer["torch"] is False
    assert answer["tensors_in_between"] == [] and answer["tensors"] == []
    assert answer["objects"] > 500
    assert answer["results"] == ["t4", "t5", "t6", "t7"]
    assert answer["held"] == {"w0": 0, "w1": 0}
    rows = sum(2 * ((2 + task % 3) * 5000 - 1) for task in range(4))
    assert answer["weight"] == pytest.approx(
        1 + 2 * (0 + 1 + 2 + 3) * rows * answer["noise"], rel=1e-4
    )


@pytest.mark.nightly
def test_a_killed_worker_is_named_in_time(answer: dict[str, Any]) -> None:
    assert "ref failed at step 2 on w1" in answer["error"] and "died" in answer["error"]
    assert answer["seconds"] < 30, "by its end, and not by its silence"
    assert answer["exits"] == [0, -9]
