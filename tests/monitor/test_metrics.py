"""Public names of metrics: one scheme for both kinds of runs, described on a page."""

from __future__ import annotations

from pathlib import Path

import pytest

from realhf.monitor.metrics import (
    SECTIONS,
    Metric,
    _compile_pattern,
    choose_calls,
    evaluation_metrics,
    public_name,
    public_names,
    render_page,
    success_by_group,
)

ROOT = Path(__file__).resolve().parents[2]
METRICS = [metric for section in SECTIONS for metric in section.metrics]
GENERAL_LAST = sorted(
    METRICS, key=lambda metric: (metric.name.startswith("<call>"), metric.name.count("<"))
)


def metric_of(name: str) -> Metric | None:
    """The entry that describes a public name, the one with the fewest placeholders; None where no
    table has it."""
    return next(
        (metric for metric in GENERAL_LAST if _compile_pattern(metric.name).fullmatch(name)), None
    )


def test_the_page_is_that_of_the_tables() -> None:
    """``python -m realhf.monitor.metrics > docs/metrics.md`` makes it again."""
    assert (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8") == render_page()


def test_a_name_and_what_it_is_made_from_occur_once() -> None:
    names = [metric.name for metric in METRICS]
    sources = [source for metric in METRICS for source in metric.sources]
    assert len(names) > 100 and len(set(names)) == len(names)
    assert len(sources) > 60 and len(set(sources)) == len(sources)
    assert all(
        metric.unit or metric.name.startswith(("policy/", "critic/", "batch/"))
        for metric in METRICS
    )


@pytest.mark.parametrize("source", ["actor_gen", "rollout"])
def test_both_kinds_of_runs_have_the_same_names(source: str) -> None:
    row = {
        f"{source}/{own}": 1.0
        for own in ("reward", "success", "success/a/b", "turns", "rollouts", "reward/format")
    }
    assert list(public_names(row)) == [
        "reward/mean",
        "success/overall",
        "success/a/b",
        "length/turns",
        "rollouts/played",
        "reward/part/format",
    ]


def test_names_that_hold_a_call() -> None:
    row = {
        "step": 3,
        "step_seconds": 2.0,
        "seconds/ref_inf": 1.0,
        "fetch_seconds/ref_inf": 0.1,
        "my/env_seconds": 0.5,
    }
    assert public_names(row) == {
        "step": 3,
        "time/step": 2.0,
        "time/ref_inf": 1.0,
        "time/fetch/ref_inf": 0.1,
        "time/part/my/environment": 0.5,
    }


def test_an_algorithm_of_ones_own() -> None:
    """Its only train call is the policy's whatever its name; what no table knows keeps the name of
    the call."""
    calls = choose_calls(["critic_train", "learn"], ["act"])
    assert calls == {"policy_call": "learn", "rollout_call": "act"}
    row = {
        "learn/loss": 1.0,
        "learn/sure": 2.0,
        "act/reward": 3.0,
        "act/env_seconds": 4.0,
        "critic_train/loss": 5.0,
    }
    assert public_names(row, **calls) == {
        "policy/loss": 1.0,
        "learn/sure": 2.0,
        "reward/mean": 3.0,
        "time/part/act/environment": 4.0,
        "critic/loss": 5.0,
    }
    assert choose_calls(["a", "b"], []) == {
        "policy_call": "actor_train",
        "rollout_call": "actor_gen",
    }
    assert public_names({"a/loss": 1.0, "b/loss": 2.0}) == {"a/loss": 1.0, "b/loss": 2.0}


def test_a_row_that_has_its_names_stays_as_it_is() -> None:
    row = {
        metric.name: float(place) for place, metric in enumerate(METRICS) if "<" not in metric.name
    }
    assert public_names(row) == row and len(row) > 80


def test_a_group_cannot_take_the_name_of_all_groups() -> None:
    row = public_names(
        {"actor_gen/success": 0.5, "actor_gen/success/overall": 0.1, "actor_gen/success/easy": 0.2}
    )
    assert row == {"success/overall": 0.5, "success/easy": 0.2} and success_by_group(row) == {
        "easy": 0.2
    }


def test_a_run_without_rollouts_of_its_own_has_a_reward() -> None:
    assert public_names({"actor_train/reward_mean": 0.5}) == {
        "reward/trained_mean": 0.5,
        "reward/mean": 0.5,
    }


def test_every_name_finds_its_description() -> None:
    assert all(metric_of(metric.name.replace("<", "").replace(">", "")) for metric in METRICS)
    for name, found in (
        ("time/ref_inf", "time/<call>"),
        ("time/fetch/ref_inf", "time/fetch/<call>"),
        ("success/overall", "success/overall"),
        ("success/a/b", "success/<group>"),
        ("my_call/n_tokens", "<call>/n_tokens"),
        ("my_call/sure", "<call>/<name>"),
    ):
        metric = metric_of(name)
        assert metric is not None and metric.name == found
    assert metric_of("nothing") is None and public_name("nothing") is None


def test_an_evaluation_has_a_name_for_its_split_way_and_group() -> None:
    entry = {
        "success": 0.5,
        "low": 0.4,
        "high": 0.6,
        "reward": 1.0,
        "turns": 2.0,
        "failed": 1,
        "episodes": 9,
    }
    found = evaluation_metrics(
        {"sampled": {"overall": entry}, "greedy": {"easy": {"success": 1.0}}}, "heldout"
    )
    assert (
        found["eval/heldout/sampled/success/overall"] == 0.5
        and found["eval/heldout/greedy/success/easy"] == 1.0
    )
    assert len(found) == 7 and all(
        (metric := metric_of(name)) and metric.name.startswith("eval/") for name in found
    )
