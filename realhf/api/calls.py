"""All requests and answers between the processes of a run, including leases and arrivals of
streamed samples (docs/reference/dataflow.md 6, 9).

The master calls workers (``transport/rpc``); rollout workers and the trainer call the master, and
rollout workers call generation workers (``transport/service``). All processes of a run have the
same version, so the message types may change freely.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import Meta, field

from realhf.api.evaluation import EpisodeResult
from realhf.api.generation import HeldTensor, WeightsManifest
from realhf.base.messages import Call, Message

ENV_ERROR = "env_error"
"""Outcome of a failed attempt: the environment failed."""
ENGINE_ERROR = "engine_error"
"""Outcome of a failed attempt: generation failed."""
AGENT_ERROR = "agent_error"
"""Outcome of a failed attempt: the agent's code failed."""
TIMEOUT = "timeout"
"""Outcome of a failed attempt: the deadline passed."""
SAMPLE_REJECTED = "rejected"
"""Outcome of a failed attempt: the sample cannot be trained on."""


class RolloutLease(Message, frozen=True):
    """A sample to be played, which the master has admitted and assigned to one rollout worker.

    ``(id, attempt)`` is the idempotency key.
    """

    id: str
    """Id of the sample."""
    attempt: int
    """Number of the attempt at this sample."""
    order: int
    """Number of the admission."""
    version: int
    """Policy version at admission."""
    deadline_s: float
    """Seconds that the worker has."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Metadata of the source's item."""
    values: dict[str, list[int]] = field(default_factory=dict)
    """Integers of the source's item, by key."""


class EvaluationPart(Message, frozen=True):
    """A share of a held-out evaluation, which a rollout worker plays in addition to its samples.

    ``(evaluation, part, greedy)`` identifies the share. It consists of every ``parts``-th instance
    (see ``HeldOutOptions``), starting with ``part``.
    """

    evaluation: int
    """Number of the evaluation."""
    part: int
    """Number of the share, from 0."""
    parts: int
    """Number of shares."""
    greedy: bool
    """Whether to sample greedily instead of at the training temperature."""
    version: int
    """Policy version that samples all tokens."""
    engines: list[str]
    """Generation workers that keep the weights of that version."""
    split: str
    """Split of the tasks to play."""
    episodes_per_task: int
    """Number of episodes per task."""
    templates: int
    """Maximum number of templates."""
    deadline_s: float
    """Seconds that the worker has."""


PayloadRef = list[int]
"""Location of a payload: [segment, offset, bytes] in the payload log of the trainer's rank 0, or
[segment, offset, bytes, rank] in that of another rank."""


def payload_rank(ref: Sequence[int]) -> int:
    """Return the trainer rank whose payload log contains a payload."""
    return ref[3] if len(ref) > 3 else 0


ACCEPTED = "accepted"
"""Answer to an arrival: the sample will be trained on."""
DUPLICATE = "duplicate"
"""Answer to an arrival: this attempt was already accepted through the same receiver."""
REFUSED = "refused"
"""Answer to an arrival: another attempt counts, or none, or this one was accepted through another
receiver."""


class Arrival(Message, frozen=True):
    """A sample that was received and stored durably, or an unusable one (``error``)."""

    id: str
    """Id of the sample."""
    attempt: int
    """Number of the attempt that produced it."""
    producer: str
    """Rollout worker that sent it."""
    ref: PayloadRef = field(default_factory=list)
    """Location of the payload; empty if unusable."""
    meta: list[bytes] = field(default_factory=list)
    """Encoded sample without tensors; empty if unusable."""
    error: str = ""
    """Why the sample is unusable; "" if it is not."""


def check_answers(arrivals: Sequence[Arrival], answers: Sequence[str]) -> list[str]:
    """Return the answers. Raises ValueError unless there is one valid answer for each arrival."""
    if len(answers) != len(arrivals) or not set(answers) <= {ACCEPTED, DUPLICATE, REFUSED}:
        raise ValueError(f"{len(arrivals)} arrivals were answered with {list(answers)!r:.200}")
    return list(answers)


