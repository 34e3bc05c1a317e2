"""Leases, acknowledgements, redelivery: docs/reference/trajectory.md 3.1, 3.10."""

from __future__ import annotations

import pytest

from realhf.trajectory.state import delivery, maintenance
from realhf.trajectory.state.delivery import LeasedBatch, NoBatch, PullRequest
from tests.trajectory.driver import Driver, ids, refused, sizes


def started(**options: object) -> Driver:
    driver = Driver(**options)
    driver.start()
    return driver


def test_without_a_trainer_there_is_no_batch_and_pulling_starts_nothing():
    driver = Driver()
    driver.push(8)
    assert driver.pull() == NoBatch("unregistered", unregistered=True)
    assert not driver.state.run.started


def test_groups_pushed_before_the_registration_are_served_after_it():
    driver = Driver()
    driver.push(4)
    driver.register()
    driver.push(4)
    assert sizes(driver.batch()) == [4, 4]


def test_the_step_grows_by_one_for_each_new_batch_only():
    driver = started()
    driver.push(4, 4, 4, 4)
    assert driver.state.run.step == 0
    first = driver.batch(sent=False)
    assert (first.step, driver.state.run.step) == (0, 1)
    again = driver.batch(sent=False)
    assert (again.step, driver.state.run.step, again.redelivered) == (0, 1, True)
    delivery.mark_sent(driver.state, driver.now, again)
    assert driver.batch().step == 1
    assert isinstance(driver.pull(), NoBatch)
    assert driver.state.run.step == 2


def test_the_next_pull_of_the_same_trainer_acknowledges_what_was_sent():
    driver = started()
    driver.push(4, 4, 4, 4)
    first = driver.batch()
    assert set(ids(first)) <= set(driver.state.groups)
    second = driver.batch()
    assert not set(ids(first)) & set(driver.state.groups)
    assert delivery.ack(driver.state, driver.now, first.lease_id)["status"] == "success"
    assert set(ids(second)) == set(driver.state.groups)


def test_an_explicit_lease_outlives_the_next_pull():
    driver = started()
    driver.push(4, 4, 4, 4)
    first = driver.batch(explicit=True)
    second = driver.batch(explicit=True)
    assert set(driver.state.groups) == {*ids(first), *ids(second)}
    delivery.ack(driver.state, driver.now, second.lease_id)
    assert set(driver.state.groups) == set(ids(first))


def test_a_lost_response_goes_to_the_next_puller_with_its_step():
    driver = started()
    driver.push(4, 4, 4, 4)
    lost = driver.batch("a", sent=False)
    delivery.mark_lost(driver.state, driver.now, lost)
    taken = driver.batch("b")
    assert (ids(taken), taken.step, taken.redelivered) == (ids(lost), lost.step, True)
    assert taken.lease_id != lost.lease_id
    with refused(409):
        delivery.ack(driver.state, driver.now, lost.lease_id)
    assert driver.batch("a").step == 1


def test_the_same_trainer_gets_its_unsent_batch_under_the_same_lease():
    driver = started()
    driver.push(4, 4)
    lost = driver.batch("a", sent=False)
    again = driver.batch("a", sent=False)
    assert (ids(again), again.lease_id, again.step) == (ids(lost), lost.lease_id, lost.step)
    delivery.mark_lost(driver.state, driver.now, lost)
    delivery.mark_sent(driver.state, driver.now, again)
    assert isinstance(driver.pull("a"), NoBatch), (
        "the end of the first response must not undo the second one"
    )


def test_an_anonymous_puller_beside_another_one_gets_a_batch_of_its_own():
    driver = started()
    driver.push(4, 4, 4, 4)
    first = driver.batch("10.0.0.1", sent=False, anonymous=True)
    second = driver.batch("10.0.0.1", sent=False, anonymous=True)
    assert not set(ids(first)) & set(ids(second))


def test_an_expired_batch_goes_to_another_trainer_and_not_to_its_slow_owner():
    driver = started(lease_timeout_s=60.0)
    driver.push(4, 4, 4, 4)
    slow = driver.batch("slow")
    driver.now += 61
    fresh = driver.batch("slow")
    assert not set(ids(fresh)) & set(ids(slow)), "the late pull of the owner is its acknowledgement"
    driver.now += 61
    other = driver.batch("other")
    assert (ids(other), other.step) == (ids(fresh), fresh.step)
    with refused(409):
        delivery.ack(driver.state, driver.now, fresh.lease_id)


