"""What an evaluation plays, and what it keeps of its episodes."""

from realhf.api.evaluation import evaluation_report
from realhf.rollout.episode.held_out import episode_results
from tests.rollout.episode.test_rollout_sample import outcome


def test_failed_episodes_are_counted_apart() -> None:
    report = evaluation_report(episode_results([outcome(), outcome("max_turns"), outcome("internal")]), 7)
    assert report["overall"]["success"] == 0.5
    assert (report["overall"]["episodes"], report["overall"]["failed"]) == (2, 1)
    assert report["overall"]["version"] == 7
    assert report["warmup"] == report["overall"]
