"""Defines every request and answer between the processes of a run, leases and arrivals of streamed
samples among them (docs/reference/dataflow.md 6, 9).

The master calls workers (``transport/rpc``); rollout workers and the trainer ask the master, and
rollout workers ask generation workers (``transport/service``). All processes of a run are of one
version, so the forms may change freely.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import Meta, field

from realhf.api.evaluation import EpisodeResult
from realhf.api.generation import HeldTensor, WeightsManifest
from realhf.base.messages import Call, Message

ENV_ERROR = "env_error"
ENGINE_ERROR = "engine_error"
AGENT_ERROR = "agent_error"
TIMEOUT = "timeout"
CANCELLED = "cancelled"
SAMPLE_REJECTED = "rejected"


class RolloutLease(Message, frozen=True):
    """Describes a sample to be played, which the master has admitted and given to one rollout
    worker. ``(id, attempt)`` is the idempotency key; ``order`` counts admissions; ``version`` is
    the policy version at admission. The worker has ``deadline_s`` seconds. ``metadata`` and
    ``values`` are the source's item."""

    id: str
    attempt: int
    order: int
    version: int
    deadline_s: float
    metadata: dict[str, Any] = field(default_factory=dict)
    values: dict[str, list[int]] = field(default_factory=dict)


class EvaluationPart(Message, frozen=True):
    """Describes a share of a held-out evaluation, which a rollout worker plays beside its samples:
    of all instances (see ``HeldOutOptions``) every ``parts``-th from ``part`` on, ``greedy`` or at
    the training temperature. All tokens come from weights of ``version``, which the generation
    workers ``engines`` keep for it. ``(evaluation, part, greedy)`` names the share; the worker has
    ``deadline_s`` seconds."""

    evaluation: int
    part: int
    parts: int
    greedy: bool
    version: int
    engines: list[str]
    split: str
    episodes_per_task: int
    templates: int
    deadline_s: float


PayloadRef = list[int]
"""Where a payload lies: [segment, offset, bytes] in the payload log of the trainer's first rank,
and [segment, offset, bytes, rank] in that of another one."""


def rank_of(ref: Sequence[int]) -> int:
    """Return the rank of the trainer whose payload log holds a payload."""
    return ref[3] if len(ref) > 3 else 0


ACCEPTED = "accepted"
DUPLICATE = "duplicate"
REFUSED = "refused"
"""Answers to an arrival. ``accepted``: it will be trained; ``duplicate``: this attempt was accepted
before, through the same receiver; ``refused``: another attempt counts, or none, or this one was
accepted through another receiver."""


class Arrival(Message, frozen=True):
    """Describes a sample that has arrived and is durable. ``ref`` says where it lies, ``meta`` is
    the encoded metadata-only sample. With ``error`` set the sample is unusable, and ``ref`` and
    ``meta`` are empty."""

    id: str
    attempt: int
    producer: str
    ref: PayloadRef = field(default_factory=list)
    meta: list[bytes] = field(default_factory=list)
    error: str = ""


def checked_answers(arrivals: Sequence[Arrival], answers: Sequence[str]) -> list[str]:
    """Return the answers if there is a known one for every arrival. Raises ValueError otherwise."""
    if len(answers) != len(arrivals) or not set(answers) <= {ACCEPTED, DUPLICATE, REFUSED}:
        raise ValueError(f"{len(arrivals)} arrivals were answered with {list(answers)!r:.200}")
    return list(answers)


Endpoints = dict[str, list[str]]
"""Kind of service -> addresses."""


class Nothing(Message, frozen=True):
    """A request or an answer without content."""


# ---- master to model worker: the graph


class InitializeRequest(Message, frozen=True):
    """Load models. ``world``: where the workers that compute together meet, ``token``: how they
    know each other there; empty where none do."""

    world: str = ""
    token: str = ""


class OpenWorldRequest(Message, frozen=True):
    """Serve the place where the workers that compute together meet. ``several_hosts``: some are on
    other hosts."""

    several_hosts: bool = False


