"""Success rates and their intervals."""

import pytest
from test_rollout_sample import outcome

from realhf.rollout.evaluation import evaluation_report, wilson_interval


def test_wilson_interval_against_published_values() -> None:
    # Newcombe 1998, table I: 81 of 263 and 15 of 148.
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert wilson_interval(15, 148) == pytest.approx((0.0624, 0.1605), abs=1e-4)
    assert wilson_interval(0, 0) == (0.0, 1.0)


def test_failed_episodes_are_counted_apart() -> None:
    report = evaluation_report([outcome(), outcome("max_turns"), outcome("env_error")])
    assert report["overall"]["success"] == 0.5
    assert (report["overall"]["episodes"], report["overall"]["failed"]) == (2, 1)
    assert report["warmup"] == report["overall"]
