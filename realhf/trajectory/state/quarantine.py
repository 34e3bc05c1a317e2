"""Quarantine: groups that can never be served are set aside with a reason, so that they do not
block others.

Source: docs/reference/trajectory.md 3.5.
"""

from __future__ import annotations

from typing import Any

import msgspec

from realhf.trajectory.records import PAYLOAD_LOST, GroupPlace, GroupRecord
from realhf.trajectory.state.batching import find_size_problem
from realhf.trajectory.state.server_state import TrajectoryState


def unservable_reason(state: TrajectoryState, size: int) -> str | None:
    """Return why a unit of ``size`` sequences can never be part of a batch; None if it can, or
    while no trainer is registered."""
    if size < 1:
        return "zero_sequences"
    if not state.run.registered:
        return None
    return find_size_problem(
        size, state.run.batch_size, strict=state.options.is_strict("divisor_packing")
    )


def isolate(state: TrajectoryState, group: GroupRecord, reason: str) -> None:
    """Put a stored or new group into quarantine. If that exceeds the quarantine's limits, its
    oldest groups are dropped."""
    state.put(
        "groups",
        group.id,
        msgspec.structs.replace(
            group, place=GroupPlace.QUARANTINE, order=state.next_order(), bundle=None, reason=reason
        ),
    )
    state.counters[f"quarantined:{reason}"] += 1
    _drop_oldest(
        state,
        len(state.quarantine) - state.options.max_quarantine_groups,
        state.quarantine_bytes - state.options.quarantine_bytes,
    )


def make_room(state: TrajectoryState, groups: int, nbytes: int) -> None:
    """Drop the oldest groups in quarantine until ``groups`` more groups with ``nbytes`` bytes fit
    in the queue. Groups in quarantine count towards the limits, but are dropped before a push is
    refused."""
    options = state.options
    total_groups = state.waiting_groups + len(state.quarantine) + groups
    total_bytes = state.waiting_bytes + state.quarantine_bytes + nbytes
    _drop_oldest(
        state,
        total_groups - options.max_queue_groups if options.max_queue_groups else 0,
        total_bytes - options.max_queue_bytes if options.max_queue_bytes else 0,
    )


def _drop_oldest(state: TrajectoryState, groups: int, nbytes: int) -> None:
    """Delete at least ``groups`` groups and ``nbytes`` bytes from quarantine, or as much as
    possible, and count the deleted groups. Groups with damaged payloads are kept until they are
    deleted explicitly, because they were valid when they were accepted."""
    dropped = 0
    freed = 0
    while dropped < groups or freed < nbytes:
        group = next(
            (group for group in state.quarantine.values() if group.reason != PAYLOAD_LOST), None
        )
        if group is None:
            break
        state.delete("groups", group.id)
        dropped = dropped + 1
        freed = freed + group.payload.nbytes
    if dropped:
        run = state.run
        state.put_run(
            msgspec.structs.replace(run, quarantine_dropped=run.quarantine_dropped + dropped)
        )


def reconsider_queue(state: TrajectoryState) -> None:
    """Move queued groups that can never be served to quarantine. Called after a registration set
    the batch size, or after a restart dissolved bundles that lost members."""
    if not any(unservable_reason(state, size) for size in state.queue.sizes()):
        return
    for group in [
        group
        for group in state.groups.values()
        if group.place is GroupPlace.QUEUE and group.bundle is None
    ]:
        reason = unservable_reason(state, group.size)
        if reason:
            isolate(state, group, reason)


def requeue(state: TrajectoryState, now: float, ids: list[int]) -> dict[str, Any]:
    """Move groups from quarantine back to the tail of the queue. Groups that still cannot be served
    stay in quarantine, and the answer lists them."""
    requeued = []
    unknown = []
    rejected = {}
    for key in ids:
        group = state.quarantine.get(key)
        if group is None:
            unknown.append(key)
            continue
        reason = unservable_reason(state, group.size) or _staleness_reason(state, group)
        if reason:
            rejected[str(key)] = reason
            continue
        state.put(
            "groups",
            key,
            msgspec.structs.replace(
                group, place=GroupPlace.QUEUE, order=state.next_order(), reason="", arrived_at=now
            ),
        )
        requeued.append(key)
    return {"requeued": requeued, "unknown": unknown, "refused": rejected}


def _staleness_reason(state: TrajectoryState, group: GroupRecord) -> str | None:
    """Return the reason that keeps a group of any size in quarantine; None if there is none."""
    bound = state.max_staleness
    if bound is not None and state.run.current_version - group.policy_version > bound:
        return "too_stale"
    return None


def clear(state: TrajectoryState, now: float) -> dict[str, Any]:
    """Delete everything in quarantine."""
    ids = list(state.quarantine)
    for key in ids:
        state.delete("groups", key)
    return {"status": "success", "deleted": len(ids)}
