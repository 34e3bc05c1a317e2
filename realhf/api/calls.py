"""Message types of all requests and answers between the processes of a run, including the leases
and arrivals of streamed samples (docs/reference/dataflow.md 6, 9).

The master calls workers (``transport/rpc``); rollout workers and the trainer call the master, and
rollout workers call generation workers (``transport/service``). All processes of a run have the
same version, so the message types may change freely.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import Meta, field

from realhf.api.evaluation import EpisodeResult
from realhf.api.generation import GroupSeat, HeldTensor, WeightsManifest
from realhf.base.messages import Call, Message

ENV_ERROR = "env_error"
"""Outcome of a failed rollout attempt: the environment failed."""
ENGINE_ERROR = "engine_error"
"""Outcome of a failed rollout attempt: generation failed."""
AGENT_ERROR = "agent_error"
"""Outcome of a failed rollout attempt: the agent's code failed."""
TIMEOUT = "timeout"
"""Outcome of a failed rollout attempt: the deadline passed."""
SAMPLE_REJECTED = "rejected"
"""Outcome of a failed rollout attempt: the sample cannot be trained on."""


class RolloutLease(Message, frozen=True):
    """A sample whose rollouts are to be played, which the master has admitted and assigned to one
    rollout worker.

    ``(id, attempt)`` is the idempotency key.
    """

    id: str
    """Id of the sample."""
    attempt: int
    """Number of this attempt at playing the sample."""
    order: int
    """Position of the sample in the order of admission."""
    version: int
    """Policy version at admission."""
    deadline_s: float
    """Seconds that the worker has to finish."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Metadata of the ``SourceItem``."""
    values: dict[str, list[int]] = field(default_factory=dict)
    """Integer sequences of the ``SourceItem``, by key."""


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
    """Seconds that the worker has to finish."""


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
"""Answer to an arrival: the sample is not wanted any more, another attempt was accepted, or this
attempt was accepted through another receiver."""


class Arrival(Message, frozen=True):
    """A sample that a trainer rank has received and stored durably, or an unusable one
    (``error``)."""

    id: str
    """Id of the sample."""
    attempt: int
    """Number of the attempt that produced it."""
    producer: str
    """Rollout worker that sent it."""
    ref: PayloadRef = field(default_factory=list)
    """Location of the payload; empty if the sample is unusable."""
    meta: list[bytes] = field(default_factory=list)
    """Encoded sample without tensors; empty if the sample is unusable."""
    error: str = ""
    """Why the sample is unusable; "" if it is usable."""


def check_answers(arrivals: Sequence[Arrival], answers: Sequence[str]) -> list[str]:
    """Return ``answers`` as a list. Raises ValueError unless there is one valid answer for each
    arrival."""
    if len(answers) != len(arrivals) or not set(answers) <= {ACCEPTED, DUPLICATE, REFUSED}:
        raise ValueError(f"{len(arrivals)} arrivals were answered with {list(answers)!r:.200}")
    return list(answers)


Endpoints = dict[str, list[str]]
"""Addresses of services by kind."""


class Nothing(Message, frozen=True):
    """A request or an answer without fields."""


# ---- master to model worker: the graph


class InitializeRequest(Message, frozen=True):
    """Request to a model worker to load its models."""

    world: str = ""
    """Rendezvous address of the workers that compute together; "" if each computes alone."""
    token: str = ""
    """Token with which these workers authenticate each other at the rendezvous; "" if each computes
    alone."""


class OpenWorldRequest(Message, frozen=True):
    """Request to a model worker to serve the rendezvous of the workers that compute together."""

    several_hosts: bool = False
    """Whether some of these workers are on other hosts."""


class OpenWorldAnswer(Message, frozen=True):
    """Address of the rendezvous that the worker serves."""

    address: str
    """host:port."""


class GroupPart(Message, frozen=True):
    """Identity of one rank in a group call, which all ranks of a role execute together on the same
    whole batch."""

    no: Annotated[int, Meta(ge=1)]
    """Number of the group call, the same for all ranks."""
    rank: Annotated[int, Meta(ge=0)]
    """Rank of the worker."""
    size: Annotated[int, Meta(ge=2)]
    """Number of ranks."""


class GatherRequest(Message, frozen=True):
    """Request to gather the sharded weights of ``role``, for work that ranks do separately next."""

    role: str
    """Model role."""
    group: GroupPart
    """This worker's rank in the group call."""
    everywhere: bool
    """Whether every rank needs the weights, or only rank 0."""


class AbortRequest(Message, frozen=True):
    """Request to abort the computation in which this worker takes part with other ranks."""

    reason: str
    """Reason, for the error message of the aborted computation."""


class FetchPart(Message, frozen=True):
    """Inputs of a call that have to be fetched from the worker that holds them."""

    endpoint: str
    """Address of that worker."""
    ids: list[str]
    """Ids of the samples."""
    keys: list[str]
    """Keys to fetch."""


