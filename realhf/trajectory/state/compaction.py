"""Moves what is left in files that are mostly empty, so that the files can be deleted.

A file of payloads is deleted when no record refers to anything in it, so that one group in a mix buffer or in
quarantine would keep 64 MiB. Payloads move like any other change: written, committed, and only then is the old place
given up.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from realhf.trajectory.base.records import GroupRecord, Payload, PayloadRef
from realhf.trajectory.state.server_state import TrajectoryState
from realhf.trajectory.store.base import Files, PayloadLost

if TYPE_CHECKING:
    from realhf.trajectory.state.engine import Engine

logger = logging.getLogger(__name__)
MOST_PER_RUN_BYTES = 64 << 20
"""How much is moved at once beside the requests, at most."""
_PART_BYTES, _PART_GROUPS = 4 << 20, 64
_LOOKED_AT_ONCE = 2000
"""Number of groups that are looked at before the event loop gets its turn."""
Move = tuple[int, PayloadRef, PayloadRef]
"""A move as (group id, old place, new place)."""


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
        for part in _parts(await self._worth_moving(files)):
            moved += await self._move(files, part)
        if moved:
            logger.info("%s: %d groups moved out of files that were mostly empty", self._engine.store.name, moved)
        return moved

    async def _worth_moving(self, files: Files) -> list[GroupRecord]:
        """Return the groups in the emptiest files."""
        groups, used = _stored(self._engine.state), Counter[int]()
        for start in range(0, len(groups), _LOOKED_AT_ONCE):
            for group in groups[start : start + _LOOKED_AT_ONCE]:
                used[files.file_of(group.payload)] += group.payload.nbytes
            await asyncio.sleep(0)
        chosen, total = set[int](), 0
        for file in files.sparse(used):
            if file not in self._unreadable and total + used[file] <= MOST_PER_RUN_BYTES:
                chosen.add(file)
                total += used[file]
        found = []
        for start in range(0, len(groups), _LOOKED_AT_ONCE):
            found += [
                group for group in groups[start : start + _LOOKED_AT_ONCE] if files.file_of(group.payload) in chosen
            ]
            await asyncio.sleep(0)
        return found

    async def _move(self, files: Files, groups: list[GroupRecord]) -> int:
        store = self._engine.store
        try:
            data = await store.read([group.payload for group in groups])
        except PayloadLost as error:
            self._give_up(files, [group.payload for group in groups if group.payload.ref in error.refs])
            return 0
        refs = await store.stage(data, reserve=False)
        moves = [(group.id, group.payload.ref, ref) for group, ref in zip(groups, refs, strict=True)]
        try:
            return await self._engine.write(move_payloads, moves)
        except Exception:
            await store.unstage(refs)
            raise

    def _give_up(self, files: Files, lost: Sequence[Payload]) -> None:
        """Leave files with damaged payloads as they are, unless the payloads were only acknowledged meanwhile."""
        alive = {group.payload.ref for group in _stored(self._engine.state)}
        self._unreadable |= {files.file_of(payload) for payload in lost if payload.ref in alive}


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
