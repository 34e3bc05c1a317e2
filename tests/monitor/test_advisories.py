"""Every rule on a made-up run that shows the illness, and all of them on one that does not."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from realhf.monitor.advisories import advise, index_rollouts
from realhf.monitor.advisory_rules import RULES, SEVERITIES
from realhf.monitor.rollouts.format import PlayLine
from realhf.monitor.rollouts.reader import RolloutRow

STEPS = 30
OPTIONS = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "options.md").read_text(
    encoding="utf-8"
)
FILTERS = {"split", "outcome", "template", "group", "step_min", "step_max"}
FILTERS |= {"length_min", "length_max", "mismatch_min", "clip_min", "staleness_min"}
HEALTHY = {
    "reward/mean": lambda step: 0.3 + 0.01 * step,
    "reward/std": lambda step: 0.4,
    "success/overall": lambda step: 0.3 + 0.01 * step,
    "success/easy": lambda step: 0.5,
    "groups/with_signal": lambda step: 10.0,
    "groups/total": lambda step: 16.0,
    "length/mean": lambda step: 100.0 + step % 3,
    "length/truncated": lambda step: 0.3 if step == 4 else 0.05,
    "length/out_of_turns": lambda step: 0.8 if step == 4 else 0.3,
    "rollouts/played": lambda step: 64.0,
    "rollouts/failed": lambda step: float(step % 2),
    "policy/loss": lambda step: -0.01 * (step % 2),
    "policy/entropy": lambda step: 2.0 - 0.02 * step,
    "policy/kl_ref": lambda step: 0.001 * step,
    "policy/ratio_max": lambda step: 3.0,
    "policy/clip_fraction": lambda step: 0.05,
    "policy/grad_norm": lambda step: 1.0 + 0.1 * (step % 5),
    "policy/lr": lambda step: 1e-5,
    "policy/updates": lambda step: 1.0,
    "policy/skipped": lambda step: 0.0,
    "mismatch/kl": lambda step: 1e-4 * (1 + step % 2),
    "mismatch/abs_p99": lambda step: 0.05,
    "critic/explained_variance": lambda step: min(0.8, -0.2 + 0.1 * step),
    "staleness/mean": lambda step: 0.6,
    "admission/capacity": lambda step: 2.0,
    "admission/staged": lambda step: 3.0,
    "admission/accepted": lambda step: 16.0 * step,
    "admission/rejected": lambda step: 1.0,
    "generation/occupancy": lambda step: 0.8,
    "training/occupancy": lambda step: 0.7,
    "throughput/tokens_per_second": lambda step: 500.0 + step,
    "time/step": lambda step: 4.0,
}
Course = Callable[[int], Any]


def run(**changed: Course) -> list[dict[str, Any]]:
    """A made-up run: healthy but for the metrics named, ``__`` standing for a slash."""
    courses = HEALTHY | {name.replace("__", "/"): course for name, course in changed.items()}
    return [
        {"step": step, **{name: course(step) for name, course in courses.items()}}
        for step in range(1, STEPS + 1)
    ]


def after(step: int, ill: float, before: float) -> Course:
    """A course that is ``ill`` from a step on."""
    return lambda now: ill if now >= step else before


def evaluation(success: float, n: float = 0.05, **more: float) -> Mapping[str, Any]:
    entry = {
        "success": success,
        "low": success - n,
        "high": success + n,
        "episodes": 100,
        "out_of_turns": 0.2,
        **more,
    }
    return {"sampled": {"overall": entry}}


LINES = [
    {"template": "t/1", "failure": "timeout" if n % 3 else None, "step": n, "split": "train"}
    for n in range(9)
]
FINE = [{"template": "t/2", "failure": "lost" if n == 5 else None, "step": n} for n in range(9)]
ILL: dict[str, tuple[int, dict[str, Course], dict[str, Any]]] = {
    "all_groups_zero": (
        20,
        {
            name: after(20, 0.0, good)
            for name, good in (
                ("groups__with_signal", 9.0),
                ("success__overall", 0.2),
                ("success__easy", 0.2),
                ("reward__std", 0.3),
            )
        },
        {},
    ),
    "all_groups_one": (
        25,
        {"groups__with_signal": after(25, 0.0, 9.0), "success__overall": after(25, 1.0, 0.9)},
        {},
    ),
    "reward_flat": (22, {"reward__std": after(22, 0.0, 0.3)}, {}),
    "few_groups_teach": (26, {"groups__with_signal": after(20, 2.0, 9.0)}, {}),
    "truncation": (12, {"length__truncated": after(12, 0.4, 0.1)}, {}),
    "out_of_turns": (12, {"length__out_of_turns": after(12, 0.7, 0.1)}, {}),
    "length_exploding": (18, {"length__mean": after(18, 250.0, 100.0)}, {}),
    "length_collapsing": (18, {"length__mean": after(18, 20.0, 100.0)}, {}),
    "group_failing": (1, {"success__hard/er": lambda step: 0.01}, {}),
    "evaluation_stale": (
        10,
        {},
        {"evaluations": [(0, evaluation(0.3)), (5, evaluation(0.3)), (10, evaluation(0.4))]},
    ),
    "evaluation_falls": (
        10,
        {},
        {"evaluations": [(0, evaluation(0.3)), (10, evaluation(0.6)), (28, evaluation(0.4))]},
    ),
    "held_out_fails": (28, {}, {"evaluations": [(0, evaluation(0.02)), (28, evaluation(0.0))]}),
    "held_out_out_of_turns": (
        28,
        {},
        {
            "evaluations": [
                (0, evaluation(0.3)),
                (28, evaluation(0.31, episodes=45, out_of_turns=31 / 45)),
            ]
        },
    ),
    "entropy_collapse": (16, {"policy__entropy": after(16, 0.1, 2.0)}, {}),
    "kl_running_away": (21, {"policy__kl_ref": after(21, 1.5, 0.02)}, {}),
    "mismatch_growing": (14, {"mismatch__kl": after(14, 0.05, 1e-4)}, {}),
    "gradient_spike": (28, {"policy__grad_norm": lambda step: 90.0 if step == 28 else 1.0}, {}),
    "policy_not_finite": (7, {"policy__loss": lambda step: math.nan if step == 7 else 0.0}, {}),
    "critic_not_finite": (9, {"critic__skipped": lambda step: float(step == 9)}, {}),
    "clip_fraction_high": (24, {"policy__clip_fraction": after(24, 0.5, 0.1)}, {}),
    "ratio_large": (27, {"policy__ratio_max": after(27, 30.0, 2.0)}, {}),
    "learning_rate_zero": (28, {"policy__lr": after(28, 0.0, 1e-5)}, {}),
    "critic_useless": (20, {"critic__explained_variance": after(20, -0.5, 0.4)}, {}),
    "failures_rising": (
        26,
        {"rollouts__failed": after(20, 16.0, 1.0), "failures__timeout": after(20, 16.0, 1.0)},
        {},
    ),
    "task_failing": (1, {}, {"index": [*LINES, *FINE]}),
    "trainer_starved": (
        11,
        {"training__occupancy": after(11, 0.1, 0.7), "generation__occupancy": lambda _: 0.95},
        {},
    ),
    "verifier_failing": (12, {"environment__verifier_failed": after(12, 0.1, 0.01)}, {}),
    "generation_starved": (11, {"generation__occupancy": after(11, 0.1, 0.8)}, {}),
    "buffer_full": (
        15,
        {"admission__staged": after(15, 20.0, 3.0), "admission__capacity": after(15, 0.0, 2.0)},
        {},
    ),
    "staleness_at_bound": (13, {"staleness__mean": after(13, 2.0, 0.5)}, {"staleness_bound": 2.0}),
    "throughput_halved": (24, {"throughput__tokens_per_second": after(24, 200.0, 500.0)}, {}),
    "samples_discarded": (
        1,
        {
            "admission__rejected": lambda step: 9.0 * step,
            "admission__dropped": lambda step: 2.0 * step,
        },
        {},
    ),
    "no_updates": (23, {"policy__updates": after(23, 0.0, 1.0)}, {}),
}


def test_a_fall_in_greedy_evaluations_leads_to_their_rollouts() -> None:
    """And a greedy evaluation is not compared with a sampled one."""
    falls = {0: 0.3, 10: 0.6, 28: 0.4}
    greedy = [(step, {"greedy": evaluation(value)["sampled"]}) for step, value in falls.items()]
    (found,) = advise(run(), evaluations=greedy)
    assert (found.id, found.filter["split"]) == ("evaluation_falls", "eval/greedy")
    mixed = [(10, {"greedy": evaluation(0.9)["sampled"]}), (28, evaluation(0.4))]
    assert advise(run(), evaluations=mixed) == []


def test_an_evaluation_says_how_many_episodes_the_limit_of_turns_ended() -> None:
    """31 of 45 ended so, and the page said that nothing seemed wrong."""
    name = "held_out_out_of_turns"
    (found,) = advise(run(), **ILL[name][2])
    assert found.text.startswith(
        "31 of 45 held-out episodes after step 28 (sampled) were cut by rollout.max_turns"
    )
    assert found.filter["step_max"] == 28
    before = [
        (step, {"sampled": {"overall": {"success": 0.3, "low": 0.2, "high": 0.4}}})
        for step in (0, 28)
    ]
    assert advise(run(), evaluations=before) == [], (
        "an evaluation of an earlier version does not say it"
    )


def test_a_few_episodes_without_success_say_nothing_yet() -> None:
    assert advise(run(), evaluations=[(28, evaluation(0.0, n=0.6, episodes=2))]) == []
    (found,) = advise([], evaluations=[(0, evaluation(0.0))])
    assert (found.id, found.since) == ("held_out_fails", 0) and "before training" in found.text


def test_nothing_is_said_about_a_healthy_run() -> None:
    evaluations = [
        (0, evaluation(0.3)),
        (10, evaluation(0.4)),
        (20, evaluation(0.42)),
        (28, evaluation(0.41)),
    ]
    assert advise(run(), FINE, evaluations=evaluations, staleness_bound=2.0) == []


@pytest.mark.parametrize("name", ILL)
def test_an_illness_is_found_and_no_other(name: str) -> None:
    since, courses, more = ILL[name]
    rows = run(**courses)
    index = more.get("index", ())
    found = advise(rows, index, **{key: value for key, value in more.items() if key != "index"})
    assert [one.id for one in found] == [name]
    (advisory,) = found
    assert advisory.since == since and advisory.severity in SEVERITIES
    assert re.search(r"\d", advisory.text) and advisory.text.endswith(".") and advisory.advice
    assert set(advisory.filter) <= FILTERS
    assert json.loads(json.dumps(asdict(advisory)))["filter"] == advisory.filter


def test_every_rule_is_tried() -> None:
    assert len(RULES) >= 25 and len(ILL) >= len(RULES)


def test_advice_names_options_that_exist() -> None:
    """Also those of environments, which stand in the same page."""
    named = set()
    for since, courses, more in ILL.values():
        del since
        index = more.get("index", ())
        for one in advise(
            run(**courses), index, **{key: value for key, value in more.items() if key != "index"}
        ):
            sections = r"\b(?:ppo|actor|critic|env|gen|rollout|async_rl|evaluation)\.[a-z_]\w*(?:\.[a-z]\w*)*"
            named |= set(re.findall(sections, one.advice))
    assert len(named) > 20 and not {name for name in named if f"`{name}`" not in OPTIONS}


def test_advice_says_which_of_its_options_do_nothing_in_the_run() -> None:
    """It named options that the algorithm or environment does not have, and the launcher refused
    them."""
    ill = run(**ILL["truncation"][1])
    (plain,) = advise(
        ill, effective=["gen.max_new_tokens", "rollout.max_total_tokens", "ppo.mask_too_long"]
    )
    (other,) = advise(ill, effective=["gen.max_new_tokens", "rollout.max_total_tokens"])
    assert "Without effect" not in plain.advice
    assert other.advice == f"{plain.advice} (Without effect in this run: ppo.mask_too_long.)"
    assert advise(ill, effective=None) == [plain], (
        "a run of earlier versions does not say what has an effect"
    )


def test_what_is_over_is_not_told_as_if_it_went_on() -> None:
    """A condition counts that holds at the end; only what cannot be undone, an update that was left
    out, stays."""
    assert advise(run(length__truncated=lambda step: 0.5 if step < 20 else 0.05)) == []


def test_the_gravest_comes_first() -> None:
    ill = {**ILL["truncation"][1], **ILL["learning_rate_zero"][1]}
    assert [one.id for one in advise(run(**ill))] == ["learning_rate_zero", "truncation"]


def test_a_task_that_fails_is_found_by_its_rollouts() -> None:
    (advisory,) = advise(run(), [*LINES, *FINE])
    assert advisory.filter == {"template": "t/1", "outcome": "failed"} and "6 of 9" in advisory.text


@pytest.mark.parametrize("value", [None, "text", [1], {"a": 1}, True, math.nan, math.inf])
def test_rows_that_hold_anything_break_nothing(value: Any) -> None:
    rows = [{"step": value, **{name: value for name in HEALTHY}} for _ in range(STEPS)]
    index = [{"template": value, "failure": value, "step": value}, {}]
    found = advise(
        rows, index, evaluations=[(0, {"sampled": value}), (1, {"sampled": {"overall": value}})]
    )
    limits = {"clip_fraction_high", "ratio_large", "truncation", "out_of_turns"}
    assert {one.id for one in found} <= {"policy_not_finite", *limits}


@pytest.mark.parametrize("steps", [0, 1, 2, 4, 9])
def test_a_run_that_has_just_begun_is_not_judged_by_its_beginning(steps: int) -> None:
    assert advise(run()[:steps]) == []


def test_a_rollout_with_several_conversations_is_judged_once():
    """A rule that counts the plays of a task used to count its branches, too."""
    plays = [
        PlayLine(id=f"s@0/{row}", time=0.0, step=1, task="t", branch=branch)
        for row, branch in enumerate((None, 0, 0))
    ]
    assert len(index_rollouts([RolloutRow(play, None) for play in plays])) == 1
