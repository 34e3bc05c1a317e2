"""Rules that detect common problems of a run from its metrics, rollouts and evaluations."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

MetricRow = Mapping[str, Any]
RolloutFilter = dict[str, str | float]
INFO = "info"
WARNING = "warning"
CRITICAL = "critical"
SEVERITIES = (CRITICAL, WARNING, INFO)
RECENT = 5
"""Number of last steps whose average counts as the current state of a run."""
MIN_STEPS = 10
"""Minimum number of steps of a run before it is compared with its beginning."""
LASTING_STEPS = 3
"""Number of steps for which a condition must hold, because it may hold by chance in a single
step."""


@dataclass(frozen=True)
class Advisory:
    """A suspected problem of a run."""

    id: str
    severity: str
    """One of ``SEVERITIES``."""
    text: str
    """Description of the problem in one sentence, with numbers."""
    since: int
    """Step since which the problem has existed."""
    advice: str
    """What the user can do, with the names of options."""
    filter: RolloutFilter = field(default_factory=dict)
    """Filter with which the viewer's table shows the rollouts that demonstrate the problem; {} if
    there are none."""


@dataclass(frozen=True)
class RunEvidence:
    """Data of a run that the rules evaluate."""

    rows: Sequence[MetricRow]
    """Metrics of the steps, in order."""
    index: Sequence[Mapping[str, Any]] = ()
    """Index lines of rollouts: ``template``, ``group``, ``failure``, ``step``, ``split``."""
    evaluations: Sequence[tuple[int, Mapping[str, Any]]] = ()
    """(number of completed steps, evaluation report) pairs, in order."""
    staleness_bound: float | None = None
    """Maximum staleness that the run's options allow; None if there is no limit."""

    @property
    def recent(self) -> Sequence[MetricRow]:
        """The last ``RECENT`` steps."""
        return self.rows[-RECENT:]

    @property
    def early(self) -> Sequence[MetricRow]:
        """The first ``RECENT`` steps; empty for a run with fewer than ``MIN_STEPS`` steps."""
        return self.rows[:RECENT] if len(self.rows) >= MIN_STEPS else ()


Rule = Callable[[RunEvidence], Iterator[Advisory]]
"""Function that yields the problems that a rule finds in a run."""
Condition = Callable[[MetricRow], bool | None]
"""Function that returns whether a condition holds in a step; None if the step lacks the metric."""


def read_number(row: MetricRow, name: str) -> float | None:
    """Return a metric as a float, including NaN and infinities; None if it is missing or not a
    number."""
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:  # an integer that is too large for a float
        return math.inf if value > 0 else -math.inf


def finite_values(rows: Sequence[MetricRow], name: str) -> list[float]:
    """Return the finite values of a metric, in order."""
    values = [read_number(row, name) for row in rows]
    return [value for value in values if value is not None and math.isfinite(value)]


def mean(rows: Sequence[MetricRow], name: str) -> float | None:
    """Return the mean of a metric's finite values; None if there are none."""
    values = finite_values(rows, name)
    return statistics.fmean(values) if values else None


def median(rows: Sequence[MetricRow], name: str) -> float | None:
    """Return the median of a metric's finite values; None if there are none."""
    values = finite_values(rows, name)
    return statistics.median(values) if values else None


def step_of(row: MetricRow) -> int:
    """Return the step number of a row; 0 if it has none."""
    step = read_number(row, "step")
    return int(step) if step is not None and math.isfinite(step) else 0


def find_start(
    rows: Sequence[MetricRow], holds: Condition, min_steps: int = LASTING_STEPS
) -> int | None:
    """Return the step since which a condition has held without interruption until the last step.

    The result is None if the condition does not hold in the last step, or has held for fewer than
    ``min_steps`` steps. Rows for which ``holds`` returns None are skipped.
    """
    since = 0
    count = 0
    for row in reversed(rows):
        holding = holds(row)
        if holding is None:
            continue
        if not holding:
            break
        since = step_of(row)
        count += 1
    return since if count >= min_steps else None


def is_above(name: str, limit: float) -> Condition:
    """Return the condition that a metric is above a limit."""
    return lambda row: None if (value := read_number(row, name)) is None else value > limit


def is_below(name: str, limit: float) -> Condition:
    """Return the condition that a metric is below a limit."""
    return lambda row: None if (value := read_number(row, name)) is None else value < limit


def equals_value(name: str, expected: float) -> Condition:
    """Return the condition that a metric equals a value."""
    return lambda row: None if (value := read_number(row, name)) is None else value == expected


def hold_all(*conditions: Condition) -> Condition:
    """Return the condition that all of the given conditions hold. It is None in steps where one of
    them is None."""

    def holds(row: MetricRow) -> bool | None:
        results = [condition(row) for condition in conditions]
        return None if None in results else all(results)

    return holds


