"""Asynchronous rollouts under random events and crashes: nothing is lost, nothing is trained twice,
nothing leaks; and the bound on staleness while generation workers come and go in the middle of
updates, in 200 random schedules."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random

import pytest

from realhf.dataflow.journal.audit import audit_folder
from tests.dataflow.rollouts.toy_generation_fleet import FleetRun
from tests.dataflow.rollouts.toy_streamed_run import StreamedRun


def drawn_run(folder: Path, random: Random) -> StreamedRun:
    batch = random.randint(1, 4)
    steps = random.randint(1, 8)
    limit = random.choice([10**6, random.randint(1, batch * steps)])
    return StreamedRun(
        folder,
        random,
        batch,
        steps,
        random.randint(0, 3),
        random.random() < 0.3,
        limit,
        random.choice([0.0, 0.0, 0.1]),
    )


@pytest.mark.slow
@pytest.mark.parametrize("first_seed", range(8, 32, 8))
async def test_a_run_that_dies_again_and_again_trains_every_sample_once(
    tmp_path: Path, first_seed: int
) -> None:
    repeated = pruned = 0
    for seed in range(first_seed, first_seed + 8):
        run = drawn_run(tmp_path / str(seed), Random(seed))
        over = False
        for _ in range(run.random.randint(0, 4)):
            over = over or await run.live(run.random.randint(1, 150))
        if not over:
            await run.live(None)
        repeated += run.repeated
        pruned += run.pruned
        check(run)
    assert repeated > 0, "no step was repeated after a crash"
    assert pruned > 0, "no payload was deleted"


def check(run: StreamedRun) -> None:
    trained = [sample_id for ids in run.trained for sample_id in ids]
    counters = run.control.counters()
    assert max(Counter(trained).values(), default=0) <= 1
    assert max(Counter(run.source.told).values(), default=0) <= 1 and set(trained) <= set(
        run.source.told
    )
    assert counters["running"] == counters["waiting"] == counters["staged"] == 0 and not run.leases
    assert counters["consumed"] == len(trained)
    tally = audit_folder(run.folder)
    assert tally.is_balanced and tally.complete and tally.ended
    assert tally.consumed == len(trained) and tally.accepted == tally.outstanding == 0
    assert tally.head_staleness_max <= run.eta
    if not run.drop and not run.damage:
        assert not tally.dropped, "no payload that is needed was deleted"
    if run.limit >= 10**6:
        assert [len(ids) for ids in run.trained] == [run.batch] * run.steps
    else:
        assert tally.admitted == run.source.count and len(trained) <= run.limit


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    "gated", [False, True], ids=["joining and dying", "failing and sent away too"]
)
async def test_no_sample_is_older_than_the_bound_whoever_generates(
    tmp_path: Path, gated: bool
) -> None:
    reached = held = 0
    for seed in range(100):
        run = FleetRun(tmp_path / str(seed), Random(seed), gated=gated)
        await run.run()
        reached += run.spread == run.eta > 0
        held += run.wasted
    assert reached > 10, "hardly any schedule came close to its bound"
    assert held or not gated, "no request came to an engine that the master had given up"
