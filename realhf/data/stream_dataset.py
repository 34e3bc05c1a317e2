"""Stream of finished samples from rollout workers into the tensor store of a model worker.

A sample is received, decoded and validated, written to the payload log, put into the store and
reported to the master. The master answers after recording the sample durably (ACCEPT). Only then is
the sample acknowledged to its producer, which keeps it until then. So a crash at any point loses no
sample. A sample that arrives twice is recognised by (id, attempt). See docs/reference/dataflow.md
9.
"""

from __future__ import annotations

import collections
import logging
import math
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from realhf.api.calls import (
    ACCEPTED,
    ARRIVED,
    DUPLICATE,
    STREAM_CHECK,
    STREAM_OPEN,
    STREAM_PRUNE,
    STREAM_RESTORE,
    Arrival,
    ArrivedRequest,
    Nothing,
    OpenStreamAnswer,
    OpenStreamRequest,
    PayloadRef,
    PruneStreamRequest,
    RestoreStreamAnswer,
    check_answers,
    payload_rank,
)
from realhf.api.keys import KeySpec, key_spec
from realhf.api.sample import SequenceSample
from realhf.base.files import convert_run_folder_errors
from realhf.data.payload_log import SEGMENT_BYTES, PayloadDamaged, PayloadLog
from realhf.transport.codec import decode_sample, encode_sample
from realhf.transport.errors import CodecError, TransportError
from realhf.transport.network import LOOPBACK, Network
from realhf.transport.push_stream import StreamFailed, StreamMessage, StreamReceiver
from realhf.transport.service import BlockingServiceClient
from realhf.transport.tensor_store import TensorStore

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)
Notify = Callable[[list[Arrival]], Sequence[str]]
"""Function that reports arrivals to the master and returns the master's answer to each
(``accepted``, ``duplicate``, ``refused``), in order. It blocks, with a timeout of its own.
TransportError, TimeoutError and OSError mean that the master cannot answer now; the call is then
retried."""
MAX_ROUND = 64
"""Maximum number of samples that are logged and reported to the master together."""
RETRY_S = (0.1, 2.0)
"""Initial and maximum delay of the exponential back-off when the master does not answer, in
seconds."""
CLOSE_TIMEOUT_S = 10.0
"""How long ``close`` waits for the master's answer, in seconds."""
NOTIFY_TIMEOUT_S = 60.0
"""Timeout for reporting arrivals to the master, in seconds."""
_FLOATS = ("f16", "bf16", "f32", "f64")
"""Dtypes whose values must be finite."""


@dataclass(slots=True)
class _StoredAttempt:
    """State of a sample in the store: which attempt is stored, and whether it is final."""

    attempt: int
    """Number of the stored attempt."""
    safe: bool
    """Whether the master has accepted the attempt. Until then the attempt may have to be
    discarded."""


@dataclass(slots=True)
class _RoundItem:
    """A sample of the round in progress."""

    arrival: Arrival
    """Report of the sample to the master."""
    sample: SequenceSample | None
    """The decoded sample; None if it is malformed."""
    stored: bool = False
    """Whether this round put the sample into the store."""


