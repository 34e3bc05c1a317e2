"""Data sets of the real package reasoning_gym through the adapter: the questions of every data set
that is served, and a run of five steps."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.interop.training import LIMIT_S, ROOT, STEPS, trained

PYTHON = ROOT / ".venv-verifiers" / "bin" / "python"
SCRIPT = """
import json
from reasoning_gym.factory import DATASETS
from realhf.api.environment import DemonstrationRequest
from realhf.env.loader.load import build_environment

served, refused = {}, []
for name in sorted(DATASETS):
    try:
        spec = build_environment("reasoning_gym", {"dataset": name})
    except ValueError as error:
        refused.append(f"{name}: {error}")
        continue
    try:
        served[name] = len([*spec.demonstrate(DemonstrationRequest(2, 1))])
    except ValueError:
        served[name] = 0
print()  # A data set prints dots and does not end their line.
print(json.dumps([served, refused]))
"""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(LIMIT_S + 60),
    pytest.mark.skipif(
        not PYTHON.exists(),
        reason="reasoning_gym is not installed; `make test-verifiers` installs it",
    ),
]


def test_every_data_set_is_served_or_refused_by_name() -> None:
    """Of those that are served, nearly all verifiers pay the package's own answer in full."""
    done = subprocess.run(
        [PYTHON, "-c", SCRIPT],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    served, refused = json.loads(done.stdout.splitlines()[-1])
    assert len(served) >= 80 and sum(n == 2 for n in served.values()) >= 0.95 * len(served), served
    assert all("evaluates text as Python" in each or "composite" in each for each in refused), (
        refused
    )
    assert any(each.startswith("puzzle24:") for each in refused)


def test_five_steps_on_a_data_set(tmp_path: Path) -> None:
    rows = trained(
        tmp_path,
        "env=reasoning_gym",
        "env.dataset=coin_flip",
        "rollout.max_turns=1",
        "rollout.max_total_tokens=700",
        python=PYTHON,
    )
    assert len(rows) == STEPS
