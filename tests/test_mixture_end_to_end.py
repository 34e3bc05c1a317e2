"""Whole runs on a mixture of environments, from the command line."""

import json
import subprocess
import sys
from collections import Counter

import pytest

from realhf.launch.__main__ import main
from realhf.monitor.rollouts.reader import RolloutStore
from tests.process_family import gone, kill_all, until
from tests.test_end_to_end import figures, undescribed

pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.timeout(900)]

MIX = (
    "env.mix=[sql,countdown]",
    "env.weights=[3,1]",
    "env.of.sql.groups=[lookup,aggregate]",
    "env.of.countdown.levels=[two-small]",
    "env.limits.sql.max_turns=2",
    "env.limits.countdown.max_turns=1",
)
STEPS = 5
TINY = (
    "seed=3",
    "model=builtin_tiny",
    "dataset.train_bs_n_seqs=4",
    "ppo.group_size=2",
    "ppo.entropy_coef=0.05",
    "rollout.sessions=4",
    "rollout.max_turns=3",
    "gen.max_new_tokens=8",
    "rollout.max_total_tokens=900",
    "evaluation.episodes_per_task=1",
    "evaluation.greedy_episodes_per_task=0",
    "evaluation.templates=2",
    "monitor.trackers=[]",
    "torch_threads=1",
)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


def arguments(root, trial, steps, experiment="grpo"):
    where = (f"fileroot={root}", f"trial_name={trial}", "experiment_name=mix")
    return [f"experiment={experiment}", *MIX, *TINY, f"total_train_steps={steps}", *where]


def metrics_file(root, trial):
    return root / "mix" / trial / "metrics.jsonl"


def count_steps(root, trial):
    file = metrics_file(root, trial)
    return file.read_text().count("\n") if file.exists() else 0


def trained(root, trial, steps, *options, experiment="grpo"):
    """Run the mixture, or go on with it, and return the metrics of its steps."""
    assert main([*arguments(root, trial, steps, experiment), *options]) == 0
    return [json.loads(line) for line in metrics_file(root, trial).read_text().splitlines()]


def played(root, trial):
    store = RolloutStore(root / "mix" / trial)
    store.refresh()
    return [row.play for row in store.rows()]


def check_rows(root, trial, rows):
    """Each environment has its share of every step, its metrics, its limits and an evaluation."""
    assert not undescribed(rows)
    for row in rows:
        shares = {name: row[f"rollouts/played/{name}"] for name in ("sql", "countdown")}
        assert shares == {"sql": 6, "countdown": 2}
        assert row["length/turns/countdown"] == 1 <= row["length/turns/sql"] <= 2
        assert {"reward/mean/sql", "success/countdown/two-small", "success/sql"} <= {*row}
        assert row["source/share/sql"] == 0.75
    plays = played(root, trial)
    assert {play.env for play in plays} == {"sql", "countdown"}
    assert all(play.task.startswith(f"{play.env}/") for play in plays)
    reports = json.loads((root / "mix" / trial / "evaluations.json").read_text())
    for report in reports.values():
        entries = report["sampled"]
        assert (entries["sql"]["episodes"], entries["countdown"]["episodes"]) == (2, 1)


@pytest.fixture(scope="module")
def whole(root):
    """Five steps without a break."""
    return trained(root, "whole", STEPS)


def drawn(root, trial):
    return Counter((play.step, play.task) for play in played(root, trial) if play.split == "train")


def test_a_mixture_is_trained_and_goes_on_as_if_it_had_never_stopped(root, whole):
    check_rows(root, "whole", whole)
    trained(root, "again", 1)
    rows = trained(root, "again", STEPS)
    assert [figures(row) for row in rows] == [figures(row) for row in whole]
    assert drawn(root, "again") == drawn(root, "whole")


def test_a_killed_mixture_goes_on_as_if_it_had_never_stopped(root, whole):
    """It is killed between a checkpoint and the next one, as a machine that loses its power is."""
    options = ("exp_ctrl.ckpt_freq_steps=2",)
    command = [sys.executable, "-m", "realhf.launch", *arguments(root, "killed", STEPS), *options]
    with (root / "killed.log").open("w") as log:
        launcher = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            assert until(lambda: count_steps(root, "killed") >= 3, 120)
        finally:
            killed = kill_all(launcher.pid)
            launcher.wait()
    assert gone(killed, 20)
    assert 3 <= count_steps(root, "killed") < STEPS, "it was killed too late"
    rows = trained(root, "killed", STEPS, *options)
    assert [figures(row) for row in rows] == [figures(row) for row in whole]


def test_a_mixture_is_trained_asynchronously(root):
    options = ("async_rl.n_generation_workers=1", "async_rl.n_rollout_workers=1")
    rows = trained(root, "streamed", 2, *options, experiment="grpo_async")
    assert len(rows) == 2 and not undescribed(rows)
    plays = [play for play in played(root, "streamed") if play.split == "train"]
    count = Counter(play.env for play in plays)
    assert count["sql"] > count["countdown"] > 0
    assert max(play.turns for play in plays if play.env == "countdown") == 1
