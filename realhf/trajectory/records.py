"""Defines what the trajectory server remembers, the rules it goes by, and the refusal that becomes an HTTP error;
every part of the server imports it.

Source: docs/reference/trajectory.md 1 (vocabulary), 3.4 to 3.10 (rules), 3.11 (what is persisted), 3.12 (strict).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Annotated, Any, TypeAlias

import msgspec

Int64: Any = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
SCHEMA: dict[str, Any] = {
    "tokens": list[list[Int64]],
    "masks": list[list[Int64]],
    "scores": list[float],
    "advantages": list[list[float]] | None,
    "ref_logprobs": list[list[float]] | None,
    "messages": list[list[dict[str, Any]]] | None,
    "generation_params": dict[str, Any] | None,
    "inference_logprobs": list[list[float]] | None,
    "overrides": list[dict[str, Any]] | None,
    "group_overrides": dict[str, Any] | None,
    "images": Any,
    "env_id": Int64 | None,
    "distill_token_ids": list[list[list[Int64]]] | None,
    "distill_logprobs": list[list[list[float]]] | None,
    "policy_version": Int64 | None,
}  # fmt: skip
"""Fields of a group and their types, in order; in binary ``INTEGER_ROWS`` and ``FLOAT_ROWS`` may be tensors."""
FIELDS = tuple(SCHEMA)
"""Every delivered item has all but the last; ``policy_version`` is there only where it was sent."""
REQUIRED = ("tokens", "masks", "scores")
INTEGER_ROWS = ("tokens", "masks")
FLOAT_ROWS = ("advantages", "ref_logprobs", "inference_logprobs")
FLOATS = ("scores", *FLOAT_ROWS, "distill_logprobs")
"""Fields of which every number is a float on the wire, also where it was pushed as an integer."""
FREE_FIELDS = ("messages", "generation_params", "overrides", "group_overrides", "images")
N_STOCK_FIELDS = 14
PayloadRef: TypeAlias = int | bytes
"""Where a group's bytes are: the bytes themselves (memory store) or a number that the store understands."""
PAYLOAD_LOST = "payload_lost"
"""Reason of a group in quarantine whose bytes were read and are not what was written."""


class Place(IntEnum):
    """Says where a group is. Every stored group is in exactly one place."""

    QUEUE = 0
    BUFFER = 1
    LEASED = 2
    QUARANTINE = 3


class Encoding(IntEnum):
    """Says which encoding a group's producer pushed its payload in."""

    JSON = 0
    MSGPACK = 1


