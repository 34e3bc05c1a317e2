"""Registration of the trainer and of environments, heartbeats, epochs, the policy version, and
stored answers for idempotent requests.

An idempotency key is stored in the same commit as the data. Its fingerprint, CRC-32 and length of
the body, tells a repeated request from a client that reuses a key by mistake; it does not protect
against an attack. Source: docs/reference/trajectory.md 2.3 to 2.5, 3.2, 3.7, 3.9, 3.10.
"""

from __future__ import annotations

import logging
import math
import uuid
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from realhf.trajectory.records import EnvRecord, RunRecord, StoredReply
from realhf.trajectory.state import quarantine
from realhf.trajectory.state.server_state import TrajectoryState
from realhf.web.refusal import Refusal

MIN_WEIGHT = 0.01
"""Smallest share of an environment, so that none starves."""
_LARGE = 1e12
"""Upper limit of weights and allocations; products of larger values would overflow."""
_TRAINER_FIELDS = ("max_token_len", "checkpoint_dir", "save_checkpoint_interval", "num_steps")
"""Fields of a registration that a restarted trainer may change."""
logger = logging.getLogger(__name__)
Answer = tuple[dict[str, Any], dict[str, str]]
"""(body, headers) of a response."""


def register(
    state: TrajectoryState,
    now: float,
    request: Mapping[str, Any],
    join: bool,
    may_reset: bool = True,
    force_new: bool = False,
    trainer: str = "",
) -> Answer:
    """Register a trainer.

    A trainer that names the current run continues it: it was restarted, or is another rank of the
    same trainer. Any other trainer starts a new run, in a new epoch. ``join``: continue the current
    run, whatever its name. ``force_new``: always start a new run. ``trainer``: the name under which
    the trainer pulls. Raises Refusal 403 if that would end a run that is protected.
    """
    number = uuid.uuid4().int
    headers = {"X-Trainer-Id": str(number)}
    if state.run.registered:
        if join and request["num_steps"] > state.run.num_steps:
            state.put_run(msgspec.structs.replace(state.run, num_steps=request["num_steps"]))
        if join or (state.options.reregister == "ignore" and not force_new):
            return {"uuid": number}, headers
        if (
            state.options.reregister == "continue"
            and not force_new
            and _is_same_run(state.run, request)
        ):
            _continue_run(state, request)
            _return_leases(state, trainer)
            return {"uuid": number}, headers | {"X-Run-Continued": "1"}
        if not may_reset:
            raise Refusal(
                403,
                "another run is registered; to replace it, send the admin token (or X-Join: 1 to "
                "join)",
            )
        reset(state, now)
    names = ("wandb_group", "wandb_project", "batch_size", "starting_step", *_TRAINER_FIELDS)
    state.put_run(
        msgspec.structs.replace(
            state.run,
            registered=True,
            started=False,
            step=request["starting_step"],
            max_staleness=request.get("max_staleness"),
            **{name: request[name] for name in names},
        )
    )
    quarantine.reconsider_queue(state)
    return {"uuid": number}, headers


def _is_same_run(run: RunRecord, request: Mapping[str, Any]) -> bool:
    return (run.wandb_group, run.wandb_project, run.batch_size) == (
        request["wandb_group"],
        request["wandb_project"],
        request["batch_size"],
    )


def _continue_run(state: TrajectoryState, request: Mapping[str, Any]) -> None:
    """Continue the run with its queue, environments, leases and steps.

    The step count continues from the run's own, even if the trainer starts at an earlier step.
    Other settings of the trainer may have changed; the staleness bound is kept if the trainer does
    not send one.
    """
    run = state.run
    changed = {name: request[name] for name in _TRAINER_FIELDS}
    step = max(run.step, request["starting_step"])
    staleness = request.get("max_staleness")
    staleness = run.max_staleness if staleness is None else staleness
    state.put_run(msgspec.structs.replace(run, step=step, max_staleness=staleness, **changed))
    state.counters["continued"] += 1
    logger.info(
        "the run %r of %r continues at step %d with %d groups queued; to start a new one, register "
        "with X-Reset: 1",
        run.wandb_group,
        run.wandb_project,
        step,
        state.queue.groups + len(state.stale),
    )


def _return_leases(state: TrajectoryState, trainer: str) -> None:
    """Give back the batches that a trainer held before it was restarted. It may not have trained on
    them, and its next pull would acknowledge them."""
    for lease in list(state.leases.values()):
        if lease.owner == trainer and lease.mode == "implicit" and not lease.returned:
            state.put("leases", lease.lease_id, msgspec.structs.replace(lease, returned=True))


