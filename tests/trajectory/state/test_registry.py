"""Registration, environments, heartbeats and the pacing numbers.

Source: docs/reference/trajectory.md 2.3 to 2.5, 3.2, 3.6, 3.7.
"""

from __future__ import annotations

import pytest

from realhf.trajectory.state import maintenance, registry, views
from realhf.trajectory.state.delivery import NoBatch
from tests.trajectory.conftest import ENV, REGISTRATION
from tests.trajectory.driver import Driver, sizes


def started(batch_size: int = 64, **options: object) -> Driver:
    driver = Driver(**options)
    driver.start(batch_size=batch_size)
    return driver


def status(driver: Driver, env: int) -> dict[str, float]:
    return registry.status_env(driver.state, driver.now, env)


def test_ids_are_dense_and_names_are_numbered():
    driver = started()
    assert [driver.env(desired_name=name) for name in "aaba"] == [0, 1, 2, 3]
    registry.disconnect_env(driver.state, driver.now, 0)
    driver.env(desired_name="a")
    assert [env.name for env in driver.state.envs.values()] == ["a_0", "a_1", "b_0", "a_2", "a_3"]


def test_a_late_environment_is_told_the_present_step():
    driver = started(batch_size=4)
    driver.push(4)
    driver.batch()
    body, _ = registry.register_env(driver.state, 0, ENV)
    assert body["starting_step"] == 1


def test_weights_by_context_length_with_a_floor_and_a_cap():
    driver = started()
    big = driver.env(weight=1.0, max_token_length=300)
    small = driver.env(weight=1.0, max_token_length=100)
    none = driver.env(weight=-3.0)
    assert status(driver, big)["env_weight"] == pytest.approx(0.75)
    assert status(driver, small)["env_weight"] == pytest.approx(0.25)
    assert status(driver, none)["env_weight"] == 0.01
    for env in (big, small):
        registry.disconnect_env(driver.state, driver.now, env)
    assert status(driver, none)["env_weight"] == 0.01, "a total of zero"
    assert status(driver, big)["env_weight"] <= 1.0


def test_huge_weights_and_lengths_do_not_overflow():
    driver = started()
    env = driver.env(weight=1e308, max_token_length=2**62, min_batch_allocation=1e308)
    driver.push(4, env=env)
    assert status(driver, env)["env_weight"] == 1.0
    other = driver.env()
    assert status(driver, other)["queue_size"] == 0


def test_minimums_are_subtracted_from_what_others_hold():
    driver = started(batch_size=16)
    first = driver.env(group_size=4, min_batch_allocation=0.5)
    second = driver.env(group_size=4)
    for _ in range(4):
        driver.push(4, env=first)
    answer = status(driver, second)
    assert answer["unallocated_fraction"] == 0.5
    assert answer["queue_size"] == 2
    registry.disconnect_env(driver.state, driver.now, first)
    answer = status(driver, second)
    assert (answer["unallocated_fraction"], answer["queue_size"]) == (1.0, 4)


def test_groups_of_nobody_count_as_others():
    driver = started()
    env = driver.env(group_size=4)
    driver.push(4)
    driver.push(4, env=99)
    assert status(driver, env)["queue_size"] == 2


def test_others_of_size_one_count_unless_strict():
    for strict, expected in ((False, 3), (True, 1)):
        driver = started(strict="count_others_of_size_one" if strict else "")
        env = driver.env(group_size=1)
        driver.push(1, env=env)
        driver.push(1)
        driver.push(1)
        assert status(driver, env)["queue_size"] == expected


def test_a_second_registration_begins_a_new_epoch():
    driver = started(batch_size=4)
    driver.env()
    driver.push(4)
    driver.register(starting_step=7, wandb_group="another")
    assert driver.state.run.epoch == 1
    assert views.status(driver.state, driver.now) == {"current_step": 7, "queue_size": 0}
    assert not driver.state.envs
    assert not driver.state.run.started


def test_joining_and_strict_registrations_change_nothing():
    for driver, join in ((started(), True), (started(reregister="ignore"), False)):
        env = driver.env()
        driver.push(4, env=env)
        uuid = driver.register(join=join, batch_size=999)["uuid"]
        assert uuid.bit_length() > 64
        assert driver.state.run.batch_size == 64
        assert views.status(driver.state, driver.now)["queue_size"] == 1


def test_reset_forgets_everything():
    driver = started(batch_size=4)
    env = driver.env()
    driver.push(4, 4, env=env)
    driver.batch()
    registry.reset(driver.state, driver.now)
    assert views.info(driver.state, 0) == {"batch_size": -1, "max_token_len": -1}
    assert views.status(driver.state, 0) == {"current_step": 0, "queue_size": 0}
    assert views.wandb_info(driver.state, 0) == {"group": None, "project": None}
    assert views.latest(driver.state, 0) is None
    assert driver.pull() == NoBatch("unregistered", unregistered=True)
    assert len(driver.state.take_changes().freed) == 2


