"""Rules about the update of policy and critic: entropy, KL, ratios, gradients, mismatch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from realhf.monitor.advisories.evidence import (
    CRITICAL,
    RECENT,
    WARNING,
    Advisory,
    Evidence,
    Row,
    above,
    below,
    is_equal,
    lasting,
    mean,
    median,
    number,
    step_of,
)

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
    since = lasting(run.rows, below("policy/entropy", COLLAPSED * before), 1) or step_of(run.recent[0])
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
        lasting(run.rows, above("policy/kl_ref", limit), 1) or step_of(run.recent[0]),
        "Raise ppo.kl_loss_coef or ppo.kl_ctl, or lower actor.optimizer.lr.",
    )


def mismatch_grows(run: Evidence) -> Iterator[Advisory]:
    """Engine and trainer disagree more and more about the same tokens."""
    before, now = mean(run.early, "mismatch/kl"), mean(run.recent, "mismatch/kl")
    if now is None or now <= MISMATCHED or (before is not None and now < GROWN_MISMATCH * before):
        return
    p99 = mean(run.recent, "mismatch/abs_p99")
    since = lasting(run.rows, above("mismatch/kl", MISMATCHED), 1) or step_of(run.recent[0])
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


def clips_much(run: Evidence) -> Iterator[Advisory]:
    """The clip decides many tokens: the updates are too large."""
    since = lasting(run.rows, above("policy/clip_fraction", CLIPPED))
    if since is not None:
        share = mean(run.recent, "policy/clip_fraction") or 0.0
        yield Advisory(
            "clip_fraction_high",
            WARNING,
            f"The clip has decided more than {CLIPPED:.0%} of the tokens since step {since} (now {share:.0%}).",
            since,
            "Lower actor.optimizer.lr, ppo.sample_reuse or ppo.ppo_n_minibatches, or staleness.",
            {"split": "train", "step_min": since, "clip_min": CLIPPED},
        )


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


def rate_is_zero(run: Evidence) -> Iterator[Advisory]:
    """The learning rate is 0: steps change nothing."""
    since = lasting(run.rows, is_equal("policy/lr", 0.0))
    if since is not None:
        yield Advisory(
            "learning_rate_zero",
            CRITICAL,
            f"The learning rate has been 0 since step {since}: the weights do not change.",
            since,
            "See actor.optimizer.lr and its schedule; a run that was made longer goes on with the schedule it began.",
        )


def critic_is_useless(run: Evidence) -> Iterator[Advisory]:
    """The critic predicts returns worse than their mean would."""
    since = lasting(run.rows, below("critic/explained_variance", 0.0), RECENT)
    if since is not None:
        value = mean(run.recent, "critic/explained_variance") or 0.0
        yield Advisory(
            "critic_useless",
            WARNING,
            f"The critic has explained less than nothing of the returns since step {since} (variance {value:.3g}): "
            "their mean would be a better guess.",
            since,
            "Give the critic steps of its own (critic.warmup_steps), a higher critic.optimizer.lr or more passes "
            "(critic.sample_reuse).",
        )


RULES = (
    entropy_collapses,
    kl_runs_away,
    mismatch_grows,
    gradient_spikes,
    not_finite,
    clips_much,
    ratio_large,
    rate_is_zero,
    critic_is_useless,
)
