"""Real runs whose processes are killed: the journal balances, everything stops, the same command goes on.

``benchmarks/kill_soak.py`` does this a hundred times; here every kind of fault comes once, in four runs. In one of them
the environment loses sessions as well, and rollouts that lost theirs are left out of their group; another is on an
environment that lives in the rollout workers."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.harness.killed_run import AWS, CTRL_C, LAUNCHER, MARKS, SERVICE, KilledRun, kill_at_random

pytestmark = [pytest.mark.sim, pytest.mark.slow, pytest.mark.timeout(400)]

RUNS = 4
STUCK_S = 150.0
LOSSES = ("env.fault_rate=0.1", "env.fault_kinds=disconnect", "rollout.retries=0", "ppo.group_size=4")
ON_SQL = {"generation"}
"""The run with this fault among its own is on sql: its faults have nothing to do with sessions or simulators."""
SINGLES = ("rollout_worker", "generation", "env", "ministack")


def dealt(seed: int) -> list[list[str]]:
    """The faults of every run: one that ends the whole run, and one that does not."""
    choice = random.Random(seed)
    heavy = ["master", "model_worker", LAUNCHER, CTRL_C]
    light = [*SINGLES]
    choice.shuffle(heavy)
    choice.shuffle(light)
    hands = [[fault, *light[number::RUNS]] for number, fault in enumerate(heavy)]
    for hand in hands:
        choice.shuffle(hand)
    return hands


def test_every_fault_is_dealt() -> None:
    assert {fault for hand in dealt(1) for fault in hand} == {*MARKS, LAUNCHER, CTRL_C}
    assert [number for number, hand in enumerate(dealt(1)) if ON_SQL & set(hand) and not {*SERVICE} & set(hand)] == [1]


@pytest.mark.parametrize("number", range(RUNS))
def test_a_run_survives(tmp_path: Path, policy: Path, number: int) -> None:
    injected = LOSSES if number == 0 else ()
    faults = dealt(1)[number]
    environment = "sql" if ON_SQL & set(faults) else AWS
    options = ("monitor.plot_every_steps=0", *injected)
    run = KilledRun(tmp_path, f"run{number}", policy, *options, seed=number, steps=6, environment=environment)
    run.start()
    try:
        kill_at_random(run, faults, random.Random(number), every_s=1.0, timeout_s=STUCK_S)
        verdict = run.verdict(run.wait(STUCK_S))
    finally:
        run.end()
    assert not verdict.problems, (verdict, run.output.read_text())
    assert verdict.kills and verdict.tally is not None
    assert verdict.tally.head_staleness_max <= 1
    rows = run.rows()
    assert any(row["rollout/failed_rollouts"] for row in rows) == bool(injected)
    assert any("rollout/failed/lost" in row for row in rows) >= bool(injected)