def _find_start_or_recent(run: RunEvidence, holds: Condition) -> int:
    """Return the step since which a condition has held; if it does not hold now, the first of the
    recent steps."""
    return find_start(run.rows, holds, 1) or step_of(run.recent[0])


def _condition_rule(
    name: str,
    severity: str,
    holds: Condition,
    text: str,
    advice: str,
    shown_by: RolloutFilter | None = None,
    *,
    min_steps: int = LASTING_STEPS,
    **metrics: str,
) -> Rule:
    """Build a rule that reports a condition if it has held for the last ``min_steps`` steps.

    text: description, which may contain ``{since}`` and the keys of ``metrics`` as placeholders.
    metrics: name of the metric whose mean over the recent steps replaces each key. shown_by: filter
    for the rollouts that demonstrate the problem; training rollouts since the step ``since`` are
    selected in addition.
    """

    def rule(run: RunEvidence) -> Iterator[Advisory]:
        since = find_start(run.rows, holds, min_steps)
        if since is not None:
            now = {key: mean(run.recent, metric) or 0.0 for key, metric in metrics.items()}
            rollouts: RolloutFilter = (
                {} if shown_by is None else {"split": "train", **shown_by, "step_min": since}
            )
            yield Advisory(name, severity, text.format(since=since, **now), since, advice, rollouts)

    return rule


SIGNAL_METRIC = "groups/with_signal"
GROUPS_METRIC = "groups/total"
SUCCESS_METRIC = "success/overall"
SPREAD_METRIC = "reward/std"
MIN_SIGNAL_FRACTION = 0.2
"""A warning is given if the fraction of groups with a nonzero advantage is below this."""
MAX_TRUNCATED_FRACTION = 0.2
"""A warning is given if the fraction of truncated sequences is above this."""
MAX_OUT_OF_TURNS_FRACTION = 0.5
"""A warning is given if the fraction of episodes ended by the limit of turns is above this. The
limit is high because a failing policy uses all its turns."""
UNSURE_SUCCESS = 0.5
"""An evaluation without any success has too few episodes for a warning if its interval reaches this
success rate."""
TURNS_ADVICE = (
    "Raise rollout.max_turns, with room for the tokens of these turns (rollout.max_total_tokens), "
    "or choose tasks that "
    "take fewer. Read some of them first: a policy that repeats itself is not helped by more turns."
)
LENGTH_CHANGE_FACTOR = 2.0
"""Factor by which a length must have changed to count as exploding or collapsing."""
FAILING_GROUP_SUCCESS = 0.05
"""Success rate below which a group counts as failing, if the rate of all groups together is at
least four times as high."""
LATE_EVALUATION_FACTOR = 2.0
"""An evaluation is late if the steps since the last one exceed this factor times the longest
earlier interval."""
WAYS = ("sampled", "greedy")
"""Sampling methods of evaluations. Results of different methods are never compared."""
STEPS_WITHOUT_EVALUATION = 50
"""Number of steps after which a run should have an evaluation in addition to the one before
training."""


def check_group_signal(run: RunEvidence) -> Iterator[Advisory]:
    """Warn if most groups have no learning signal."""
    signal = finite_values(run.recent, SIGNAL_METRIC)
    groups = finite_values(run.recent, GROUPS_METRIC)
    if (
        len(signal) < RECENT
        or not sum(groups)
        or not 0 < sum(signal) < MIN_SIGNAL_FRACTION * sum(groups)
    ):
        return
    yield Advisory(
        "few_groups_teach",
        WARNING,
        f"{sum(signal):.0f} of the {sum(groups):.0f} groups of the last {RECENT} steps had an "
        f"advantage; the others "
        "cost as much and taught nothing.",
        step_of(run.recent[0]),
        "Choose tasks that the policy solves sometimes (the curriculum's options), or raise "
        "ppo.group_size.",
        {"split": "train", "step_min": step_of(run.recent[0])},
    )


def check_length(run: RunEvidence) -> Iterator[Advisory]:
    """Warn if sequences have become much longer or much shorter."""
    before = mean(run.early, "length/mean")
    now = mean(run.recent, "length/mean")
    if (
        before is None
        or now is None
        or before <= 0
        or 1 / LENGTH_CHANGE_FACTOR <= now / before <= LENGTH_CHANGE_FACTOR
    ):
        return
    longer = now > before
    limit = before * LENGTH_CHANGE_FACTOR if longer else before / LENGTH_CHANGE_FACTOR
    since = _find_start_or_recent(run, (is_above if longer else is_below)("length/mean", limit))
    yield Advisory(
        "length_exploding" if longer else "length_collapsing",
        WARNING,
        f"A sequence has {now:.0f} sampled tokens; in the first {RECENT} steps it had "
        f"{before:.0f}.",
        since,
        "Look whether the reward pays for length; ppo.loss_agg decides how the length of a "
        "sequence counts.",
        {"split": "train", "step_min": since, "length_min" if longer else "length_max": limit},
    )