def test_an_expired_explicit_batch_goes_to_anyone():
    driver = started(lease_timeout_s=60.0)
    driver.push(4, 4)
    first = driver.batch("a", explicit=True)
    driver.now += 59
    delivery.renew(driver.state, driver.now, first.lease_id)
    driver.now += 59
    assert isinstance(driver.pull("a", explicit=True), NoBatch)
    driver.now += 2
    again = driver.batch("a", explicit=True)
    assert ids(again) == ids(first)
    assert again.lease_id != first.lease_id


@pytest.mark.parametrize("explicit", [False, True])
def test_who_renews_a_batch_has_received_it(explicit):
    """Also where the server could not note that it was sent: the same trainer used to be given it
    again."""
    driver = started()
    driver.push(4, 4, 4, 4)
    first = driver.batch("a", sent=False, explicit=explicit)
    assert ids(driver.batch("a", sent=False, explicit=explicit)) == ids(first), (
        "nobody knows that it arrived"
    )
    (lease,) = driver.state.leases
    delivery.renew(driver.state, driver.now, lease)
    assert not set(ids(driver.batch("a", explicit=explicit))) & set(ids(first))


def test_at_most_once_never_hands_a_batch_out_again():
    driver = started(delivery="at_most_once")
    driver.push(4, 4, 4, 4)
    lost = driver.batch("a", sent=False)
    delivery.mark_lost(driver.state, driver.now, lost)
    assert not set(ids(driver.batch("a"))) & set(ids(lost))
    assert not driver.state.leases
    assert not driver.state.groups


def test_at_most_once_after_a_crash_or_a_silent_client():
    driver = started(delivery="at_most_once", send_timeout_s=5.0)
    driver.push(4, 4)
    driver.batch("a", sent=False)
    driver.now += 6
    assert isinstance(driver.pull("b"), NoBatch)
    assert maintenance.is_due(driver.state, driver.now)
    maintenance.tidy(driver.state, driver.now)
    assert not driver.state.groups
    assert not maintenance.is_due(driver.state, driver.now)


def test_strict_anonymous_pulls_are_acknowledged_when_sent():
    driver = started(strict="lease_anonymous")
    driver.push(4, 4, 4, 4)
    first = driver.batch("peer", anonymous=True, sent=False)
    delivery.mark_lost(driver.state, driver.now, first)
    again = driver.batch("peer", anonymous=True)
    assert ids(again) == ids(first)
    assert not driver.state.leases
    assert len(driver.state.groups) == 2


def test_a_restart_returns_what_was_being_sent_and_keeps_what_was_sent():
    driver = started()
    driver.push(4, 4, 4, 4)
    sent = driver.batch("a")
    unsent = driver.batch("b", sent=False)
    maintenance.restart(driver.state, driver.now)
    taken = driver.batch("c")
    assert ids(taken) == ids(unsent)
    assert isinstance(driver.pull("d"), NoBatch)
    assert driver.state.leases[sent.lease_id].sent


def test_ended_leases_are_forgotten_after_a_while():
    driver = started(replay_ttl_s=100.0)
    driver.push(4, 4)
    first = driver.batch()
    delivery.ack(driver.state, driver.now, first.lease_id)
    driver.now += 101
    maintenance.tidy(driver.state, driver.now)
    with refused(404):
        delivery.ack(driver.state, driver.now, first.lease_id)


def test_a_trainer_without_a_name_gets_none_while_a_batch_is_on_its_way_to_it():
    """Of two pulls at once one gets the batch and the other none. The answer without a batch says
    that one is held under the address, so that no cookie goes with it: the pull after that has to
    acknowledge the batch."""
    driver = started()
    peer = PullRequest("peer 10.0.0.1")
    driver.push(4, 4)
    batch = delivery.pull(driver.state, driver.now, peer)
    assert isinstance(batch, LeasedBatch)
    ahead = delivery.pull(driver.state, driver.now, peer)
    assert isinstance(ahead, NoBatch) and ahead.holding
    other = delivery.pull(driver.state, driver.now, PullRequest("peer 10.0.0.2"))
    assert isinstance(other, NoBatch) and not other.holding, "it is nobody else's"
    delivery.mark_sent(driver.state, driver.now, batch)
    later = delivery.pull(driver.state, driver.now, peer)
    assert isinstance(later, NoBatch) and not later.holding
    assert not driver.state.leases and not driver.state.groups, (
        "the batch is acknowledged, so nobody gets it again"
    )