class Payload(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Describes one group's bytes.

    JSON is one object, without surrounding white space, of known keys only. MessagePack is the key-value pairs of the
    map *without its header*. ``present``: bit i is set where FIELDS[i] is a key of it; ``crc``: CRC-32 of the bytes.
    """

    ref: PayloadRef
    nbytes: int
    encoding: Encoding
    present: int
    crc: int


class GroupRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Records one stored group.

    ``order`` is its position within its place and grows with every entry; ``size`` counts sequences; ``bundle`` is
    (order of the first member, number of members) of a set that must leave together, whose members have consecutive
    orders; ``arrived_at`` is in seconds since 1970; ``reason`` says why it is in quarantine.
    """

    id: int
    order: int
    place: Place
    env_id: int | None
    size: int
    payload: Payload
    policy_version: int
    arrived_at: float
    bundle: tuple[int, int] | None = None
    reason: str = ""

    @property
    def members(self) -> tuple[GroupRecord, ...]:
        """Return the group alone: a single group is a unit of one member."""
        return (self,)


class EnvRecord(msgspec.Struct, frozen=True, array_like=True):
    """Records one rollout handler. ``last_seen`` is in seconds since 1970; ``served`` counts sequences handed out;
    ``virtual_time`` is served over share, the clock of weighted filling (docs/reference/trajectory.md 3.6)."""

    env_id: int
    desired_name: str
    name: str
    max_token_length: int
    weight: float
    group_size: int
    min_batch_allocation: float | None
    connected: bool
    last_seen: float
    served: int = 0
    virtual_time: float = 0.0


class LeaseRecord(msgspec.Struct, frozen=True, array_like=True):
    """Records one batch in a trainer's hands.

    ``groups``: ids in the order of delivery; ``sent``: the whole response went out on a live connection; ``returned``:
    given back or never sent, to be handed out first; times in seconds since 1970. ``mode`` says what ends it:
    ``implicit`` (the owner's next pull), ``explicit`` (an ack only), ``on_sent`` (the whole response went out),
    ``at_most_once`` (its creation; it is never handed out again). ``attempt`` counts responses, so that the end of an
    earlier one is not taken for the end of the present one.
    """

    lease_id: str
    owner: str
    step: int
    groups: tuple[int, ...]
    created_at: float
    expires_at: float
    sent: bool = False
    returned: bool = False
    mode: str = "implicit"
    attempt: int = 0


class ClosedLease(msgspec.Struct, frozen=True, array_like=True):
    """Records a lease that ended: ``outcome`` is ``acked`` or ``superseded`` (redelivered to another trainer)."""

    lease_id: str
    outcome: str
    closed_at: float


class Replay(msgspec.Struct, frozen=True, array_like=True):
    """Records the answer to an idempotency key: ``fingerprint`` of the request, JSON ``body``, ``headers``."""

    key: str
    fingerprint: str
    body: bytes
    headers: dict[str, str]
    stored_at: float


class RunRecord(msgspec.Struct, frozen=True, array_like=True):
    """Records the registration and its counters; there is one per state.

    ``registered`` False: no trainer since the last reset. ``latest``: the last group that entered the queue, kept
    readable after its consumption. ``other_time`` and ``clock``: virtual time of groups without an environment, and of
    the last served pack (docs/reference/trajectory.md 3.6).
    """

    epoch: int = 0
    registered: bool = False
    started: bool = False
    wandb_group: str | None = None
    wandb_project: str | None = None
    batch_size: int = -1
    max_token_len: int = -1
    checkpoint_dir: str = ""
    save_checkpoint_interval: int = 0
    starting_step: int = 0
    num_steps: int = 0
    step: int = 0
    max_staleness: int | None = None
    policy_version: int | None = None
    latest: GroupRecord | None = None
    other_time: float = 0.0
    clock: float = 0.0
    quarantine_dropped: int = 0

    @property
    def current_version(self) -> int:
        """Policy version that a group without one is stamped with (docs/reference/trajectory.md 3.9)."""
        return self.step if self.policy_version is None else self.policy_version


Record: TypeAlias = GroupRecord | EnvRecord | LeaseRecord | ClosedLease | Replay | RunRecord
TABLES: dict[str, type] = {
    "run": RunRecord,
    "envs": EnvRecord,
    "groups": GroupRecord,
    "leases": LeaseRecord,
    "closed": ClosedLease,
    "replays": Replay,
}
"""Name of each table and the record of its rows. Keys: "run", env_id, group id, lease_id, lease_id, key."""


def place_of(record: Record) -> tuple[str, int | str]:
    """Return the table and the key of a record."""
    match record:
        case RunRecord():
            return "run", "run"
        case EnvRecord():
            return "envs", record.env_id
        case GroupRecord():
            return "groups", record.id
        case LeaseRecord():
            return "leases", record.lease_id
        case ClosedLease():
            return "closed", record.lease_id
        case Replay():
            return "replays", record.key


class Incoming(msgspec.Struct, frozen=True):
    """Holds a valid group: its canonical bytes (see ``records.Payload``) and what routing needs. ``size`` is the number
    of sequences, ``len(tokens)``; a ``policy_version`` of None is replaced by the current one."""

    data: bytes
    encoding: Encoding
    present: int
    crc: int
    size: int
    env_id: int | None
    policy_version: int | None


STRICT_ROWS = (
    "reregister", "divisor_packing", "weighted_fill", "recheck_minimums", "heartbeat_timeout_s", "lease_anonymous",
    "count_others_of_size_one", "status_before_registration", "fence_epochs", "bound_staleness", "bound_integers",
    "forget_on_reset",
)  # fmt: skip
"""Rows of the strict switch (docs/reference/trajectory.md 3.12)."""
TRUE_WORDS, FALSE_WORDS = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")
_CHOICES = {
    "reregister": ("continue", "reset", "ignore"), "delivery": ("at_least_once", "at_most_once"),
    "stale_policy": ("quarantine", "last"), "min_rounding": ("floor", "ceil"),
}  # fmt: skip


def setting(default: Any, about: str, kind: type = str, **more: Any) -> Any:
    """Declare a setting, which is also a flag and a variable of the server; ``kind`` reads its text."""
    return field(default=default, metadata={"about": about, "kind": kind, **more})


@dataclass(frozen=True)
class StateOptions:
    """Holds the rules of one state. Sizes in bytes (0: no limit), times in seconds. Raises ValueError naming a bad
    one."""

    strict: str = setting(
        "", "the original's behaviour: all of it, or the rows with these names (docs/reference/trajectory.md 3.12), "
        "with commas between them", bare="all",
    )  # fmt: skip
    reregister: str = setting(
        None, "a second registration of the same group, project and batch size: continue (the run and its queue go on),"
        " reset (a new epoch) or ignore (the first one wins, as for any other registration); default continue, strict "
        "ignore",
    )  # fmt: skip
    heartbeat_timeout_s: float = setting(
        None, "seconds of silence after which an environment stops blocking; default 300, strict never", float
    )
    lease_timeout_s: float = setting(600.0, "seconds until an unacknowledged batch goes to another trainer", float)
    send_timeout_s: float = setting(60.0, "seconds that a response may take to go out", float)
    delivery: str = setting("at_least_once", "at_least_once, or at_most_once: a batch is gone when it is handed out")
    max_queue_groups: int = setting(
        1_000_000, "groups held before pushes get 503 (0: no limit); those in quarantine count, and go first", int
    )
    max_queue_bytes: int = setting(16 << 30, "bytes held before pushes get 503 (0: no limit), likewise", int)
    quarantine_bytes: int = setting(256 << 20, "bytes kept in quarantine; the oldest go first", int)
    max_quarantine_groups: int = setting(100_000, "groups kept in quarantine; the oldest go first", int)
    buffer_expiry_s: float = setting(3600.0, "seconds that a group of an odd size waits for others", float)
    max_buffered_groups: int = setting(4096, "groups of odd sizes held for one environment", int)
    replay_ttl_s: float = setting(3600.0, "seconds that idempotency keys and ended leases are remembered", float)
    max_replays: int = setting(
        250_000, "idempotency keys, and ended leases, remembered; beyond that the oldest are forgotten early", int
    )
    env_expiry_s: float = setting(
        86_400.0, "seconds of silence after which an environment is forgotten, if nothing of it waits", float
    )
    max_staleness: int | None = setting(None, "policy versions that a group may lie behind (default: no bound)", int)
    stale_policy: str = setting("quarantine", "too stale groups: quarantine, or last (only when nothing fresher fills)")
    min_rounding: str = setting("floor", "minimum allocations in sequences: floor or ceil")

    def __post_init__(self) -> None:
        object.__setattr__(self, "strict", ",".join(_strict_rows(self.strict)))
        defaults = {
            "reregister": "ignore" if self.is_strict("reregister") else "continue",
            "heartbeat_timeout_s": math.inf if self.is_strict("heartbeat_timeout_s") else 300.0,
        }
        for name, default in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} is {getattr(self, name)!r}; choose one of {', '.join(choices)}")
        for name in (
            "heartbeat_timeout_s", "lease_timeout_s", "send_timeout_s", "buffer_expiry_s", "replay_ttl_s",
            "env_expiry_s",
        ):  # fmt: skip
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be more than 0 seconds")

    def is_strict(self, *rows: str) -> bool:
        """Return whether the original's behaviour counts in all of these rows."""
        return set(rows) <= set(self.strict.split(","))