class CallRequest(Message, frozen=True):
    """Request to run the model function call ``mfc`` on samples.

    Its inputs are in the worker's own store or are fetched from other workers (``fetches``).
    """

    mfc: str
    """Name of the model function call."""
    role: str
    """Model role that the call runs on."""
    ids: list[str]
    """Ids of the samples."""
    keys: list[str]
    """Input keys."""
    metadata: dict[str, list[Any]]
    """Metadata columns of the samples."""
    fetches: list[FetchPart]
    """Inputs to fetch from other workers."""
    step: int
    """Train step."""
    seed: int
    """Seed of the call."""
    endpoints: Endpoints
    """Addresses of the services that the call may use."""
    group: GroupPart | None = None
    """This worker's rank in a group call, of which only rank 0 stores the outputs; None if the
    worker computes alone."""


class CallAnswer(Message, frozen=True):
    """Result of a model function call."""

    meta: list[bytes] | None
    """Encoded output sample without tensors; None if the call has no outputs."""
    stats: dict[str, Any]
    """Statistics of the call."""
    compute_s: float
    """Seconds of computation."""
    fetch_s: float
    """Seconds of fetching inputs."""


class LoadRequest(Message, frozen=True):
    """Request to store the integer sequences of samples from the source, and the tensors that the
    dataset provides for their ``metadata``."""

    ids: list[str]
    """Ids of the samples."""
    values: dict[str, list[list[int]]]
    """Integer sequences by key, one per id."""
    metadata: dict[str, list[Any]]
    """Metadata columns of the samples."""


class LoadAnswer(Message, frozen=True):
    """Result of a ``LoadRequest``."""

    meta: list[bytes] | None
    """Encoded sample from the dataset without tensors; None if there is no dataset."""


class ClearRequest(Message, frozen=True):
    """Request to free all tensors stored for these samples."""

    ids: list[str]
    """Ids of the samples."""


class HeldAnswer(Message, frozen=True):
    """Size of a model worker's store, and the worker's roles."""

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
"""Report the size of the worker's store and the worker's roles."""


# ---- master to model worker: outside of the graph


class Probe(Message, frozen=True):
    """Tokens that an engine sampled after a fixed prefix, for checking a weight update."""

    token_ids: list[int]
    """Token ids of the whole sequence, prefix included."""
    logprobs: list[float]
    """Log-probabilities of the sampled tokens, which are the last ones."""


class ProgressAnswer(Message, frozen=True):
    """Progress of the current or last call."""

    over: int
    """Number of finished episodes."""
    wanted: int
    """Total number of episodes; 0 if the call plays none."""


class EvaluateRequest(Message, frozen=True):
    """Request to evaluate a role with the method ``evaluate`` of an interface."""

    role: str
    """Model role to evaluate."""
    interface: str
    """Registered name of the interface."""
    interface_args: dict[str, Any]
    """Arguments of the interface's constructor."""
    args: dict[str, Any]
    """Arguments of ``evaluate``."""
    step: int
    """Train step."""
    seed: int
    """Seed of the evaluation."""
    endpoints: Endpoints
    """Addresses of the services that the interface may use."""


class EvaluateAnswer(Message, frozen=True):
    """Statistics that the interface has returned."""

    stats: dict[str, Any]


class CheckpointRequest(Message, frozen=True):
    """Request to write or read checkpoints of roles and interfaces."""

    roles: dict[str, str]
    """Checkpoint folder of each role, shared by all ranks of the role."""
    folder: str
    """Folder for the state of all interfaces."""


class SavedFile(Message, frozen=True, array_like=True):
    """A file that a worker has written and flushed to disk."""

    path: str
    size: int
    """Size in bytes."""
    sha256: str
    """SHA-256 in hexadecimal."""


class SaveAnswer(Message, frozen=True):
    """All files that this worker has written."""

    files: list[SavedFile]


class ExportRequest(Message, frozen=True):
    """Request to export a role in Hugging Face format into ``folder``."""

    role: str
    """Model role."""
    folder: str


class KeepExportRequest(Message, frozen=True):
    """Request to replace the folder ``target`` with the exported ``folder``."""

    folder: str
    """Exported folder."""
    target: str
    """Folder to replace."""
    held_out: str
    """JSON text of the held-out results, which is added to the folder as a file."""


class PublishWeightsRequest(Message, frozen=True):
    """Request to publish the weights of ``role`` for generation workers."""

    role: str
    """Model role."""
    version: int
    """Policy version that the trainer's weights must have."""
    trial: int = 0
    """Step of a self-test: ``TRIAL_CHANGE`` changes the weights before publishing them,
    ``TRIAL_RESTORE`` changes them back; 0 outside of a self-test."""
    probes: list[Probe] = field(default_factory=list)
    """Sequences to score in the step ``TRIAL_RESTORE``."""
    broadcast: bool = False
    """Whether the trainer only offers its own tensors, which ``START_BROADCAST`` then sends."""


