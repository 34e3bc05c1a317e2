"""Whole runs over several hosts, which are network namespaces with their own addresses at one bridge."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.bed import STALENESS, ClusterRun, hosts, running

pytestmark = [pytest.mark.several_hosts, pytest.mark.slow, pytest.mark.timeout(900)]
RUN_S = 600.0
STEPS = 10


def check_books(run: ClusterRun, steps: int) -> None:
    """Every sample was trained once, and none too late."""
    tally = run.tally()
    assert tally.ended and tally.complete and tally.balanced, tally
    assert (tally.steps, tally.outstanding, tally.accepted) == (steps, 0, 0), tally
    assert tally.head_staleness_max <= STALENESS, tally
    assert len(run.rows()) == steps


def test_ten_steps_over_three_hosts(tmp_path: Path, tiny_policy: Path):
    """Trainer, generation and rollouts are on different hosts."""
    with hosts("a", "b", "c") as lan, running(lan, tmp_path, tiny_policy) as run:
        for name in ("b", "c"):
            run.join(name)
        run.launch(
            f"total_train_steps={STEPS}",
            "scheduler.hosts=[b,c]",
            "scheduler.placement.generation=b",
            "scheduler.placement.rollout_worker=c",
        )
        run.until(lambda: len(run.rows()) >= 1, RUN_S)
        status = run.operator("status").splitlines()
        run.ended(RUN_S)
        check_books(run, STEPS)
        for name in ("b", "c"):
            assert run.agents[name].wait(30) == 0, "an agent ends with its run"
    assert [line.split()[0] for line in status[1:]] == [
        "launcher",
        "master",
        "model_worker/0",
        "b",
        "generation/0",
        "c",
        "rollout_worker/0",
    ]