def check_groups(run: RunEvidence) -> Iterator[Advisory]:
    """Warn if one group of tasks fails while others succeed."""
    overall = mean(run.recent, SUCCESS_METRIC)
    if overall is None or overall < 4 * FAILING_GROUP_SUCCESS:
        return
    names = sorted(
        {name for row in run.recent for name in row if name.startswith("success/")}
        - {SUCCESS_METRIC}
    )
    for name in names:
        value = mean(run.recent, name)
        if (
            value is None
            or value >= FAILING_GROUP_SUCCESS
            or len(finite_values(run.rows, name)) < LASTING_STEPS
        ):
            continue
        group = name.removeprefix("success/")
        since = _find_start_or_recent(run, is_below(name, FAILING_GROUP_SUCCESS))
        yield Advisory(
            "group_failing",
            WARNING,
            f"Tasks of the group {group!r} succeed in {value:.0%} of the rollouts, all together in "
            f"{overall:.0%}.",
            since,
            "Read such rollouts: tasks may be too hard for now, or impossible.",
            {"split": "train", "group": group, "outcome": "unsolved", "step_min": since},
        )


def check_evaluation_age(run: RunEvidence) -> Iterator[Advisory]:
    """Warn if the last evaluation is old."""
    if not run.rows or not run.evaluations:
        return
    steps = [step for step, _ in run.evaluations]
    now = step_of(run.rows[-1])
    longest = max((later - step for step, later in pairwise(steps)), default=0)
    limit = (
        max(MIN_STEPS, LATE_EVALUATION_FACTOR * longest) if longest else STEPS_WITHOUT_EVALUATION
    )
    if now - steps[-1] > limit:
        yield Advisory(
            "evaluation_stale",
            INFO,
            f"The last evaluation was made after step {steps[-1]}; {now - steps[-1]} steps were "
            f"trained since.",
            steps[-1],
            "evaluation.every_steps adds evaluations during training.",
        )


def check_held_out_trend(run: RunEvidence) -> Iterator[Advisory]:
    """Warn if held-out success has fallen below the interval of its best value while the training
    reward has risen."""
    way, points = _held_out_evaluations(run)
    if len(points) < 2:
        return
    best_step, best = max(points[:-1], key=lambda point: point[1]["success"])
    last_step, last = points[-1]
    if not last["high"] < best["low"]:
        return
    before = mean(
        [row for row in run.rows if step_of(row) <= best_step][-RECENT:] or run.rows[:RECENT],
        "reward/mean",
    )
    now = mean(run.recent, "reward/mean")
    if before is None or now is None or now <= before:
        return
    yield Advisory(
        "evaluation_falls",
        CRITICAL,
        f"Held-out success fell from {best['success']:.0%} after step {best_step} to "
        f"{last['success']:.0%} after step "
        f"{last_step}, while the training reward rose from {before:.3g} to {now:.3g}.",
        best_step,
        "The policy fits its training tasks: take more of them, raise ppo.kl_loss_coef, or go back "
        "to the "
        f"checkpoint of step {best_step}.",
        {"split": f"eval/{way}", "outcome": "unsolved", "step_min": last_step},
    )


def check_held_out_success(run: RunEvidence) -> Iterator[Advisory]:
    """Warn if no episode of the last evaluation succeeded, provided that there were enough
    episodes."""
    way, points = _held_out_evaluations(run)
    if not points:
        return
    step, last = points[-1]
    if last["success"] > 0 or last["high"] >= UNSURE_SUCCESS:
        return
    yield Advisory(
        "held_out_fails",
        WARNING,
        f"No held-out episode succeeded {_when(step)} ({_of_episodes(last)}{way}).",
        step,
        "Read some of them: what a policy says must be what the environment reads, and "
        "gen.max_new_tokens, "
        "rollout.max_turns and rollout.max_total_tokens must leave room for a solution. Begin with "
        "easier tasks "
        "(options of env) or a warm start (actor.warm_start=true). An environment that never "
        "reports the metric "
        "success has no successful episode.",
        {"split": f"eval/{way}", "outcome": "unsolved", "step_min": step, "step_max": step},
    )


