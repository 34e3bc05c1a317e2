"""Asynchronous training."""

from __future__ import annotations

from dataclasses import dataclass

from realhf.api.config.option import option


@dataclass
class AsyncConfig:
    """Asynchronous training: rollout workers play while the trainer trains (docs/asynchronous.md)."""

    enabled: bool = option(
        False,
        "Rollout workers play while the trainer trains; without it each step waits for the episodes it trains on.",
        idle="no episodes are played for it while it trains",
    )
    max_head_offpolicyness: int = option(
        1,
        "The oldest token of a sample lies at most this many versions (eta) behind the weights it trains; 0 is "
        "synchronous batches.",
        at_least=0,
        on_resume="warns",
    )
    max_concurrent_rollouts: int | None = option(
        None,
        "At most this many samples are in play or on their way to the trainer; without a number, as many as the "
        "environment's sessions hold and two batches.",
        on_resume="free",
    )
    n_rollout_workers: int = option(1, "This many processes play episodes.", at_least=1, on_resume="free")
    n_generation_workers: int = option(1, "This many processes generate tokens.", at_least=1, on_resume="free")
    generation_threads: int = option(
        1, "Every embedded engine computes on this many threads.", at_least=1, on_resume="free"
    )
    staleness_policy: str = option(
        "wait",
        "A step waits for stragglers, or drops samples that are too old.",
        choices=("wait", "drop"),
        on_resume="warns",
    )
    kv_policy: str = option(
        "recompute",
        "Under new weights, running episodes recompute their keys and values or keep them.",
        choices=("recompute", "keep"),
        on_resume="warns",
    )
    weights: str = option(
        "shm",
        "New weights travel through shared memory, files, or the sockets of the run (fetch).",
        choices=("shm", "disk", "fetch"),
        retired={"broadcast": "fetch reaches the same hosts, encrypted with the keys of the run"},
        on_resume="free",
    )
    rollout_deadline_s: float = option(
        600.0, "A sample that takes longer than these seconds is given back.", above=0, on_resume="free"
    )
    pause_timeout_s: float = option(
        30.0, "An engine stops for new weights within these seconds.", above=0, on_resume="free"
    )
    recover_retries: int = option(
        1,
        "After the death of its master or a model worker, the run begins again from its last checkpoint this many "
        "times within recover_window_s.",
        at_least=0,
        on_resume="free",
    )
    recover_window_s: float = option(
        3600.0, "Deaths longer ago than these seconds do not count towards recover_retries.", above=0, on_resume="free"
    )
    keep_journal: bool = option(
        False,
        "What the journal needs no more is kept in its folder 'archive', so that every sample can be audited.",
        on_resume="free",
    )
    niceness: int = option(
        0,
        "Rollouts, generation and environment step back this far behind the trainer, for cores that are always busy.",
        at_least=0,
        at_most=19,
        on_resume="free",
    )
    max_attempts: int = option(
        3, "A sample whose group did not come about is admitted this many times in all.", at_least=1, on_resume="free"
    )
    max_deaths: int = option(
        3, "A sample is given up when the worker that played it has died this many times.", at_least=1, on_resume="free"
    )
