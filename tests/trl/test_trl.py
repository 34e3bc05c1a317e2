"""TRL's GRPOTrainer with our tool class, with our pool as its rollout function, and with the class
of an example: two real steps on CPU."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.your_environment import DIGITS, Lock
from realhf.aws.server.program import EnvServerProcess
from realhf.aws.tasks.loader import instantiate
from realhf.aws.training import sft_data

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-trl" / "bin" / "python"
SESSIONS = 8
LIMIT_S = 500
pytestmark = [
    pytest.mark.sim,
    pytest.mark.slow,
    pytest.mark.timeout(LIMIT_S + 60),
    pytest.mark.skipif(
        not PYTHON.exists(),
        reason="no TRL beside us; `make test-trl` makes .venv-trl and runs this",
    ),
]


@pytest.fixture(scope="module")
def server() -> Iterator[EnvServerProcess]:
    with EnvServerProcess(SESSIONS) as process:
        yield process


def train(mode: str, server: EnvServerProcess, folder: Path) -> dict[str, Any]:
    rows = []
    for task in (instantiate(1, 7), instantiate(3, 7)):
        rows.append(
            {
                "task_id": task.task_id,
                "seed": task.seed,
                "text": task.description,
                "solution": task.solution[0],
                "wrong": "aws sqs list-queues",
            }
        )
    return run(mode, {"rows": rows, "url": server.url}, folder, AWS_RL_ENV_URL=server.url)


def run(mode: str, job: dict[str, Any], folder: Path, **variables: str) -> dict[str, Any]:
    """What the program in the side environment found."""
    given = folder / "given.json"
    found = folder / "found.json"
    given.write_text(json.dumps(job))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", **variables}
    command = [
        str(PYTHON),
        str(Path(__file__).with_name("train_two_steps.py")),
        mode,
        str(given),
        str(found),
    ]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(found.read_text())


@pytest.mark.parametrize(
    ("mode", "reward"),
    [("tool", "rewards/AwsToolEnv/mean"), ("rollout", "rewards/episode_reward/mean")],
)
def test_two_steps(mode: str, reward: str, server: EnvServerProcess, tmp_path: Path) -> None:
    found = train(mode, server, tmp_path)
    steps = [entry for entry in found["log"] if "loss" in entry]
    assert found["steps"] == len(steps) == 2
    assert found["moved"] > 0, "no parameter changed"
    assert any(0 < entry[reward] < 1 for entry in steps), "some episodes are solved, some not"
    if mode == "tool":
        assert sum(entry["tools/call_frequency"] for entry in steps) > 0
        assert all(entry["tools/failure_frequency"] == 0 for entry in steps)


def test_two_steps_on_the_class_of_the_example(tmp_path: Path) -> None:
    """The class that this package trains on, imported unchanged, as TRL's
    ``environment_factory``."""
    rows = []
    for seed in (1, 2):
        lock = Lock()
        text = lock.reset(seed=seed)
        rows.append(
            {"seed": seed, "text": text, "solution": lock.digit, "wrong": (lock.digit + 1) % DIGITS}
        )
    found = run("own", {"rows": rows}, tmp_path)
    steps = [entry for entry in found["log"] if "loss" in entry]
    assert found["steps"] == len(steps) == 2 and found["moved"] > 0
    assert sum(entry["tools/call_frequency"] for entry in steps) > 0
    assert all(entry["tools/failure_frequency"] == 0 for entry in steps)
    assert any(0 < entry["rewards/Lock/mean"] <= 1 for entry in steps), "some locks are opened"


def test_demonstrations_load_as_a_dataset(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    options = [
        "--episodes-per-task",
        "20",
        "--tiers",
        "intermediate",
        "--tags",
        "networking",
        "--pool-size",
        "2",
    ]
    assert sft_data.main(["--out", str(out), *options]) == 0
    code = (
        "import sys, datasets; rows = datasets.load_dataset('json', data_files=sys.argv[1], "
        "split='train', "
        "cache_dir=sys.argv[2]); print(len(rows), *sorted(set(rows['kind'])))"
    )
    done = subprocess.run(
        [str(PYTHON), "-c", code, str(out), str(tmp_path / "cache")],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    count, *kinds = done.stdout.split()
    assert int(count) == len(out.read_text().splitlines())
    assert kinds == ["canonical", "continuation", "hint", "recovery", "verification"]