def test_strict_reset_keeps_what_the_original_keeps():
    driver = started(batch_size=4, strict="forget_on_reset")
    driver.push(4)
    registry.reset(driver.state, driver.now)
    assert views.latest(driver.state, 0) is not None
    assert views.info(driver.state, 0) == {
        "batch_size": -1,
        "max_token_len": REGISTRATION["max_token_len"],
    }
    assert not driver.state.take_changes().freed


def test_a_silent_environment_stops_blocking_and_a_poll_revives_it():
    driver = started(batch_size=8, heartbeat_timeout_s=300.0)
    silent = driver.env(group_size=4, min_batch_allocation=0.5)
    other = driver.env(group_size=4)
    for _ in range(4):
        driver.push(4, env=other)
    assert driver.pull() == NoBatch(f"min_unmet:{silent}")
    driver.now += 301
    registry.heartbeat(driver.state, driver.now, other)
    assert [env["state"] for env in views.envs(driver.state, driver.now)["envs"]] == [
        "stale",
        "connected",
    ]
    assert sizes(driver.batch()) == [4, 4]
    assert registry.heartbeat_due(driver.state, driver.now, silent)
    registry.heartbeat(driver.state, driver.now, silent)
    assert driver.pull() == NoBatch(f"min_unmet:{silent}")


def test_a_push_is_a_sign_of_life_and_polls_do_not_write_each_time():
    driver = started()
    env = driver.env(group_size=4)
    assert not registry.heartbeat_due(driver.state, driver.now + 1, env)
    driver.now += 200
    driver.push(4, env=env)
    assert driver.state.envs[env].last_seen == driver.now


@pytest.mark.parametrize("weights", [(1, 2, 5), (1, 1, 1), (10, 1, 1)])
def test_weights_hold_over_fifty_batches(weights):
    driver = started(batch_size=8)
    envs = [driver.env(group_size=2, weight=float(weight)) for weight in weights]
    for _ in range(400):
        for env in envs:
            driver.push(2, env=env)
    served = dict.fromkeys(envs, 0)
    for _ in range(50):
        for group in driver.batch().groups:
            served[group.env_id] += group.size
    total = sum(served.values())
    for env, weight in zip(envs, weights, strict=True):
        assert abs(served[env] / total - weight / sum(weights)) < 0.02


@pytest.mark.parametrize("late", [1, None])
def test_who_returns_gets_no_burst(late):
    """An environment, or groups of nobody, after a pause."""
    driver = started(batch_size=2)
    steady = driver.env(group_size=2)
    _ = driver.env(group_size=2)
    for _ in range(60):
        driver.push(2, env=steady)
    for _ in range(20):
        driver.batch()
    for _ in range(60):
        driver.push(2, env=late)
    owners = [driver.batch().groups[0].env_id for _ in range(20)]
    assert abs(owners.count(late) - 10) <= 1


def test_environments_that_each_had_a_name_of_their_own_are_forgotten_too():
    """The latest names count on, so that a name stays unique; a name for each process must not cost
    for ever."""
    driver = Driver(env_expiry_s=1000.0)
    driver.start()
    for number in range(maintenance.NAMES_KEPT + 50):
        driver.env(desired_name=f"env-{number}")
    driver.now += 1001
    alive = driver.env()
    while maintenance.is_due(driver.state, driver.now):
        maintenance.tidy(driver.state, driver.now)
    assert len(driver.state.envs) == maintenance.NAMES_KEPT
    assert list(driver.state.envs)[-1] == alive
    assert driver.env() == alive + 1, "no number is used twice"


def test_environments_that_are_long_gone_are_forgotten():
    """Each one costs every poll a little. Numbers are never used twice all the same."""
    driver = Driver(env_expiry_s=1000.0)
    driver.start()
    for _ in range(4):
        driver.env()
    driver.env(desired_name="other")
    driver.push(4, env=1)
    driver.push(2, env=2)
    driver.now += 1001
    alive = driver.env()
    assert maintenance.is_due(driver.state, driver.now)
    maintenance.tidy(driver.state, driver.now)
    assert not maintenance.is_due(driver.state, driver.now)
    assert list(driver.state.envs) == [1, 2, 4, alive], "what waits, and the newest of each name"
    assert [driver.env(), driver.env(desired_name="other")] == [6, 7]
    assert [driver.state.envs[number].name for number in (alive, 6, 7)] == [
        "env_4",
        "env_5",
        "other_1",
    ]
