"""Record types of the trajectory server and the options of its state, which all parts of the server
use.

Source: docs/reference/trajectory.md 1 (vocabulary), 3.4 to 3.10 (rules), 3.11 (persisted data),
3.12 (strict).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Any, ClassVar, TypeAlias

import msgspec

from realhf.web.refusal import Refusal
from realhf.web.settings import FALSE_WORDS, TRUE_WORDS, SettingError, Settings, setting

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
"""Fields of a group and their types, in order. In MessagePack, the fields of INTEGER_ROWS and
FLOAT_ROWS may be sent as tensors."""
FIELDS = tuple(SCHEMA)
"""All field names. A delivered group has every one of them, except that ``policy_version`` (the
last) is present only if the producer sent it."""
REQUIRED = ("tokens", "masks", "scores")
INTEGER_ROWS = ("tokens", "masks")
"""Fields with one row of integers per sequence."""
FLOAT_ROWS = ("advantages", "ref_logprobs", "inference_logprobs")
"""Fields with one row of floats per sequence."""
FLOATS = ("scores", *FLOAT_ROWS, "distill_logprobs")
"""Fields whose numbers are all floats on the wire, even if they were pushed as integers."""
FREE_FIELDS = ("messages", "generation_params", "overrides", "group_overrides", "images")
"""Fields that may hold any JSON value."""
N_STOCK_FIELDS = 14
"""Number of fields that the original server knows."""
PayloadRef: TypeAlias = int | bytes
"""Location of a group's bytes: the bytes themselves (memory store), or a number that the store
interprets."""
PAYLOAD_LOST = "payload_lost"
"""Quarantine reason of a group whose stored bytes are damaged or missing."""


class GroupPlace(IntEnum):
    """Location of a group. Every stored group is in exactly one place."""

    QUEUE = 0
    """In the queue, ready to be packed into a batch."""
    BUFFER = 1
    """In the mix buffer of its environment, waiting for other groups."""
    LEASED = 2
    """In a batch that a trainer holds."""
    QUARANTINE = 3
    """Set aside, because it cannot be served."""


class Encoding(IntEnum):
    """Encoding in which a producer pushed a payload."""

    JSON = 0
    """One JSON object."""
    MSGPACK = 1
    """MessagePack key-value pairs."""


class Payload(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Description of one group's bytes.

    JSON is one object without surrounding white space, with known keys only. MessagePack is the
    key-value pairs of the map *without its header*.
    """

    ref: PayloadRef
    """Location in the store."""
    nbytes: int
    """Size in bytes."""
    encoding: Encoding
    """Encoding of the bytes."""
    present: int
    """Bit mask of the fields: bit i is set if the payload contains FIELDS[i]."""
    crc: int
    """CRC-32 of the bytes."""


class GroupRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One stored group."""

    id: int
    """Unique number of the group."""
    order: int
    """Position within its place. Every move to a place gives a group a higher number there."""
    place: GroupPlace
    """Current location of the group."""
    env_id: int | None
    """Environment that pushed it; None if unknown."""
    size: int
    """Number of sequences."""
    payload: Payload
    """Description of the group's bytes."""
    policy_version: int
    """Version of the weights with which the group was sampled."""
    arrived_at: float
    """Time of arrival, in seconds since 1970."""
    bundle: tuple[int, int] | None = None
    """(order of the first member, number of members) of a set of groups that must be delivered
    together; None for a group that is delivered on its own. The members have consecutive orders."""
    reason: str = ""
    """Why it is in quarantine; "too_stale" also marks stale groups in the queue."""

    @property
    def members(self) -> tuple[GroupRecord, ...]:
        """The group itself as the only member, so that a single group can be used like a
        ``Bundle``."""
        return (self,)


class EnvRecord(msgspec.Struct, frozen=True, array_like=True):
    """One registered environment (rollout handler)."""

    env_id: int
    """Id of the environment, a number."""
    desired_name: str
    """Name that the environment asked for."""
    name: str
    """Unique name that the server assigned."""
    max_token_length: int
    """Maximum length of a sequence, in tokens."""
    weight: float
    """Weight in batches, relative to other environments."""
    group_size: int
    """Number of sequences in a regular group."""
    min_batch_allocation: float | None
    """Smallest share of every batch; None for no minimum."""
    connected: bool
    """False once the environment has disconnected."""
    last_seen: float
    """Time of the last heartbeat, in seconds since 1970."""
    served: int = 0
    """Number of the environment's sequences that were delivered so far."""
    virtual_time: float = 0.0
    """Number of served sequences divided by share; the clock of weighted filling
    (docs/reference/trajectory.md 3.6)."""


