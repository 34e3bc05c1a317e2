"""The bound on staleness while generation workers come and go in the middle of updates: 200 random schedules."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from tests.dataflow.rollouts.toy_generation_fleet import FleetRun


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("gated", [False, True], ids=["joining and dying", "failing and sent away too"])
async def test_no_sample_is_older_than_the_bound_whoever_generates(tmp_path: Path, gated: bool) -> None:
    reached = held = 0
    for seed in range(100):
        run = FleetRun(tmp_path / str(seed), Random(seed), gated=gated)
        await run.run()
        reached += run.spread == run.eta > 0
        held += run.wasted
    assert reached > 10, "hardly any schedule came close to its bound"
    assert held or not gated, "no request came to an engine that the master had given up"