class OpenWorldAnswer(Message, frozen=True):
    """Where the workers that compute together meet, host:port."""

    address: str


class GroupPart(Message, frozen=True):
    """One rank's part in a group call: all ranks of a role get the whole batch under the same
    number ``no``."""

    no: Annotated[int, Meta(ge=1)]
    rank: Annotated[int, Meta(ge=0)]
    size: Annotated[int, Meta(ge=2)]


class GatherRequest(Message, frozen=True):
    """Bring the whole weights of ``role`` together, for what ranks do alone next: on each of them,
    or on the first."""

    role: str
    group: GroupPart
    everywhere: bool


class AbortRequest(Message, frozen=True):
    """Break off what this worker computes together with others."""

    reason: str


class FetchPart(Message, frozen=True):
    """Inputs that lie on another worker."""

    endpoint: str
    ids: list[str]
    keys: list[str]


class CallRequest(Message, frozen=True):
    """Run the model function call ``mfc`` on these samples, with inputs from the own store and from
    ``fetches``; in a group call together with other ranks, of which the first alone stores the
    outputs."""

    mfc: str
    role: str
    ids: list[str]
    keys: list[str]
    metadata: dict[str, list[Any]]
    fetches: list[FetchPart]
    step: int
    seed: int
    endpoints: Endpoints
    group: GroupPart | None = None


class CallAnswer(Message, frozen=True):
    """``meta``: frames of the outputs without their tensors, None where the call has none. Times in
    seconds."""

    meta: list[bytes] | None
    stats: dict[str, Any]
    compute_s: float
    fetch_s: float


class LoadRequest(Message, frozen=True):
    """Store the integers that the source drew (key -> one row per id), and what the dataset has for
    ``metadata``."""

    ids: list[str]
    values: dict[str, list[list[int]]]
    metadata: dict[str, list[Any]]


class LoadAnswer(Message, frozen=True):
    """``meta``: frames of what the dataset stored, without tensors; None without a dataset."""

    meta: list[bytes] | None


class ClearRequest(Message, frozen=True):
    """Free what is held of these samples."""

    ids: list[str]


class HeldAnswer(Message, frozen=True):
    """What a model worker's store holds, and the roles that it has."""

    nbytes: int
    samples: int
    roles: list[str]


OPEN_WORLD = Call("open_world", OpenWorldRequest, OpenWorldAnswer)
INITIALIZE = Call("initialize", InitializeRequest, Nothing)
GATHER = Call("gather", GatherRequest, Nothing)
ABORT = Call("abort", AbortRequest, Nothing)
CALL = Call("call", CallRequest, CallAnswer)
LOAD = Call("load", LoadRequest, LoadAnswer)
CLEAR = Call("clear", ClearRequest, Nothing)
HELD = Call("stats", Nothing, HeldAnswer)


# ---- master to model worker: beside the graph


class Probe(Message, frozen=True):
    """What an engine sampled after a fixed prefix: the whole sequence, and the log-probabilities of
    its last tokens."""

    token_ids: list[int]
    logprobs: list[float]


class ProgressAnswer(Message, frozen=True):
    """How many episodes of the call that runs, or ran last, are ``over``, of how many; 0 of 0 where
    it plays none."""

    over: int
    wanted: int


class EvaluateRequest(Message, frozen=True):
    """Evaluate a role by an interface."""

    role: str
    interface: str
    interface_args: dict[str, Any]
    args: dict[str, Any]
    step: int
    seed: int
    endpoints: Endpoints


class EvaluateAnswer(Message, frozen=True):
    """What the interface reports."""

    stats: dict[str, Any]


class CheckpointRequest(Message, frozen=True):
    """Write or read the state of roles, each in its own folder (role -> folder), and of all
    interfaces in ``folder``. A role's folder is that of all its ranks where several workers train
    it together."""

    roles: dict[str, str]
    folder: str


class SavedFile(Message, frozen=True, array_like=True):
    """A file that a worker wrote and synced: its path, its size in bytes, and its SHA-256 in
    hexadecimal."""

    path: str
    size: int
    sha256: str