class PublishWeightsAnswer(Message, frozen=True):
    """Description of the published weights, and results of the step ``TRIAL_RESTORE``.

    ``changed`` and ``restored`` contain, for each probe, the log-probabilities of its sampled
    tokens in the trainer's own forward pass. They are empty if the change did not affect the
    trainer's model, for example because its ``weights`` method returns copies.
    """

    manifest: WeightsManifest
    """Description of the weights and how to get them."""
    changed: list[list[float]] = field(default_factory=list)
    """Log-probabilities under the changed weights."""
    restored: list[list[float]] = field(default_factory=list)
    """Log-probabilities under the restored weights."""


class StartBroadcastRequest(Message, frozen=True):
    """Request to the trainer to send a version to a group of generation workers, which get an
    ``UpdateWeightsRequest`` with a seat at the same time."""

    version: int
    """Policy version, the one that was published last."""
    trial: int
    """Step of a self-test; 0 outside of one."""
    members: list[str]
    """Generation workers in the order of their ranks. A group with the same members is used
    again."""
    world_size: int
    """Number of ranks with the trainer."""
    timeout_s: float
    """Seconds until the broadcast counts as failed."""


class StartBroadcastAnswer(Message, frozen=True):
    """Answer of a trainer that begins to send."""

    offered: bool
    """Whether the trainer still has this version. If not, nothing is sent."""
    unique_id: bytes = b""
    """Id of a new group; b"" if its members have joined it before."""
    pack_bytes: int = 0
    """Size at which a pack of tensors is full."""


class StopBroadcastAnswer(Message, frozen=True):
    """Answer of a trainer that has ended a group."""

    error: str
    """Why the weights had not reached the group; "" if the trainer noticed nothing."""


TRIAL_CHANGE = 1
"""First step of a self-test of weight updates: change the weights."""
TRIAL_RESTORE = 2
"""Second step of a self-test of weight updates: restore the weights."""
PROGRESS = Call("progress", Nothing, ProgressAnswer)
"""Report the progress of the current or last call."""
EVALUATE = Call("evaluate", EvaluateRequest, EvaluateAnswer)
SAVE = Call("save", CheckpointRequest, SaveAnswer)
RESTORE = Call("restore", CheckpointRequest, Nothing)
COMMITTED = Call("committed", Nothing, Nothing)
"""Notify the interfaces that the checkpoint of the last ``SAVE`` is complete."""
EXPORT = Call("export", ExportRequest, Nothing)
KEEP_EXPORT = Call("keep_export", KeepExportRequest, Nothing)
PUBLISH_WEIGHTS = Call("publish_weights", PublishWeightsRequest, PublishWeightsAnswer)
START_BROADCAST = Call("start_broadcast", StartBroadcastRequest, StartBroadcastAnswer)
"""Start to send a version to a group of generation workers."""
STOP_BROADCAST = Call("stop_broadcast", Nothing, StopBroadcastAnswer)
"""End the group, and with it a broadcast in progress."""


# ---- master to the trainer: the stream of samples


class OpenStreamRequest(Message, frozen=True):
    """Request to a trainer rank to listen for samples from rollout workers."""

    control: str
    """Address of the master's service."""
    credits: int
    """Maximum number of samples in flight from one producer."""
    keys: list[str]
    """Keys that a sample must have."""
    group_size: int
    """Number of rollouts per sample."""
    max_sequences: int
    """Maximum number of sequences in a sample."""
    max_tokens: int
    """Maximum number of tokens in a sample."""
    rank: int = 0
    """Trainer rank of this receiver."""


class OpenStreamAnswer(Message, frozen=True):
    """Address to which rollout workers connect."""

    endpoint: str
    """The receiver's address."""


class RestoreStreamRequest(Message, frozen=True):
    """Request to load samples from the payload log into the worker's store."""

    items: list[tuple[str, int, PayloadRef]]
    """(id, attempt, location of the payload) of each sample."""


class RestoreStreamAnswer(Message, frozen=True):
    """Restored samples: one arrival per requested item, in the same order."""

    arrivals: list[Arrival]


class PruneStreamRequest(Message, frozen=True):
    """Request to delete payloads that are no longer needed from the log."""

    alive: list[PayloadRef]
    """Payloads that a recovery may still need."""
    newest: PayloadRef | None
    """The last payload accepted through this receiver, or None."""
    ranks: int = 1
    """Number of receivers."""


