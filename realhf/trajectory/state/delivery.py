"""Delivery of batches to trainers: forming batches, leases, acknowledgements, redelivery.

Source: docs/reference/trajectory.md 2.8, 3.1, 3.3, 3.4, 3.6, 3.9, 3.10.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from realhf.trajectory.records import (
    PAYLOAD_LOST,
    ClosedLease,
    GroupPlace,
    GroupRecord,
    LeaseRecord,
    PayloadRef,
)
from realhf.trajectory.state.batching import (
    FairShare,
    NotSelected,
    Selected,
    select_exact,
    select_strict,
    select_strict_with_minimums,
    select_with_minimums,
)
from realhf.trajectory.state.quarantine import isolate, unservable_reason
from realhf.trajectory.state.queue_index import QueueIndex
from realhf.trajectory.state.registry import is_alive, shares
from realhf.trajectory.state.server_state import TrajectoryState
from realhf.web.refusal import Refusal


@dataclass(frozen=True)
class PullRequest:
    """A trainer's request for a batch."""

    identity: str
    """Name of the trainer; if ``anonymous``, its peer address."""
    anonymous: bool = True
    """Whether the trainer sent no name."""
    ack: str | None = None
    """Id of a lease to acknowledge before the pull."""
    explicit: bool = False
    """Whether only explicit acks end the new lease."""


@dataclass(frozen=True)
class LeasedBatch:
    """A batch leased to a trainer. The lease is durable before the batch is sent."""

    lease_id: str
    """Id of the lease."""
    step: int
    """Step of the batch."""
    groups: list[GroupRecord]
    """Groups in the order of delivery."""
    attempt: int
    """Number of earlier attempts to deliver the batch."""
    epoch: int
    """Epoch of the run."""

    @property
    def redelivered(self) -> bool:
        """Whether the batch was delivered before."""
        return self.attempt > 0

    @property
    def versions(self) -> tuple[int, int]:
        """Oldest and newest policy version in the batch."""
        versions = [group.policy_version for group in self.groups]
        return min(versions), max(versions)


@dataclass(frozen=True)
class NoBatch:
    """Result of a pull for which there is no batch."""

    reason: str
    """A value of ``X-Batch-Reason``."""
    unregistered: bool = False
    """Whether no trainer is registered."""
    holding: bool = False
    """Whether the trainer still holds another batch under its current name. Only a pull under that
    name acknowledges that batch."""


def pull(state: TrajectoryState, now: float, request: PullRequest) -> LeasedBatch | NoBatch:
    """Acknowledge the batches sent to this trainer earlier, then lease the next batch to it. Raises
    Refusal 404 or 409 for an invalid ``ack``."""
    if not state.run.registered:
        return NoBatch("unregistered", unregistered=True)
    if request.ack is not None:
        ack(state, now, request.ack)
    if not state.run.started:
        state.put_run(msgspec.structs.replace(state.run, started=True))
    for lease in [
        lease for lease in state.leases.values() if _is_acked_by_pull(lease, request.identity)
    ]:
        close_lease(state, now, lease, "acked")
    waiting = next(_find_redeliverable(state, now, request), None)
    if waiting is not None:
        return _redeliver(state, now, waiting, request)
    formed = form(state, now)
    if isinstance(formed, NotSelected):
        state.counters[f"null:{formed.reason.partition(':')[0]}"] += 1
        holding = any(
            lease.owner == request.identity and lease.mode == "implicit"
            for lease in state.leases.values()
        )
        return NoBatch(formed.reason, holding=holding)
    return _lease_groups(state, now, formed, request)


def mark_sent(state: TrajectoryState, now: float, batch: LeasedBatch) -> None:
    """Record that the whole response was sent on a live connection."""
    lease = _current_lease(state, batch)
    if lease is None:
        return
    if lease.mode in ("on_sent", "at_most_once"):
        close_lease(state, now, lease, "acked")
        return
    _update_lease(state, lease, sent=True, expires_at=now + state.options.lease_timeout_s)


