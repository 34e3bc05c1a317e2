"""Defines housekeeping commands: what a restart changes, and what the passing of time ends.

Source: docs/reference/trajectory.md 3.5 (buffer expiry), 3.7, 3.10, 3.11.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, takewhile

import msgspec

from realhf.trajectory.base.records import GroupRecord, LeaseRecord
from realhf.trajectory.state import quarantine
from realhf.trajectory.state.delivery import close_lease
from realhf.trajectory.state.server_state import TrajectoryState

NAMES_KEPT = 256
"""Number of names of environments that are remembered when nobody has them any more."""
PER_ROUND = 1000
"""Largest number of rows that one round of housekeeping removes."""


def restart(state: TrajectoryState, now: float) -> None:
    """Adapt the state to a restart of a server that works alone: no response is on its way any more, and every
    heartbeat clock starts anew."""
    for env in list(state.envs.values()):
        state.put("envs", env.env_id, msgspec.structs.replace(env, last_seen=now))
    for lease in list(state.leases.values()):
        if lease.mode == "at_most_once":
            close_lease(state, now, lease, "acked")
        elif not lease.sent:
            state.put("leases", lease.lease_id, msgspec.structs.replace(lease, returned=True))
    quarantine.reconsider_queue(state)


def due(state: TrajectoryState, now: float) -> bool:
    """Return whether there is anything to tidy."""
    tasks = (_expired_buffers, _old_replays, _old_leases, _ended_for_good, _gone_envs)
    return any(next(task(state, now), None) is not None for task in tasks)


def tidy(state: TrajectoryState, now: float) -> None:
    """Move leftovers of the mix buffers to quarantine; forget old answers, ended leases and environments long gone."""
    for group in list(_expired_buffers(state, now)):
        quarantine.isolate(state, group, "buffer_leftover_expired")
    for key in list(_old_replays(state, now)):
        if now - state.replays[key].stored_at <= state.options.replay_ttl_s:
            state.counters["replays_forgotten_early"] += 1
        state.delete("replays", key)
    for key in list(_old_leases(state, now)):
        state.delete("closed", key)
    for lease in list(_ended_for_good(state, now)):
        close_lease(state, now, lease, "acked")
    for env_id in list(_gone_envs(state, now)):
        state.delete("envs", env_id)


def _gone_envs(state: TrajectoryState, now: float) -> Iterator[int]:
    """Yield environments that were silent too long and have nothing here. The newest one, and the newest of each of the
    latest names, stay: numbers count on from them. Names that are older count from 0 again."""
    limit = now - state.options.env_expiry_s
    silent = [env for env in state.envs.values() if env.last_seen < limit]
    if not silent:
        return
    newest = {env.desired_name: env.env_id for env in state.envs.values()}
    kept = {*sorted(newest.values())[-NAMES_KEPT:], *state.buffers, *state.queue.env_sequences()}
    yield from islice((env.env_id for env in silent if env.env_id not in kept), PER_ROUND)


def _expired_buffers(state: TrajectoryState, now: float) -> Iterator[GroupRecord]:
    limit = now - state.options.buffer_expiry_s
    for held in state.buffers.values():
        yield from islice(takewhile(lambda group: group.arrived_at < limit, held.values()), PER_ROUND)


def _old_replays(state: TrajectoryState, now: float) -> Iterator[str]:
    """Yield the keys of answers that are too old or too many, the oldest first."""
    limit, surplus = now - state.options.replay_ttl_s, len(state.replays) - state.options.max_replays
    for index, replay in enumerate(islice(state.replays.values(), PER_ROUND)):
        if replay.stored_at >= limit and index >= surplus:
            return
        yield replay.key


def _old_leases(state: TrajectoryState, now: float) -> Iterator[str]:
    limit, surplus = now - state.options.replay_ttl_s, len(state.closed) - state.options.max_replays
    for index, closed in enumerate(islice(state.closed.values(), PER_ROUND)):
        if closed.closed_at >= limit and index >= surplus:
            return
        yield closed.lease_id


def _ended_for_good(state: TrajectoryState, now: float) -> Iterator[LeaseRecord]:
    for lease in state.leases.values():
        if lease.mode == "at_most_once" and lease.expires_at <= now:
            yield lease
