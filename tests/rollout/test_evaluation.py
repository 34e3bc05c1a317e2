"""Success rates and their intervals."""

from realhf.rollout.evaluation import evaluation_report
from tests.rollout.episode.test_rollout_sample import outcome


def test_failed_episodes_are_counted_apart() -> None:
    report = evaluation_report([outcome(), outcome("max_turns"), outcome("internal")])
    assert report["overall"]["success"] == 0.5
    assert (report["overall"]["episodes"], report["overall"]["failed"]) == (2, 1)
    assert report["warmup"] == report["overall"]
