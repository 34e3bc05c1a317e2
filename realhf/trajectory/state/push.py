"""Routing of pushed groups to the queue, the mix buffer or quarantine.

Source: docs/reference/trajectory.md 2.6, 2.7, 3.8.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgspec

from realhf.trajectory.records import (
    EnvRecord,
    GroupPlace,
    GroupRecord,
    Incoming,
    Payload,
    PayloadRef,
)
from realhf.trajectory.state.quarantine import isolate, make_room, unservable_reason
from realhf.trajectory.state.registry import Answer, check_epoch, heartbeat, run_once
from realhf.trajectory.state.server_state import TrajectoryState
from realhf.web.refusal import Refusal


def push(
    state: TrajectoryState,
    now: float,
    groups: Sequence[Incoming],
    refs: Sequence[PayloadRef],
    listed: bool,
    key: str | None = None,
    fingerprint: str = "",
    epoch: str | None = None,
) -> Answer:
    """Store groups whose payloads were staged; a list is stored completely or not at all.

    With an idempotency ``key`` a repeated request gets the first answer. Raises Refusal 503 (queue
    full), 422 (the key was used for another body) or 409 (``epoch`` belongs to an older run); the
    payloads are then discarded.
    """
    try:
        check_epoch(state, now, epoch)
        answer, replayed = run_once(
            state, now, key, fingerprint, _store_groups, groups, refs, listed
        )
    except Refusal:
        state.discard(*refs)
        raise
    if replayed:
        state.discard(*refs)
    return answer


def _store_groups(
    state: TrajectoryState,
    now: float,
    groups: Sequence[Incoming],
    refs: Sequence[PayloadRef],
    listed: bool,
) -> Answer:
    refuse_when_full(state, len(groups), sum(len(group.data) for group in groups))
    reasons: set[str] = set()
    buffered = 0
    buffer_size = 0
    for incoming, ref in zip(groups, refs, strict=True):
        size = _route(state, now, incoming, ref, reasons)
        if size is not None:
            buffered = buffered + 1
            buffer_size = size
    for env_id in {group.env_id for group in groups if group.env_id is not None}:
        heartbeat(state, now, env_id)
    state.counters["pushed_groups"] += len(groups)
    state.counters["pushed_sequences"] += sum(group.size for group in groups)
    headers = {"X-Quarantined": ",".join(sorted(reasons))} if reasons else {}
    if not listed:
        return (
            {"status": "buffered", "buffer_size": buffer_size}
            if buffered
            else {"status": "received"}
        ), headers
    body: dict[str, Any] = {"status": "received", "groups_processed": len(groups)}
    if buffered:
        body |= {"buffered": buffered, "last_buffer_size": buffer_size}
    return body, headers


def refuse_when_full(state: TrajectoryState, groups: int, nbytes: int) -> None:
    """Drop groups from quarantine to make room for the given groups and bytes; raise Refusal 503 if
    the queue is full. The status is never 4xx, because the original clients would then drop their
    data."""
    options = state.options
    full = (
        options.max_queue_groups and state.waiting_groups + groups > options.max_queue_groups
    ) or (options.max_queue_bytes and state.waiting_bytes + nbytes > options.max_queue_bytes)
    if full:
        state.counters["refused_full"] += 1
        wait = "1" if random.random() < 0.7 else "2"
        raise Refusal(
            503,
            f"the queue is full: {state.waiting_groups} groups, {state.waiting_bytes} bytes",
            {"Retry-After": wait},
        )
    make_room(state, groups, nbytes)


def _route(
    state: TrajectoryState, now: float, incoming: Incoming, ref: PayloadRef, reasons: set[str]
) -> int | None:
    """Place one group. If it goes to its environment's mix buffer, return the number of sequences
    in that buffer, otherwise None."""
    payload = Payload(ref, len(incoming.data), incoming.encoding, incoming.present, incoming.crc)
    version = (
        state.run.current_version if incoming.policy_version is None else incoming.policy_version
    )
    env = None if incoming.env_id is None else state.envs.get(incoming.env_id)
    group = GroupRecord(
        state.next_id(), 0, GroupPlace.QUEUE, incoming.env_id, incoming.size, payload, version, now
    )
    _catch_up_clock(state, env)
    if env is None or incoming.size == max(1, env.group_size):
        _enqueue_or_isolate(state, group, reasons)
        return None
    reason = _buffer_problem(state, env, incoming.size)
    if reason:
        isolate(state, group, reason)
        reasons.add(reason)
    else:
        _buffer(state, group, env, reasons)
    return sum(member.size for member in state.buffers.get(env.env_id, {}).values())


def _catch_up_clock(state: TrajectoryState, env: EnvRecord | None) -> None:
    """Advance an environment with an empty queue to the current virtual time, so that it does not
    get a burst to catch up (docs/reference/trajectory.md 3.6). Groups without a known environment
    (None) count as one environment."""
    clock = state.run.clock
    queued = state.queue.env_sequences()
    if env is not None:
        if env.virtual_time < clock and env.env_id not in queued:
            state.put("envs", env.env_id, msgspec.structs.replace(env, virtual_time=clock))
    elif state.run.other_time < clock and all(env_id in state.envs for env_id in queued):
        state.put_run(msgspec.structs.replace(state.run, other_time=clock))


def _buffer_problem(state: TrajectoryState, env: EnvRecord, size: int) -> str | None:
    if size < 1:
        return "zero_sequences"
    if size > max(1, env.group_size) and not state.options.is_strict("divisor_packing"):
        return "larger_than_env_group_size"
    return None


def _buffer(state: TrajectoryState, group: GroupRecord, env: EnvRecord, reasons: set[str]) -> None:
    """Put a group into the mix buffer. If some groups in the buffer then add up to the declared
    group size, move them to the queue."""
    buffered = state.buffers.get(env.env_id, {})
    if len(buffered) >= state.options.max_buffered_groups:
        isolate(state, next(iter(buffered.values())), "buffer_full")
        reasons.add("buffer_full")
    state.put(
        "groups",
        group.id,
        msgspec.structs.replace(group, place=GroupPlace.BUFFER, order=state.next_order()),
    )
    waiting = list(state.buffers[env.env_id].values())
    target = max(1, env.group_size)
    complete = [waiting[index] for index in find_set([member.size for member in waiting], target)]
    if not complete:
        return
    batch_size = state.run.batch_size
    if (
        not state.options.is_strict("divisor_packing")
        and len(complete) > 1
        and batch_size > 0
        and batch_size % target == 0
    ):
        _enqueue(state, complete, bundled=True)
        return
    for member in complete:
        _enqueue_or_isolate(state, member, reasons)


def _enqueue_or_isolate(state: TrajectoryState, group: GroupRecord, reasons: set[str]) -> None:
    reason = unservable_reason(state, group.size)
    if reason:
        isolate(state, group, reason)
        reasons.add(reason)
    else:
        _enqueue(state, [group])


def _enqueue(state: TrajectoryState, members: list[GroupRecord], *, bundled: bool = False) -> None:
    """Append groups to the tail of the queue, as one unit if ``bundled``. The last one becomes the
    latest example."""
    first = None
    for member in members:
        order = state.next_order()
        first = order if first is None else first
        bundle = (first, len(members)) if bundled else None
        member = msgspec.structs.replace(member, place=GroupPlace.QUEUE, order=order, bundle=bundle)
        state.put("groups", member.id, member)
        state.put_run(msgspec.structs.replace(state.run, latest=member))


MAX_BITS = 1 << 25
"""Largest product of number of groups and target size for an exact search, which then takes a few
milliseconds. Of a larger buffer only the oldest part is searched."""


def find_set(sizes: Sequence[int], target: int) -> list[int]:
    """Return ascending indices of sizes that sum to ``target``; [] if there are none.

    It first adds sizes in order of arrival, skipping those that do not fit. If that fails, it
    searches for an exact subset from the newest index downwards, and leaves out an index whenever
    the older ones can make up the rest without it. Sizes and target are in sequences; sizes are at
    least 1.
    """
    if target < 1 or sum(sizes) < target:
        return []
    return _find_in_order(sizes, target) or _find_exact(sizes, target)


def _find_in_order(sizes: Sequence[int], target: int) -> list[int]:
    indices = []
    total = 0
    for index, size in enumerate(sizes):
        if total + size <= target:
            indices.append(index)
            total += size
            if total == target:
                return indices
    return []


def _find_exact(sizes: Sequence[int], target: int) -> list[int]:
    """Solve the subset sum with bit sets: bit j of ``reachable[i]`` is set if some of the first i
    sizes sum to j."""
    sizes = sizes[: max(1, MAX_BITS // (target + 1))]
    mask = (1 << (target + 1)) - 1
    reachable = [1]
    for size in sizes:
        last = reachable[-1]
        reachable.append((last | last << size) & mask if size <= target else last)
    if not reachable[-1] >> target & 1:
        return []
    indices = []
    remaining = target
    for index in range(len(sizes) - 1, -1, -1):
        if sizes[index] <= remaining and reachable[index] >> (remaining - sizes[index]) & 1:
            indices.append(index)
            remaining -= sizes[index]
    return indices[::-1]