class StreamDataset:
    """Receiver of finished samples for one model worker.

    Attributes:
        counts: Number of samples ``accepted``, ``duplicate``, ``refused`` and ``malformed``, and of
            ``notify_retries``.
        endpoint: Address that producers connect to.

    Args:
        run_id: Id of the run.
        folder: Folder with the payload logs of all ranks.
        store: Tensor store of the worker.
        notify: Function that reports arrivals to the master. It is called on a thread of this
            object, one call at a time, in the order in which payloads are logged.
        credits: Number of samples that producers may send ahead.
        limits: Required format of the samples.
        network: Network settings of the run.
        rank: Rank of the worker among those that train together.
        segment_bytes: Size of a payload log segment, in bytes.

    Every method but ``close`` raises StreamFailed after a thread has failed.
    """

    def __init__(
        self,
        run_id: str,
        folder: Path,
        store: TensorStore,
        notify: Notify,
        *,
        credits: int,
        limits: SampleLimits,
        network: Network = LOOPBACK,
        rank: int = 0,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self._store = store
        self._notify = notify
        self._limits = limits
        self._rank = rank
        self._log = PayloadLog(folder, rank=rank, segment_bytes=segment_bytes)
        self._stored: dict[str, _StoredAttempt] = {}
        self._stored_lock = threading.Lock()
        self._queue: collections.deque[StreamMessage] = collections.deque()
        self._filled = threading.Condition()
        self._log_lock = threading.Lock()
        self._closing = threading.Event()
        self._failure: BaseException | None = None
        self.counts: collections.Counter[str] = collections.Counter()
        store.on_clear(self._forget_cleared)
        self._receiver = StreamReceiver(run_id, self._deliver, credits=credits, network=network)
        self.endpoint = self._receiver.endpoint
        self._thread = threading.Thread(target=self._run, name="stream-dataset", daemon=True)
        self._thread.start()

    def restore(self, items: Iterable[tuple[str, int, PayloadRef]]) -> list[Arrival]:
        """Put logged samples, given as (id, attempt, ref), back into the store after a restart.
        They may come from any rank.

        Returns one arrival per sample. If a sample cannot be read, ``error`` of its arrival is set.
        """
        self.check()
        return [self._restore_sample(id, attempt, list(ref)) for id, attempt, ref in items]

    def prune(
        self, alive: Collection[PayloadRef], newest: PayloadRef | None = None, ranks: int = 1
    ) -> list[int]:
        """Delete the log segments that contain no payload in ``alive``; return their numbers.

        Args:
            alive: References of the payloads to keep.
            newest: The last reference that was accepted when ``alive`` was collected; default: the
                last one in ``alive``. Its segment and all later ones are kept, because they may
                contain payloads that are newer than ``alive``.
            ranks: Current number of ranks. Rank 0 also prunes the logs of higher ranks, which an
                earlier start of the run had.
        """
        self.check()
        own_refs = [ref for ref in alive if payload_rank(ref) == self._rank]
        first_kept = max((ref[0] for ref in [*own_refs, *([newest] if newest else [])]), default=0)
        with self._log_lock:
            newer = [n for n in self._log.segments() if n >= first_kept]
            deleted = self._log.keep_only({ref[0] for ref in own_refs} | set(newer))
            if self._rank == 0:
                self._log.sweep(alive, ranks)
        return deleted

    def check(self) -> None:
        """Raise StreamFailed if samples can no longer arrive."""
        if self._failure is not None:
            raise StreamFailed(
                f"the stream of samples failed: {type(self._failure).__name__}: {self._failure}"
            ) from self._failure
        self._receiver.check()

    def close(self) -> None:
        """Stop the threads. Samples that the master has not answered stay with their producers; the
        store is unchanged."""
        self._closing.set()
        with self._filled:
            self._filled.notify()
        self._thread.join(timeout=CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            _log.warning(
                "the master has not answered for samples that arrived; not waiting for it any "
                "longer"
            )
        self._receiver.close()
        with self._log_lock:
            self._log.close()

    # ---- threads

    def _deliver(self, messages: list[StreamMessage]) -> None:
        """Queue received messages. Runs on the receiver's thread."""
        with self._filled:
            self._queue.extend(messages)
            self._filled.notify()

    def _run(self) -> None:
        """Process rounds of queued messages until the dataset is closed."""
        try:
            while True:
                with self._filled:
                    while not self._queue and not self._closing.is_set():
                        self._filled.wait()
                    if self._closing.is_set():
                        return
                    messages = self._next_round()
                self._process(messages)
        except BaseException as error:
            self._failure = error
            _log.exception("the stream of samples failed")

    def _next_round(self) -> list[StreamMessage]:
        """Take messages with distinct ids from the queue. Two attempts at the same sample are thus
        processed in different rounds."""
        ids: set[str] = set()
        messages: list[StreamMessage] = []
        while self._queue and len(messages) < MAX_ROUND and self._queue[0].id not in ids:
            messages.append(self._queue.popleft())
            ids.add(messages[-1].id)
        return messages

    def _process(self, messages: list[StreamMessage]) -> None:
        """Log, store, report and acknowledge the samples of one round."""
        new_messages = [
            message for message in messages if not self._is_safe(message.id, message.attempt)
        ]
        self.counts["duplicate"] += len(messages) - len(new_messages)
        items = self._log_samples([(message, *self._read(message)) for message in new_messages])
        for item in items:
            item.stored = item.sample is not None and self._put(
                item.arrival, item.sample, safe=False
            )
        answers = self._report([item.arrival for item in items])
        if answers is None:
            return
        for item, answer in zip(items, answers, strict=True):
            self._apply_answer(item, answer)
        self._receiver.ack(messages)

    # ---- one sample

    def _read(self, message: StreamMessage) -> tuple[SequenceSample | None, str]:
        """Return the decoded sample and "", or None and the reason why it is malformed."""
        try:
            return self._limits.read(message.id, message.frames), ""
        except CodecError as error:
            _log.warning("sample from %s refused: %s", message.producer, error)
            return None, str(error)

    def _log_samples(
        self, decoded: list[tuple[StreamMessage, SequenceSample | None, str]]
    ) -> list[_RoundItem]:
        """Write the valid samples to the payload log. Return one item per message."""
        with self._log_lock:
            refs = iter(
                self._log.append(
                    [message.frames for message, sample, _ in decoded if sample is not None]
                )
            )
        items: list[_RoundItem] = []
        for message, sample, error in decoded:
            ref, meta = ([], []) if sample is None else (next(refs), _encode_meta(sample))
            items.append(
                _RoundItem(
                    Arrival(message.id, message.attempt, message.producer, ref, meta, error), sample
                )
            )
        return items

    def _is_safe(self, id: str, attempt: int) -> bool:
        """Return whether this attempt is in the store and the master has accepted it."""
        return self._stored.get(id) == _StoredAttempt(attempt, safe=True)

    def _put(self, arrival: Arrival, sample: SequenceSample, *, safe: bool) -> bool:
        """Put a sample into the store. Return False if the store already has an attempt at this
        sample."""
        with self._stored_lock:
            if arrival.id in self._stored:
                self._mark_safe(arrival, safe)
                return False
            self._stored[arrival.id] = _StoredAttempt(arrival.attempt, safe)
            self._store.put(sample, producer=_producer_key(arrival.id, arrival.attempt))
            return True

    def _discard(self, id: str, attempt: int) -> None:
        """Remove the received values of an attempt from the store.

        Values that calls have computed for the sample are kept, because another receiver has the
        sample.
        """
        with self._stored_lock:
            stored = self._stored.get(id)
            if stored is not None and stored.attempt == attempt:
                del self._stored[id]
            self._store.discard(id, _producer_key(id, attempt))

    def _mark_safe(self, arrival: Arrival, safe: bool) -> None:
        """If ``safe``, record that the master has accepted the stored attempt. The caller holds the
        lock."""
        stored = self._stored.get(arrival.id)
        if stored is not None and stored.attempt == arrival.attempt:
            stored.safe = stored.safe or safe

    def _report(self, arrivals: list[Arrival]) -> list[str] | None:
        """Report arrivals to the master, retrying until it answers. Return its answers, or None if
        the dataset is closed first."""
        if not arrivals:
            return []
        wait = RETRY_S[0]
        while True:
            try:
                answers = check_answers(arrivals, self._notify(arrivals))
                break
            except (TransportError, OSError) as error:
                self.counts["notify_retries"] += 1
                _log.warning(
                    "the master did not take %d arrivals, again in %.1f s: %s",
                    len(arrivals),
                    wait,
                    error,
                )
                if self._closing.wait(wait):
                    return None
                wait = min(2 * wait, RETRY_S[1])
        if wait > RETRY_S[0]:
            # After a retry, "duplicate" may refer to the first report, whose answer was lost.
            answers = [ACCEPTED if answer == DUPLICATE else answer for answer in answers]
        return answers

    def _apply_answer(self, item: _RoundItem, answer: str) -> None:
        """Keep a sample in the store if the master accepted it, otherwise discard it."""
        arrival = item.arrival
        sample = item.sample
        self.counts["malformed" if sample is None else answer] += 1
        if sample is None:
            return
        if answer == ACCEPTED and item.stored:
            with self._stored_lock:
                self._mark_safe(arrival, True)
        elif answer == ACCEPTED:
            stored = self._stored.get(arrival.id)
            if stored is not None and stored.attempt != arrival.attempt:
                self._discard(arrival.id, stored.attempt)
            self._put(arrival, sample, safe=True)
        elif item.stored and not self._is_safe(arrival.id, arrival.attempt):
            self._discard(arrival.id, arrival.attempt)

    def _restore_sample(self, id: str, attempt: int, ref: PayloadRef) -> Arrival:
        """Put one logged sample back into the store. Return its arrival, with ``error`` set if that
        failed."""
        try:
            with convert_run_folder_errors(self._log.folder):
                sample = self._limits.read(id, self._log.read(ref))
        except (PayloadDamaged, CodecError) as error:
            _log.warning("sample %s could not be restored: %s", id, error)
            return Arrival(id, attempt, "", error=str(error))
        arrival = Arrival(id, attempt, "", ref, _encode_meta(sample))
        if not self._put(arrival, sample, safe=True) and not self._is_safe(id, attempt):
            return Arrival(id, attempt, "", error=f"the store holds another attempt of {id!r}")
        return arrival

    def _forget_cleared(self, ids: frozenset[str]) -> None:
        """Drop the records of samples that the store has cleared. Runs on any thread."""
        with self._stored_lock:
            for id in ids:
                self._stored.pop(id, None)


def _producer_key(id: str, attempt: int) -> str:
    """Return the producer name under which the store keeps the received values of an attempt."""
    return f"{id}#{attempt}"


def _encode_meta(sample: SequenceSample) -> list[bytes]:
    """Return the encoded metadata of a sample, without its data."""
    return [bytes(frame) for frame in encode_sample(sample.meta())]


class StreamHost:
    """A worker's handlers for the master's calls about its sample stream. ``open`` creates the
    ``StreamDataset``."""

    def __init__(
        self,
        run_id: str,
        worker: str,
        folder: Path,
        store: TensorStore,
        network: Network = LOOPBACK,
    ) -> None:
        self._network = network
        self._run_id = run_id
        self._worker = worker
        self._folder = folder
        self._store = store
        self._master: BlockingServiceClient | None = None
        self._dataset: StreamDataset | None = None

    def handlers(self) -> dict[str, Callable[[Any], Any]]:
        """Return the handlers by call name. They belong to the immediate lane."""
        return dict(
            [
                STREAM_OPEN.with_handler(self.open),
                STREAM_RESTORE.with_handler(
                    lambda request: RestoreStreamAnswer(
                        self._require_dataset().restore(request.items)
                    )
                ),
                STREAM_PRUNE.with_handler(self._prune),
                STREAM_CHECK.with_handler(self._check),
            ]
        )

    def open(self, request: OpenStreamRequest) -> OpenStreamAnswer:
        """Create the dataset and its connection to the master, unless they exist already."""
        if self._dataset is None:
            self._master = BlockingServiceClient(
                request.control, "the master", self._worker, self._run_id, self._network
            )
            limits = SampleLimits(
                tuple(key_spec(name) for name in request.keys),
                min_sequences=request.group_size,
                max_sequences=request.max_sequences,
                max_tokens=request.max_tokens,
            )
            self._dataset = StreamDataset(
                self._run_id,
                self._folder,
                self._store,
                self._notify,
                credits=request.credits,
                limits=limits,
                network=self._network,
                rank=request.rank,
            )
        return OpenStreamAnswer(self._dataset.endpoint)

    def close(self) -> None:
        """Close the connection to the master and the dataset, if they exist."""
        if self._master is not None:
            self._master.close()
        if self._dataset is not None:
            self._dataset.close()

    def _prune(self, request: PruneStreamRequest) -> Nothing:
        self._require_dataset().prune(request.alive, request.newest, request.ranks)
        return Nothing()

    def _check(self, request: Nothing) -> Nothing:
        self._require_dataset().check()
        return request

    def _require_dataset(self) -> StreamDataset:
        """Return the dataset. Raises RuntimeError if ``open`` was not called before."""
        if self._dataset is None:
            raise RuntimeError("the stream is not open")
        return self._dataset

    def _notify(self, arrivals: Sequence[Arrival]) -> Sequence[str]:
        assert self._master is not None
        return self._master.ask(
            ARRIVED, ArrivedRequest(list(arrivals)), timeout_s=NOTIFY_TIMEOUT_S
        ).answers


@dataclass(frozen=True)
class SampleLimits:
    """Required format and maximum size of a finished sample."""

    keys: tuple[KeySpec, ...]
    """The keys that a sample must have, with dtype, trailing shape and length rule; no others are
    allowed. ``packed_input_ids`` must be one of them."""
    min_sequences: int = 1
    """Minimum number of sequences."""
    max_sequences: int = 1024
    """Maximum number of sequences."""
    max_tokens: int = 1 << 20
    """Maximum number of tokens in a sequence."""
    max_bytes: int = 256 << 20
    """Maximum size of the encoded sample, in bytes."""

    def __post_init__(self) -> None:
        if "packed_input_ids" not in {spec.name for spec in self.keys}:
            raise ValueError("samples of a stream need the key packed_input_ids")

    def read(self, id: str, frames: Sequence[Any]) -> SequenceSample:
        """Decode and return the sample with this id from ``frames``. Raises CodecError if it is
        invalid."""
        nbytes = sum(memoryview(frame).nbytes for frame in frames)
        if nbytes > self.max_bytes:
            raise CodecError(f"sample {id!r} has {nbytes} bytes, allowed are {self.max_bytes}")
        sample = decode_sample(frames)
        if sample.ids != (id,):
            raise CodecError(f"sample {id!r} has the ids {sample.ids!r:.100}")
        if sample.data is None:
            raise CodecError(f"sample {id!r} has no data")
        differing = sorted(sample.keys ^ {spec.name for spec in self.keys})
        if differing:
            raise CodecError(f"sample {id!r}: keys {differing} are missing or not expected")
        tokens: list[int] = sample.lengths("packed_input_ids").values.tolist()
        if not self.min_sequences <= len(tokens) <= self.max_sequences:
            raise CodecError(
                f"sample {id!r} has {len(tokens)} sequences, allowed are {self.min_sequences} to "
                f"{self.max_sequences}"
            )
        if tokens and not 1 <= min(tokens) <= max(tokens) <= self.max_tokens:
            raise CodecError(
                f"sample {id!r} has a sequence of no or more than {self.max_tokens} tokens"
            )
        expected = {"L": tokens, "L-1": [n - 1 for n in tokens], "1": [1] * len(tokens)}
        dtypes = sample.dtypes
        lengths = _length_lists(sample)
        for spec in self.keys:
            _check_key(sample, spec, dtypes[spec.name], lengths[spec.name], expected)
        return sample


def _check_key(
    sample: SequenceSample,
    spec: KeySpec,
    dtype: str,
    lengths: list[int],
    expected: dict[str, list[int]],
) -> None:
    """Raise CodecError if the values of one key do not conform to its specification.

    ``lengths``: lengths of the key's sequences. ``expected``: the required lengths for each length
    rule.
    """
    tensor = sample[spec.name]
    shape = tuple(tensor.shape[1:])
    if dtype != spec.dtype or shape != spec.trailing:
        raise CodecError(
            f"{_describe_key(sample, spec)}: {dtype} {shape}, expected {spec.dtype} {spec.trailing}"
        )
    if spec.rule != "free" and lengths != expected[spec.rule]:
        raise CodecError(
            f"{_describe_key(sample, spec)}: lengths {lengths!r:.80} do not fit "
            f"{expected['L']!r:.80} tokens"
        )
    if (
        spec.dtype in _FLOATS
        and not _is_finite(tensor)
        and not _is_finite(_drop_failures(sample, spec))
    ):
        raise CodecError(f"{_describe_key(sample, spec)}: a value is not finite")


def _is_finite(tensor: Tensor) -> bool:
    """Return whether all values are finite, in a single pass.

    Unless it overflows, the sum of the values is finite if and only if all of them are.
    """
    total = tensor.sum() if tensor.element_size() >= 4 else tensor.double().sum()
    return math.isfinite(total.item())


def _drop_failures(sample: SequenceSample, spec: KeySpec) -> Tensor:
    """Return the key's values. If there is one value per rollout, leave out those of failed
    rollouts, whose missing reward is encoded as NaN."""
    tensor = sample[spec.name]
    per_rollout = (
        spec.rule == "1" and "outcome" in sample.keys and sample["outcome"].shape == tensor.shape
    )
    return tensor[sample["outcome"] == 0] if per_rollout else tensor


def _length_lists(sample: SequenceSample) -> dict[str, list[int]]:
    """Return the sequence lengths for each key. Keys that share their lengths also share the
    list."""
    columns = {key: sample.lengths(key) for key in sample.keys}
    lists = {id(column): column.values.tolist() for column in columns.values()}
    return {key: lists[id(column)] for key, column in columns.items()}


def _describe_key(sample: SequenceSample, spec: KeySpec) -> str:
    """Return text that identifies a key of a sample in error messages."""
    return f"sample {sample.ids[0]!r}, key {spec.name!r}"
