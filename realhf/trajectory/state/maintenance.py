"""Housekeeping: effects of a restart, expiry, and compaction of payload files.

Source: docs/reference/trajectory.md 3.5 (buffer expiry), 3.7, 3.10, 3.11.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice, takewhile
from typing import Any

import msgspec

from realhf.trajectory.records import GroupRecord, LeaseRecord
from realhf.trajectory.state import quarantine
from realhf.trajectory.state.delivery import close_lease
from realhf.trajectory.state.server_state import TrajectoryState
from realhf.trajectory.store.segments import SegmentFile, Segments

NAMES_KEPT = 256
"""Number of environment names that are kept although no environment uses them any more."""
PER_ROUND = 1000
"""Maximum number of rows that one round of housekeeping removes."""


def restart(state: TrajectoryState, now: float) -> None:
    """Adapt the restored state when a server that does not share its store restarts: no response is
    being sent any more, and the heartbeat timeout of every environment starts over."""
    for env in list(state.envs.values()):
        state.put("envs", env.env_id, msgspec.structs.replace(env, last_seen=now))
    for lease in list(state.leases.values()):
        if lease.mode == "at_most_once":
            close_lease(state, now, lease, "acked")
        elif not lease.sent:
            state.put("leases", lease.lease_id, msgspec.structs.replace(lease, returned=True))
    quarantine.reconsider_queue(state)


def is_due(state: TrajectoryState, now: float) -> bool:
    """Return whether there is anything to clean up."""
    tasks = (_expired_buffers, _old_replays, _old_leases, _finished_leases, _expired_envs)
    return any(next(task(state, now), None) is not None for task in tasks)


def tidy(state: TrajectoryState, now: float) -> None:
    """Move expired groups of the mix buffers to quarantine, and delete old answers, ended leases
    and expired environments."""
    for group in list(_expired_buffers(state, now)):
        quarantine.isolate(state, group, "buffer_leftover_expired")
    for key in list(_old_replays(state, now)):
        if now - state.replays[key].stored_at <= state.options.replay_ttl_s:
            state.counters["replays_forgotten_early"] += 1
        state.delete("replays", key)
    for key in list(_old_leases(state, now)):
        state.delete("closed", key)
    for lease in list(_finished_leases(state, now)):
        close_lease(state, now, lease, "acked")
    for env_id in list(_expired_envs(state, now)):
        state.delete("envs", env_id)


def _expired_envs(state: TrajectoryState, now: float) -> Iterator[int]:
    """Yield environments that have been silent too long and have no data here. The newest
    environment, and the newest one of each recent name, are kept because the numbering of new ones
    continues from them. For older names it starts from 0 again."""
    limit = now - state.options.env_expiry_s
    silent = [env for env in state.envs.values() if env.last_seen < limit]
    if not silent:
        return
    newest = {env.desired_name: env.env_id for env in state.envs.values()}
    kept_ids = {
        *sorted(newest.values())[-NAMES_KEPT:],
        *state.buffers,
        *state.queue.env_sequences(),
    }
    yield from islice((env.env_id for env in silent if env.env_id not in kept_ids), PER_ROUND)


def _expired_buffers(state: TrajectoryState, now: float) -> Iterator[GroupRecord]:
    limit = now - state.options.buffer_expiry_s
    for groups in state.buffers.values():
        yield from islice(
            takewhile(lambda group: group.arrived_at < limit, groups.values()), PER_ROUND
        )


def _old_replays(state: TrajectoryState, now: float) -> Iterator[str]:
    return _too_old(state, now, state.replays, "stored_at")


def _old_leases(state: TrajectoryState, now: float) -> Iterator[str]:
    return _too_old(state, now, state.closed, "closed_at")


def _too_old(
    state: TrajectoryState, now: float, rows: Mapping[str, Any], time: str
) -> Iterator[str]:
    """Yield the keys of rows that are older than the limit or exceed the maximum number of rows,
    oldest first."""
    limit = now - state.options.replay_ttl_s
    surplus = len(rows) - state.options.max_replays
    for index, (key, row) in enumerate(islice(rows.items(), PER_ROUND)):
        if getattr(row, time) >= limit and index >= surplus:
            return
        yield key


def _finished_leases(state: TrajectoryState, now: float) -> Iterator[LeaseRecord]:
    for lease in state.leases.values():
        if lease.mode == "at_most_once" and lease.expires_at <= now:
            yield lease


def find_in_use(
    state: TrajectoryState, now: float, files: Segments
) -> tuple[list[GroupRecord], dict[int, SegmentFile]]:
    """Return the groups whose payloads are in use, and the files that are no longer written to."""
    latest = [state.run.latest] if state.run.latest is not None else []
    return [*latest, *state.groups.values()], files.closed_files()


def held_bytes(state: TrajectoryState) -> int:
    """Return the bytes of all payloads that records refer to."""
    latest = state.run.latest
    alone = latest.payload.nbytes if latest is not None and latest.id not in state.groups else 0
    return state.waiting_bytes + state.quarantine_bytes + alone
