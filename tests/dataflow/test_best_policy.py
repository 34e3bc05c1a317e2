"""Which evaluated policy is the best one of a run, and what its figures outlive."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from realhf.api.evaluation import EpisodeResult, evaluation_report
from realhf.dataflow.best_policy import (
    BEST_POLICY_FILE,
    HELD_OUT_FILE,
    BestPolicy,
    best_policy_metrics,
)


def report(achieved, of=10, *, version=3, valid=True):
    results = [EpisodeResult("easy", valid, number < achieved, 0.0, 1) for number in range(of)]
    return evaluation_report(results, version)


def test_sampled_episodes_decide_and_greedy_ones_where_none_were_sampled():
    both = best_policy_metrics(3, {"sampled": report(4), "greedy": report(9)})
    assert both is not None
    assert (both["decoding"], both["success"], both["step"], both["version"]) == (
        "sampled",
        0.4,
        3,
        3,
    )
    assert both["low"] < 0.4 < both["high"] and both["episodes"] == 10
    greedy = best_policy_metrics(3, {"greedy": report(9)})
    assert greedy is not None and (greedy["decoding"], greedy["success"]) == ("greedy", 0.9)


def test_an_evaluation_whose_episodes_all_failed_decides_nothing():
    assert best_policy_metrics(3, {"sampled": report(0, valid=False)}) is None
    assert best_policy_metrics(3, {}) is None


def test_a_better_policy_replaces_the_one_that_is_kept_and_an_equal_one_does_not(tmp_path):
    def figures(achieved):
        found = best_policy_metrics(1, {"sampled": report(achieved)})
        assert found is not None
        return found

    best = BestPolicy(tmp_path)
    assert best.is_beaten_by(figures(0)), "the first one, however bad"
    best.folder.mkdir()
    best.record(figures(5))
    assert not best.is_beaten_by(figures(5)) and best.is_beaten_by(figures(6))
    again = BestPolicy(tmp_path)
    assert again.metrics == figures(5) and not again.is_beaten_by(figures(4))


@pytest.mark.parametrize("content", [b"{", b"{}", b"[]", b'{"success": "high"}', b"\xff"])
def test_figures_that_cannot_be_read_are_refused_and_stay(tmp_path, content):
    (tmp_path / "best_policy.json").write_bytes(content)
    with pytest.raises(
        RuntimeError, match=r"best_policy.json cannot be read.*exp_ctrl.keep_best=false"
    ):
        BestPolicy(tmp_path)
    assert (tmp_path / "best_policy.json").read_bytes() == content


def figures(success: float, step: int = 4) -> dict[str, Any]:
    found = best_policy_metrics(step, {"sampled": report(round(10 * success))})
    assert found is not None
    return found


def kept(run: Path, success: float, step: int) -> BestPolicy:
    """Do what the model worker and the master do for a policy that is the best."""
    best = BestPolicy(run)
    best.folder.mkdir(exist_ok=True)
    (best.folder / HELD_OUT_FILE).write_text(json.dumps(figures(success, step)))
    best.record(figures(success, step))
    return best


def test_a_run_that_was_killed_between_policy_and_figures_knows_the_policy_that_it_has(
    tmp_path: Path,
) -> None:
    """The figures of the policy before stayed, and a worse policy could take the place of the one
    that is kept."""
    kept(tmp_path, 0.5, 2)
    (tmp_path / "best_policy" / HELD_OUT_FILE).write_text(json.dumps(figures(0.9, 4)))
    best = BestPolicy(tmp_path)
    assert best.metrics == figures(0.9, 4) and not best.is_beaten_by(figures(0.7, 6))
    (tmp_path / BEST_POLICY_FILE).unlink()
    assert BestPolicy(tmp_path).metrics == figures(0.9, 4)
    (tmp_path / "best_policy" / HELD_OUT_FILE).write_text("{")
    assert BestPolicy(tmp_path).metrics is None


def test_a_best_policy_that_is_gone_is_missed(tmp_path: Path) -> None:
    """The run went on, kept no policy that was not better, and said at its end where the best one
    is."""
    folder = kept(tmp_path, 0.5, 2).folder
    folder.rename(tmp_path / ".best_policy.999999999.old")
    assert BestPolicy(tmp_path).metrics == figures(0.5, 2), "it was killed between two renames"
    folder.rename(tmp_path / "elsewhere")
    with pytest.raises(
        RuntimeError, match=r"best_policy is missing, although .*best_policy\.json has the metrics"
    ):
        BestPolicy(tmp_path)
    (tmp_path / BEST_POLICY_FILE).unlink()
    assert BestPolicy(tmp_path).metrics is None
