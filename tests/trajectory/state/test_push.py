"""Routing of pushed groups, quarantine, back-pressure, idempotency.

Source: docs/reference/trajectory.md 2.6, 2.7, 3.5, 3.8, 3.10.
"""

from __future__ import annotations

import asyncio
import math

import msgspec
import pytest

from realhf.trajectory.records import StateOptions, StoredReply
from realhf.trajectory.state import delivery, maintenance, quarantine, views
from realhf.trajectory.state.delivery import NoBatch
from realhf.trajectory.state.engine import StateEngine
from realhf.trajectory.state.server_state import TrajectoryState
from realhf.trajectory.store.open import MemoryStore
from realhf.web.refusal import Refusal
from tests.trajectory.driver import Driver, ids, refused, sizes


def started(batch_size: int = 8, **options: object) -> Driver:
    driver = Driver(**options)
    driver.start(batch_size=batch_size)
    return driver


def reasons(driver: Driver) -> dict[str, int]:
    return views.quarantine(driver.state, driver.now, 100, None)["by_reason"]


def test_groups_without_an_environment_or_of_an_unknown_one_are_queued_whatever_their_size():
    driver = started()
    assert (
        driver.push(2)[0]
        == driver.push(4, env=77)[0]
        == driver.push(1, env=-5)[0]
        == {"status": "received"}
    )
    assert views.status(driver.state, driver.now)["queue_size"] == 3


def test_odd_sizes_wait_in_the_mix_buffer_until_a_set_adds_up():
    driver = started()
    env = driver.env(group_size=4)
    assert driver.push(3, env=env)[0] == {"status": "buffered", "buffer_size": 3}
    assert driver.push(3, env=env)[0] == {"status": "buffered", "buffer_size": 6}
    assert views.latest(driver.state, driver.now) is None
    assert driver.push(1, env=env)[0] == {"status": "buffered", "buffer_size": 3}, (
        "the first 3 and the 1 are out"
    )
    assert views.status(driver.state, driver.now)["queue_size"] == 2
    assert views.latest(driver.state, driver.now).size == 1
    assert views.buffers(driver.state, driver.now)["buffers"] == [
        {"env_id": env, "groups": 1, "sequences": 3, "oldest_age_s": 0.0}
    ]


def test_a_released_set_is_delivered_together_and_does_not_jam():
    driver = started()
    env = driver.env(group_size=4)
    driver.push(3, env=env)
    driver.push(4, env=env)
    driver.push(1, env=env)
    batch = driver.batch()
    assert sizes(batch) == [4, 3, 1]
    assert reasons(driver) == {}


def test_a_set_whose_target_does_not_divide_the_batch_is_not_bundled():
    driver = started()
    env = driver.env(group_size=3)
    driver.push(1, env=env)
    _, headers = driver.push(2, env=env)
    assert all(group.bundle is None for group in driver.state.groups.values())
    assert headers == {}
    assert views.status(driver.state, driver.now)["queue_size"] == 2


def test_a_list_answers_for_all_of_it():
    driver = started()
    env = driver.env(group_size=4)
    assert driver.push(4, 1, 2, env=env)[0] == {
        "status": "received",
        "groups_processed": 3,
        "buffered": 2,
        "last_buffer_size": 3,
    }
    assert driver.push(listed=True)[0] == {"status": "received", "groups_processed": 0}
    assert driver.push(4, env=env, listed=True)[0] == {"status": "received", "groups_processed": 1}


@pytest.mark.parametrize(
    ("size", "reason"),
    [(0, "zero_sequences"), (16, "larger_than_batch"), (3, "size_does_not_divide_batch")],
)
def test_what_can_never_be_served_is_set_aside(size, reason):
    driver = started()
    driver.push(8)
    assert driver.push(size) == ({"status": "received"}, {"X-Quarantined": reason})
    assert reasons(driver) == {reason: 1}
    assert sizes(driver.batch()) == [8]


def test_larger_than_its_environments_groups():
    driver = started()
    env = driver.env(group_size=2)
    body, headers = driver.push(4, env=env)
    assert body == {"status": "buffered", "buffer_size": 0}
    assert headers == {"X-Quarantined": "larger_than_env_group_size"}
    driver = started(strict="divisor_packing")
    assert driver.push(4, env=driver.env(group_size=2)) == (
        {"status": "buffered", "buffer_size": 4},
        {},
    )


