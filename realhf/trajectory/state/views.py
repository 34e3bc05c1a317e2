"""Bodies of the read-only endpoints.

Source: docs/reference/trajectory.md 2.2, 3.5, 3.7.
"""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import Any

from realhf.trajectory.records import GroupRecord
from realhf.trajectory.state.registry import is_alive
from realhf.trajectory.state.server_state import TrajectoryState


def status(state: TrajectoryState, now: float) -> dict[str, Any]:
    """Return the current step and the number of queued groups (not sequences; without groups in mix
    buffers and leases)."""
    if not state.run.registered and state.options.is_strict("status_before_registration"):
        return {"current_step": 0, "queue_size": 0}
    return {"current_step": state.run.step, "queue_size": state.queue.groups + len(state.stale)}


def info(state: TrajectoryState, now: float) -> dict[str, Any]:
    """Return the batch size in sequences and the length limit in tokens; both are -1 without a
    trainer."""
    return {"batch_size": state.run.batch_size, "max_token_len": state.run.max_token_len}


def wandb_info(state: TrajectoryState, now: float) -> dict[str, Any]:
    """Return group and project of the trainer's run; null without a trainer."""
    return {"group": state.run.wandb_group, "project": state.run.wandb_project}


def latest(state: TrajectoryState, now: float) -> GroupRecord | None:
    """Return the last group that entered the queue."""
    return state.run.latest


def envs(state: TrajectoryState, now: float) -> dict[str, Any]:
    """Return a description of every environment. ``state`` is connected, stale (silent too long) or
    disconnected. Queued data is counted in groups and in sequences, served data in sequences."""
    groups = state.queue.env_groups()
    sequences = state.queue.env_sequences()
    items = [
        {
            "env_id": env.env_id,
            "name": env.name,
            "state": "connected"
            if is_alive(state, env, now)
            else "stale"
            if env.connected
            else "disconnected",
            "last_seen_age_s": max(0.0, now - env.last_seen),
            "weight": env.weight,
            "group_size": env.group_size,
            "min_batch_allocation": env.min_batch_allocation,
            "queued_groups": groups.get(env.env_id, 0),
            "queued_sequences": sequences.get(env.env_id, 0),
            "served_sequences": env.served,
        }
        for env in state.envs.values()
    ]
    foreign = [env_id for env_id in groups if env_id not in state.envs]
    others = {
        "queued_groups": sum(groups[env_id] for env_id in foreign),
        "queued_sequences": sum(sequences[env_id] for env_id in foreign),
    }
    return {"envs": items, "others": others}


def buffers(state: TrajectoryState, now: float) -> dict[str, Any]:
    """Return a description of the mix buffer of each environment."""
    return {
        "buffers": [
            {
                "env_id": env_id,
                "groups": len(held),
                "sequences": sum(group.size for group in held.values()),
                "oldest_age_s": max(0.0, now - next(iter(held.values())).arrived_at),
            }
            for env_id, held in sorted(
                state.buffers.items(), key=lambda item: -1 if item[0] is None else item[0]
            )
        ]
    }


def quarantine(state: TrajectoryState, now: float, limit: int, after: int | None) -> dict[str, Any]:
    """Return at most ``limit`` groups in quarantine with ids above ``after``, and the number of
    groups for each reason."""
    ids = sorted(key for key in state.quarantine if after is None or key > after)
    groups = [state.quarantine[key] for key in islice(ids, max(0, limit))]
    return {
        "total": len(state.quarantine),
        "dropped": state.run.quarantine_dropped,
        "by_reason": dict(Counter(group.reason for group in state.quarantine.values())),
        "items": [
            {
                "id": group.id,
                "env_id": group.env_id,
                "size": group.size,
                "reason": group.reason,
                "age_s": max(0.0, now - group.arrived_at),
            }
            for group in groups
        ],
    }


def leases(state: TrajectoryState, now: float) -> dict[str, Any]:
    """Return the batches that trainers hold."""
    return {
        "leases": [
            {
                "lease_id": lease.lease_id,
                "owner": lease.owner,
                "step": lease.step,
                "groups": len(lease.groups),
                "age_s": max(0.0, now - lease.created_at),
                "expires_in_s": lease.expires_at - now,
                "state": "returned" if lease.returned else "sent" if lease.sent else "sending",
                "mode": lease.mode,
            }
            for lease in state.leases.values()
        ]
    }
