"""What the sequence buffer tells about itself: figures, why a call waits, and its invariants.

None of this is on the path of a sample; the functions scan the resident samples.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from realhf.dataflow.buffer.sequence_buffer import AsyncIOSequenceBuffer
    from realhf.dataflow.buffer.types import Station


def stats(buffer: AsyncIOSequenceBuffer) -> dict[str, Any]:
    """Figures for the log; ages in seconds."""
    slots = buffer.table.resident()
    oldest = time.monotonic() - float(buffer.table.put_time[slots].min()) if len(slots) else 0.0
    return {
        "resident": len(buffer),
        "max_size": buffer.max_size,
        "putters_waiting": len(buffer.space),
        "oldest_age_s": oldest,
        "put": buffer.put_total,
        "evicted": buffer.evicted_total,
        "released": dict(buffer.released),
        "calls": {
            s.name: {"ready": s.ready, "leased": s.leased, "waiting": len(s.waiters)} for s in buffer.stations.values()
        },
    }


def explain_wait(buffer: AsyncIOSequenceBuffer, mfc: str, step_batch: int | None) -> str:
    """One line: what ``mfc`` has, what is missing and who produces it."""
    station, table = buffer.stations[mfc], buffer.table
    slots = table.resident()
    if step_batch is not None:
        slots = slots[table.step_batch[slots] == step_batch]
    slots = slots[(table.leased[slots] | table.done[slots]) & station.bit == 0]
    ready = int(np.count_nonzero(table.ready[slots] & station.bit))
    where = "" if step_batch is None else f" of step {step_batch}"
    text = f"{mfc} takes {station.n_seqs} samples{where}: {ready} ready, {len(slots)} not yet taken"
    for key in station.inputs:
        missing = int(np.count_nonzero(table.keys[slots] & table.key_mask([key]) == 0))
        if missing:
            text += f"; {missing} lack {key!r} (from {' or '.join(buffer.graph.producers(key))})"
    if len(slots) < station.n_seqs:
        text += f"; the source owes {station.n_seqs - len(slots)}"
    return text


def check_invariants(buffer: AsyncIOSequenceBuffer) -> None:
    """Check invariants 1, 2, 3, 6, 8, 9 and 11 of docs/reference/dataflow.md 4; the others need a history."""
    table, slots = buffer.table, buffer.table.resident()
    _check(len(slots) == len(table) == sum(buffer.step_batch_sizes.values()), 11, "resident count")
    _check(all(table.ids[s] == i for i, s in table.slot_of.items()), 11, "index of ids")
    _check(buffer.put_total == len(slots) + buffer.evicted_total, 1, "put = resident + evicted")
    _check(len(slots) + buffer.space.reserved <= buffer.max_size, 8, "resident exceeds max_size")
    everyone = sum(s.bit for s in buffer.stations.values())
    _check(not (table.done[slots] == everyone).any(), 6, "a sample stays after all calls are done")
    for station in buffer.stations.values():
        _check_station(buffer, station, slots)
    _check(not buffer.space.first_fits(), 9, "a put waits while there is room")


def _check_station(buffer: AsyncIOSequenceBuffer, station: Station, slots: np.ndarray) -> None:
    table, name = buffer.table, station.name
    ready = table.ready[slots] & station.bit != 0
    leased = table.leased[slots] & station.bit != 0
    done = table.done[slots] & station.bit != 0
    has_keys = (table.keys[slots] & station.required) == station.required
    _check(bool((ready == has_keys).all()), 2, f"{name}: ready differs from required keys present")
    _check(not (leased & done).any(), 3, f"{name}: a sample is leased and done")
    _check(not (leased & ~ready).any(), 3, f"{name}: a leased sample is not ready")
    _check(station.leased == int(leased.sum()), 11, f"{name}: leased counter")
    by_lease = sum(len(lease.ids) for lease in buffer.leases.values() if lease.mfc == name)
    _check(station.leased == by_lease, 11, f"{name}: active leases")
    free = ~leased & ~done
    for step_batch in {*station.queues, *table.step_batch[slots].tolist()}:
        inside = table.step_batch[slots] == step_batch
        queue = station.queues.get(step_batch)
        _check(queue is not None, 11, f"{name}: no queue for step batch {step_batch}")
        if queue is not None:
            held = sorted(queue.slots().tolist())
            _check(held == sorted(slots[inside & free & ready].tolist()), 11, f"{name}: queue {step_batch}")
            _check(queue.live == len(held), 11, f"{name}: live counter of {step_batch}")
            _check(queue.not_issued == int((inside & free).sum()), 11, f"{name}: not_issued of {step_batch}")
    for waiter in station.waiters:
        if not waiter.future.done():
            available = sum(queue.live for queue in station.eligible(waiter.step_batch))
            _check(available < station.n_seqs, 9, f"{name}: waits while a batch is ready")


def _check(holds: bool, number: int, what: str) -> None:
    if not holds:
        raise AssertionError(f"buffer invariant {number}: {what}")
