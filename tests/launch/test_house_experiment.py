"""An experiment inside the tree that brings its own parts: the launcher knows their names, every
worker has them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent.parent
HERE = Path(__file__).resolve().parent
YAML = """# @package _global_
experiment: house_experiment
total_train_steps: 2
torch_threads: 1
dataset: {train_bs_n_seqs: 2}
ppo: {loss: twice}
"""


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree with one more experiment in it."""
    folder = tmp_path_factory.mktemp("house")
    for part in ("realhf", "workers", "experiments", "configs"):
        shutil.copytree(
            ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__", "static")
        )
    for name in ("toy_experiment.py", "house_experiment.py"):
        shutil.copy(HERE / name, folder / "experiments")
    (folder / "configs" / "experiment" / "house_experiment.yaml").write_text(YAML)
    return folder


def launch(house: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "realhf.launch",
        "experiment=house_experiment",
        "trial_name=t",
        "fileroot=runs",
    ]
    environment = {**os.environ, "PYTHONPATH": str(house)}
    return subprocess.run(
        [*command, *options],
        cwd=house,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.nightly
def test_its_interface_source_and_loss_work_in_the_workers(house: Path):
    done = launch(house)
    assert done.returncode == 0, done.stderr + done.stdout
    run = house / "runs" / "house_experiment" / "t"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["policy/loss"] for row in rows] == [2.0 * (1 + 2), 2.0 * (1 + 2 + 3 + 4)]
    assert json.loads((run / "plan.json").read_text())["plugins"] == [
        "experiments.house_experiment"
    ]


def test_a_name_that_nobody_registered_is_refused_and_its_own_is_among_the_known(house: Path):
    done = launch(house, "ppo.loss=thrice", "mode=check")
    assert done.returncode == 2
    assert "ppo.loss=thrice: unknown" in done.stderr and "twice" in done.stderr


@pytest.mark.nightly
def test_a_file_outside_the_tree_is_held_to_the_names_that_it_registers(tmp_path: Path):
    user = tmp_path / "mine.py"
    user.write_text(
        (HERE / "toy_experiment.py").read_text()
        + "\nfrom experiments.policy_gradient import Config\n"
        "from realhf.registry import policy_losses\npolicy_losses.register('my_loss')(len)\n_toy = "
        "build\n\n\n"
        "def build(config: Config):\n    assert config.ppo.loss == 'my_loss'\n    return "
        "_toy(config)\n"
    )
    command = [
        sys.executable,
        "-m",
        "realhf.launch",
        f"+experiment_path={user}",
        "mode=check",
        "trial_name=t",
        f"fileroot={tmp_path}",
        "total_train_steps=1",
    ]

    def check(loss: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, f"ppo.loss={loss}"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    assert (done := check("my_loss")).returncode == 0, done.stderr
    assert (done := check("my_los")).returncode == 2 and "ppo.loss=my_los: unknown" in done.stderr
