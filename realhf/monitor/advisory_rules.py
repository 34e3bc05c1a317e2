"""Judges a run by rules, each of which looks for one thing that goes wrong, in its metrics, rollouts and
evaluations."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

Row = Mapping[str, Any]
Filter = dict[str, str | float]
INFO, WARNING, CRITICAL = "info", "warning", "critical"
SEVERITIES = (CRITICAL, WARNING, INFO)
RECENT = 5
"""So many steps at the end of a run say how it is now."""
LEAST = 10
"""A run is compared with its own beginning from so many steps on."""
LASTING = 3
"""A condition that may hold by chance counts when it has held for so many steps."""


@dataclass(frozen=True)
class Advisory:
    """Says what seems wrong with a run.

    ``severity`` is one of ``SEVERITIES``; ``text`` a sentence with the figures; ``since`` the step since which it is
    so; ``filter`` finds the rollouts that show it, by the fields of the viewer's table ({} where none do); ``advice``
    is what one may do about it, with the options.
    """

    id: str
    severity: str
    text: str
    since: int
    advice: str
    filter: Filter = field(default_factory=dict)


@dataclass(frozen=True)
class Evidence:
    """Holds what rules judge: rows of metrics in order, index lines of rollouts (``template``, ``group``, ``failure``,
    ``step``, ``split``), evaluation reports by step, and the bound on staleness where there is one."""

    rows: Sequence[Row]
    index: Sequence[Mapping[str, Any]] = ()
    evaluations: Sequence[tuple[int, Mapping[str, Any]]] = ()
    staleness_bound: float | None = None

    @property
    def recent(self) -> Sequence[Row]:
        """The last steps."""
        return self.rows[-RECENT:]

    @property
    def early(self) -> Sequence[Row]:
        """The first steps; none in a run that is too short to be compared with its beginning."""
        return self.rows[:RECENT] if len(self.rows) >= LEAST else ()


Rule = Callable[[Evidence], Iterator[Advisory]]
Condition = Callable[[Row], bool | None]


def number(row: Row, name: str) -> float | None:
    """Return a value that is a number, NaN and infinities included; None for anything else."""
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:  # an integer beyond all floats
        return math.inf if value > 0 else -math.inf


def finite(rows: Sequence[Row], name: str) -> list[float]:
    """Return the finite values of a metric, in order."""
    found = [number(row, name) for row in rows]
    return [value for value in found if value is not None and math.isfinite(value)]


def mean(rows: Sequence[Row], name: str) -> float | None:
    """Average the finite values of a metric; None without one."""
    values = finite(rows, name)
    return statistics.fmean(values) if values else None


def median(rows: Sequence[Row], name: str) -> float | None:
    """Return the median of the finite values of a metric; None without one."""
    values = finite(rows, name)
    return statistics.median(values) if values else None


def step_of(row: Row) -> int:
    """Return the step of a row, 0 where it says none."""
    found = number(row, "step")
    return int(found) if found is not None and math.isfinite(found) else 0


def lasting(rows: Sequence[Row], holds: Condition, least: int = LASTING) -> int | None:
    """Return the step since which a condition holds without a break up to the end; None where it does not hold now or
    has not for ``least`` steps. Rows of which ``holds`` says None count for nothing."""
    since, count = 0, 0
    for row in reversed(rows):
        found = holds(row)
        if found is None:
            continue
        if not found:
            break
        since, count = step_of(row), count + 1
    return since if count >= least else None


def above(name: str, limit: float) -> Condition:
    """Make a condition: the metric is above a limit."""
    return lambda row: None if (value := number(row, name)) is None else value > limit


def below(name: str, limit: float) -> Condition:
    """Make a condition: the metric is below a limit."""
    return lambda row: None if (value := number(row, name)) is None else value < limit


def is_equal(name: str, wanted: float) -> Condition:
    """Make a condition: the metric has this value."""
    return lambda row: None if (value := number(row, name)) is None else value == wanted


def both(*conditions: Condition) -> Condition:
    """Make a condition: all hold. None where one of them says nothing."""

    def holds(row: Row) -> bool | None:
        found = [condition(row) for condition in conditions]
        return None if None in found else all(found)

    return holds


def _since(run: Evidence, holds: Condition) -> int:
    """Return the step since which a condition holds, the first of the last steps where it is not so now."""
    return lasting(run.rows, holds, 1) or step_of(run.recent[0])


def _lasting(
    name: str,
    severity: str,
    holds: Condition,
    text: str,
    advice: str,
    shown_by: Filter | None = None,
    *,
    least: int = LASTING,
    **figures: str,
) -> Rule:
    """Make the rule that a condition holds to the end. ``text`` may name ``{since}`` and ``figures``, each the mean of
    a metric in the last steps; ``shown_by`` are the rollouts of training from then on that show it."""

    def rule(run: Evidence) -> Iterator[Advisory]:
        since = lasting(run.rows, holds, least)
        if since is not None:
            now = {key: mean(run.recent, metric) or 0.0 for key, metric in figures.items()}
            rollouts: Filter = {} if shown_by is None else {"split": "train", **shown_by, "step_min": since}
            yield Advisory(name, severity, text.format(since=since, **now), since, advice, rollouts)

    return rule


SIGNAL, ALL_GROUPS, SUCCESS, SPREAD = "groups/with_signal", "groups/total", "success/overall", "reward/std"
LITTLE_SIGNAL = 0.2
"""Least share of groups that should teach something."""
TRUNCATED = 0.2
"""Most truncated sequences that are taken for granted."""
OUT_OF_TURNS = 0.5
"""Most episodes that the limit of turns may end: a policy that fails uses all its turns."""
UNSURE = 0.5
"""An evaluation without a success whose interval reaches this far has too few episodes to say that none succeeds."""
TURNS_ADVICE = (
    "Raise rollout.max_turns, with room for the tokens of these turns (rollout.max_total_tokens), or choose tasks that "
    "take fewer. Read some of them first: a policy that repeats itself is not helped by more turns."
)
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


def length_changed(run: Evidence) -> Iterator[Advisory]:
    """Answers have become much longer or much shorter."""
    before, now = mean(run.early, "length/mean"), mean(run.recent, "length/mean")
    if before is None or now is None or before <= 0 or 1 / GROWN <= now / before <= GROWN:
        return
    longer = now > before
    limit = before * GROWN if longer else before / GROWN
    since = _since(run, (above if longer else below)("length/mean", limit))
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
        since = _since(run, below(name, FALLEN_BEHIND))
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
    way, points = _held_out(run)
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


def held_out_fails(run: Evidence) -> Iterator[Advisory]:
    """No episode of the last evaluation succeeded, and there were enough of them to say so."""
    way, points = _held_out(run)
    if not points:
        return
    step, last = points[-1]
    if last["success"] > 0 or last["high"] >= UNSURE:
        return
    yield Advisory(
        "held_out_fails",
        WARNING,
        f"No held-out episode succeeded {_when(step)} ({_of_episodes(last)}{way}).",
        step,
        "Read some of them: what a policy says must be what the environment reads, and gen.max_new_tokens, "
        "rollout.max_turns and rollout.max_total_tokens must leave room for a solution. Begin with easier tasks "
        "(options of env) or a warm start (actor.warm_start=true). An environment that never reports the metric "
        "success has no successful episode.",
        {"split": f"eval/{way}", "outcome": "unsolved", "step_min": step, "step_max": step},
    )


def held_out_cut(run: Evidence) -> Iterator[Advisory]:
    """Most episodes of the last evaluation were ended by the limit of turns."""
    way, points = _held_out(run)
    if not points:
        return
    step, last = points[-1]
    share, episodes = last.get("out_of_turns"), last.get("episodes")
    if share is None or not episodes or share <= OUT_OF_TURNS:
        return
    yield Advisory(
        "held_out_out_of_turns",
        WARNING,
        f"{share * episodes:.0f} of {episodes:.0f} held-out episodes {_when(step)} ({way}) were cut by "
        "rollout.max_turns before they succeeded.",
        step,
        TURNS_ADVICE,
        {"split": f"eval/{way}", "outcome": "unsolved", "step_min": step, "step_max": step},
    )


def _held_out(run: Evidence) -> tuple[str, list[tuple[int, dict[str, float]]]]:
    """Return the way of sampling that stands for the run, and its evaluations as (step, figures of all groups)."""
    way = next((way for way in WAYS if any(_overall(report, way) for _, report in run.evaluations)), WAYS[0])
    return way, [(step, entry) for step, report in run.evaluations if (entry := _overall(report, way)) is not None]


def _when(step: int) -> str:
    return f"after step {step}" if step else "before training"


def _of_episodes(entry: Mapping[str, float]) -> str:
    return f"{entry['episodes']:.0f} episodes, " if "episodes" in entry else ""


def _overall(report: Mapping[str, Any], way: str) -> dict[str, float] | None:
    """Return the figures of all groups together for one way of sampling, None where they are not whole."""
    groups = report.get(way)
    entry = groups.get("overall") if isinstance(groups, Mapping) else None
    if not isinstance(entry, Mapping):
        return None
    found = {key: value for key in (*_NEEDED, *_KNOWN) if (value := number(entry, key)) is not None}
    return found if found.keys() >= {*_NEEDED} else None


_NEEDED = ("success", "low", "high")
_KNOWN = ("episodes", "out_of_turns")
"""What reports of earlier versions may lack."""


COLLAPSED = 0.2
"""Entropy below this share of its beginning has collapsed."""
DRIFTED_KL = 1.0
"""KL from the reference, nats a token, beyond which the policy is another one."""
GROWN_KL, SOME_KL = 10.0, 0.1
MISMATCHED = 0.01
"""KL of engine and trainer, nats, that hurts."""
GROWN_MISMATCH = 3.0
SPIKE = 10.0
"""A norm so many times the median is a spike."""
CLIPPED, LARGE_RATIO = 0.3, 10.0
NORM, SKIPPED = "policy/grad_norm", "policy/skipped"


def entropy_collapses(run: Evidence) -> Iterator[Advisory]:
    """The policy tries hardly anything any more."""
    before, now = mean(run.early, "policy/entropy"), mean(run.recent, "policy/entropy")
    if before is None or now is None or before <= 0 or now >= COLLAPSED * before:
        return
    since = _since(run, below("policy/entropy", COLLAPSED * before))
    yield Advisory(
        "entropy_collapse",
        WARNING,
        f"Entropy fell from {before:.3g} to {now:.3g} nats a token: the rollouts of a group hardly differ any more.",
        since,
        "Raise ppo.entropy_coef or ppo.eps_clip_higher, or lower actor.optimizer.lr.",
        {"split": "train", "step_min": since},
    )


def kl_runs_away(run: Evidence) -> Iterator[Advisory]:
    """The policy leaves its reference."""
    before, now = mean(run.early, "policy/kl_ref"), mean(run.recent, "policy/kl_ref")
    if now is None or not (now > DRIFTED_KL or (before is not None and now > max(SOME_KL, GROWN_KL * before))):
        return
    limit = DRIFTED_KL if before is None else min(DRIFTED_KL, max(SOME_KL, GROWN_KL * before))
    yield Advisory(
        "kl_running_away",
        WARNING,
        f"The KL divergence from the reference is {now:.3g} nats a token"
        + ("." if before is None else f"; in the first {RECENT} steps it was {before:.3g}."),
        _since(run, above("policy/kl_ref", limit)),
        "Raise ppo.kl_loss_coef or ppo.kl_ctl, or lower actor.optimizer.lr.",
    )


def mismatch_grows(run: Evidence) -> Iterator[Advisory]:
    """Engine and trainer disagree more and more about the same tokens."""
    before, now = mean(run.early, "mismatch/kl"), mean(run.recent, "mismatch/kl")
    if now is None or now <= MISMATCHED or (before is not None and now < GROWN_MISMATCH * before):
        return
    p99 = mean(run.recent, "mismatch/abs_p99")
    since = _since(run, above("mismatch/kl", MISMATCHED))
    yield Advisory(
        "mismatch_growing",
        WARNING,
        f"Engine and trainer are {now:.3g} nats apart (KL of a token)"
        + ("" if before is None else f", at the beginning {before:.3g}")
        + ("." if p99 is None else f"; 99 % of the log-probabilities differ by less than {p99:.3g}."),
        since,
        "Lower async_rl.max_head_offpolicyness, correct with ppo.use_decoupled_loss=true and "
        "ppo.behav_imp_weight_mode, and compare dtypes of engine and trainer.",
        {"split": "train", "step_min": since, "mismatch_min": MISMATCHED},
    )


def gradient_spikes(run: Evidence) -> Iterator[Advisory]:
    """A recent gradient is far larger than usual."""
    usual = median(run.rows[:-RECENT], NORM) if run.early else None
    if not usual:
        return
    worst = max(run.recent, key=lambda row: _finite_norm(row))
    if _finite_norm(worst) > SPIKE * usual:
        yield Advisory(
            "gradient_spike",
            WARNING,
            f"The gradient's norm was {_finite_norm(worst):.3g} at step {step_of(worst)}; usual are {usual:.3g}.",
            step_of(worst),
            "Lower actor.optimizer.gradient_clipping or actor.optimizer.lr; look at the rollouts of that step.",
            {"split": "train", "step_min": step_of(worst), "step_max": step_of(worst)},
        )


def _finite_norm(row: Row) -> float:
    value = number(row, NORM)
    return value if value is not None and math.isfinite(value) else 0.0


def not_finite(run: Evidence) -> Iterator[Advisory]:
    """Updates were left out, or figures of them are no numbers."""
    for call, title in (("policy", "policy"), ("critic", "critic")):
        bad = [row for row in run.rows if _is_bad(row, call)]
        if bad:
            yield Advisory(
                f"{call}_not_finite",
                CRITICAL if _is_bad(run.rows[-1], call) else WARNING,
                f"Loss or gradient of the {title} was not finite at {len(bad)} of {len(run.rows)} steps, last at step "
                f"{step_of(bad[-1])}; such updates are left out.",
                step_of(bad[0]),
                "nonfinite.jsonl names the samples. Lower the learning rate, or train in float32.",
                {"split": "train", "step_min": step_of(bad[-1]), "step_max": step_of(bad[-1])},
            )


def _is_bad(row: Row, call: str) -> bool:
    if (number(row, f"{call}/skipped") or 0.0) > 0:
        return True
    values: Sequence[float | None] = [number(row, f"{call}/{name}") for name in ("loss", "grad_norm")]
    return any(value is not None and not math.isfinite(value) for value in values)


def ratio_large(run: Evidence) -> Iterator[Advisory]:
    """Single tokens have become far likelier than they were when sampled."""
    since = lasting(run.rows, above("policy/ratio_max", LARGE_RATIO))
    if since is not None:
        largest = max(value for row in run.recent if (value := number(row, "policy/ratio_max")) is not None)
        yield Advisory(
            "ratio_large",
            WARNING,
            f"The largest ratio of a step has been above {LARGE_RATIO:g} since step {since} (up to {largest:.3g}).",
            since,
            "Look at the mismatch and at staleness; ppo.c_clip bounds what such a token costs.",
            {"split": "train", "step_min": since},
        )


SPEED, GENERATION, TRAINING = "throughput/tokens_per_second", "generation/occupancy", "training/occupancy"
MANY_FAILURES, SOME_FAILURES, RISEN = 0.2, 0.05, 2.0
"""Share of failed rollouts that is too much by itself, or when it has risen by the factor."""
FAILS, ATTEMPTS = 0.5, 6
"""A task fails when at least this share of at least so many rollouts of it failed."""
MOST_TASKS = 5
"""So many tasks are named at most."""
IDLE, BUSY = 0.3, 0.9
SLOWED = 0.5
DISCARDED = 0.2


def failures_rise(run: Evidence) -> Iterator[Advisory]:
    """Many rollouts fail, or more than before."""
    now, before = _failed_share(run.recent), _failed_share(run.early)
    if now is None or not (now > MANY_FAILURES or (before is not None and now > max(SOME_FAILURES, RISEN * before))):
        return
    kinds: Counter[str] = Counter()
    for row in run.recent:
        for name in row:
            if name.startswith("failures/"):
                kinds[name.removeprefix("failures/")] += int(sum(finite([row], name)))
    told = ", ".join(f"{kind} {count}" for kind, count in kinds.most_common(4) if count)
    yield Advisory(
        "failures_rising",
        CRITICAL if now > 0.5 else WARNING,
        f"{now:.0%} of the rollouts of the last {len(run.recent)} steps failed"
        + ("" if before is None else f", at the beginning {before:.0%}")
        + (f" ({told})." if told else "."),
        step_of(run.recent[0]),
        "Read what failed and the log of the environment; rollout.message_timeout_s, env.pool_size and rollout.retries "
        "decide how much is borne.",
        {"split": "train", "outcome": "failed", "step_min": step_of(run.recent[0])},
    )


def _failed_share(rows: Sequence[Row]) -> float | None:
    played, failed = sum(finite(rows, "rollouts/played")), sum(finite(rows, "rollouts/failed"))
    return failed / played if played > 0 else None


def task_fails(run: Evidence) -> Iterator[Advisory]:
    """The environment fails at particular tasks."""
    played: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    first: dict[str, int] = {}
    for line in run.index:
        task, failure, step = line.get("template"), line.get("failure"), line.get("step")
        if not isinstance(task, str) or not task or not isinstance(step, int):
            continue
        played[task] += 1
        if failure:
            failed[task] += 1
            first[task] = min(first.get(task, step), step)
    bad = [task for task, count in failed.most_common() if played[task] >= ATTEMPTS and count >= FAILS * played[task]]
    for task in bad[:MOST_TASKS]:
        yield Advisory(
            "task_failing",
            WARNING,
            f"{failed[task]} of {played[task]} rollouts of the task {task!r} failed"
            + (f" ({len(bad)} tasks fail like that)." if len(bad) > 1 else "."),
            first[task],
            "A failure is the environment's or the agent's, not the policy's: play this task alone, or leave it out.",
            {"template": task, "outcome": "failed"},
        )


def staleness_at_bound(run: Evidence) -> Iterator[Advisory]:
    """Nearly everything that is trained on is as old as it may be."""
    bound = run.staleness_bound
    if not bound or bound <= 0:
        return
    since = lasting(run.rows, above("staleness/mean", 0.9 * bound - 1e-9), RECENT)
    if since is not None:
        yield Advisory(
            "staleness_at_bound",
            INFO,
            f"Samples have been {mean(run.recent, 'staleness/mean') or 0.0:.2g} versions old on average since step "
            f"{since}; the bound is {bound:g}: generation is as far ahead as it may be.",
            since,
            "A smaller async_rl.max_head_offpolicyness costs little speed here; compare the mismatch.",
            {"split": "train", "step_min": since, "staleness_min": bound},
        )


def slower(run: Evidence) -> Iterator[Advisory]:
    """Throughput has halved."""
    before = median(run.rows[: max(RECENT, len(run.rows) // 2)], SPEED) if run.early else None
    now = median(run.recent, SPEED)
    if not before or now is None or now >= SLOWED * before:
        return
    since = _since(run, below(SPEED, SLOWED * before))
    seconds, usual = median(run.recent, "time/step"), median(run.rows[: len(run.rows) // 2], "time/step")
    yield Advisory(
        "throughput_halved",
        WARNING,
        f"{now:.0f} tokens/s, in the first half {before:.0f}"
        + ("." if seconds is None or usual is None else f"; a step takes {seconds:.3g} s instead of {usual:.3g} s."),
        since,
        "The timeline shows which part became slower; other programs on the machine are a usual cause.",
    )


def many_discarded(run: Evidence) -> Iterator[Advisory]:
    """Samples that were played are thrown away."""
    if not run.rows:
        return
    last = run.rows[-1]
    lost = sum(sum(finite([last], f"admission/{name}")) for name in ("rejected", "dropped", "given_up"))
    kept = sum(finite([last], "admission/accepted"))
    if kept + lost < 20 or lost <= DISCARDED * (kept + lost):
        return
    since = next((step_of(row) for row in run.rows if sum(finite([row], "admission/rejected"))), step_of(last))
    yield Advisory(
        "samples_discarded",
        WARNING,
        f"{lost:.0f} samples were played for nothing (rejected, dropped or given up), {kept:.0f} were accepted.",
        since,
        "Look at the failures; rollout.retries and rollout.min_group_size decide when a whole sample is rejected.",
        {"split": "train", "outcome": "failed"},
    )


def no_updates(run: Evidence) -> Iterator[Advisory]:
    """Train steps make no update of the policy although groups have a signal."""
    since = lasting(run.rows, both(is_equal("policy/updates", 0.0), above("groups/with_signal", 0.0)))
    if since is not None and not sum(finite(run.recent, "policy/skipped")):
        yield Advisory(
            "no_updates",
            WARNING,
            f"The policy has had no update since step {since}, although groups have advantages.",
            since,
            "critic.warmup_steps lets the critic learn first: is that meant to take so long?",
        )


def _batch_waits(row: Row) -> bool | None:
    """Whether a whole batch of finished samples is staged and nothing may be admitted."""
    groups, staged = number(row, ALL_GROUPS) or 0.0, number(row, "admission/staged")
    return None if staged is None or groups <= 0 else staged >= groups and number(row, "admission/capacity") == 0


RULES: tuple[Rule, ...] = (
    _lasting(
        "all_groups_zero",
        CRITICAL,
        both(is_equal(SIGNAL, 0.0), is_equal(SUCCESS, 0.0)),
        "No rollout has succeeded since step {since}, and no group has an advantage: the policy learns nothing.",
        "Begin with easier tasks (options of env), more rollouts of each (ppo.group_size), or a warm start "
        "(actor.warm_start=true).",
        {"outcome": "unsolved"},
    ),
    _lasting(
        "all_groups_one",
        WARNING,
        both(is_equal(SIGNAL, 0.0), is_equal(SUCCESS, 1.0)),
        "Every rollout has succeeded since step {since}, and no group has an advantage: nothing is left to learn.",
        "Take harder tasks (options of env), or stop here.",
        {"outcome": "success"},
    ),
    _lasting(
        "reward_flat",
        CRITICAL,
        both(below(SPREAD, 1e-6), above(SUCCESS, 0.0), below(SUCCESS, 1.0)),
        "All rewards have been equal since step {since} (mean {reward:.3g}), yet some rollouts succeed.",
        "Look at how the environment rewards, and at ppo.max_reward_clip and ppo.reward_scaling.",
        {},
        reward="reward/mean",
    ),
    few_groups_teach,
    _lasting(
        "truncation",
        WARNING,
        above("length/truncated", TRUNCATED),
        f"A token limit has ended more than {TRUNCATED:.0%} of the sequences since step {{since}} (now {{share:.0%}}).",
        "Raise gen.max_new_tokens or rollout.max_total_tokens, or mask such sequences (ppo.mask_too_long=true).",
        {"outcome": "truncated"},
        share="length/truncated",
    ),
    _lasting(
        "out_of_turns",
        WARNING,
        above("length/out_of_turns", OUT_OF_TURNS),
        f"rollout.max_turns has ended more than {OUT_OF_TURNS:.0%} of the rollouts before they succeeded since step "
        "{since} (now {share:.0%}).",
        TURNS_ADVICE,
        {"outcome": "unsolved"},
        share="length/out_of_turns",
    ),
    length_changed,
    group_fails,
    evaluation_late,
    evaluation_falls,
    held_out_fails,
    held_out_cut,
    entropy_collapses,
    kl_runs_away,
    mismatch_grows,
    gradient_spikes,
    not_finite,
    _lasting(
        "clip_fraction_high",
        WARNING,
        above("policy/clip_fraction", CLIPPED),
        f"The clip has decided more than {CLIPPED:.0%} of the tokens since step {{since}} (now {{share:.0%}}).",
        "Lower actor.optimizer.lr, ppo.sample_reuse or ppo.ppo_n_minibatches, or staleness.",
        {"clip_min": CLIPPED},
        share="policy/clip_fraction",
    ),
    ratio_large,
    _lasting(
        "learning_rate_zero",
        CRITICAL,
        is_equal("policy/lr", 0.0),
        "The learning rate has been 0 since step {since}: the weights do not change.",
        "See actor.optimizer.lr and its schedule; a larger total_train_steps stretches the schedule.",
    ),
    _lasting(
        "critic_useless",
        WARNING,
        below("critic/explained_variance", 0.0),
        "The critic has explained less than nothing of the returns since step {since} (variance {value:.3g}): their "
        "mean would be a better guess.",
        "Give the critic steps of its own (critic.warmup_steps), a higher critic.optimizer.lr or more passes "
        "(critic.sample_reuse).",
        least=RECENT,
        value="critic/explained_variance",
    ),
    failures_rise,
    task_fails,
    _lasting(
        "trainer_starved",
        WARNING,
        both(below(TRAINING, IDLE), above(GENERATION, BUSY)),
        "The trainer has worked {training:.0%} of the time since step {since}, while generation works "
        "{generation:.0%}: it waits for rollouts.",
        "Give generation more: async_rl.n_generation_workers, more devices, shorter rollouts.",
        least=RECENT,
        training=TRAINING,
        generation=GENERATION,
    ),
    _lasting(
        "generation_starved",
        WARNING,
        both(below(GENERATION, IDLE), below(TRAINING, BUSY), above("admission/capacity", 0.0)),
        "Generation has worked {generation:.0%} of the time since step {since}, although {capacity:.0f} samples might "
        "be admitted: episodes wait for their environment.",
        "Play more at once: env.pool_size, async_rl.n_rollout_workers; look how long the environment takes.",
        least=RECENT,
        generation=GENERATION,
        capacity="admission/capacity",
    ),
    _lasting(
        "buffer_full",
        INFO,
        _batch_waits,
        "At least a whole batch of finished samples has waited for the trainer since step {since}, and nothing is "
        "admitted meanwhile (generation works {generation:.0%} of the time).",
        "The trainer is the slower side: give it more workers (actor.workers), or generation fewer.",
        least=RECENT,
        generation=GENERATION,
    ),
    staleness_at_bound,
    slower,
    many_discarded,
    no_updates,
)
