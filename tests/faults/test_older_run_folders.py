"""A run folder that an earlier commit wrote is resumed: what it stores (plan, journal, payload log,
checkpoint) names classes and fields, which may have been renamed since.

``data/run_folders_of_0.1.0.tar.xz`` holds ``policy`` and ``runs`` with a synchronous and an
asynchronous run that were killed after the checkpoint of step 3. Commit bca51a49 wrote it with
``write_run_folders``.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from realhf.api.config import BuiltinModelConfig
from realhf.aws.tasks.loader import instantiate, load_templates
from realhf.backends.builtin_policy import build_builtin_policy
from tests.faults.run_folders import EXPERIMENTS, KILLED_AFTER, STEPS, launch, launch_and_kill

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ARCHIVE = Path(__file__).with_name("data") / "run_folders_of_0.1.0.tar.xz"
SIZES = BuiltinModelConfig(
    vocab_size=300, hidden_size=16, num_layers=1, num_heads=2, intermediate_size=16
)
"""A policy so small that its checkpoints may lie in the repository."""


def write_run_folders() -> None:
    """Write what the archive holds into the working folder: options of a run hold its paths, so
    they are relative."""
    root = Path()
    tasks = [instantiate(template.task_id, 1) for template in load_templates(["warmup"])]
    with (root / "talks.jsonl").open("w", encoding="utf-8") as talks:
        for task in tasks:
            messages = [
                {"role": "user", "content": task.description},
                {"role": "assistant", "content": task.solution[0]},
            ]
            talks.write(json.dumps({"messages": messages}) + "\n")
    build_builtin_policy(root / "talks.jsonl", root / "policy", SIZES, seed=3)
    for kind in EXPERIMENTS:
        launch_and_kill(kind, root / "runs", root / "policy")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", EXPERIMENTS)
def test_a_run_folder_of_an_earlier_commit_is_resumed(kind: str, tmp_path: Path) -> None:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    trial = tmp_path / "runs" / kind / "t"
    before = steps_of(trial)
    assert before == [*range(1, KILLED_AFTER + 1)]
    finished = launch(kind, Path("runs"), Path("policy"), folder=tmp_path)
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr
    assert steps_of(trial) == [*range(1, STEPS + 1)]
    launches = json.loads((trial / "provenance.json").read_text())["launches"]
    assert [each["completed_steps"] for each in launches] == [0, KILLED_AFTER]


def steps_of(trial: Path) -> list[int]:
    """Return the steps of a run in the order in which their metrics were written."""
    lines = (trial / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]
