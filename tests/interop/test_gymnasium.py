"""Environments of Gymnasium through the adapter: one that ships with it, and one whose actions are
text."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.interop.training import LIMIT_S, ROOT, STEPS, trained

PYTHON = ROOT / ".venv-verifiers" / "bin" / "python"
HERE = Path(__file__).resolve().parent
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(LIMIT_S + 60),
    pytest.mark.skipif(
        not PYTHON.exists(), reason="Gymnasium is not installed; `make test-verifiers` installs it"
    ),
]


def test_named_actions_and_text_play_the_environments() -> None:
    done = subprocess.run(
        [PYTHON, HERE / "play_foreign.py", "gymnasium"],
        env={"PATH": str(PYTHON.parent), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["lake"]["reward"] == 1.0 and found["lake"]["metrics"]["success"] == 1.0
    assert len(found["lake"]["read"]) == 7 and "(Right)" in found["lake"]["read"][-1]
    assert (
        found["hole"]["done"]
        and found["hole"]["reward"] == 0.0
        and found["hole"]["metrics"]["success"] == 0.0
    )
    assert found["prompt"] == "Answer with one of: left, down, right, up."
    password = found["password"]
    assert "cannot be used" in password["read"][1] and password["read"][-1] == "right"
    assert password["reward"] == 0.0, "one turn was no action"
    for problem, named in zip(
        found["problems"], ("env.id=Nothing-v9", "env.actions", "Box"), strict=True
    ):
        assert named in problem
    assert found["held out"] == 7


def test_five_steps_on_an_environment_of_gymnasium(tmp_path: Path) -> None:
    rows = trained(
        tmp_path,
        "env.path=gymnasium",
        "env.id=FrozenLake-v1",
        "env.actions=[left,down,right,up]",
        "env.kwargs.is_slippery=false",
        "env.render=true",
        "rollout.max_turns=4",
        "rollout.max_total_tokens=900",
        python=PYTHON,
    )
    assert len(rows) == STEPS
    assert all(row["batch/tokens"] > 0 for row in rows)
