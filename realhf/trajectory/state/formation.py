"""Forms the next batch from the state: staleness first, then the selector that applies, then the accounts.

Source: docs/reference/trajectory.md 3.3, 3.4, 3.6, 3.9.
"""

from __future__ import annotations

import math

import msgspec

from realhf.trajectory.base.records import GroupRecord
from realhf.trajectory.batching.exact_selection import select_exact
from realhf.trajectory.batching.fair_share import FairShare
from realhf.trajectory.batching.minimum_selection import select_with_minimums
from realhf.trajectory.batching.packs import NotSelected, Selected
from realhf.trajectory.batching.queue_index import QueueIndex
from realhf.trajectory.batching.strict_selection import select_strict, select_strict_with_minimums
from realhf.trajectory.state.quarantine import isolate, unservable_reason
from realhf.trajectory.state.registry import is_alive, shares
from realhf.trajectory.state.server_state import TrajectoryState

STALE_PER_BATCH = 250
"""Number of stale groups set aside in one go, so that no pull takes long."""


def form(state: TrajectoryState, now: float) -> list[GroupRecord] | NotSelected:
    """Return the groups of the next batch in the order of delivery and charge their environments; the queue still holds
    the groups."""
    if state.run.batch_size < 1:
        return NotSelected("batch_size_not_positive")
    if _set_stale_aside(state):
        return NotSelected("staleness")
    if not state.queue.groups and not state.stale:
        return NotSelected("empty")
    selected = _select(state, state.queue, now)
    if isinstance(selected, NotSelected) and state.stale:
        selected = _select(state, state.with_stale, now)
    if isinstance(selected, Selected):
        _charge(state, selected)
        return [state.groups[group.id] for group in selected.groups]
    return selected


def _set_stale_aside(state: TrajectoryState) -> bool:
    """Take groups beyond the bound out of the queue, or put them at its end; return True while there are more of
    them."""
    stale, more = state.take_stale(STALE_PER_BATCH)
    for group in stale:
        _release(state, state.queue.companions(group))
        if state.options.stale_policy == "quarantine":
            isolate(state, group, "too_stale")
        else:
            state.put(
                "groups",
                group.id,
                msgspec.structs.replace(group, bundle=None, reason="too_stale", order=state.next_order()),
            )
    return more


def _release(state: TrajectoryState, members: list[GroupRecord]) -> None:
    """Release the other members of a set that lost one: each of them counts alone now."""
    for member in (state.groups[each.id] for each in members):
        alone = msgspec.structs.replace(member, bundle=None, order=state.next_order())
        reason = unservable_reason(state, member.size)
        if reason:
            isolate(state, alone, reason)
        else:
            state.put("groups", member.id, alone)


def _select(state: TrajectoryState, index: QueueIndex, now: float) -> Selected | NotSelected:
    options, batch_size, fair = state.options, state.run.batch_size, _fair_share(state, now)
    minimums = [
        (env.env_id, max(0.0, min(env.min_batch_allocation, 1e12)))
        for env in state.envs.values()
        if env.min_batch_allocation is not None and is_alive(state, env, now)
    ]
    if options.divisor_packing:
        if minimums:
            return select_with_minimums(
                index, batch_size, fair, minimums, rounding=options.min_rounding, recheck=options.recheck_minimums
            )
        return select_exact(index, batch_size, fair)
    if minimums:
        return select_strict_with_minimums(index, batch_size, fair, minimums, recheck=options.recheck_minimums)
    return select_strict(index, batch_size, fair)


def _fair_share(state: TrajectoryState, now: float) -> FairShare:
    if not state.options.weighted_fill:
        return FairShare(shares={}, times={}, clock=0.0, default_share=math.inf)
    known, other = shares(state, now)
    times: dict[int | None, float] = {env.env_id: env.virtual_time for env in state.envs.values()}
    return FairShare(
        shares=known, times=times | {None: max(state.run.other_time, 0.0)}, clock=state.run.clock, default_share=other
    )


def _charge(state: TrajectoryState, selected: Selected) -> None:
    """Advance the virtual times and count what was served."""
    for env_id, served in selected.served.items():
        env = None if env_id is None else state.envs.get(env_id)
        if env is not None:
            time = selected.times.get(env_id, env.virtual_time)
            changed = msgspec.structs.replace(env, served=env.served + served, virtual_time=time)
            state.put("envs", env.env_id, changed)
    if state.options.weighted_fill:
        other = selected.times.get(None, state.run.other_time)
        state.put_run(msgspec.structs.replace(state.run, clock=selected.clock, other_time=other))