def mark_lost(state: TrajectoryState, now: float, batch: LeasedBatch) -> None:
    """Make a batch available for redelivery, because the client disconnected before the response
    was sent. If the lease is ``at_most_once``, it is closed instead."""
    lease = _current_lease(state, batch)
    if lease is None:
        return
    if lease.mode == "at_most_once":
        close_lease(state, now, lease, "acked")
        return
    state.counters["responses_lost"] += 1
    _update_lease(state, lease, returned=True)


def _current_lease(state: TrajectoryState, batch: LeasedBatch) -> LeaseRecord | None:
    """Return the lease of a batch whose response has just ended; None if it has been given back, or
    if a later attempt to send it has started."""
    lease = state.leases.get(batch.lease_id)
    return None if lease is None or lease.returned or lease.attempt != batch.attempt else lease


def isolate_lost(
    state: TrajectoryState, now: float, batch: LeasedBatch, lost: frozenset[PayloadRef]
) -> None:
    """Quarantine the damaged groups of a batch and put its other groups back into the queue, so
    that damage does not block delivery. ``lost``: references of the damaged payloads. If the batch
    is the newest and was never delivered before, its step number is released."""
    lease = state.leases.get(batch.lease_id)
    if lease is None:
        return
    state.delete("leases", lease.lease_id)
    state.put("closed", lease.lease_id, ClosedLease(lease.lease_id, "superseded", now))
    if not batch.redelivered and state.run.step == lease.step + 1:
        state.put_run(msgspec.structs.replace(state.run, step=lease.step))
    for group in [state.groups[key] for key in lease.groups]:
        if group.payload.ref in lost:
            isolate(state, group, PAYLOAD_LOST)
        elif reason := unservable_reason(state, group.size):  # its bundle has been dissolved
            isolate(state, group, reason)
        else:
            state.put(
                "groups",
                group.id,
                msgspec.structs.replace(group, place=GroupPlace.QUEUE, order=state.next_order()),
            )


def ack(state: TrajectoryState, now: float, lease_id: str) -> dict[str, Any]:
    """Delete the groups of a lease for good; idempotent. Raises Refusal 404 (unknown lease) or 409
    (the batch has been redelivered to another trainer)."""
    lease = state.leases.get(lease_id)
    if lease is not None:
        close_lease(state, now, lease, "acked")
    else:
        _check_closed(state, lease_id, "acked")
    return {"status": "success", "lease_id": lease_id}


def nack(state: TrajectoryState, now: float, lease_id: str) -> dict[str, Any]:
    """Make a batch available to the next pull at once, without waiting for its lease to expire.
    Raises Refusal 404 or 409 (already acknowledged, or redelivered)."""
    lease = _find_lease(state, lease_id)
    state.counters["nacked"] += 1
    _update_lease(state, lease, returned=True)
    return {"status": "success", "lease_id": lease_id}


def renew(state: TrajectoryState, now: float, lease_id: str) -> dict[str, Any]:
    """Extend a lease by another lease timeout. The renewal also shows that the trainer has received
    the batch. Raises Refusal 404 or 409."""
    lease = _find_lease(state, lease_id)
    if lease.returned:
        raise Refusal(409, f"lease {lease_id} was given back")
    lease = _update_lease(state, lease, sent=True, expires_at=now + state.options.lease_timeout_s)
    return {"status": "success", "lease_id": lease_id, "expires_in_s": lease.expires_at - now}


def _find_lease(state: TrajectoryState, lease_id: str) -> LeaseRecord:
    lease = state.leases.get(lease_id)
    if lease is None:
        _check_closed(state, lease_id, "")
        raise AssertionError("unreachable")
    return lease