def _strict_rows(names: str) -> list[str]:
    """Return the rows named, in the order of ``STRICT_ROWS``; a word like yes or no means all or none of them."""
    words = str(names).lower()
    if words in (*FALSE_WORDS, "none"):
        return []
    if words in (*TRUE_WORDS, "all"):
        return list(STRICT_ROWS)
    chosen = {name.strip().replace("-", "_") for name in words.split(",")}
    if unknown := sorted(chosen.difference(STRICT_ROWS)):
        raise ValueError(f"strict has no row {unknown[0]!r}; give all, none or some of {', '.join(STRICT_ROWS)}")
    return [row for row in STRICT_ROWS if row in chosen]


class Refusal(Exception):
    """Is raised for a request that cannot be served. ``detail`` is JSON-able: a text, or the list of a 422."""

    def __init__(self, status: int, detail: Any, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(f"{status}: {detail}")
        self.status = status
        self.detail = detail
        self.headers = dict(headers or {})

    def __reduce__(self) -> tuple[Any, ...]:
        return Refusal, (self.status, self.detail, self.headers)


def invalid(loc: list[str | int], message: str, kind: str = "value_error", given: Any = None) -> Refusal:
    """Make a 422 in the shape of the contract: ``{"detail": [{"type", "loc", "msg", "input"}]}``."""
    return Refusal(422, [{"type": kind, "loc": loc, "msg": message, "input": given}])
