"""The potential: its formula on chosen points, and that returns telescope."""

import random

import pytest

from realhf.aws.grading.reward import RewardMeter, level, monotone_progress, score


@pytest.mark.parametrize(
    ("value", "arguments"),
    [
        (0.0, {"progress": 0.0, "achieved": False}),
        (0.45, {"progress": 0.5, "achieved": False}),
        (0.225, {"progress": 0.5, "achieved": False, "last_failed": True}),
        (0.35, {"progress": 0.5, "achieved": False, "rollbacks": 1}),
        (0.49, {"progress": 0.5, "achieved": False, "idempotent_retries": 2}),
        (0.0, {"progress": 0.0, "achieved": False, "rollbacks": 3}),
        (0.96, {"progress": 1.0, "achieved": False, "idempotent_retries": 3}),
        (0.99, {"progress": 1.0, "achieved": False, "idempotent_retries": 9}),
        (1.0, {"progress": 1.0, "achieved": True}),
        (1.0, {"progress": 0.1, "achieved": True, "last_failed": True, "rollbacks": 5}),
        (0.85, {"progress": 1.0, "achieved": True, "hints": 1}),
        (0.45 * 0.85**3, {"progress": 0.5, "achieved": False, "hints": 3}),
        (1.05, {"progress": 1.0, "achieved": True, "chaos_survived": True}),
        (1.05 * 0.85**2, {"progress": 1.0, "achieved": True, "chaos_survived": True, "hints": 2}),
    ],
)
def test_score(value: float, arguments: dict) -> None:
    assert score(**arguments) == pytest.approx(value, abs=1e-8)


def test_rewards_of_any_episode_add_up_to_its_score_exactly() -> None:
    rng = random.Random(1)
    for _ in range(500):
        meter = RewardMeter()
        total = 0.0
        best = 0.0
        facts: dict = {}
        for _ in range(rng.randint(1, 15)):
            progress = rng.choice([0, 1 / 3, 0.5, 2 / 3, 0.7, 1.0])
            facts = {
                "last_failed": rng.random() < 0.3,
                "rollbacks": rng.randrange(3),
                "idempotent_retries": rng.randrange(4),
            }
            total += meter.step(progress, achieved=False, **facts)
            best = max(best, progress)
        assert total == meter.total == score(best, achieved=False, **facts)
        total += meter.step(1.0, achieved=True, **facts)
        assert total == 1.0


def test_progress_is_monotone() -> None:
    """Exploit of layer 6: lose ground and earn it again."""
    assert monotone_progress(0.5, 0.0) == 0.5
    meter = RewardMeter()
    facts = {"achieved": False, "last_failed": False, "rollbacks": 0, "idempotent_retries": 0}
    rewards = [meter.step(progress, **facts) for progress in (0.5, 0.0, 0.5, 0.0, 0.5)]
    assert rewards[0] > 0 and rewards[1:] == [0.0] * 4


@pytest.mark.parametrize(
    ("value", "arguments"),
    [
        (0.5, {"progress": 0.5, "rose": True}),
        (0.4, {"progress": 0.5, "rose": False}),
        (0.25, {"progress": 0.5, "rose": True, "last_failed": True}),
        (0.32, {"progress": 0.5, "rose": False, "rollbacks": 1, "idempotent_retries": 1}),
        (0.0, {"progress": 0.0, "rose": False, "rollbacks": 1}),
        (0.4 * 0.85, {"progress": 0.5, "rose": False, "hints": 1}),
        (0.85, {"progress": 1.0, "rose": True, "achieved": True, "hints": 1}),
    ],
)
def test_level(value: float, arguments: dict) -> None:
    assert level(**arguments) == pytest.approx(value, abs=1e-8)


def test_in_the_mode_level_the_last_reward_is_the_score() -> None:
    meter = RewardMeter("level")
    rewards = [meter.step(progress, achieved=False) for progress in (0.5, 0.5, 0.75)]
    assert rewards == pytest.approx([0.5, 0.4, 0.7], abs=1e-8) and meter.total == rewards[-1]
    assert meter.step(1.0, achieved=True) == meter.total == 1.0


def test_an_unknown_mode_is_named() -> None:
    with pytest.raises(ValueError, match="best"):
        RewardMeter("best")