def test_early_groups_are_judged_when_the_batch_size_is_known():
    driver = Driver()
    for size in (3, 4, 0, 16):
        driver.push(size)
    assert reasons(driver) == {"zero_sequences": 1}
    driver.register()
    assert reasons(driver) == {
        "zero_sequences": 1,
        "size_does_not_divide_batch": 1,
        "larger_than_batch": 1,
    }
    assert views.status(driver.state, driver.now)["queue_size"] == 1


def test_requeue_takes_what_can_be_served_now():
    driver = started(batch_size=8)
    driver.push(3)
    driver.push(0)
    held = [item["id"] for item in views.quarantine(driver.state, driver.now, 10, None)["items"]]
    assert quarantine.requeue(driver.state, driver.now, [*held, 999]) == {
        "requeued": [],
        "unknown": [999],
        "refused": {str(held[0]): "size_does_not_divide_batch", str(held[1]): "zero_sequences"},
    }
    driver.state.put_run(msgspec.structs.replace(driver.state.run, batch_size=3))
    assert quarantine.requeue(driver.state, driver.now, held)["requeued"] == held[:1]
    assert ids(driver.batch()) == held[:1]
    assert quarantine.clear(driver.state, driver.now)["deleted"] == 1


def test_quarantine_counts_as_held_and_yields_to_what_can_be_served():
    driver = started(max_queue_groups=4)
    for _ in range(10):
        driver.push(16)
    assert len(driver.state.quarantine) <= 4
    oldest = next(iter(driver.state.quarantine))
    driver.push(4, 4, 4)
    assert driver.state.waiting_groups + len(driver.state.quarantine) == 4
    assert oldest not in driver.state.quarantine
    dropped = driver.state.run.quarantine_dropped
    assert dropped == 10 - len(driver.state.quarantine)
    driver.push(4)
    assert not driver.state.quarantine
    with pytest.raises(Exception, match="full"):
        driver.push(4)
    assert driver.state.run.quarantine_dropped == 10


def test_quarantine_is_bounded_in_bytes_and_groups():
    driver = started(max_queue_bytes=100)
    for _ in range(30):
        driver.push(16)
    assert driver.state.quarantine_bytes + driver.state.waiting_bytes <= 100
    driver = started(quarantine_bytes=25)
    for _ in range(5):
        driver.push(3)
    page = views.quarantine(driver.state, driver.now, 10, None)
    assert (page["total"], page["dropped"], len(driver.state.groups)) == (2, 3, 2)
    driver = started(max_quarantine_groups=3)
    for _ in range(5):
        driver.push(16)
    assert len(driver.state.quarantine) == 3
    assert quarantine.clear(driver.state, driver.now)["deleted"] == 3


def test_pages_of_the_quarantine():
    driver = started()
    for _ in range(5):
        driver.push(3)
    first = views.quarantine(driver.state, driver.now, 2, None)["items"]
    rest = views.quarantine(driver.state, driver.now, 10, first[-1]["id"])["items"]
    assert len(first) == 2
    assert len(rest) == 3
    assert not {item["id"] for item in first} & {item["id"] for item in rest}


def test_leftovers_of_the_buffer_expire_into_quarantine():
    driver = started(buffer_expiry_s=100.0)
    env = driver.env(group_size=4)
    driver.push(3, env=env)
    driver.now += 90
    driver.push(3, env=env)
    assert not maintenance.is_due(driver.state, driver.now)
    driver.now += 20
    assert maintenance.is_due(driver.state, driver.now)
    maintenance.tidy(driver.state, driver.now)
    assert reasons(driver) == {"buffer_leftover_expired": 1}
    assert views.buffers(driver.state, driver.now)["buffers"][0]["groups"] == 1


def test_the_buffer_is_bounded():
    driver = started(max_buffered_groups=3)
    env = driver.env(group_size=4)
    for _ in range(5):
        driver.push(3, env=env)
    assert reasons(driver) == {"buffer_full": 2}
    assert views.buffers(driver.state, driver.now)["buffers"][0]["groups"] == 3