Endpoints = dict[str, list[str]]
"""Kind of service -> addresses."""


class Nothing(Message, frozen=True):
    """A request or an answer without content."""


# ---- master to model worker: the graph


class InitializeRequest(Message, frozen=True):
    """Request to load models."""

    world: str = ""
    """Rendezvous address of the workers that compute together; "" if none do."""
    token: str = ""
    """Token by which they authenticate each other there; "" if none do."""


class OpenWorldRequest(Message, frozen=True):
    """Request to serve the rendezvous of the workers that compute together."""

    several_hosts: bool = False
    """Whether some of them are on other hosts."""


class OpenWorldAnswer(Message, frozen=True):
    """Rendezvous of the workers that compute together."""

    address: str
    """host:port."""


class GroupPart(Message, frozen=True):
    """One rank's part in a group call, in which all ranks of a role get the whole batch."""

    no: Annotated[int, Meta(ge=1)]
    """Number of the group call, the same for all ranks."""
    rank: Annotated[int, Meta(ge=0)]
    """Rank of the worker."""
    size: Annotated[int, Meta(ge=2)]
    """Number of ranks."""


class GatherRequest(Message, frozen=True):
    """Request to gather the sharded weights of ``role`` for work that ranks do alone next."""

    role: str
    """Model role."""
    group: GroupPart
    """Part of this worker in the group."""
    everywhere: bool
    """Whether every rank needs the weights, or only rank 0."""


class AbortRequest(Message, frozen=True):
    """Request to abort what this worker computes together with others."""

    reason: str
    """Text for the error of the aborted computation."""


class FetchPart(Message, frozen=True):
    """Inputs that another worker stores."""

    endpoint: str
    """Address of that worker."""
    ids: list[str]
    """Ids of the samples."""
    keys: list[str]
    """Keys to fetch."""


class CallRequest(Message, frozen=True):
    """Request to run the model function call ``mfc`` on samples.

    Inputs come from the worker's own store and from ``fetches``.
    """

    mfc: str
    """Name of the model function call."""
    role: str
    """Model role that it runs on."""
    ids: list[str]
    """Ids of the samples."""
    keys: list[str]
    """Input keys."""
    metadata: dict[str, list[Any]]
    """Metadata columns of the samples."""
    fetches: list[FetchPart]
    """Inputs that other workers store."""
    step: int
    """Train step."""
    seed: int
    """Seed of the call."""
    endpoints: Endpoints
    """Addresses of the services that the call may use."""
    group: GroupPart | None = None
    """Part in a group call with other ranks, of which only rank 0 stores the outputs; None if the
    worker computes alone."""


class CallAnswer(Message, frozen=True):
    """Result of a model function call."""

    meta: list[bytes] | None
    """Frames of the outputs without tensors; None if the call has no outputs."""
    stats: dict[str, Any]
    """Statistics of the call."""
    compute_s: float
    """Seconds of computation."""
    fetch_s: float
    """Seconds of fetching inputs."""


class LoadRequest(Message, frozen=True):
    """Request to store the integers that the source drew, and what the dataset provides for
    ``metadata``."""

    ids: list[str]
    """Ids of the samples."""
    values: dict[str, list[list[int]]]
    """Integers by key, one row per id."""
    metadata: dict[str, list[Any]]
    """Metadata columns of the samples."""


class LoadAnswer(Message, frozen=True):
    """Result of a ``LoadRequest``."""

    meta: list[bytes] | None
    """Frames of what the dataset stored, without tensors; None without a dataset."""


class ClearRequest(Message, frozen=True):
    """Request to free everything stored for these samples."""

    ids: list[str]
    """Ids of the samples."""


class HeldAnswer(Message, frozen=True):
    """Contents of a model worker's store, and the worker's roles."""

    nbytes: int
    """Bytes of the stored tensors."""
    samples: int
    """Number of stored samples."""
    roles: list[str]
    """Model roles of the worker."""