def check_held_out_turns(run: RunEvidence) -> Iterator[Advisory]:
    """Warn if the limit of turns ended most episodes of the last evaluation."""
    way, points = _held_out_evaluations(run)
    if not points:
        return
    step, last = points[-1]
    share = last.get("out_of_turns")
    episodes = last.get("episodes")
    if share is None or not episodes or share <= MAX_OUT_OF_TURNS_FRACTION:
        return
    yield Advisory(
        "held_out_out_of_turns",
        WARNING,
        f"{share * episodes:.0f} of {episodes:.0f} held-out episodes {_when(step)} ({way}) were "
        f"cut by "
        "rollout.max_turns before they succeeded.",
        step,
        TURNS_ADVICE,
        {"split": f"eval/{way}", "outcome": "unsolved", "step_min": step, "step_max": step},
    )


def _held_out_evaluations(run: RunEvidence) -> tuple[str, list[tuple[int, dict[str, float]]]]:
    """Return (sampling method that represents the run, its evaluations). An evaluation is (step,
    results of all groups together)."""
    way = next(
        (way for way in WAYS if any(_read_overall(report, way) for _, report in run.evaluations)),
        WAYS[0],
    )
    return way, [
        (step, entry)
        for step, report in run.evaluations
        if (entry := _read_overall(report, way)) is not None
    ]


def _when(step: int) -> str:
    return f"after step {step}" if step else "before training"


def _of_episodes(entry: Mapping[str, float]) -> str:
    return f"{entry['episodes']:.0f} episodes, " if "episodes" in entry else ""


def _read_overall(report: Mapping[str, Any], way: str) -> dict[str, float] | None:
    """Return the results of all groups together for the sampling method ``way``; None if they are
    incomplete."""
    groups = report.get(way)
    entry = groups.get("overall") if isinstance(groups, Mapping) else None
    if not isinstance(entry, Mapping):
        return None
    keys = (*_REQUIRED_FIELDS, *_OPTIONAL_FIELDS)
    results = {key: value for key in keys if (value := read_number(entry, key)) is not None}
    return results if results.keys() >= {*_REQUIRED_FIELDS} else None


_REQUIRED_FIELDS = ("success", "low", "high")
_OPTIONAL_FIELDS = ("episodes", "out_of_turns")
"""Fields that may be missing in reports of earlier versions."""


COLLAPSED_ENTROPY_FRACTION = 0.2
"""Entropy counts as collapsed below this fraction of its initial value."""
LARGE_KL = 1.0
"""KL divergence from the reference, in nats per token, from which the policy counts as a different
one."""
KL_GROWTH_FACTOR = 10.0
"""A warning is given if that KL divergence has grown by this factor ..."""
MIN_GROWING_KL = 0.1
"""... and is above this value."""
HARMFUL_MISMATCH = 0.01
"""KL divergence between engine and trainer, in nats per token, from which it harms training."""
MISMATCH_GROWTH_FACTOR = 3.0
"""A warning is given if that KL divergence has grown by this factor."""
NORM_SPIKE_FACTOR = 10.0
"""A gradient norm counts as a spike from this multiple of the median on."""
MAX_CLIPPED_FRACTION = 0.3
"""A warning is given if the fraction of clipped tokens is above this."""
MAX_RATIO = 10.0
"""A warning is given if a ratio of new to old probability is above this."""
NORM_METRIC = "policy/grad_norm"
SKIPPED_METRIC = "policy/skipped"


def check_entropy(run: RunEvidence) -> Iterator[Advisory]:
    """Warn if the policy's entropy has collapsed."""
    before = mean(run.early, "policy/entropy")
    now = mean(run.recent, "policy/entropy")
    if before is None or now is None or before <= 0 or now >= COLLAPSED_ENTROPY_FRACTION * before:
        return
    since = _find_start_or_recent(
        run, is_below("policy/entropy", COLLAPSED_ENTROPY_FRACTION * before)
    )
    yield Advisory(
        "entropy_collapse",
        WARNING,
        f"Entropy fell from {before:.3g} to {now:.3g} nats a token: the rollouts of a group hardly "
        f"differ any more.",
        since,
        "Raise ppo.entropy_coef or ppo.eps_clip_higher, or lower actor.optimizer.lr.",
        {"split": "train", "step_min": since},
    )


def check_kl(run: RunEvidence) -> Iterator[Advisory]:
    """Warn if the policy moves away from its reference."""
    before = mean(run.early, "policy/kl_ref")
    now = mean(run.recent, "policy/kl_ref")
    if now is None or not (
        now > LARGE_KL
        or (before is not None and now > max(MIN_GROWING_KL, KL_GROWTH_FACTOR * before))
    ):
        return
    limit = (
        LARGE_KL
        if before is None
        else min(LARGE_KL, max(MIN_GROWING_KL, KL_GROWTH_FACTOR * before))
    )
    yield Advisory(
        "kl_running_away",
        WARNING,
        f"The KL divergence from the reference is {now:.3g} nats a token"
        + ("." if before is None else f"; in the first {RECENT} steps it was {before:.3g}."),
        _find_start_or_recent(run, is_above("policy/kl_ref", limit)),
        "Raise ppo.kl_loss_coef or ppo.kl_ctl, or lower actor.optimizer.lr.",
    )