@pytest.mark.parametrize("bound", [{"max_queue_groups": 3}, {"max_queue_bytes": 35}])
def test_full_is_503_whole_and_recovers_after_an_acknowledgement(bound):
    driver = started(**bound)
    driver.push(4, 4)
    with refused(503) as refusal:
        driver.push(4, 4)
    assert int(refusal.value.headers["Retry-After"]) >= 1
    assert views.status(driver.state, driver.now)["queue_size"] == 2
    assert len(driver.state.take_changes().freed) == 2, "payloads of a refused list are given up"
    driver.batch()
    with pytest.raises(Refusal):
        driver.push(4, 4)
    driver.pull()
    driver.push(4, 4)


def test_a_repeat_with_the_same_key_gets_the_first_answer_and_stores_nothing():
    driver = started()
    env = driver.env(group_size=4)
    first = driver.push(3, env=env, key="k", fingerprint="a")
    driver.state.take_changes()
    again, headers = driver.push(3, env=env, key="k", fingerprint="a")
    assert again == first[0]
    assert headers == {"Idempotency-Replayed": "true"}
    assert len(driver.state.groups) == 1
    assert len(driver.state.take_changes().freed) == 1
    with refused(422):
        driver.push(3, env=env, key="k", fingerprint="b")


def test_a_refused_push_may_be_tried_again_under_its_key():
    driver = started(max_queue_groups=2)
    driver.push(4, 4)
    with pytest.raises(Refusal):
        driver.push(4, key="k")
    driver.batch()
    driver.pull()
    assert driver.push(4, key="k") == ({"status": "received"}, {})


def test_keys_expire():
    driver = started(replay_ttl_s=100.0)
    driver.push(4, key="k")
    driver.now += 101
    driver.push(4, key="k", fingerprint="other")
    assert len(driver.state.groups) == 2
    driver.now += 101
    maintenance.tidy(driver.state, driver.now)
    assert not driver.state.replays


def test_stale_groups_are_set_aside_when_a_batch_is_formed():
    driver = started()
    driver.register(join=True)
    driver.register(batch_size=8, max_staleness=2)
    driver.pull()
    driver.push(4, version=0)
    driver.push(4, version=5)
    driver.push(4, version=6)
    driver.at_version(7)
    batch = driver.batch()
    assert [group.policy_version for group in batch.groups] == [5, 6]
    assert reasons(driver) == {"too_stale": 1}
    held = views.quarantine(driver.state, driver.now, 1, None)["items"][0]["id"]
    assert quarantine.requeue(driver.state, driver.now, [held])["refused"] == {
        str(held): "too_stale"
    }


def test_a_stale_member_of_a_set_does_not_strand_the_others():
    driver = started(max_staleness=2)
    env = driver.env(group_size=4)
    driver.push(2, env=env, version=0)
    driver.push(1, env=env, version=5)
    driver.push(1, env=env, version=5)
    assert {group.bundle for group in driver.state.groups.values()} != {None}
    driver.at_version(5)
    assert isinstance(driver.pull(), NoBatch)
    assert reasons(driver) == {"too_stale": 1}
    for _ in range(3):
        driver.push(2, version=5)
    assert sorted(sizes(driver.batch())) == [1, 1, 2, 2, 2]


def test_payloads_that_are_lost_hold_nobody_up():
    driver = started()
    for _ in range(3):
        driver.push(4)
    batch = driver.batch(sent=False)
    state = driver.state
    lost = batch.groups[0]
    unique = type(lost.payload)(b"gone", 4, lost.payload.encoding, 7, 0)
    state.put("groups", lost.id, msgspec.structs.replace(lost, payload=unique))
    delivery.isolate_lost(state, driver.now, batch, frozenset([b"gone"]))
    assert reasons(driver) == {"payload_lost": 1}
    assert sorted(ids(driver.batch())) == sorted(
        [batch.groups[1].id, *(set(state.groups) - set(ids(batch)))]
    )
    assert quarantine.requeue(state, driver.now, [lost.id])["requeued"] == [lost.id], (
        "somebody repaired the disk"
    )