class SaveAnswer(Message, frozen=True):
    """Every file that this worker wrote."""

    files: list[SavedFile]


class ExportRequest(Message, frozen=True):
    """Write a role in Hugging Face format into ``folder``."""

    role: str
    folder: str


class KeepExportRequest(Message, frozen=True):
    """Put the exported ``folder`` in the place of ``target``, with ``held_out`` (JSON text) as a
    file in it."""

    folder: str
    target: str
    held_out: str


class PublishWeightsRequest(Message, frozen=True):
    """Make the weights of ``role`` available; they must be of this policy version. In a self-test
    (``trial``) they are changed before, by ``TRIAL_CHANGE``, and changed back by
    ``TRIAL_RESTORE``."""

    role: str
    version: int
    trial: int = 0
    probes: list[Probe] = field(default_factory=list)


class PublishWeightsAnswer(Message, frozen=True):
    """How to get the weights. ``changed`` and ``restored``, of ``TRIAL_RESTORE``: for each probe
    the log-probabilities of what was sampled, by the trainer's own forward pass under the changed
    and under the restored weights; empty where the change did not reach the trainer's model, as
    where ``weights`` are copies."""

    manifest: WeightsManifest
    changed: list[list[float]] = field(default_factory=list)
    restored: list[list[float]] = field(default_factory=list)


TRIAL_CHANGE = 1
TRIAL_RESTORE = 2
"""Steps of a self-test of weight updates."""
PROGRESS = Call("progress", Nothing, ProgressAnswer)
EVALUATE = Call("evaluate", EvaluateRequest, EvaluateAnswer)
SAVE = Call("save", CheckpointRequest, SaveAnswer)
RESTORE = Call("restore", CheckpointRequest, Nothing)
COMMITTED = Call("committed", Nothing, Nothing)
EXPORT = Call("export", ExportRequest, Nothing)
KEEP_EXPORT = Call("keep_export", KeepExportRequest, Nothing)
PUBLISH_WEIGHTS = Call("publish_weights", PublishWeightsRequest, PublishWeightsAnswer)


# ---- master to the model worker that trains: the stream of samples


class OpenStreamRequest(Message, frozen=True):
    """Listen for samples. ``control``: the master's service; ``credits``: samples of one producer
    on their way; ``rank``: the number of this receiver among those of the trainer; the rest bounds
    what a sample may be."""

    control: str
    credits: int
    keys: list[str]
    group_size: int
    max_sequences: int
    max_tokens: int
    rank: int = 0


class OpenStreamAnswer(Message, frozen=True):
    """Where producers connect."""

    endpoint: str


class RestoreStreamRequest(Message, frozen=True):
    """Bring logged samples, (id, attempt, ref), back into the store."""

    items: list[tuple[str, int, PayloadRef]]


class RestoreStreamAnswer(Message, frozen=True):
    """One arrival per item, in order."""

    arrivals: list[Arrival]


class PruneStreamRequest(Message, frozen=True):
    """``alive``: payloads that a recovery may need; ``newest``: the last one of this receiver that
    was accepted; ``ranks``: how many receivers there are."""

    alive: list[PayloadRef]
    newest: PayloadRef | None
    ranks: int = 1


STREAM_OPEN = Call("stream_open", OpenStreamRequest, OpenStreamAnswer)
STREAM_RESTORE = Call("stream_restore", RestoreStreamRequest, RestoreStreamAnswer)
STREAM_PRUNE = Call("stream_prune", PruneStreamRequest, Nothing)
STREAM_CHECK = Call("stream_check", Nothing, Nothing)


# ---- master to rollout and generation workers


class PlayRequest(Message, frozen=True):
    """Begin to take samples from ``control``, play them in the environments ``env``, send each of
    them to one of the receivers ``streams``."""

    control: str
    streams: list[str]
    env: list[str]


class UpdateWeightsRequest(Message, frozen=True):
    """Load this version between two tokens."""

    manifest: WeightsManifest


class ChangedTensor(Message, frozen=True, array_like=True):
    """A tensor that an engine changed, or lost, without an update; digests."""

    name: str
    before: str
    now: str


