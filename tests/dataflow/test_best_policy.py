"""Which evaluated policy is the best one of a run, and what its figures outlive."""

from __future__ import annotations

import pytest

from realhf.api.evaluation import EpisodeResult, evaluation_report
from realhf.dataflow.best_policy import BestPolicy, best_figures


def report(achieved, of=10, *, version=3, valid=True):
    results = [EpisodeResult("easy", valid, number < achieved, 0.0, 1) for number in range(of)]
    return evaluation_report(results, version)


def test_sampled_episodes_decide_and_greedy_ones_where_none_were_sampled():
    both = best_figures(3, {"sampled": report(4), "greedy": report(9)})
    assert both is not None
    assert (both["decoding"], both["success"], both["step"], both["version"]) == ("sampled", 0.4, 3, 3)
    assert both["low"] < 0.4 < both["high"] and both["episodes"] == 10
    greedy = best_figures(3, {"greedy": report(9)})
    assert greedy is not None and (greedy["decoding"], greedy["success"]) == ("greedy", 0.9)


def test_an_evaluation_whose_episodes_all_failed_decides_nothing():
    assert best_figures(3, {"sampled": report(0, valid=False)}) is None
    assert best_figures(3, {}) is None


def test_a_better_policy_replaces_the_one_that_is_kept_and_an_equal_one_does_not(tmp_path):
    def figures(achieved):
        found = best_figures(1, {"sampled": report(achieved)})
        assert found is not None
        return found

    best = BestPolicy(tmp_path)
    assert best.is_beaten_by(figures(0)), "the first one, however bad"
    best.record(figures(5))
    assert not best.is_beaten_by(figures(5)) and best.is_beaten_by(figures(6))
    again = BestPolicy(tmp_path)
    assert again.figures == figures(5) and not again.is_beaten_by(figures(4))


@pytest.mark.parametrize("content", [b"{", b"{}", b"[]", b'{"success": "high"}', b"\xff"])
def test_figures_that_cannot_be_read_are_refused_and_stay(tmp_path, content):
    (tmp_path / "best_policy.json").write_bytes(content)
    with pytest.raises(RuntimeError, match=r"best_policy.json cannot be read.*exp_ctrl.keep_best=false"):
        BestPolicy(tmp_path)
    assert (tmp_path / "best_policy.json").read_bytes() == content
