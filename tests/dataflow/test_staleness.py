"""Admission: the formula, and what keeps it true (spec dataflow, section 9; tests: section 14, 8)."""

from __future__ import annotations

import pytest

from realhf.dataflow.staleness import StalenessManager


def manager(batch_size: int = 4, eta: int = 2, max_concurrent: int = 1000, **counters: int) -> StalenessManager:
    return StalenessManager(
        batch_size=batch_size, max_head_offpolicyness=eta, max_concurrent=max_concurrent, **counters
    )


@pytest.mark.parametrize("eta", [0, 1, 2, 4, 8])
def test_first_one_batch_and_eta_more_then_one_for_each_version(eta: int) -> None:
    counters = manager(eta=eta)
    assert counters.capacity == (1 + eta) * 4
    counters.admit(counters.capacity)
    for version in range(1, 6):
        assert counters.capacity == 0
        with pytest.raises(ValueError, match="capacity"):
            counters.admit()
        counters.accept(4)
        counters.consume(4)
        assert counters.capacity == 0
        counters.set_version(version)
        assert counters.capacity == 4
        counters.admit(4)
