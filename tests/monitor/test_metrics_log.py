"""The report of a step as flat numbers."""

from __future__ import annotations

from realhf.monitor.run_log import flatten_step


def test_staleness_stands_at_the_top_level() -> None:
    measured = {"loss": 0.5, "staleness/head_mean": 0.5, "staleness/head_max": 2.0, "mismatch/abs_p50": 0.1}
    metrics = flatten_step(
        wall_s=1.0,
        stats={"actor_train": measured},
        times={},
        tokens={"actor_train": 3},
        buffer={},
        source={},
        train_calls=["actor_train"],
    )
    assert (metrics["staleness/head_mean"], metrics["staleness/head_max"]) == (0.5, 2.0)
    assert (metrics["actor_train/loss"], metrics["actor_train/mismatch/abs_p50"]) == (0.5, 0.1)
    assert not [name for name in metrics if name.startswith("actor_train/staleness")]
