"""``benchmarks/learning.py --by-tier``: templates that never train are one group, whose interval is
that of all their episodes; tiers stand in their order."""

from __future__ import annotations

from pathlib import Path

from benchmarks.learning import draw_tiers, rates_by_tier, tier_table
from realhf.api.evaluation import wilson_interval


def group(solved: int, n_episodes: int) -> dict[str, float]:
    low, high = wilson_interval(solved, n_episodes)
    return {"success": solved / n_episodes, "low": low, "high": high, "episodes": n_episodes}


BEFORE = {
    "overall": group(11, 28),
    "expert": group(2, 8),
    "warmup": group(8, 8),
    "unseen-expert": group(0, 4),
    "unseen-warmup": group(1, 8),
}
AFTER = {
    "overall": group(19, 28),
    "expert": group(4, 8),
    "warmup": group(8, 8),
    "unseen-expert": group(1, 4),
    "unseen-warmup": group(6, 8),
}


def test_templates_that_never_train_are_one_group():
    found = rates_by_tier(AFTER)
    assert set(found) == {"overall", "expert", "warmup", "unseen"}
    assert found["expert"][0] == 0.5 and found["expert"][3] == 8
    share, low, high, n_episodes = found["unseen"]
    assert (share, n_episodes) == (7 / 12, 12)
    assert (round(low, 3), round(high, 3)) == (0.320, 0.807)


def test_groups_without_episodes_are_left_out():
    assert rates_by_tier({"unseen-warmup": {"success": 0.0, "episodes": 0}}) == {}
    assert set(rates_by_tier({"warmup": {"success": 0.5, "episodes": 2}})) == {"warmup"}


def test_the_table_has_a_row_for_each_evaluation_and_the_tiers_in_their_order():
    told = tier_table({0: rates_by_tier(BEFORE), 8: rates_by_tier(AFTER)}).splitlines()
    assert told[0] == "| step | episodes | overall | warmup | expert | unseen |"
    assert [line.split("|")[1].strip() for line in told[2:]] == ["0", "8"]
    assert told[3].split("|")[4].strip().startswith("100.0 [")
    assert told[2].endswith("| 8.3 [1.5, 35.4] |")


def test_a_group_of_some_evaluations_only_has_empty_cells_and_a_shorter_line(tmp_path: Path):
    rates = {0: rates_by_tier({"overall": group(1, 4)}), 8: rates_by_tier(AFTER)}
    first = tier_table(rates).splitlines()[2]
    assert first.startswith("| 0 | 4 | 25.0 [") and first.endswith("|  |  |  |")
    draw_tiers([{"rates": rates, "kind": "synchronous", "seed": 1}], tmp_path / "tiers.png")
    assert (tmp_path / "tiers.png").stat().st_size > 10_000
