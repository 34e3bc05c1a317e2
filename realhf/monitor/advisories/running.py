"""Rules about how a run goes: failures, processes that wait for each other, speed, staleness."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from realhf.monitor.advisories.evidence import (
    CRITICAL,
    INFO,
    RECENT,
    WARNING,
    Advisory,
    Evidence,
    Row,
    above,
    below,
    both,
    finite,
    is_equal,
    lasting,
    mean,
    median,
    number,
    step_of,
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


def trainer_starves(run: Evidence) -> Iterator[Advisory]:
    """The trainer waits for samples."""
    since = lasting(run.rows, both(below(TRAINING, IDLE), above(GENERATION, BUSY)), RECENT)
    if since is not None:
        yield Advisory(
            "trainer_starved",
            WARNING,
            f"The trainer has worked {_percent(run, TRAINING)} of the time since step {since}, while generation works "
            f"{_percent(run, GENERATION)}: it waits for rollouts.",
            since,
            "Give generation more: async_rl.n_generation_workers, more devices, shorter rollouts.",
        )


def generation_starves(run: Evidence) -> Iterator[Advisory]:
    """Generation has nothing to do although samples may be admitted."""
    waits = both(below(GENERATION, IDLE), below(TRAINING, BUSY), above("admission/capacity", 0.0))
    since = lasting(run.rows, waits, RECENT)
    if since is not None:
        yield Advisory(
            "generation_starved",
            WARNING,
            f"Generation has worked {_percent(run, GENERATION)} of the time since step {since}, although "
            f"{mean(run.recent, 'admission/capacity') or 0.0:.0f} samples might be admitted: episodes wait for their "
            "environment.",
            since,
            "Play more at once: env.pool_size, async_rl.n_rollout_workers; look how long the environment takes.",
        )


def buffer_is_full(run: Evidence) -> Iterator[Advisory]:
    """Finished samples wait for the trainer, a batch of them and more, and nothing is admitted."""
    rows = [row for row in run.rows if (number(row, "groups/total") or 0.0) > 0]
    since = lasting(
        rows,
        lambda row: (
            None
            if (staged := number(row, "admission/staged")) is None
            else staged >= (number(row, "groups/total") or 0.0) and number(row, "admission/capacity") == 0
        ),
        RECENT,
    )
    if since is not None:
        yield Advisory(
            "buffer_full",
            INFO,
            f"At least a whole batch of finished samples has waited for the trainer since step {since}, and nothing is "
            f"admitted meanwhile (generation works {_percent(run, GENERATION)} of the time).",
            since,
            "The trainer is the slower side: give it more workers (actor.workers), or generation fewer.",
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
    since = lasting(run.rows, below(SPEED, SLOWED * before), 1) or step_of(run.recent[0])
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


def _percent(run: Evidence, name: str) -> str:
    return f"{mean(run.recent, name) or 0.0:.0%}"


RULES = (
    failures_rise,
    task_fails,
    trainer_starves,
    generation_starves,
    buffer_is_full,
    staleness_at_bound,
    slower,
    many_discarded,
    no_updates,
)
