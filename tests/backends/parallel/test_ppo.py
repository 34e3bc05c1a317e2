"""PPO on several workers: values, advantages and both losses are those of one worker."""

from __future__ import annotations

import pytest
import torch

from realhf.api.parallel import Parallel
from tests.backends.parallel import ppo_training
from tests.backends.parallel.rank_processes import results, run_ranks

pytestmark = pytest.mark.slow


@pytest.mark.nightly
@pytest.mark.parametrize(
    "parallel",
    [Parallel(dp=2), Parallel(fsdp=2), Parallel(dp=4), Parallel(fsdp=4)],
    ids=["dp2", "fsdp2", "dp4", "fsdp4"],
)
def test_five_steps_are_those_of_one_worker(parallel: Parallel) -> None:
    """Also with fewer sequences than ranks, and with one sequence. Losses are equal to 1e-5; the norm of a critic's
    gradient is the square root of sums that differ more in the last bits after four steps of AdamW."""
    torch.set_num_threads(1)
    expected = ppo_training.alone()
    outcomes = results(run_ranks(parallel.size, ppo_training.on_ranks, parallel.size, parallel))
    for found in outcomes:
        assert found == outcomes[0], "every rank reports what rank 0 does, to the bit"
        for own, alone in zip(found, expected, strict=True):
            assert own.keys() == alone.keys()
            for name in own:
                if not name.endswith("positions_per_token"):  # Tells how much padding there is.
                    close = 1e-4 if name.endswith("grad_norm") else 1e-5
                    assert own[name] == pytest.approx(alone[name], rel=close, abs=1e-5, nan_ok=True), name
    assert all(row["critic/loss"] > 0 for row in expected)
