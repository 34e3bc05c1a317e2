"""Rules about what is learned: rewards, groups of tasks, lengths, evaluations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from realhf.monitor.advisories.evidence import (
    CRITICAL,
    INFO,
    LASTING,
    LEAST,
    RECENT,
    WARNING,
    Advisory,
    Evidence,
    above,
    below,
    both,
    finite,
    is_equal,
    lasting,
    mean,
    number,
    step_of,
)

SIGNAL, ALL_GROUPS, SUCCESS, SPREAD = "groups/with_signal", "groups/total", "success/overall", "reward/std"
LITTLE_SIGNAL = 0.2
"""Least share of groups that should teach something."""
TRUNCATED = 0.2
"""Most truncated sequences that are taken for granted."""
GROWN = 2.0
"""A length that has changed by this factor has exploded or collapsed."""
FALLEN_BEHIND = 0.05
"""Success of a group below this counts as failing where all groups together have four times as much."""
LATE = 2.0
"""An evaluation is late after so many of the longest intervals before."""
WAYS = ("sampled", "greedy")
"""Ways of sampling in evaluations; one is never compared with the other."""
UNSEEN = 50
"""A run of so many steps wants an evaluation beside the one before training."""


def all_zero(run: Evidence) -> Iterator[Advisory]:
    """No group has a signal, and nothing succeeds."""
    since = lasting(run.rows, both(is_equal(SIGNAL, 0.0), is_equal(SUCCESS, 0.0)))
    if since is not None:
        yield Advisory(
            "all_groups_zero",
            CRITICAL,
            f"No rollout has succeeded since step {since}, and no group has an advantage: the policy learns nothing.",
            since,
            "Begin with easier tasks (options of env), more rollouts of each (ppo.group_size), or a warm start "
            "(actor.warm_start=true).",
            {"split": "train", "outcome": "unsolved", "step_min": since},
        )


def all_one(run: Evidence) -> Iterator[Advisory]:
    """No group has a signal, because everything succeeds."""
    since = lasting(run.rows, both(is_equal(SIGNAL, 0.0), is_equal(SUCCESS, 1.0)))
    if since is not None:
        yield Advisory(
            "all_groups_one",
            WARNING,
            f"Every rollout has succeeded since step {since}, and no group has an advantage: nothing is left to learn.",
            since,
            "Take harder tasks (options of env), or stop here.",
            {"split": "train", "outcome": "success", "step_min": since},
        )


def flat_reward(run: Evidence) -> Iterator[Advisory]:
    """All rewards are equal, and are neither those of success nor of failure alone."""
    mixed = both(above(SUCCESS, 0.0), below(SUCCESS, 1.0))
    since = lasting(run.rows, both(below(SPREAD, 1e-6), mixed))
    if since is not None:
        value = mean(run.recent, "reward/mean")
        yield Advisory(
            "reward_flat",
            CRITICAL,
            f"All rewards have been equal since step {since} (mean {value or 0.0:.3g}), yet some rollouts succeed.",
            since,
            "Look at how the environment rewards, and at ppo.max_reward_clip and ppo.reward_scaling.",
            {"split": "train", "step_min": since},
        )


def few_groups_teach(run: Evidence) -> Iterator[Advisory]:
    """Most groups have no signal."""
    signal, groups = finite(run.recent, SIGNAL), finite(run.recent, ALL_GROUPS)
    if len(signal) < RECENT or not sum(groups) or not 0 < sum(signal) < LITTLE_SIGNAL * sum(groups):
        return
    yield Advisory(
        "few_groups_teach",
        WARNING,
        f"{sum(signal):.0f} of the {sum(groups):.0f} groups of the last {RECENT} steps had an advantage; the others "
        "cost as much and taught nothing.",
        step_of(run.recent[0]),
        "Choose tasks that the policy solves sometimes (the curriculum's options), or raise ppo.group_size.",
        {"split": "train", "step_min": step_of(run.recent[0])},
    )


def truncation(run: Evidence) -> Iterator[Advisory]:
    """A token limit ends many sequences."""
    since = lasting(run.rows, above("length/truncated", TRUNCATED))
    if since is not None:
        share = mean(run.recent, "length/truncated") or 0.0
        yield Advisory(
            "truncation",
            WARNING,
            f"A token limit has ended more than {TRUNCATED:.0%} of the sequences since step {since} (now {share:.0%}).",
            since,
            "Raise gen.max_new_tokens or rollout.max_total_tokens, or mask such sequences (ppo.mask_too_long=true).",
            {"split": "train", "outcome": "truncated", "step_min": since},
        )


def length_changed(run: Evidence) -> Iterator[Advisory]:
    """Answers have become much longer or much shorter."""
    before, now = mean(run.early, "length/mean"), mean(run.recent, "length/mean")
    if before is None or now is None or before <= 0 or 1 / GROWN <= now / before <= GROWN:
        return
    longer = now > before
    limit = before * GROWN if longer else before / GROWN
    since = lasting(run.rows, (above if longer else below)("length/mean", limit), 1) or step_of(run.recent[0])
    yield Advisory(
        "length_exploding" if longer else "length_collapsing",
        WARNING,
        f"A sequence has {now:.0f} sampled tokens; in the first {RECENT} steps it had {before:.0f}.",
        since,
        "Look whether the reward pays for length; ppo.loss_agg decides how the length of a sequence counts.",
        {"split": "train", "step_min": since, "length_min" if longer else "length_max": limit},
    )


def group_fails(run: Evidence) -> Iterator[Advisory]:
    """One group of tasks fails while others succeed."""
    overall = mean(run.recent, SUCCESS)
    if overall is None or overall < 4 * FALLEN_BEHIND:
        return
    names = sorted({name for row in run.recent for name in row if name.startswith("success/")} - {SUCCESS})
    for name in names:
        value = mean(run.recent, name)
        if value is None or value >= FALLEN_BEHIND or len(finite(run.rows, name)) < LASTING:
            continue
        group = name.removeprefix("success/")
        since = lasting(run.rows, below(name, FALLEN_BEHIND), 1) or step_of(run.recent[0])
        yield Advisory(
            "group_failing",
            WARNING,
            f"Tasks of the group {group!r} succeed in {value:.0%} of the rollouts, all together in {overall:.0%}.",
            since,
            "Read such rollouts: tasks may be too hard for now, or impossible.",
            {"split": "train", "group": group, "outcome": "unsolved", "step_min": since},
        )


def evaluation_late(run: Evidence) -> Iterator[Advisory]:
    """The last evaluation lies far back."""
    if not run.rows or not run.evaluations:
        return
    steps, now = [step for step, _ in run.evaluations], step_of(run.rows[-1])
    longest = max((later - step for step, later in pairwise(steps)), default=0)
    limit = max(LEAST, LATE * longest) if longest else UNSEEN
    if now - steps[-1] > limit:
        yield Advisory(
            "evaluation_stale",
            INFO,
            f"The last evaluation was made after step {steps[-1]}; {now - steps[-1]} steps were trained since.",
            steps[-1],
            "evaluation.every_steps evaluates beside training.",
        )


def evaluation_falls(run: Evidence) -> Iterator[Advisory]:
    """Held-out success falls below the interval of its best, while the training reward has risen."""
    way = next((way for way in WAYS if any(_overall(report, way) for _, report in run.evaluations)), WAYS[0])
    points = [(step, entry) for step, report in run.evaluations if (entry := _overall(report, way)) is not None]
    if len(points) < 2:
        return
    best_step, best = max(points[:-1], key=lambda point: point[1]["success"])
    last_step, last = points[-1]
    if not last["high"] < best["low"]:
        return
    before = mean([row for row in run.rows if step_of(row) <= best_step][-RECENT:] or run.rows[:RECENT], "reward/mean")
    now = mean(run.recent, "reward/mean")
    if before is None or now is None or now <= before:
        return
    yield Advisory(
        "evaluation_falls",
        CRITICAL,
        f"Held-out success fell from {best['success']:.0%} after step {best_step} to {last['success']:.0%} after step "
        f"{last_step}, while the training reward rose from {before:.3g} to {now:.3g}.",
        best_step,
        "The policy fits its training tasks: take more of them, raise ppo.kl_loss_coef, or go back to the "
        f"checkpoint of step {best_step}.",
        {"split": f"eval/{way}", "outcome": "unsolved", "step_min": last_step},
    )


def _overall(report: Mapping[str, Any], way: str) -> dict[str, float] | None:
    """Return the figures of all groups together for one way of sampling, None where they are not whole."""
    groups = report.get(way)
    entry = groups.get("overall") if isinstance(groups, Mapping) else None
    if not isinstance(entry, Mapping):
        return None
    found = {key: value for key in _NEEDED if (value := number(entry, key)) is not None}
    return found if len(found) == len(_NEEDED) else None


_NEEDED = ("success", "low", "high")
RULES = (
    all_zero,
    all_one,
    flat_reward,
    few_groups_teach,
    truncation,
    length_changed,
    group_fails,
    evaluation_late,
    evaluation_falls,
)