class UpdateWeightsAnswer(Message, frozen=True):
    """How long the weights were on their way, how long generation stood still, and how long digests
    took. ``held``: what the engine holds now, by the manifest's names; None: it cannot tell.
    ``changed``: tensors that were not, before this update, what they were after the one before."""

    weight_stage_ms: float
    weight_pause_ms: float
    weight_digest_ms: float = 0.0
    held: dict[str, HeldTensor] | None = None
    changed: list[ChangedTensor] = field(default_factory=list)


class PinAnswer(Message, frozen=True):
    """``version``: of the weights in use. ``kept``: requests for this version are answered until
    ``unpin``, whatever is loaded meanwhile; else only until the next weights are."""

    version: int
    kept: bool


class StatusAnswer(Message, frozen=True):
    """A generation worker at the moment ``at_s`` of its clock: ``busy_s`` and ``generated_tokens``
    since its start, requests ``running`` and ``waiting`` now."""

    at_s: float
    busy_s: float
    generated_tokens: float
    running: float
    waiting: float


class ProbeRequest(Message, frozen=True):
    """Sample after the fixed prefix. ``last``: nothing need be cached for another one."""

    last: bool


PLAY = Call("play", PlayRequest, Nothing)
UPDATE_WEIGHTS = Call("update_weights", UpdateWeightsRequest, UpdateWeightsAnswer)
PROBE_WEIGHTS = Call("probe_weights", ProbeRequest, Probe)
PIN_WEIGHTS = Call("pin_weights", Nothing, PinAnswer)
UNPIN_WEIGHTS = Call("unpin_weights", Nothing, Nothing)
STATUS = Call("status", Nothing, StatusAnswer)


# ---- rollout workers and the trainer to the master


class AllocateRequest(Message, frozen=True):
    """Up to ``count`` samples to play; the master may hold the request for ``hold_s`` seconds."""

    count: int
    hold_s: float


class AllocateAnswer(Message, frozen=True):
    """``leases``: None: there is none yet, ask again; []: stop, unless there are shares of an
    ``evaluation``."""

    leases: list[RolloutLease] | None
    evaluation: list[EvaluationPart] = field(default_factory=list)


class RejectedRequest(Message, frozen=True):
    """An attempt failed."""

    id: str
    attempt: int
    outcome: str
    message: str


class EvaluatedRequest(Message, frozen=True):
    """The share ``(evaluation, part, greedy)`` was played; with ``error`` set it was not."""

    evaluation: int
    part: int
    greedy: bool
    results: list[EpisodeResult]
    error: str = ""


class ArrivedRequest(Message, frozen=True):
    """These samples have arrived at the trainer and are durable."""

    arrivals: list[Arrival]


class ArrivedAnswer(Message, frozen=True):
    """``ACCEPTED``, ``DUPLICATE`` or ``REFUSED``, one per arrival."""

    answers: list[str]


ALLOCATE = Call("allocate", AllocateRequest, AllocateAnswer)
REJECTED = Call("rejected", RejectedRequest, Nothing)
EVALUATED = Call("evaluated", EvaluatedRequest, Nothing)
STOPPED = Call("stopped", Nothing, Nothing)
ARRIVED = Call("arrived", ArrivedRequest, ArrivedAnswer)


# ---- rollout workers to generation workers


class GenerateRequest(Message, frozen=True, array_like=True):
    """``GenRequest`` of a client, which numbers its slots from 0."""

    slot: int
    token_ids: list[Annotated[int, Meta(ge=0)]]
    sampled: int
    seed: int | None
    min_version: int
    pinned_version: int = -1
    greedy: bool = False


class GenerateAnswer(Message, frozen=True, array_like=True):
    """``GenOutput``."""

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str


class FreeRequest(Message, frozen=True, array_like=True):
    """The episodes in these slots are over."""

    slots: list[int]


GENERATE = Call("generate", GenerateRequest, GenerateAnswer)
FREE = Call("free", FreeRequest, Nothing)
