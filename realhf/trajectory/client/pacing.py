"""Advises a producer how fast to work, from the numbers of ``/status-env``. Source: docs/reference/trajectory.md
2.5."""

from __future__ import annotations

from dataclasses import dataclass

from realhf.trajectory.client.answers import EnvRegistration, EnvStatus

BATCHES_AHEAD = 3
"""Number of queued batches from which a producer should pause."""


@dataclass(frozen=True)
class Pace:
    """Holds advice for a producer. ``pause``: enough is queued, begin nothing new; ``workers``: groups that may be in
    the making at once; ``done``: what is queued already suffices for the rest of the run."""

    pause: bool
    workers: int
    done: bool
    status: EnvStatus


def pace(status: EnvStatus, env: EnvRegistration) -> Pace:
    """Advise one environment. With an unregistered or empty batch size (below 1), no environment has to pause."""
    batch, group = max(1, env.batch_size), max(1, env.group_size)
    queued = status.queue_size * group
    own = int(batch * (status.unallocated_fraction + max(0.0, env.min_batch_allocation or 0.0)))
    return Pace(
        pause=queued >= BATCHES_AHEAD * batch,
        workers=max(0, BATCHES_AHEAD * own // group - status.queue_size),
        done=status.current_step + queued // batch > env.num_steps,
        status=status,
    )