def check_mismatch(run: RunEvidence) -> Iterator[Advisory]:
    """Warn if engine and trainer disagree more and more about the probabilities of the same
    tokens."""
    before = mean(run.early, "mismatch/kl")
    now = mean(run.recent, "mismatch/kl")
    if (
        now is None
        or now <= HARMFUL_MISMATCH
        or (before is not None and now < MISMATCH_GROWTH_FACTOR * before)
    ):
        return
    p99 = mean(run.recent, "mismatch/abs_p99")
    since = _find_start_or_recent(run, is_above("mismatch/kl", HARMFUL_MISMATCH))
    yield Advisory(
        "mismatch_growing",
        WARNING,
        f"Engine and trainer are {now:.3g} nats apart (KL of a token)"
        + ("" if before is None else f", at the beginning {before:.3g}")
        + (
            "."
            if p99 is None
            else f"; 99 % of the log-probabilities differ by less than {p99:.3g}."
        ),
        since,
        "Lower async_rl.max_head_offpolicyness, correct with ppo.use_decoupled_loss=true and "
        "ppo.behav_imp_weight_mode, and compare dtypes of engine and trainer.",
        {"split": "train", "step_min": since, "mismatch_min": HARMFUL_MISMATCH},
    )


def check_gradient_norm(run: RunEvidence) -> Iterator[Advisory]:
    """Warn if a recent gradient is far larger than usual."""
    usual = median(run.rows[:-RECENT], NORM_METRIC) if run.early else None
    if not usual:
        return
    worst = max(run.recent, key=lambda row: _finite_norm(row))
    if _finite_norm(worst) > NORM_SPIKE_FACTOR * usual:
        yield Advisory(
            "gradient_spike",
            WARNING,
            f"The gradient's norm was {_finite_norm(worst):.3g} at step {step_of(worst)}; usual "
            f"are {usual:.3g}.",
            step_of(worst),
            "Lower actor.optimizer.gradient_clipping or actor.optimizer.lr; look at the rollouts "
            "of that step.",
            {"split": "train", "step_min": step_of(worst), "step_max": step_of(worst)},
        )


def _finite_norm(row: MetricRow) -> float:
    value = read_number(row, NORM_METRIC)
    return value if value is not None and math.isfinite(value) else 0.0


def check_finite_updates(run: RunEvidence) -> Iterator[Advisory]:
    """Warn if updates were skipped, or if their loss or gradient norm is not finite."""
    for call, title in (("policy", "policy"), ("critic", "critic")):
        bad = [row for row in run.rows if _is_bad(row, call)]
        if bad:
            yield Advisory(
                f"{call}_not_finite",
                CRITICAL if _is_bad(run.rows[-1], call) else WARNING,
                f"Loss or gradient of the {title} was not finite at {len(bad)} of {len(run.rows)} "
                f"steps, last at step "
                f"{step_of(bad[-1])}; such updates are left out.",
                step_of(bad[0]),
                "nonfinite.jsonl names the samples. Lower the learning rate, or train in float32.",
                {"split": "train", "step_min": step_of(bad[-1]), "step_max": step_of(bad[-1])},
            )


def _is_bad(row: MetricRow, call: str) -> bool:
    if (read_number(row, f"{call}/skipped") or 0.0) > 0:
        return True
    values: Sequence[float | None] = [
        read_number(row, f"{call}/{name}") for name in ("loss", "grad_norm")
    ]
    return any(value is not None and not math.isfinite(value) for value in values)


def check_ratio(run: RunEvidence) -> Iterator[Advisory]:
    """Warn if single tokens have become far more likely than they were when they were sampled."""
    since = find_start(run.rows, is_above("policy/ratio_max", MAX_RATIO))
    if since is not None:
        largest = max(
            value
            for row in run.recent
            if (value := read_number(row, "policy/ratio_max")) is not None
        )
        yield Advisory(
            "ratio_large",
            WARNING,
            f"The largest ratio of a step has been above {MAX_RATIO:g} since step {since} (up to "
            f"{largest:.3g}).",
            since,
            "Look at the mismatch and at staleness; ppo.c_clip bounds what such a token costs.",
            {"split": "train", "step_min": since},
        )


