"""Real runs whose processes are killed: the journal balances, everything stops, the same command
goes on.

``benchmarks/kill_soak.py`` does this a hundred times; here every kind of fault comes once, in two
runs. One has an environment with processes of its own, which loses sessions as well, so that
rollouts that lost theirs are left out of their group; the other is on an environment that lives in
the rollout workers."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.harness.killed_run import (
    AWS,
    CTRL_C,
    FROZEN,
    LAUNCHER,
    MARKS,
    SERVICE,
    KilledRun,
    kill_at_random,
)

pytestmark = [pytest.mark.sim, pytest.mark.slow, pytest.mark.timeout(900)]

STUCK_S = 400.0
LOSSES = (
    "env.fault_rate=0.1",
    "env.fault_kinds=disconnect",
    "rollout.retries=0",
    "ppo.group_size=4",
)
HANDS = (
    ("env", LAUNCHER, "ministack"),
    (f"{FROZEN}generation", "master", "rollout_worker", CTRL_C, "model_worker"),
)
"""The faults of every run. A launcher that is killed has the most to leave behind where simulators
run; one worker is not killed but stands still for ever, and ``benchmarks/freeze_soak.py`` does that
to all of them."""
NOTICED = ("rpc.heartbeat_s=1", "rpc.dead_after_s=5")


def test_every_fault_is_dealt_and_those_of_a_service_to_a_run_that_has_one() -> None:
    assert sorted(fault.removeprefix(FROZEN) for hand in HANDS for fault in hand) == sorted(
        [*MARKS, LAUNCHER, CTRL_C]
    )
    assert {*SERVICE} < {*HANDS[0]}


@pytest.mark.nightly
@pytest.mark.parametrize("number", range(len(HANDS)))
def test_a_run_survives(tmp_path: Path, policy: Path, number: int) -> None:
    environment, injected = (AWS, LOSSES) if number == 0 else ("sql", NOTICED)
    faults = HANDS[number]
    options = injected
    run = KilledRun(
        tmp_path,
        f"run{number}",
        policy,
        *options,
        seed=number,
        steps=4 + len(faults),
        environment=environment,
    )
    run.start()
    try:
        kill_at_random(run, faults, random.Random(number), every_s=1.0, timeout_s=STUCK_S)
        verdict = run.verdict(run.wait(STUCK_S))
    finally:
        run.end()
    assert not verdict.problems, (verdict, run.output.read_text())
    assert verdict.kills and verdict.tally is not None
    assert verdict.tally.head_staleness_max <= 1
    assert number == 0 or any("no heartbeat for" in death for death in run.deaths()), run.deaths()
    rows = run.rows()
    assert any(row["rollouts/failed"] for row in rows) == (number == 0)
    assert any("failures/lost" in row for row in rows) >= (number == 0)