def _check_closed(state: TrajectoryState, lease_id: str, expected: str) -> None:
    closed = state.closed.get(lease_id)
    if closed is None:
        raise Refusal(404, f"unknown lease {lease_id[:64]}")
    if closed.outcome != expected:
        superseded = closed.outcome == "superseded"
        what_happened = (
            "was redelivered to another trainer" if superseded else "is already acknowledged"
        )
        raise Refusal(409, f"lease {lease_id} {what_happened}")


def _is_acked_by_pull(lease: LeaseRecord, identity: str) -> bool:
    return (
        lease.owner == identity and lease.sent and not lease.returned and lease.mode == "implicit"
    )


def _find_redeliverable(
    state: TrajectoryState, now: float, request: PullRequest
) -> Iterator[LeaseRecord]:
    """Yield the leases that this trainer must get before a new batch: its own batch that was not
    sent, batches given back, and expired ones."""
    leases = sorted(
        (lease for lease in state.leases.values() if lease.mode != "at_most_once"),
        key=lambda lease: lease.step,
    )
    if not request.anonymous:
        yield from (lease for lease in leases if lease.owner == request.identity and not lease.sent)
    yield from (lease for lease in leases if lease.returned)
    for lease in leases:
        if lease.expires_at <= now and (
            lease.owner != request.identity or lease.mode == "explicit" or not lease.sent
        ):
            yield lease


def _redeliver(
    state: TrajectoryState, now: float, lease: LeaseRecord, request: PullRequest
) -> LeasedBatch:
    """Deliver the same groups with the same step again. If the trainer's name differs, it gets a
    new lease and the old one is superseded."""
    state.counters["redelivered"] += 1
    lease_id = lease.lease_id
    if lease.owner != request.identity or lease.sent:
        lease_id = uuid.uuid4().hex
        state.delete("leases", lease.lease_id)
        state.put("closed", lease.lease_id, ClosedLease(lease.lease_id, "superseded", now))
    groups = [state.groups[key] for key in lease.groups]
    return _hand_out(state, now, request, lease_id, lease.step, groups, lease.attempt + 1)


def _lease_groups(
    state: TrajectoryState, now: float, groups: list[GroupRecord], request: PullRequest
) -> LeasedBatch:
    groups_taken = [
        msgspec.structs.replace(group, place=GroupPlace.LEASED, bundle=None, reason="")
        for group in groups
    ]
    for group in groups_taken:
        state.put("groups", group.id, group)
    batch = _hand_out(state, now, request, uuid.uuid4().hex, state.run.step, groups_taken, 0)
    state.put_run(msgspec.structs.replace(state.run, step=batch.step + 1))
    state.counters["formed"] += 1
    return batch


def _hand_out(
    state: TrajectoryState,
    now: float,
    request: PullRequest,
    lease_id: str,
    step: int,
    groups: list[GroupRecord],
    attempt: int,
) -> LeasedBatch:
    """Record the lease of a batch until it is sent."""
    ids = tuple(group.id for group in groups)
    expires_at = now + state.options.send_timeout_s
    mode = _lease_mode(state, request)
    lease = LeaseRecord(
        lease_id, request.identity, step, ids, now, expires_at, mode=mode, attempt=attempt
    )
    state.put("leases", lease_id, lease)
    return LeasedBatch(lease_id, step, groups, attempt, state.run.epoch)


def _lease_mode(state: TrajectoryState, request: PullRequest) -> str:
    if state.options.delivery == "at_most_once":
        return "at_most_once"
    if request.anonymous and state.options.is_strict("lease_anonymous"):
        return "on_sent"
    return "explicit" if request.explicit else "implicit"


def _update_lease(state: TrajectoryState, lease: LeaseRecord, **changed: Any) -> LeaseRecord:
    lease = msgspec.structs.replace(lease, **changed)
    state.put("leases", lease.lease_id, lease)
    return lease


def close_lease(state: TrajectoryState, now: float, lease: LeaseRecord, outcome: str) -> None:
    """End a lease and delete its groups for good."""
    state.delete("leases", lease.lease_id)
    for key in lease.groups:
        state.delete("groups", key)
    state.put("closed", lease.lease_id, ClosedLease(lease.lease_id, outcome, now))
    state.counters["acked"] += 1