SPEED_METRIC = "throughput/tokens_per_second"
GENERATION_METRIC = "generation/occupancy"
TRAINING_METRIC = "training/occupancy"
MAX_FAILURE_FRACTION = 0.2
"""A warning is given if the fraction of failed rollouts is above this ..."""
RISING_FAILURE_FRACTION = 0.05
"""... or if it is above this ..."""
FAILURE_RISE_FACTOR = 2.0
"""... and has risen by this factor."""
FAILING_TASK_FRACTION = 0.5
"""A task counts as failing if at least this fraction of its rollouts has failed ..."""
MIN_TASK_ATTEMPTS = 6
"""... and it had at least this number of rollouts."""
MAX_FAILED_VERIFIERS = 0.05
"""A warning is given if the fraction of episodes whose verifier gave no reward is above this."""
MAX_TASKS = 5
"""Maximum number of tasks to name in a message."""
IDLE_OCCUPANCY = 0.3
"""Occupancy below which a part of the run counts as idle."""
BUSY_OCCUPANCY = 0.9
"""Occupancy above which a part of the run counts as busy."""
SLOW_THROUGHPUT_FRACTION = 0.5
"""A run counts as slowed down below this fraction of its earlier throughput."""
MAX_DISCARDED_FRACTION = 0.2
"""A warning is given if the fraction of discarded samples is above this."""


def check_failure_rate(run: RunEvidence) -> Iterator[Advisory]:
    """Warn if many rollouts fail, or considerably more than before."""
    now = _failed_share(run.recent)
    before = _failed_share(run.early)
    if now is None or not (
        now > MAX_FAILURE_FRACTION
        or (before is not None and now > max(RISING_FAILURE_FRACTION, FAILURE_RISE_FACTOR * before))
    ):
        return
    kinds: Counter[str] = Counter()
    for row in run.recent:
        for name in row:
            if name.startswith("failures/"):
                kinds[name.removeprefix("failures/")] += int(sum(finite_values([row], name)))
    counts = ", ".join(f"{kind} {count}" for kind, count in kinds.most_common(4) if count)
    yield Advisory(
        "failures_rising",
        CRITICAL if now > 0.5 else WARNING,
        f"{now:.0%} of the rollouts of the last {len(run.recent)} steps failed"
        + ("" if before is None else f", at the beginning {before:.0%}")
        + (f" ({counts})." if counts else "."),
        step_of(run.recent[0]),
        "Read what failed and the log of the environment; rollout.message_timeout_s, "
        "rollout.sessions and rollout.retries decide how much is borne, and so does the environment's "
        "pool_size where it has one.",
        {"split": "train", "outcome": "failed", "step_min": step_of(run.recent[0])},
    )


def _failed_share(rows: Sequence[MetricRow]) -> float | None:
    played = sum(finite_values(rows, "rollouts/played"))
    failed = sum(finite_values(rows, "rollouts/failed"))
    return failed / played if played > 0 else None


def check_failing_tasks(run: RunEvidence) -> Iterator[Advisory]:
    """Warn if the environment fails at particular tasks."""
    played: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    first: dict[str, int] = {}
    for line in run.index:
        task = line.get("template")
        failure = line.get("failure")
        step = line.get("step")
        if not isinstance(task, str) or not task or not isinstance(step, int):
            continue
        played[task] += 1
        if failure:
            failed[task] += 1
            first[task] = min(first.get(task, step), step)
    bad = [
        task
        for task, count in failed.most_common()
        if played[task] >= MIN_TASK_ATTEMPTS and count >= FAILING_TASK_FRACTION * played[task]
    ]
    for task in bad[:MAX_TASKS]:
        yield Advisory(
            "task_failing",
            WARNING,
            f"{failed[task]} of {played[task]} rollouts of the task {task!r} failed"
            + (f" ({len(bad)} tasks fail like that)." if len(bad) > 1 else "."),
            first[task],
            "A failure is the environment's or the agent's, not the policy's: play this task "
            "alone, or leave it out.",
            {"template": task, "outcome": "failed"},
        )


def check_staleness(run: RunEvidence) -> Iterator[Advisory]:
    """Warn if almost all samples are as stale as the options allow."""
    bound = run.staleness_bound
    if not bound or bound <= 0:
        return
    since = find_start(run.rows, is_above("staleness/mean", 0.9 * bound - 1e-9), RECENT)
    if since is not None:
        yield Advisory(
            "staleness_at_bound",
            INFO,
            f"Samples have been {mean(run.recent, 'staleness/mean') or 0.0:.2g} versions old on "
            f"average since step "
            f"{since}; the bound is {bound:g}: generation is as far ahead as it may be.",
            since,
            "A smaller async_rl.max_head_offpolicyness costs little speed here; compare the "
            "mismatch.",
            {"split": "train", "step_min": since, "staleness_min": bound},
        )


