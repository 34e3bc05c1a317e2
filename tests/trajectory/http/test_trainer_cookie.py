"""A session that pulls ahead keeps the name under which it holds a batch. Source: docs/reference/trajectory.md 3.10."""

from __future__ import annotations

from realhf.trajectory.state import delivery
from realhf.trajectory.state.delivery import Batch, NoBatch, PullRequest
from tests.trajectory.state.test_delivery import started


def test_a_trainer_without_a_name_gets_none_while_a_batch_is_on_its_way_to_it():
    """Of two pulls at once one gets the batch and the other none. The answer without a batch says that one is held
    under the address, so that no cookie goes with it: the pull after that has to acknowledge the batch."""
    driver, peer = started(), PullRequest("peer 10.0.0.1")
    driver.push(4, 4)
    batch = delivery.pull(driver.state, driver.now, peer)
    assert isinstance(batch, Batch)
    ahead = delivery.pull(driver.state, driver.now, peer)
    assert isinstance(ahead, NoBatch) and ahead.holding
    other = delivery.pull(driver.state, driver.now, PullRequest("peer 10.0.0.2"))
    assert isinstance(other, NoBatch) and not other.holding, "it is nobody else's"
    delivery.mark_sent(driver.state, driver.now, batch)
    later = delivery.pull(driver.state, driver.now, peer)
    assert isinstance(later, NoBatch) and not later.holding
    assert not driver.state.leases and not driver.state.groups, "the batch is acknowledged, so nobody gets it again"