STALE_PER_BATCH = 250
"""Maximum number of stale groups moved per pull, so that a pull stays short."""


def form(state: TrajectoryState, now: float) -> list[GroupRecord] | NotSelected:
    """Select the groups of the next batch, in the order of delivery, and charge their environments.
    The groups stay in the queue."""
    if state.run.batch_size < 1:
        return NotSelected("batch_size_not_positive")
    if _move_stale(state):
        return NotSelected("staleness")
    if not state.queue.groups and not state.stale:
        return NotSelected("empty")
    selected = _select(state, state.queue, now)
    if isinstance(selected, NotSelected) and state.stale:
        selected = _select(state, state.with_stale, now)
    if isinstance(selected, Selected):
        _charge(state, selected)
        return selected.groups
    return selected


def _move_stale(state: TrajectoryState) -> bool:
    """Remove groups beyond the staleness bound from the queue, or move them to its end. Return
    whether more stale groups remain."""
    stale, more = state.take_stale(STALE_PER_BATCH)
    for group in stale:
        _unbundle(state, state.queue.companions(group))
        if state.options.stale_policy == "quarantine":
            isolate(state, group, "too_stale")
        else:
            state.put(
                "groups",
                group.id,
                msgspec.structs.replace(
                    group, bundle=None, reason="too_stale", order=state.next_order()
                ),
            )
    return more


def _unbundle(state: TrajectoryState, members: list[GroupRecord]) -> None:
    """Dissolve a bundle that lost a member; each remaining member becomes a unit of its own."""
    for member in members:
        alone = msgspec.structs.replace(member, bundle=None, order=state.next_order())
        reason = unservable_reason(state, member.size)
        if reason:
            isolate(state, alone, reason)
        else:
            state.put("groups", member.id, alone)


def _select(state: TrajectoryState, index: QueueIndex, now: float) -> Selected | NotSelected:
    options = state.options
    batch_size = state.run.batch_size
    fair = _fair_share(state, now)
    minimums = [
        (env.env_id, max(0.0, min(env.min_batch_allocation, 1e12)))
        for env in state.envs.values()
        if env.min_batch_allocation is not None and is_alive(state, env, now)
    ]
    recheck = not options.is_strict("recheck_minimums")
    if not options.is_strict("divisor_packing"):
        if minimums:
            return select_with_minimums(
                index, batch_size, fair, minimums, rounding=options.min_rounding, recheck=recheck
            )
        return select_exact(index, batch_size, fair)
    if minimums:
        return select_strict_with_minimums(index, batch_size, fair, minimums, recheck=recheck)
    return select_strict(index, batch_size, fair)


def _fair_share(state: TrajectoryState, now: float) -> FairShare:
    if state.options.is_strict("weighted_fill"):
        return FairShare(shares={}, times={}, clock=0.0, default_share=math.inf)
    known, other = shares(state, now)
    times: dict[int | None, float] = {env.env_id: env.virtual_time for env in state.envs.values()}
    return FairShare(
        shares=known,
        times=times | {None: max(state.run.other_time, 0.0)},
        clock=state.run.clock,
        default_share=other,
    )


def _charge(state: TrajectoryState, selected: Selected) -> None:
    """Advance the virtual times and count the served sequences."""
    for env_id, served in selected.ledger.served.items():
        env = None if env_id is None else state.envs.get(env_id)
        if env is not None:
            time = selected.ledger.times.get(env_id, env.virtual_time)
            changed = msgspec.structs.replace(env, served=env.served + served, virtual_time=time)
            state.put("envs", env.env_id, changed)
    if not state.options.is_strict("weighted_fill"):
        other = selected.ledger.times.get(None, state.run.other_time)
        state.put_run(
            msgspec.structs.replace(state.run, clock=selected.ledger.clock, other_time=other)
        )
