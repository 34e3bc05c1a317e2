"""Keeps the state tidy: what a restart changes, what the passing of time ends, and the compaction of payload files.

Source: docs/reference/trajectory.md 3.5 (buffer expiry), 3.7, 3.10, 3.11.

A file of payloads is deleted when no record refers to anything in it, so that one group in a mix buffer or in
quarantine would keep 64 MiB. Payloads move like any other change: written, committed, and only then is the old place
given up.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any

import msgspec

from realhf.trajectory.records import GroupRecord, LeaseRecord, PayloadRef
from realhf.trajectory.state import quarantine
from realhf.trajectory.state.delivery import close_lease
from realhf.trajectory.state.server_state import TrajectoryState
from realhf.trajectory.store.base import PayloadLost
from realhf.trajectory.store.segments import Segments

if TYPE_CHECKING:
    from realhf.trajectory.state.engine import Engine

logger = logging.getLogger(__name__)
NAMES_KEPT = 256
"""Number of names of environments that are remembered when nobody has them any more."""
PER_ROUND = 1000
"""Largest number of rows that one round of housekeeping removes."""
MOST_PER_RUN_BYTES = 64 << 20
"""How much is moved at once beside the requests, at most."""
_PART_BYTES, _PART_GROUPS = 4 << 20, 64
Move = tuple[int, PayloadRef, PayloadRef]
"""A move as (group id, old place, new place)."""


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
    return _too_old(state, now, state.replays, "stored_at")


def _old_leases(state: TrajectoryState, now: float) -> Iterator[str]:
    return _too_old(state, now, state.closed, "closed_at")


def _too_old(state: TrajectoryState, now: float, rows: Mapping[str, Any], time: str) -> Iterator[str]:
    """Yield the keys of rows that are too old or too many, the oldest first."""
    limit, surplus = now - state.options.replay_ttl_s, len(rows) - state.options.max_replays
    for index, (key, row) in enumerate(islice(rows.items(), PER_ROUND)):
        if getattr(row, time) >= limit and index >= surplus:
            return
        yield key


def _ended_for_good(state: TrajectoryState, now: float) -> Iterator[LeaseRecord]:
    for lease in state.leases.values():
        if lease.mode == "at_most_once" and lease.expires_at <= now:
            yield lease


class Compactor:
    """Compacts the files of one engine. ``run`` costs little while there is nothing to gain."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._unreadable: set[int] = set()

    async def run(self) -> int:
        """Move groups out of files that are mostly empty; return how many. Raises StoreFailure."""
        state, files = self._engine.state, self._engine.store.files
        if files is None or not files.wasteful(held_bytes(state)):
            return 0
        moved = 0
        groups = await asyncio.to_thread(_in_sparse_files, _stored(state), files, frozenset(self._unreadable))
        for part in _parts(groups):
            moved += await self._move(files, part)
        if moved:
            logger.info("%s: %d groups moved out of files that were mostly empty", self._engine.store.name, moved)
        return moved

    async def _move(self, files: Segments, groups: list[GroupRecord]) -> int:
        store = self._engine.store
        try:
            data = await store.read([group.payload for group in groups])
        except PayloadLost as error:
            # Files with damaged payloads stay as they are, unless the payloads were only acknowledged meanwhile.
            alive = {group.payload.ref for group in _stored(self._engine.state)}
            lost = [group.payload for group in groups if group.payload.ref in error.refs & alive]
            self._unreadable.update(map(files.file_of, lost))
            return 0
        refs = await store.stage(data, reserve=False)
        moves = [(group.id, group.payload.ref, ref) for group, ref in zip(groups, refs, strict=True)]
        try:
            return await self._engine.write(move_payloads, moves)
        except Exception:
            await store.unstage(refs)
            raise


def held_bytes(state: TrajectoryState) -> int:
    """Count the bytes of all payloads that records refer to."""
    latest = state.run.latest
    alone = latest.payload.nbytes if latest is not None and latest.id not in state.groups else 0
    return state.waiting_bytes + state.quarantine_bytes + alone


def move_payloads(state: TrajectoryState, now: float, moves: Sequence[Move]) -> int:
    """Give payloads their new places; give up the new places of groups that have gone meanwhile. Returns how many
    moved."""
    moved = 0
    for key, old, new in moves:
        known = state.move_payload(key, old, new)
        state.discard(old if known else new)
        moved += known
    return moved


def _stored(state: TrajectoryState) -> list[GroupRecord]:
    latest = state.run.latest
    return [*state.groups.values(), *([latest] if latest is not None and latest.id not in state.groups else [])]


def _in_sparse_files(groups: Sequence[GroupRecord], files: Segments, unreadable: Collection[int]) -> list[GroupRecord]:
    """Return the groups in the emptiest files, for a thread of its own."""
    used = Counter[int]()
    for group in groups:
        used[files.file_of(group.payload)] += group.payload.nbytes
    chosen, total = set[int](), 0
    for file in files.sparse(used):
        if file not in unreadable and total + used[file] <= MOST_PER_RUN_BYTES:
            chosen.add(file)
            total += used[file]
    return [group for group in groups if files.file_of(group.payload) in chosen]


def _parts(groups: Sequence[GroupRecord]) -> Iterator[list[GroupRecord]]:
    part: list[GroupRecord] = []
    size = 0
    for group in groups:
        if part and (size + group.payload.nbytes > _PART_BYTES or len(part) >= _PART_GROUPS):
            yield part
            part, size = [], 0
        part.append(group)
        size += group.payload.nbytes
    if part:
        yield part