def test_stale_groups_may_fill_what_nothing_fresher_fills():
    driver = started(max_staleness=1, stale_policy="last")
    driver.push(4, version=0)
    driver.at_version(9)
    driver.push(4, version=9)
    driver.push(4, version=9)
    assert [group.policy_version for group in driver.batch().groups] == [9, 9]
    assert views.status(driver.state, driver.now)["queue_size"] == 1
    driver.push(4, version=9)
    assert [group.policy_version for group in driver.batch().groups] == [0, 9]
    assert reasons(driver) == {}


def test_a_group_without_a_version_gets_the_current_one():
    driver = started()
    driver.push(8)
    driver.batch()
    driver.push(8)
    assert driver.batch().versions == (1, 1)


def test_a_stale_group_behind_a_fresh_one_fills_what_nothing_fresher_does():
    """Whatever the order of the policy versions."""
    for per_batch, versions in (
        (3, [5, 0, 5]),
        (4, [5, 0, 5, 0]),
        (2, [5, 0]),
        (2, [0, 5, 1, 5]),
        (2, [5, 5, 0, 5]),
    ):
        driver = started(max_staleness=1, stale_policy="last", batch_size=4 * per_batch)
        for version in versions:
            driver.push(4, version=version)
        driver.at_version(5)
        batches = [driver.batch() for _ in range(len(versions) // per_batch)]
        found = [group.policy_version for batch in batches for group in batch.groups]
        assert found == sorted(versions, key=lambda version: version < 5), (
            "fresh ones first, then the oldest policy"
        )
        assert isinstance(driver.pull(), NoBatch)


def test_more_keys_than_are_remembered_forgets_the_oldest():
    driver = started(max_replays=5)
    for number in range(9):
        driver.push(4, key=f"k{number}")
    maintenance.tidy(driver.state, driver.now)
    assert list(driver.state.replays) == [f"k{number}" for number in range(4, 9)]
    assert driver.state.counters["replays_forgotten_early"] == 4
    assert not maintenance.is_due(driver.state, driver.now)


def test_what_is_held_in_memory_is_bounded_unless_told_otherwise():
    """A queued group takes some 500 bytes of memory and a key some 400, however small they are."""
    options = StateOptions()
    assert 0 < options.max_queue_groups * 500 + options.max_replays * 400 <= 1 << 30
    assert 0 < options.max_quarantine_groups <= options.max_queue_groups
    assert options.env_expiry_s < math.inf


def test_keys_expire_in_the_order_of_their_age_after_a_restart_too():
    """A store may give rows back in any order."""
    driver = started(replay_ttl_s=100.0)
    for key in ("z", "m", "a"):
        driver.push(4, key=key)
        driver.now += 30
    snapshot = {table: list(rows.values()) for table, rows in driver.state.tables.items()}
    snapshot["replays"].reverse()
    driver.state.load(snapshot)
    driver.now += 30
    maintenance.tidy(driver.state, driver.now)
    assert list(driver.state.replays) == ["m", "a"]


@pytest.mark.slow
async def test_housekeeping_goes_on_until_nothing_is_left_to_do():
    """However many keys expire at once, they are gone before the next pause."""
    engine = StateEngine(MemoryStore(), StateOptions(replay_ttl_s=60.0), tidy_every_s=0.3)
    await engine.open()

    def remember(state: TrajectoryState, at: float) -> None:
        for number in range(5000):
            state.put("replays", f"k{number}", StoredReply(f"k{number}", "f", b"{}", {}, at))

    await engine.write(remember)
    engine._clock.continue_from(engine.state.newest_time() + 61.0)
    while len(engine.state.replays) == 5000:
        await asyncio.sleep(0.01)
    for _ in range(100):
        await asyncio.sleep(0)
    assert not engine.state.replays
    await engine.close()


def test_what_was_good_when_it_was_taken_stays_until_somebody_deletes_it():
    """Damaged payloads used to fall out of a full quarantine."""
    driver = started(quarantine_bytes=25, max_quarantine_groups=3, max_queue_bytes=60)
    for _ in range(4):
        driver.push(4)
    for batch in (driver.batch("a", sent=False), driver.batch("b", sent=False)):
        delivery.isolate_lost(
            driver.state, driver.now, batch, frozenset(group.payload.ref for group in batch.groups)
        )
    for _ in range(5):
        driver.push(5)
    driver.push(4, 4)
    assert reasons(driver)["payload_lost"] == 4
    quarantine.clear(driver.state, driver.now)
    assert not driver.state.quarantine