class LeaseRecord(msgspec.Struct, frozen=True, array_like=True):
    """One batch that a trainer holds."""

    lease_id: str
    """Unique id of the lease."""
    owner: str
    """Name of the trainer that holds the batch."""
    step: int
    """Step of the batch."""
    groups: tuple[int, ...]
    """Group ids in the order of delivery."""
    created_at: float
    """Time of creation, in seconds since 1970."""
    expires_at: float
    """Time of expiry, in seconds since 1970."""
    sent: bool = False
    """Whether the whole response was sent on a live connection."""
    returned: bool = False
    """Whether the batch was given back or never sent. Such a batch is delivered before new ones."""
    mode: str = "implicit"
    """Event that ends the lease: ``implicit`` (the owner's next pull), ``explicit`` (an ack only),
    ``on_sent`` (the whole response was sent) or ``at_most_once`` (its creation; it is never
    delivered again)."""
    attempt: int = 0
    """Number of earlier attempts to send the batch. It tells the end of an earlier response from
    the end of the current one."""


class ClosedLease(msgspec.Struct, frozen=True, array_like=True):
    """A lease that ended."""

    lease_id: str
    """Id of the lease."""
    outcome: str
    """``acked`` or ``superseded`` (delivered again under another lease)."""
    closed_at: float
    """Time at which the lease ended, in seconds since 1970."""


class StoredReply(msgspec.Struct, frozen=True, array_like=True):
    """The answer to a request with an idempotency key, stored so that a repeated request gets the
    same answer."""

    key: str
    """The idempotency key."""
    fingerprint: str
    """Fingerprint of the request."""
    body: bytes
    """JSON body of the answer."""
    headers: dict[str, str]
    """Headers of the answer."""
    stored_at: float
    """Time at which the answer was stored, in seconds since 1970."""


class RunRecord(msgspec.Struct, frozen=True, array_like=True):
    """Registration of the run and its counters. A state has exactly one."""

    epoch: int = 0
    """Number of resets."""
    registered: bool = False
    """Whether a trainer has registered since the last reset."""
    started: bool = False
    """Whether a trainer has pulled since the registration."""
    wandb_group: str | None = None
    """Group name of the run, as the trainer registered it."""
    wandb_project: str | None = None
    """Project name of the run, as the trainer registered it."""
    batch_size: int = -1
    """Number of sequences in a batch; -1 without a trainer."""
    max_token_len: int = -1
    """Maximum length of a sequence, in tokens; -1 without a trainer."""
    checkpoint_dir: str = ""
    """Checkpoint folder that is passed on to environments."""
    save_checkpoint_interval: int = 0
    """Number of steps between two checkpoints."""
    starting_step: int = 0
    """First step of the run."""
    num_steps: int = 0
    """Number of steps of the run."""
    step: int = 0
    """Number of batches delivered."""
    max_staleness: int | None = None
    """Largest number of policy versions that a group of this run may lag; None: the server's
    setting."""
    policy_version: int | None = None
    """Version announced by the trainer; None if it announced none, and the step number is used
    instead."""
    latest: GroupRecord | None = None
    """Last group that entered the queue; it stays readable after it was consumed."""
    other_time: float = 0.0
    """Virtual time of groups whose environment is unknown (docs/reference/trajectory.md 3.6)."""
    clock: float = 0.0
    """Virtual time of the pack that was served last."""
    quarantine_dropped: int = 0
    """Number of groups dropped from quarantine."""

    @property
    def current_version(self) -> int:
        """Policy version assigned to a group without one (docs/reference/trajectory.md 3.9)."""
        return self.step if self.policy_version is None else self.policy_version


Record: TypeAlias = GroupRecord | EnvRecord | LeaseRecord | ClosedLease | StoredReply | RunRecord
TABLES: dict[str, type] = {
    "run": RunRecord,
    "envs": EnvRecord,
    "groups": GroupRecord,
    "leases": LeaseRecord,
    "closed": ClosedLease,
    "replays": StoredReply,
}
"""Record type of each table. The keys of the tables are, in this order: "run", env_id, group id,
lease_id, lease_id, idempotency key."""


def table_and_key(record: Record) -> tuple[str, int | str]:
    """Return (table, key) of a record."""
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
        case StoredReply():
            return "replays", record.key


class Incoming(msgspec.Struct, frozen=True):
    """A group that was pushed and validated but is not stored yet."""

    data: bytes
    """Canonical bytes, see ``Payload``."""
    encoding: Encoding
    """Encoding of the bytes."""
    present: int
    """Bit mask of the present fields, see ``Payload``."""
    crc: int
    """CRC-32 of the bytes."""
    size: int
    """Number of sequences, ``len(tokens)``."""
    env_id: int | None
    """Environment that pushed it; None if unknown."""
    policy_version: int | None
    """Version of the weights; None if the producer sent none, and the current version is used."""