OPEN_WORLD = Call("open_world", OpenWorldRequest, OpenWorldAnswer)
INITIALIZE = Call("initialize", InitializeRequest, Nothing)
GATHER = Call("gather", GatherRequest, Nothing)
ABORT = Call("abort", AbortRequest, Nothing)
CALL = Call("call", CallRequest, CallAnswer)
LOAD = Call("load", LoadRequest, LoadAnswer)
CLEAR = Call("clear", ClearRequest, Nothing)
HELD = Call("stats", Nothing, HeldAnswer)
"""Report what the worker's store holds."""


# ---- master to model worker: outside of the graph


class Probe(Message, frozen=True):
    """What an engine sampled after a fixed prefix."""

    token_ids: list[int]
    """The whole sequence, prefix included."""
    logprobs: list[float]
    """Log-probabilities of the last tokens."""


class ProgressAnswer(Message, frozen=True):
    """Progress of the call that runs, or ran last."""

    over: int
    """Number of finished episodes."""
    wanted: int
    """Number of episodes in total; 0 if the call plays none."""


class EvaluateRequest(Message, frozen=True):
    """Request to evaluate a role by an interface."""

    role: str
    """Model role to evaluate."""
    interface: str
    """Registered name of the interface."""
    interface_args: dict[str, Any]
    """Arguments of the interface's constructor."""
    args: dict[str, Any]
    """Arguments of the evaluation."""
    step: int
    """Train step."""
    seed: int
    """Seed of the evaluation."""
    endpoints: Endpoints
    """Addresses of the services that the interface may use."""


class EvaluateAnswer(Message, frozen=True):
    """Statistics that the interface reports."""

    stats: dict[str, Any]


class CheckpointRequest(Message, frozen=True):
    """Request to write or read the state of roles and interfaces."""

    roles: dict[str, str]
    """Folder of each role, shared by all ranks of the role."""
    folder: str
    """Folder of the state of all interfaces."""


class SavedFile(Message, frozen=True, array_like=True):
    """A file that a worker wrote and flushed to the disk."""

    path: str
    size: int
    """Size in bytes."""
    sha256: str
    """SHA-256 in hexadecimal."""


class SaveAnswer(Message, frozen=True):
    """All files that this worker wrote."""

    files: list[SavedFile]


class ExportRequest(Message, frozen=True):
    """Request to write a role in Hugging Face format into ``folder``."""

    role: str
    """Model role."""
    folder: str


class KeepExportRequest(Message, frozen=True):
    """Request to replace ``target`` by the exported ``folder``."""

    folder: str
    """Exported folder."""
    target: str
    """Folder to replace."""
    held_out: str
    """JSON text that is added to the folder as a file."""


class PublishWeightsRequest(Message, frozen=True):
    """Request to make the weights of ``role`` available to generation."""

    role: str
    """Model role."""
    version: int
    """Policy version that the weights must have."""
    trial: int = 0
    """Step of a self-test: ``TRIAL_CHANGE`` changes the weights before publishing them,
    ``TRIAL_RESTORE`` changes them back; 0 outside of a self-test."""
    probes: list[Probe] = field(default_factory=list)
    """Sequences to score in ``TRIAL_RESTORE``."""


class PublishWeightsAnswer(Message, frozen=True):
    """Published weights, and results of ``TRIAL_RESTORE``.

    ``changed`` and ``restored`` contain, for each probe, the log-probabilities of the sampled
    tokens by the trainer's own forward pass. They are empty if the change did not reach the
    trainer's model, for example because ``weights`` returns copies.
    """

    manifest: WeightsManifest
    """How to get the weights."""
    changed: list[list[float]] = field(default_factory=list)
    """Log-probabilities under the changed weights."""
    restored: list[list[float]] = field(default_factory=list)
    """Log-probabilities under the restored weights."""