STREAM_OPEN = Call("stream_open", OpenStreamRequest, OpenStreamAnswer)
STREAM_RESTORE = Call("stream_restore", RestoreStreamRequest, RestoreStreamAnswer)
STREAM_PRUNE = Call("stream_prune", PruneStreamRequest, Nothing)
STREAM_CHECK = Call("stream_check", Nothing, Nothing)
"""Raise an error if the worker cannot receive samples any more."""


# ---- master to rollout and generation workers


class PlayRequest(Message, frozen=True):
    """Request to start playing samples."""

    control: str
    """Address of the master's service, which allocates samples."""
    streams: list[str]
    """Addresses of the receivers; each sample is sent to one of them."""
    env: list[str]
    """Addresses of the environments."""


class UpdateWeightsRequest(Message, frozen=True):
    """Request to a generation worker to load new weights between two tokens."""

    manifest: WeightsManifest
    """The new weights and how to get them."""
    seat: GroupSeat | None = None
    """Place in the group that gets them by a broadcast; None for other media."""


class GroupPlaceAnswer(Message, frozen=True):
    """Place that a generation worker's engine needs in a group."""

    ranks: int
    """Number of ranks; 0 if it cannot take part."""
    reason: str = ""
    """Why it cannot, as a clause after the engine's name."""


class ChangedTensor(Message, frozen=True, array_like=True):
    """A tensor that has changed or disappeared in an engine since the last weight update."""

    name: str
    """Name of the tensor in the manifest."""
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
    """The engine's tensors now, by their names in the manifest; None if the engine cannot report
    them."""
    changed: list[ChangedTensor] = field(default_factory=list)
    """Tensors that changed between the previous update and this one."""


class PinAnswer(Message, frozen=True):
    """Result of pinning the current weights."""

    version: int
    """Policy version of the current weights."""
    kept: bool
    """Whether the worker serves requests for this version until ``UNPIN_WEIGHTS``, even after
    updates. If false, it does so only until the next update."""


class StatusAnswer(Message, frozen=True):
    """Status of a generation worker."""

    at_s: float
    """Time of the status on the worker's clock, in seconds."""
    busy_s: float
    """Seconds of computation since the worker's start."""
    generated_tokens: float
    """Tokens generated since the worker's start."""
    running: float
    """Number of running requests."""
    waiting: float
    """Number of waiting requests."""


class ProbeRequest(Message, frozen=True):
    """Request to sample tokens after the fixed prefix; see ``Probe``."""

    last: bool
    """Whether this is the last probe, so that its cache need not be kept."""


PLAY = Call("play", PlayRequest, Nothing)
UPDATE_WEIGHTS = Call("update_weights", UpdateWeightsRequest, UpdateWeightsAnswer)
GROUP_PLACE = Call("group_place", Nothing, GroupPlaceAnswer)
"""Report the place that the engine needs in a group that gets weights by a broadcast."""
PROBE_WEIGHTS = Call("probe_weights", ProbeRequest, Probe)
PIN_WEIGHTS = Call("pin_weights", Nothing, PinAnswer)
"""Keep the current weights for an evaluation."""
UNPIN_WEIGHTS = Call("unpin_weights", Nothing, Nothing)
"""Release the weights that ``PIN_WEIGHTS`` has kept."""
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
    """Samples to play. None: no sample is available yet, ask again. []: there are no more samples;
    stop unless ``evaluation`` has shares."""
    evaluation: list[EvaluationPart] = field(default_factory=list)
    """Shares of an evaluation to play."""


class RejectedRequest(Message, frozen=True):
    """Report that a rollout attempt failed."""

    id: str
    """Id of the sample."""
    attempt: int
    """Number of the failed attempt."""
    outcome: str
    """Kind of failure, such as ``ENV_ERROR``."""
    message: str
    """Description of the failure."""


class EvaluatedRequest(Message, frozen=True):
    """Report that the evaluation share ``(evaluation, part, greedy)`` was played or has failed."""

    evaluation: int
    part: int
    greedy: bool
    results: list[EpisodeResult]
    """Results of the episodes of the share."""
    error: str = ""
    """Why the share failed; "" if it was played."""


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
    """A ``GenRequest`` of a rollout worker, which numbers its slots from 0."""

    slot: int
    """The rollout worker's slot number."""
    token_ids: list[Annotated[int, Meta(ge=0)]]
    sampled: int
    seed: int | None
    min_version: int
    pinned_version: int = -1
    greedy: bool = False
    max_new_tokens: int = 0
    grammar: str = ""


class GenerateAnswer(Message, frozen=True, array_like=True):
    """A ``GenOutput`` as a message."""

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str
    unmasked_logprobs: list[float] | None = None
    mask_failed: bool = False


class FreeRequest(Message, frozen=True, array_like=True):
    """Report that the episodes in these slots have ended."""

    slots: list[int]


GENERATE = Call("generate", GenerateRequest, GenerateAnswer)
FREE = Call("free", FreeRequest, Nothing)