STRICT_ROWS = (
    "reregister", "divisor_packing", "weighted_fill", "recheck_minimums", "heartbeat_timeout_s", "lease_anonymous",
    "count_others_of_size_one", "status_before_registration", "fence_epochs", "bound_staleness", "bound_integers",
    "forget_on_reset",
)  # fmt: skip
"""Rules for which ``strict`` can select the original server's behaviour (the rows of the table in
docs/reference/trajectory.md 3.12)."""
_POSITIVE_SECONDS = (
    "heartbeat_timeout_s", "lease_timeout_s", "send_timeout_s", "buffer_expiry_s", "replay_ttl_s", "env_expiry_s",
)  # fmt: skip
"""Settings that must be longer than 0 seconds."""


@dataclass(frozen=True)
class StateOptions(Settings):
    """The rules of one state. Sizes in bytes (0: no limit), times in seconds. Raises SettingError
    for a bad one."""

    PREFIX: ClassVar[str] = "REALHF_TRAJ_"

    strict: str = setting(
        "", "the original's behaviour: all of it, or the rows with these names "
            "(docs/reference/trajectory.md 3.12), "
        "with commas between them", bare="all",
    )  # fmt: skip
    reregister: str = setting(
        None, "a second registration of the same group, project and batch size: continue (the run "
              "and its queue go on),"
        " reset (a new epoch) or ignore (the first one wins, as for any other registration); "
        "default continue, strict "
        "ignore", choices=("continue", "reset", "ignore"),
    )  # fmt: skip
    heartbeat_timeout_s: float = setting(
        None,
        "seconds of silence after which an environment stops blocking; default 300, strict never",
    )
    lease_timeout_s: float = setting(
        600.0, "seconds until an unacknowledged batch goes to another trainer"
    )
    send_timeout_s: float = setting(60.0, "seconds that a response may take to go out")
    delivery: str = setting(
        "at_least_once",
        "at_least_once, or at_most_once: a batch is gone when it is handed out",
        choices=("at_least_once", "at_most_once"),
    )
    max_queue_groups: int = setting(
        1_000_000,
        "groups held before pushes get 503 (0: no limit); those in quarantine count, and go first",
    )
    max_queue_bytes: int = setting(
        16 << 30, "bytes held before pushes get 503 (0: no limit), likewise"
    )
    quarantine_bytes: int = setting(256 << 20, "bytes kept in quarantine; the oldest go first")
    max_quarantine_groups: int = setting(100_000, "groups kept in quarantine; the oldest go first")
    buffer_expiry_s: float = setting(3600.0, "seconds that a group of an odd size waits for others")
    max_buffered_groups: int = setting(4096, "groups of odd sizes held for one environment")
    replay_ttl_s: float = setting(
        3600.0, "seconds that idempotency keys and ended leases are remembered"
    )
    max_replays: int = setting(
        250_000,
        "idempotency keys, and ended leases, remembered; beyond that the oldest are forgotten "
        "early",
    )
    env_expiry_s: float = setting(
        86_400.0,
        "seconds of silence after which an environment is forgotten, if nothing of it waits",
    )
    max_staleness: int | None = setting(
        None, "policy versions that a group may lie behind (default: no bound)"
    )
    stale_policy: str = setting(
        "quarantine",
        "too stale groups: quarantine, or last (only when nothing fresher fills)",
        choices=("quarantine", "last"),
    )
    min_rounding: str = setting(
        "floor", "minimum allocations in sequences: floor or ceil", choices=("floor", "ceil")
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "strict", ",".join(self._strict_rows()))
        defaults = {
            "reregister": "ignore" if self.is_strict("reregister") else "continue",
            "heartbeat_timeout_s": math.inf if self.is_strict("heartbeat_timeout_s") else 300.0,
        }
        for name, default in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        super().__post_init__()
        for name in _POSITIVE_SECONDS:
            if not getattr(self, name) > 0:
                raise SettingError(f"{self.setting_label(name)} must be more than 0 seconds")

    def is_strict(self, *rows: str) -> bool:
        """Return whether all of these rules follow the original server's behaviour."""
        return set(rows) <= set(self.strict.split(","))

    def _strict_rows(self) -> list[str]:
        """Return the rules that ``strict`` names, in the order of ``STRICT_ROWS``; "yes" means all
        of them and "no" none."""
        words = str(self.strict).lower()
        if words in (*FALSE_WORDS, "none"):
            return []
        if words in (*TRUE_WORDS, "all"):
            return list(STRICT_ROWS)
        chosen = {name.strip().replace("-", "_") for name in words.split(",")}
        if unknown := sorted(chosen.difference(STRICT_ROWS)):
            raise SettingError(
                f"{self.setting_label('strict')} has no row {unknown[0]!r}; give all, none or "
                f"some of "
                f"{', '.join(STRICT_ROWS)}"
            )
        return [row for row in STRICT_ROWS if row in chosen]


def invalid(
    loc: list[str | int], message: str, kind: str = "value_error", given: Any = None
) -> Refusal:
    """Return a Refusal with status 422 in the original server's format: ``{"detail": [{"type",
    "loc", "msg", "input"}]}``."""
    return Refusal(422, [{"type": kind, "loc": loc, "msg": message, "input": given}])