def check_throughput(run: RunEvidence) -> Iterator[Advisory]:
    """Warn if the throughput has halved."""
    before = (
        median(run.rows[: max(RECENT, len(run.rows) // 2)], SPEED_METRIC) if run.early else None
    )
    now = median(run.recent, SPEED_METRIC)
    if not before or now is None or now >= SLOW_THROUGHPUT_FRACTION * before:
        return
    since = _find_start_or_recent(run, is_below(SPEED_METRIC, SLOW_THROUGHPUT_FRACTION * before))
    seconds = median(run.recent, "time/step")
    usual = median(run.rows[: len(run.rows) // 2], "time/step")
    yield Advisory(
        "throughput_halved",
        WARNING,
        f"{now:.0f} tokens/s, in the first half {before:.0f}"
        + (
            "."
            if seconds is None or usual is None
            else f"; a step takes {seconds:.3g} s instead of {usual:.3g} s."
        ),
        since,
        "The timeline shows which part became slower; other programs on the machine are a usual "
        "cause.",
    )


def check_discarded_samples(run: RunEvidence) -> Iterator[Advisory]:
    """Warn if many played samples are discarded."""
    if not run.rows:
        return
    last = run.rows[-1]
    discarded = sum(
        sum(finite_values([last], f"admission/{name}"))
        for name in ("rejected", "dropped", "given_up")
    )
    accepted = sum(finite_values([last], "admission/accepted"))
    if accepted + discarded < 20 or discarded <= MAX_DISCARDED_FRACTION * (accepted + discarded):
        return
    since = next(
        (step_of(row) for row in run.rows if sum(finite_values([row], "admission/rejected"))),
        step_of(last),
    )
    yield Advisory(
        "samples_discarded",
        WARNING,
        f"{discarded:.0f} samples were played for nothing (rejected, dropped or given up), {accepted:.0f} "
        f"were accepted.",
        since,
        "Look at the failures; rollout.retries and rollout.min_group_size decide when a whole "
        "sample is rejected.",
        {"split": "train", "outcome": "failed"},
    )


def check_updates(run: RunEvidence) -> Iterator[Advisory]:
    """Warn if train steps do not update the policy although groups have a learning signal."""
    since = find_start(
        run.rows, hold_all(equals_value("policy/updates", 0.0), is_above("groups/with_signal", 0.0))
    )
    if since is not None and not sum(finite_values(run.recent, "policy/skipped")):
        yield Advisory(
            "no_updates",
            WARNING,
            f"The policy has had no update since step {since}, although groups have advantages.",
            since,
            "critic.warmup_steps lets the critic learn first: is that meant to take so long?",
        )


def _batch_waits(row: MetricRow) -> bool | None:
    """Return whether a complete batch of finished samples is waiting and no further sample may be
    admitted."""
    groups = read_number(row, GROUPS_METRIC) or 0.0
    staged = read_number(row, "admission/staged")
    return (
        None
        if staged is None or groups <= 0
        else staged >= groups and read_number(row, "admission/capacity") == 0
    )


RULES: tuple[Rule, ...] = (
    _condition_rule(
        "all_groups_zero",
        CRITICAL,
        hold_all(equals_value(SIGNAL_METRIC, 0.0), equals_value(SUCCESS_METRIC, 0.0)),
        "No rollout has succeeded since step {since}, and no group has an advantage: the policy "
        "learns nothing.",
        "Begin with easier tasks (options of env), more rollouts of each (ppo.group_size), or a "
        "warm start "
        "(actor.warm_start=true).",
        {"outcome": "unsolved"},
    ),
    _condition_rule(
        "all_groups_one",
        WARNING,
        hold_all(equals_value(SIGNAL_METRIC, 0.0), equals_value(SUCCESS_METRIC, 1.0)),
        "Every rollout has succeeded since step {since}, and no group has an advantage: nothing is "
        "left to learn.",
        "Take harder tasks (options of env), or stop here.",
        {"outcome": "success"},
    ),
    _condition_rule(
        "reward_flat",
        CRITICAL,
        hold_all(
            is_below(SPREAD_METRIC, 1e-6),
            is_above(SUCCESS_METRIC, 0.0),
            is_below(SUCCESS_METRIC, 1.0),
        ),
        "All rewards have been equal since step {since} (mean {reward:.3g}), yet some rollouts "
        "succeed.",
        "Look at how the environment rewards, and at ppo.max_reward_clip and ppo.reward_scaling.",
        {},
        reward="reward/mean",
    ),
    check_group_signal,
    _condition_rule(
        "truncation",
        WARNING,
        is_above("length/truncated", MAX_TRUNCATED_FRACTION),
        f"A token limit has ended more than {MAX_TRUNCATED_FRACTION:.0%} of the sequences since step {{since}} "
        f"(now {{share:.0%}}).",
        "Raise gen.max_new_tokens or rollout.max_total_tokens, or mask such sequences "
        "(ppo.mask_too_long=true).",
        {"outcome": "truncated"},
        share="length/truncated",
    ),
    _condition_rule(
        "out_of_turns",
        WARNING,
        is_above("length/out_of_turns", MAX_OUT_OF_TURNS_FRACTION),
        f"rollout.max_turns has ended more than {MAX_OUT_OF_TURNS_FRACTION:.0%} of the rollouts before they "
        f"succeeded since step "
        "{since} (now {share:.0%}).",
        TURNS_ADVICE,
        {"outcome": "unsolved"},
        share="length/out_of_turns",
    ),
    check_length,
    check_groups,
    check_evaluation_age,
    check_held_out_trend,
    check_held_out_success,
    check_held_out_turns,
    check_entropy,
    check_kl,
    check_mismatch,
    check_gradient_norm,
    check_finite_updates,
    _condition_rule(
        "clip_fraction_high",
        WARNING,
        is_above("policy/clip_fraction", MAX_CLIPPED_FRACTION),
        f"The clip has decided more than {MAX_CLIPPED_FRACTION:.0%} of the tokens since step {{since}} (now "
        f"{{share:.0%}}).",
        "Lower actor.optimizer.lr, ppo.sample_reuse or ppo.ppo_n_minibatches, or staleness.",
        {"clip_min": MAX_CLIPPED_FRACTION},
        share="policy/clip_fraction",
    ),
    check_ratio,
    _condition_rule(
        "learning_rate_zero",
        CRITICAL,
        equals_value("policy/lr", 0.0),
        "The learning rate has been 0 since step {since}: the weights do not change.",
        "See actor.optimizer.lr and its schedule; a larger total_train_steps stretches the "
        "schedule.",
    ),
    _condition_rule(
        "critic_useless",
        WARNING,
        is_below("critic/explained_variance", 0.0),
        "The critic has explained less than nothing of the returns since step {since} (variance "
        "{value:.3g}): their "
        "mean would be a better guess.",
        "Give the critic steps of its own (critic.warmup_steps), a higher critic.optimizer.lr or "
        "more passes "
        "(critic.sample_reuse).",
        min_steps=RECENT,
        value="critic/explained_variance",
    ),
    check_failure_rate,
    check_failing_tasks,
    _condition_rule(
        "verifier_failing",
        WARNING,
        is_above("environment/verifier_failed", MAX_FAILED_VERIFIERS),
        f"The verifier has given no reward in more than {MAX_FAILED_VERIFIERS:.0%} of the episodes since step "
        "{since} (now {share:.0%}); they are paid 0.",
        "Read why in these rollouts: either the policy breaks the verifier, or the tasks or the "
        "host do, and then the rewards mislead.",
        {"outcome": "unsolved"},
        share="environment/verifier_failed",
    ),
    _condition_rule(
        "trainer_starved",
        WARNING,
        hold_all(
            is_below(TRAINING_METRIC, IDLE_OCCUPANCY), is_above(GENERATION_METRIC, BUSY_OCCUPANCY)
        ),
        "The trainer has worked {training:.0%} of the time since step {since}, while generation "
        "works "
        "{generation:.0%}: it waits for rollouts.",
        "Give generation more: async_rl.n_generation_workers, more devices, shorter rollouts.",
        min_steps=RECENT,
        training=TRAINING_METRIC,
        generation=GENERATION_METRIC,
    ),
    _condition_rule(
        "generation_starved",
        WARNING,
        hold_all(
            is_below(GENERATION_METRIC, IDLE_OCCUPANCY),
            is_below(TRAINING_METRIC, BUSY_OCCUPANCY),
            is_above("admission/capacity", 0.0),
        ),
        "Generation has worked {generation:.0%} of the time since step {since}, although "
        "{capacity:.0f} samples might "
        "be admitted: episodes wait for their environment.",
        "Play more at once: rollout.sessions, async_rl.n_rollout_workers, and the environment's "
        "pool_size where it has one; look how long the environment takes.",
        min_steps=RECENT,
        generation=GENERATION_METRIC,
        capacity="admission/capacity",
    ),
    _condition_rule(
        "buffer_full",
        INFO,
        _batch_waits,
        "At least a whole batch of finished samples has waited for the trainer since step {since}, "
        "and nothing is "
        "admitted in that time (generation works {generation:.0%} of the time).",
        "The trainer is the slower side: give it more workers (actor.workers), or generation "
        "fewer.",
        min_steps=RECENT,
        generation=GENERATION_METRIC,
    ),
    check_staleness,
    check_throughput,
    check_discarded_samples,
    check_updates,
)
