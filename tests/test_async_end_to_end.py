"""The asynchronous command, with everything real and tiny, beside the synchronous one."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from realhf.dataflow.journal.audit import audit_folder
from realhf.launch.run import find_unknown_files
from tests.test_end_to_end import MOVING, launch, undescribed

pytestmark = [pytest.mark.sim, pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 3
NO_EVALUATION = ("evaluation.episodes_per_task=0",)
ALIKE_IN_BOTH = (
    "reward/mean",
    "reward/std",
    "success/overall",
    "length/mean",
    "length/truncated",
    "length/turns",
    "groups/with_signal",
    "batch/tokens",
    "policy/loss",
    "policy/entropy",
    "policy/grad_norm",
)
"""Metrics of both kinds of runs, by the same names."""
Trained = Callable[..., list[dict[str, Any]]]
ALIKE = ("ppo.use_decoupled_loss=true", "ppo.prox_logp_method=recompute", *MOVING, *NO_EVALUATION)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("async-runs")


@pytest.fixture(scope="module")
def trained(root, tiny_policy):
    """trained(experiment, trial, *options, steps=STEPS) -> the metrics of a run that must
    succeed."""

    def run(experiment, trial, *options, steps=STEPS):
        wanted = (f"total_train_steps={steps}", *ALIKE, *options)
        done = launch(root, trial, *wanted, experiment=experiment, policy=tiny_policy)
        assert done.returncode == 0, done.stderr[-2000:]
        lines = (root / experiment / trial / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    return run


@pytest.fixture(scope="module")
def streamed(trained):
    return trained("grpo_aws_async", "eta0", "async_rl.max_head_offpolicyness=0")


@pytest.mark.nightly
def test_staleness_zero_is_the_synchronous_run(root, trained, streamed):
    played = trained("grpo_aws", "sync")
    for one, other in zip(played, streamed, strict=True):
        for name in ALIKE_IN_BOTH:
            assert one[name] == pytest.approx(other[name], rel=1e-5, abs=1e-7), name
        assert other["staleness/max"] == 0
    order = [
        [
            line
            for line in (root / experiment / trial / "episodes.txt").read_text().splitlines()
            if line.startswith("task: ")
        ]
        for experiment, trial in (("grpo_aws", "sync"), ("grpo_aws_async", "eta0"))
    ]
    assert order[0] == order[1] and len(order[0]) == 2 * STEPS


@pytest.mark.nightly
def test_a_run_leaves_what_it_promised(root, streamed):
    folder = root / "grpo_aws_async" / "eta0"
    for name in (
        "admission/accepted",
        "admission/version",
        "time/episode/p99",
        "time/weights",
        "device/actor_train/peak_bytes",
        "generation/tokens_per_second",
        "generation/weight_pause_ms",
        "training/occupancy",
        "staleness/mean",
        "success/overall",
    ):
        assert name in streamed[-1], name
    assert not undescribed(streamed)
    assert streamed[-1]["admission/consumed"] == streamed[-1]["admission/accepted"] == 2 * STEPS
    for name in ("trace.json", "report.html", "policy"):
        assert (folder / name).exists(), name
    assert find_unknown_files(folder) == []
    spans = {
        event["name"] for event in json.loads((folder / "trace.json").read_text())["traceEvents"]
    }
    assert {"train/actor_train", "weights/publish", "weights/load"} <= spans
    tally = audit_folder(folder / "journal")
    assert tally.consumed == tally.admitted == 2 * STEPS and not tally.lost and not tally.twice


@pytest.mark.nightly
def test_stale_samples_within_the_bound_and_a_run_that_goes_on(root, trained):
    """Begun with two workers of a kind, it goes on with one of each."""
    options = ("async_rl.max_head_offpolicyness=2", "async_rl.weights=disk")
    two = ("async_rl.n_rollout_workers=2", "async_rl.n_generation_workers=2", "env.pool_size=4")
    evaluated = (
        "evaluation.episodes_per_task=2",
        "evaluation.greedy_episodes_per_task=1",
        "evaluation.every_steps=2",
        "evaluation.interim_share=1",
    )
    trained("grpo_aws_async", "eta2", *options, *two, *evaluated, steps=3)
    rows = trained("grpo_aws_async", "eta2", *options, *evaluated, steps=5)
    reports = json.loads((root / "grpo_aws_async" / "eta2" / "evaluations.json").read_text())
    assert list(reports) == ["0", "2", "3", "4", "5"]
    for step, report in reports.items():
        overall = report["sampled"]["overall"]
        greedy = report["greedy"]["overall"]
        assert (
            overall["episodes"] == 2 * greedy["episodes"] > 0
            and overall["failed"] == greedy["failed"] == 0
        )
        assert overall["version"] == greedy["version"] == int(step), (
            "played beside training, by one version"
        )
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert 0 < max(row["staleness/max"] for row in rows) <= 2
    fresh = [row for row in rows if row["staleness/max"] == 0]
    assert fresh and all(row["mismatch/abs_max"] < 1e-4 for row in fresh)
