"""Whole runs on environments that are no AWS, from the command line: registered ones, and a file of
one's own."""

import json
import math
from collections import Counter
from pathlib import Path

import pytest

from realhf.launch.__main__ import main
from realhf.monitor.rollouts.reader import RolloutStore

TINY = (
    "model=builtin_tiny",
    "total_train_steps=2",
    "dataset.train_bs_n_seqs=2",
    "ppo.group_size=2",
    "rollout.sessions=4",
    "gen.max_new_tokens=8",
    "rollout.max_total_tokens=900",
    "evaluation.episodes_per_task=1",
    "evaluation.greedy_episodes_per_task=0",
    "evaluation.templates=2",
    "monitor.trackers=[]",
    "recover_mode=disabled",
    "torch_threads=1",
)
AGENT = Path(__file__).resolve().parent / "rollout" / "branching_agent.py"
REPORTER = Path(__file__).resolve().parent / "rollout" / "reporting_agent.py"
EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "your_environment.py"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """For all runs of this file, which find the model that one of them has made."""
    return tmp_path_factory.mktemp("runs")


def trained(root, name, *arguments):
    """Run an experiment and return the metrics of its steps."""
    assert (
        main(
            [*TINY, *arguments, f"fileroot={root}", "trial_name=default", f"experiment_name={name}"]
        )
        == 0
    )
    lines = (root / name / "default" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def kept(root, name):
    """Return the rollouts that a run kept. Whatever was trained was played, with the same tokens,
    and is read whole."""
    store = RolloutStore(root / name / "default")
    store.refresh()
    rows = list(store.rows())
    assert store.problems == [] and {line.id for line in store.train.lines} <= {
        row.play.id for row in rows
    }
    assert {row.train.n_tokens for row in rows if row.train} - {0}
    assert all(row.train.n_tokens in (0, row.play.length) for row in rows if row.train)
    assert all(store.record(row.play)["messages"] for row in rows if row.play.failure is None)
    return rows


@pytest.mark.nightly
@pytest.mark.slow
def test_an_environment_that_ships_is_trained_on_after_a_warm_start(root):
    """By the second algorithm, which needs no reference."""
    rows = trained(
        root, "countdown", "experiment=reinforce", "env=countdown", "ppo.entropy_coef=0.05"
    )
    assert len(rows) == 2 and all(row["batch/tokens"] > 0 for row in rows)
    assert [(row["policy/updates"], row["rew_inf/n_scored"]) for row in rows] == [(1, 4), (1, 4)]
    assert not [name for row in rows for name in row if name.startswith("ref_inf")]
    played = kept(root, "countdown")
    assert Counter(row.step for row in played if row.train) == {1: 4, 2: 4}
    assert {(row.play.split, row.play.step) for row in played} >= {
        ("eval/sampled", 0),
        ("eval/sampled", 2),
    }


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("experiment", ["grpo", "grpo_async"])
def test_groups_without_signal_give_way_and_are_counted(root, experiment):
    """Of a policy that knows nothing yet most groups teach nothing: up to a bound others are played
    in their place."""
    name = f"dapo_{experiment}"
    options = (
        "env=countdown",
        "actor.path=builtin_tiny",
        "ppo.algo=dapo",
        "ppo.correction=tis",
        "ppo.overlong_buffer=0",
    )
    rows = trained(root, name, f"experiment={experiment}", *options)
    assert len(rows) == 2 and sum(row["groups/dropped"] for row in rows) > 0
    for row in rows:
        assert row["groups/flat"] == 2 - row["groups/with_signal"]
        assert (
            row["rollouts/played"] == 2 * (2 + row["groups/dropped"]) and row["batch/rollouts"] == 4
        )
    ahead = 0 if experiment == "grpo" else 1
    dropped, flat = (sum(row[f"groups/{key}"] for row in rows) for key in ("dropped", "flat"))
    assert flat == 0 or 2 <= dropped <= 2 * (2 + ahead), (
        "what is left is left by the bound, which holds for every step"
    )
    played = [row for row in kept(root, name) if row.play.split == "train"]
    assert len(played) >= sum(row["rollouts/played"] for row in rows), (
        "those that gave way are kept, too"
    )


@pytest.mark.nightly
@pytest.mark.slow
def test_an_agent_with_tools_and_branches_is_trained_and_its_failures_are_counted(root):
    """On a file of one's own, untrained and asynchronously. Rows of every branch arrive, failures
    of the agent are counted by kind, and no loss is lost to them."""
    rows = trained(
        root,
        "branches",
        "experiment=grpo_async",
        f"env.path={EXAMPLE}:Lock",
        "actor.path=builtin_tiny",
        f"rollout.agent={AGENT}:rollout",
        "rollout.retries=0",
        "ppo.group_size=6",
        "rollout.sessions=6",
        "total_train_steps=3",
    )
    assert len(rows) == 3 and all(math.isfinite(row["policy/loss"]) for row in rows)
    assert any(row["batch/sequences"] > 2 * 6 for row in rows), "branches are rows of their own"
    assert all(row["batch/rollouts"] == 2 * 6 for row in rows), "and a rollout counts once"
    assert sum(row.get("failures/agent", 0) for row in rows) > 0
    assert not any(
        name.startswith("failures/") and name != "failures/agent" for row in rows for name in row
    )
    played = kept(root, "branches")
    assert {row.step for row in played if row.train} == {1, 2, 3} and any(
        row.play.branch is not None for row in played
    )
    assert {row.play.failure for row in played} == {None, "agent"} and any(
        row.staleness is not None for row in played
    )
    evaluations = json.loads((root / "branches" / "default" / "evaluations.json").read_text())
    played = {step: report["sampled"]["overall"] for step, report in evaluations.items()}
    assert {step: entry["episodes"] + entry["failed"] for step, entry in played.items()} == {
        "0": 1,
        "3": 1,
    }


@pytest.mark.nightly
@pytest.mark.slow
def test_answers_under_a_token_mask_all_fit_and_are_trained(root):
    """A policy that was trained on nothing answers a client that parses what it asked for. Under
    the mask all answers fit, freely none does. Training corrects for the mask, which is no mismatch
    of engine and trainer."""
    pytest.importorskip("llguidance", reason="make install installs it")
    options = (
        "experiment=grpo_async",
        f"env.path={EXAMPLE}:Lock",
        "actor.path=builtin_tiny",
        f"rollout.agent={REPORTER}:rollout",
        "gen.max_new_tokens=300",
        "total_train_steps=3",
        "ppo.group_size=4",
        "evaluation.episodes_per_task=2",
    )
    rows = trained(root, "masked", *options, "rollout.agent_structured=constrain")
    assert len(rows) == 3 and all(math.isfinite(row["policy/loss"]) for row in rows)
    assert [row["rollouts/broken_rules"] for row in rows] == [0.0] * 3
    assert not [name for row in rows for name in row if name.startswith("failures/")]
    for row in rows:
        assert 0 < row["policy/behaviour_weight_mean"] < 0.9, "weights correct for the mask"
        assert row["policy/behaviour_weight_max"] < 1.1
        assert row["mismatch/abs_p99"] < 0.1, "which engine and trainer do not see"
    rewards = [row.play.reward or 0.0 for row in kept(root, "masked")]
    assert rewards and min(rewards) >= 0, "the client could parse everything"
    report = json.loads((root / "masked" / "default" / "evaluations.json").read_text())
    assert all(entry["sampled"]["overall"]["failed"] == 0 for entry in report.values())
    rows = trained(root, "free", *options)
    assert all(row["rollouts/broken_rules"] > 0.9 for row in rows)