def reset(state: TrajectoryState, now: float) -> None:
    """Delete everything and start the next epoch (docs/reference/trajectory.md 2.9). Strict mode
    keeps the data that the original server keeps."""
    old = state.run
    run = RunRecord(epoch=old.epoch + 1)
    if state.options.is_strict("forget_on_reset"):
        run = msgspec.structs.replace(
            run,
            latest=old.latest,
            max_token_len=old.max_token_len,
            checkpoint_dir=old.checkpoint_dir,
            save_checkpoint_interval=old.save_checkpoint_interval,
        )
    state.clear(run)
    state.counters["resets"] += 1


def start_epoch_after(state: TrajectoryState, now: float, ended: int) -> None:
    """Start an epoch later than ``ended``, which the store lost completely or in part. Does nothing
    if a later epoch has already started.

    Remaining data is kept. The number of the new epoch is the time in milliseconds, because epoch
    numbers must be unique and the store may have lost epochs after ``ended`` too.
    """
    if state.run.epoch <= ended:
        state.put_run(msgspec.structs.replace(state.run, epoch=max(ended + 1, int(now * 1000))))


def register_env(state: TrajectoryState, now: float, request: Mapping[str, Any]) -> Answer:
    """Register an environment; it has to wait until the trainer has pulled a batch."""
    run = state.run
    if not run.started:
        return NotYet({"status": "wait for trainer to start"}, {})
    env_id = max(state.envs, default=-1) + 1
    requested = request["desired_name"]
    names = [env.name for env in state.envs.values() if env.desired_name == requested]
    # Count on from the newest environment of this name, because older ones may have expired.
    name = f"{requested}_{int(names[-1].rpartition('_')[2]) + 1 if names else 0}"
    env = EnvRecord(
        env_id,
        requested,
        name,
        request["max_token_length"],
        request["weight"],
        request["group_size"],
        request.get("min_batch_allocation"),
        connected=True,
        last_seen=now,
        virtual_time=run.clock,
    )
    state.put("envs", env_id, env)
    body = {
        "status": "success",
        "env_id": env_id,
        "wandb_name": name,
        "checkpoint_dir": run.checkpoint_dir,
        "starting_step": run.step,
        "checkpoint_interval": run.save_checkpoint_interval,
        "num_steps": run.num_steps,
    }
    return body, {}


def disconnect_env(state: TrajectoryState, now: float, env_id: int) -> dict[str, Any]:
    """Exclude an environment from weights and minimums; its groups can still be served."""
    env = state.envs.get(env_id)
    if env is None:
        return {
            "status": "failure",
            "error": f"unknown env_id {env_id}; {len(state.envs)} are registered",
        }
    if env.connected:
        state.put("envs", env_id, msgspec.structs.replace(env, connected=False))
    return {"status": "success"}


def check_epoch(state: TrajectoryState, now: float, sent: str | None) -> None:
    """Raise Refusal 409 for a request of an earlier run. Requests without an epoch are not checked.

    Source: docs/reference/trajectory.md 3.2.
    """
    if (
        sent is not None
        and not state.options.is_strict("fence_epochs")
        and sent != str(state.run.epoch)
    ):
        raise Refusal(409, f"epoch {sent[:40]} has ended; the current one is {state.run.epoch}")


def set_policy_version(state: TrajectoryState, now: float, version: int) -> dict[str, Any]:
    """Set the version of the trainer's weights (docs/reference/trajectory.md 3.9)."""
    state.put_run(msgspec.structs.replace(state.run, policy_version=version))
    return {"status": "success", "policy_version": version}


def is_alive(state: TrajectoryState, env: EnvRecord, now: float) -> bool:
    """Return whether an environment is connected and has sent a heartbeat within the timeout."""
    return env.connected and now - env.last_seen <= state.options.heartbeat_timeout_s


def heartbeat_due(state: TrajectoryState, now: float, env_id: int) -> bool:
    """Return whether a heartbeat should be stored: a tenth of the timeout, but at most 30 seconds,
    has passed since the last one."""
    env = state.envs.get(env_id)
    return env is not None and now - env.last_seen > min(
        state.options.heartbeat_timeout_s / 10, 30.0
    )


def heartbeat(state: TrajectoryState, now: float, env_id: int) -> None:
    """Record a heartbeat."""
    if heartbeat_due(state, now, env_id):
        state.put("envs", env_id, msgspec.structs.replace(state.envs[env_id], last_seen=now))