TRIAL_CHANGE = 1
"""First step of a self-test of weight updates: change the weights."""
TRIAL_RESTORE = 2
"""Second step of a self-test of weight updates: restore the weights."""
PROGRESS = Call("progress", Nothing, ProgressAnswer)
"""Report the progress of the call that runs, or ran last."""
EVALUATE = Call("evaluate", EvaluateRequest, EvaluateAnswer)
SAVE = Call("save", CheckpointRequest, SaveAnswer)
RESTORE = Call("restore", CheckpointRequest, Nothing)
COMMITTED = Call("committed", Nothing, Nothing)
"""Notify the interfaces that the checkpoint of the last ``SAVE`` is complete."""
EXPORT = Call("export", ExportRequest, Nothing)
KEEP_EXPORT = Call("keep_export", KeepExportRequest, Nothing)
PUBLISH_WEIGHTS = Call("publish_weights", PublishWeightsRequest, PublishWeightsAnswer)


# ---- master to the trainer: the stream of samples


class OpenStreamRequest(Message, frozen=True):
    """Request to listen for samples."""

    control: str
    """Address of the master's service."""
    credits: int
    """Maximum number of samples of one producer in flight."""
    keys: list[str]
    """Keys that a sample must have."""
    group_size: int
    """Number of rollouts per sample."""
    max_sequences: int
    """Maximum number of sequences in a sample."""
    max_tokens: int
    """Maximum number of tokens in a sample."""
    rank: int = 0
    """Number of this receiver among those of the trainer."""


class OpenStreamAnswer(Message, frozen=True):
    """Address to which producers connect."""

    endpoint: str
    """Address."""


class RestoreStreamRequest(Message, frozen=True):
    """Request to load logged samples into the store."""

    items: list[tuple[str, int, PayloadRef]]
    """(id, attempt, location of the payload)."""


class RestoreStreamAnswer(Message, frozen=True):
    """One arrival per item, in the same order."""

    arrivals: list[Arrival]


class PruneStreamRequest(Message, frozen=True):
    """Request to delete payloads that are no longer needed."""

    alive: list[PayloadRef]
    """Payloads that a recovery may need."""
    newest: PayloadRef | None
    """Last payload of this receiver that was accepted."""
    ranks: int = 1
    """Number of receivers."""


STREAM_OPEN = Call("stream_open", OpenStreamRequest, OpenStreamAnswer)
STREAM_RESTORE = Call("stream_restore", RestoreStreamRequest, RestoreStreamAnswer)
STREAM_PRUNE = Call("stream_prune", PruneStreamRequest, Nothing)
STREAM_CHECK = Call("stream_check", Nothing, Nothing)
"""Fail if the worker cannot receive samples any more."""


# ---- master to rollout and generation workers


class PlayRequest(Message, frozen=True):
    """Request to start playing samples."""

    control: str
    """Address of the service that allocates samples."""
    streams: list[str]
    """Addresses of the receivers; each sample is sent to one of them."""
    env: list[str]
    """Addresses of the environments."""


class UpdateWeightsRequest(Message, frozen=True):
    """Request to load new weights between two tokens."""

    manifest: WeightsManifest
    """The new weights and how to get them."""


class ChangedTensor(Message, frozen=True, array_like=True):
    """A tensor that an engine changed or lost without an update."""

    name: str
    """Name in the manifest."""
    before: str
    """Digest after the previous update."""
    now: str
    """Digest before this update."""


class UpdateWeightsAnswer(Message, frozen=True):
    """Durations and verification of a weight update."""

    weight_stage_ms: float
    """Duration of the transfer."""
    weight_pause_ms: float
    """Time for which generation was paused."""
    weight_digest_ms: float = 0.0
    """Time for computing digests."""
    held: dict[str, HeldTensor] | None = None
    """What the engine holds now, by the names of the manifest; None if it cannot report it."""
    changed: list[ChangedTensor] = field(default_factory=list)
    """Tensors that differed before this update from their state after the previous one."""


class PinAnswer(Message, frozen=True):
    """Result of pinning the weights in use."""

    version: int
    """Version of the weights in use."""
    kept: bool
    """Whether requests for this version are answered until ``unpin``, even after updates; if false,
    only until the next update."""


class StatusAnswer(Message, frozen=True):
    """Status of a generation worker."""

    at_s: float
    """Time of the status by the worker's clock."""
    busy_s: float
    """Seconds of work since its start."""
    generated_tokens: float
    """Tokens generated since its start."""
    running: float
    """Number of running requests."""
    waiting: float
    """Number of waiting requests."""


class ProbeRequest(Message, frozen=True):
    """Request to sample after the fixed prefix."""

    last: bool
    """Whether this is the last probe, so that its cache need not be kept."""


PLAY = Call("play", PlayRequest, Nothing)
UPDATE_WEIGHTS = Call("update_weights", UpdateWeightsRequest, UpdateWeightsAnswer)
PROBE_WEIGHTS = Call("probe_weights", ProbeRequest, Probe)
PIN_WEIGHTS = Call("pin_weights", Nothing, PinAnswer)
"""Keep the weights in use for an evaluation."""
UNPIN_WEIGHTS = Call("unpin_weights", Nothing, Nothing)
"""Release the weights that ``PIN_WEIGHTS`` kept."""
STATUS = Call("status", Nothing, StatusAnswer)


# ---- rollout workers and the trainer to the master


class AllocateRequest(Message, frozen=True):
    """Request for samples to play."""

    count: int
    """Maximum number of samples."""
    hold_s: float
    """Seconds for which the master may delay its answer."""


class AllocateAnswer(Message, frozen=True):
    """Samples and evaluation shares to play."""

    leases: list[RolloutLease] | None
    """None: no sample yet, ask again; []: stop, unless ``evaluation`` has shares."""
    evaluation: list[EvaluationPart] = field(default_factory=list)
    """Shares of an evaluation to play."""


class RejectedRequest(Message, frozen=True):
    """Report that an attempt failed."""

    id: str
    """Id of the sample."""
    attempt: int
    """Number of the failed attempt."""
    outcome: str
    """Kind of failure, such as ``ENV_ERROR``."""
    message: str
    """Description of the failure."""


class EvaluatedRequest(Message, frozen=True):
    """Report that the share ``(evaluation, part, greedy)`` was played, or failed."""

    evaluation: int
    part: int
    greedy: bool
    results: list[EpisodeResult]
    """Results of the episodes of the share."""
    error: str = ""
    """Why it failed; "" if it was played."""


class ArrivedRequest(Message, frozen=True):
    """Report that the trainer has received samples and stored them durably."""

    arrivals: list[Arrival]
    """Samples that arrived."""


class ArrivedAnswer(Message, frozen=True):
    """Decisions about arrivals."""

    answers: list[str]
    """``ACCEPTED``, ``DUPLICATE`` or ``REFUSED`` for each arrival."""


ALLOCATE = Call("allocate", AllocateRequest, AllocateAnswer)
REJECTED = Call("rejected", RejectedRequest, Nothing)
EVALUATED = Call("evaluated", EvaluatedRequest, Nothing)
STOPPED = Call("stopped", Nothing, Nothing)
"""Report that the rollout worker has sent all finished samples and closed its sessions."""
ARRIVED = Call("arrived", ArrivedRequest, ArrivedAnswer)


# ---- rollout workers to generation workers


class GenerateRequest(Message, frozen=True, array_like=True):
    """A client's ``GenRequest``, with slots numbered from 0 by the client."""

    slot: int
    """Number of the slot at the client."""
    token_ids: list[Annotated[int, Meta(ge=0)]]
    sampled: int
    seed: int | None
    min_version: int
    pinned_version: int = -1
    greedy: bool = False


class GenerateAnswer(Message, frozen=True, array_like=True):
    """A ``GenOutput``."""

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str


class FreeRequest(Message, frozen=True, array_like=True):
    """Report that the episodes in these slots have ended."""

    slots: list[int]


GENERATE = Call("generate", GenerateRequest, GenerateAnswer)
FREE = Call("free", FreeRequest, Nothing)