def shares(state: TrajectoryState, now: float) -> tuple[dict[int | None, float], float]:
    """Return (share of each known environment in batches, total share of all other groups).

    Source: docs/reference/trajectory.md 3.6.
    """
    weights = {
        env.env_id: _weight(env) if is_alive(state, env, now) else 0.0
        for env in state.envs.values()
    }
    total = sum(weights.values()) + 1.0 if _has_foreign_groups(state) else sum(weights.values())
    if total <= 0:
        return dict.fromkeys(weights, MIN_WEIGHT), MIN_WEIGHT
    return {env_id: max(MIN_WEIGHT, weight / total) for env_id, weight in weights.items()}, max(
        MIN_WEIGHT, 1 / total
    )


def status_env(state: TrajectoryState, now: float, env_id: int) -> dict[str, Any]:
    """Return the values from which an environment decides how fast to produce. The cost is linear
    in the number of environments.

    Source: docs/reference/trajectory.md 2.5.
    """
    env = state.envs.get(env_id)
    if env is None:
        raise Refusal(404, "unknown env_id")
    alive = [other for other in state.envs.values() if is_alive(state, other, now)]
    largest = max(1, state.queue.max_group_size())
    own = state.queue.env_sequences().get(env_id, 0)
    unit = max(1, env.group_size, state.queue.env_max_group(env_id))
    others = _count_others(
        state, env_id, largest, {other.env_id: _allocation(other) for other in alive}
    )
    allocated = sum(_allocation(other) for other in alive)
    return {
        "current_step": state.run.step,
        "queue_size": (own + others) // unit,
        "unallocated_fraction": 1.0 - min(1.0, allocated),
        "self_queue_size": own // unit,
        "max_group_size": largest,
        "env_weight": _env_weight(state, env, alive),
    }


def _weight(env: EnvRecord) -> float:
    return min(max(0.0, env.weight), _LARGE)


def _allocation(env: EnvRecord) -> float:
    return min(max(0.0, env.min_batch_allocation or 0.0), _LARGE)


def _has_foreign_groups(state: TrajectoryState) -> bool:
    return any(env_id not in state.envs for env_id in state.queue.env_sequences())


def _count_others(
    state: TrajectoryState, env_id: int, largest: int, allocations: Mapping[int, float]
) -> int:
    """Return the number of sequences of other environments, counted in packs of the largest size
    and beyond their minimums."""
    if largest == 1 and state.options.is_strict("count_others_of_size_one"):
        return 0
    batch_size = state.run.batch_size
    total = 0
    for other, sequences in state.queue.env_sequences().items():
        if other != env_id:
            packed = math.ceil(sequences / largest) * largest
            minimum = int(batch_size * allocations.get(other, 0.0)) if other is not None else 0
            total += max(0, packed - minimum)
    return total


def _env_weight(state: TrajectoryState, env: EnvRecord, alive: list[EnvRecord]) -> float:
    total = sum(other.max_token_length * _weight(other) for other in alive)
    share = env.max_token_length * _weight(env) / total if total else 0.0
    share = max(MIN_WEIGHT, share)
    return share if state.options.is_strict("count_others_of_size_one") else min(1.0, share)


MAX_KEY_LENGTH = 128


class NotYet(NamedTuple):
    """``Answer`` that asks the client to try again later; it is not stored under an idempotency
    key."""

    body: dict[str, Any]
    """Body of the response."""
    headers: dict[str, str]
    """Headers of the response."""


def run_once(
    state: TrajectoryState,
    now: float,
    key: str | None,
    fingerprint: str,
    command: Callable[..., Answer],
    *args: Any,
) -> tuple[Answer, bool]:
    """Return (answer of ``command(state, now, *args)``, whether it is a stored answer to an earlier
    request with the same key). Only a final answer is stored. Raises Refusal 422 if the key was
    used for a different request, and the command's errors."""
    if key is None:
        return command(state, now, *args), False
    replay = state.replays.get(key)
    if replay is not None and now - replay.stored_at <= state.options.replay_ttl_s:
        if replay.fingerprint != fingerprint:
            raise Refusal(422, "this Idempotency-Key was used for another request")
        state.counters["replayed"] += 1
        return (
            msgspec.json.decode(replay.body),
            replay.headers | {"Idempotency-Replayed": "true"},
        ), True
    if replay is not None:
        state.delete("replays", key)
    answer = command(state, now, *args)
    if isinstance(answer, NotYet):
        return answer, False
    body, headers = answer
    state.put("replays", key, StoredReply(key, fingerprint, encode_body(body), headers, now))
    return (body, headers), False


def encode_body(body: dict[str, Any]) -> bytes:
    """Encode an answer as JSON. msgspec is not used for a registration, because its 128-bit
    ``uuid`` exceeds msgspec's integers."""
    number = body.get("uuid")
    return b'{"uuid":%d}' % number if number is not None else msgspec.json.encode(body)
