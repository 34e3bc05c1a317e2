"""Brings finished samples from rollout workers into the tensor store of a model worker, and serves the calls of the
master about them (docs/reference/dataflow.md 9).

A sample is received, decoded and checked, written to the payload log, put into the store, reported to the master, and
when the master has answered (its ACCEPT is durable then) acknowledged to its producer. Until then the producer keeps
it, so a death at any point loses nothing; a sample that comes twice is recognised by (id, attempt).
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
    checked_answers,
    rank_of,
)
from realhf.api.keys import KeySpec, key_spec
from realhf.api.sample import SequenceSample
from realhf.base.files import run_folder_needed
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
"""Reports arrivals to the master and returns its answer (``accepted``, ``duplicate``, ``refused``) to each, in order.
It blocks, with a deadline of its own. TransportError, TimeoutError and OSError mean that it cannot answer now and
should be called again soon."""
MAX_ROUND = 64
RETRY_S = (0.1, 2.0)
CLOSE_TIMEOUT_S = 10.0


@dataclass(slots=True)
class _Held:
    """An attempt in the store. ``safe``: the master knows of it. Until then its answer may be to forget the attempt."""

    attempt: int
    safe: bool


@dataclass(slots=True)
class _Item:
    """A sample of the round, None when it is malformed. ``stored``: this round has put it into the store."""

    arrival: Arrival
    sample: SequenceSample | None
    stored: bool = False


class StreamDataset:
    """Receives samples for one model worker, ``rank`` among those that train together. ``notify`` is called on a thread
    of this object, in the order in which payloads are logged, one call at a time. ``counts``: samples ``accepted``,
    ``duplicate``, ``refused`` and ``malformed``, and ``notify_retries``.

    Raises StreamFailed (from every method but ``close``) when a thread has failed.
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
        self._store, self._notify, self._limits, self._rank = store, notify, limits, rank
        self._log = PayloadLog(folder, rank=rank, segment_bytes=segment_bytes)
        self._held: dict[str, _Held] = {}
        self._held_lock = threading.Lock()
        self._queue: collections.deque[StreamMessage] = collections.deque()
        self._filled = threading.Condition()
        self._log_lock = threading.Lock()
        self._closing = threading.Event()
        self._failure: BaseException | None = None
        self.counts: collections.Counter[str] = collections.Counter()
        store.on_clear(self._forget)
        self._receiver = StreamReceiver(run_id, self._deliver, credits=credits, network=network)
        self.endpoint = self._receiver.endpoint
        self._thread = threading.Thread(target=self._run, name="stream-dataset", daemon=True)
        self._thread.start()

    def restore(self, items: Iterable[tuple[str, int, PayloadRef]]) -> list[Arrival]:
        """Put logged samples (id, attempt, ref), of any rank, back into the store after a restart. The arrival of one
        that cannot be read has ``error`` set."""
        self.check()
        return [self._restored(id, attempt, list(ref)) for id, attempt, ref in items]

    def prune(self, alive: Collection[PayloadRef], newest: PayloadRef | None = None, ranks: int = 1) -> list[int]:
        """Delete the segments of the log that hold none of these payloads and are older than ``newest``, the last ref
        that was accepted when ``alive`` was made (without it, the last one of ``alive``): whatever came later is alive,
        too. Returns the segments deleted. The first rank does the same for those that are none of the ``ranks`` any
        more."""
        self.check()
        own = [ref for ref in alive if rank_of(ref) == self._rank]
        horizon = max((ref[0] for ref in [*own, *([newest] if newest else [])]), default=0)
        with self._log_lock:
            later = [n for n in self._log.segments() if n >= horizon]
            gone = self._log.keep_only({ref[0] for ref in own} | set(later))
            if self._rank == 0:
                self._log.sweep(alive, ranks)
        return gone

    def check(self) -> None:
        """Raise StreamFailed when nothing can arrive any more."""
        if self._failure is not None:
            raise StreamFailed(
                f"the stream of samples failed: {type(self._failure).__name__}: {self._failure}"
            ) from self._failure
        self._receiver.check()

    def close(self) -> None:
        """Stop the threads. Samples without an answer from the master stay with their producers; the store is left as
        it is."""
        self._closing.set()
        with self._filled:
            self._filled.notify()
        self._thread.join(timeout=CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            _log.warning("the master has not answered for samples that arrived; not waiting for it any longer")
        self._receiver.close()
        with self._log_lock:
            self._log.close()

    # ---- threads

    def _deliver(self, messages: list[StreamMessage]) -> None:
        """Queue received messages; runs on the receiver's thread."""
        with self._filled:
            self._queue.extend(messages)
            self._filled.notify()

    def _run(self) -> None:
        try:
            while True:
                with self._filled:
                    while not self._queue and not self._closing.is_set():
                        self._filled.wait()
                    if self._closing.is_set():
                        return
                    messages = self._next_round()
                self._round(messages)
        except BaseException as error:
            self._failure = error
            _log.exception("the stream of samples failed")

    def _next_round(self) -> list[StreamMessage]:
        """Take messages of distinct ids: two attempts at one sample are answered one after the other."""
        ids: set[str] = set()
        messages: list[StreamMessage] = []
        while self._queue and len(messages) < MAX_ROUND and self._queue[0].id not in ids:
            messages.append(self._queue.popleft())
            ids.add(messages[-1].id)
        return messages

    def _round(self, messages: list[StreamMessage]) -> None:
        fresh = [message for message in messages if not self._is_safe(message.id, message.attempt)]
        self.counts["duplicate"] += len(messages) - len(fresh)
        items = self._logged([(message, *self._read(message)) for message in fresh])
        for item in items:
            item.stored = item.sample is not None and self._put(item.arrival, item.sample, safe=False)
        answers = self._tell([item.arrival for item in items])
        if answers is None:
            return
        for item, answer in zip(items, answers, strict=True):
            self._settle(item, answer)
        self._receiver.ack(messages)

    # ---- one sample

    def _read(self, message: StreamMessage) -> tuple[SequenceSample | None, str]:
        try:
            return self._limits.read(message.id, message.frames), ""
        except CodecError as error:
            _log.warning("sample from %s refused: %s", message.producer, error)
            return None, str(error)

    def _logged(self, read: list[tuple[StreamMessage, SequenceSample | None, str]]) -> list[_Item]:
        with self._log_lock:
            refs = iter(self._log.append([message.frames for message, sample, _ in read if sample is not None]))
        items: list[_Item] = []
        for message, sample, error in read:
            ref, meta = ([], []) if sample is None else (next(refs), _meta(sample))
            items.append(_Item(Arrival(message.id, message.attempt, message.producer, ref, meta, error), sample))
        return items

    def _is_safe(self, id: str, attempt: int) -> bool:
        """Return whether the store holds this attempt and the master knows of it."""
        return self._held.get(id) == _Held(attempt, safe=True)

    def _put(self, arrival: Arrival, sample: SequenceSample, *, safe: bool) -> bool:
        """Put a sample into the store. Returns False when the store holds it already, from this attempt or another
        one."""
        with self._held_lock:
            if arrival.id in self._held:
                self._mark_safe(arrival, safe)
                return False
            self._held[arrival.id] = _Held(arrival.attempt, safe)
            self._store.put(sample, producer=_stored_by(arrival.id, arrival.attempt))
            return True

    def _take_back(self, id: str, attempt: int) -> None:
        """Forget what arrived of a sample. What calls have computed of it here stays, where another receiver has it."""
        with self._held_lock:
            held = self._held.get(id)
            if held is not None and held.attempt == attempt:
                del self._held[id]
            self._store.discard(id, _stored_by(id, attempt))

    def _mark_safe(self, arrival: Arrival, safe: bool) -> None:
        held = self._held.get(arrival.id)
        if held is not None and held.attempt == arrival.attempt:
            held.safe = held.safe or safe

    def _tell(self, arrivals: list[Arrival]) -> list[str] | None:
        """Ask the master for its answers; returns None when this object was closed before there were any."""
        if not arrivals:
            return []
        wait = RETRY_S[0]
        while True:
            try:
                answers = checked_answers(arrivals, self._notify(arrivals))
                break
            except (TransportError, OSError) as error:
                self.counts["notify_retries"] += 1
                _log.warning("the master did not take %d arrivals, again in %.1f s: %s", len(arrivals), wait, error)
                if self._closing.wait(wait):
                    return None
                wait = min(2 * wait, RETRY_S[1])
        if wait > RETRY_S[0]:
            # The master may have accepted what was reported to it before, and only its answer was lost.
            answers = [ACCEPTED if answer == DUPLICATE else answer for answer in answers]
        return answers

    def _settle(self, item: _Item, answer: str) -> None:
        """Keep what was accepted and forget the rest."""
        arrival, sample = item.arrival, item.sample
        self.counts["malformed" if sample is None else answer] += 1
        if sample is None:
            return
        if answer == ACCEPTED and item.stored:
            with self._held_lock:
                self._mark_safe(arrival, True)
        elif answer == ACCEPTED:
            held = self._held.get(arrival.id)
            if held is not None and held.attempt != arrival.attempt:
                self._take_back(arrival.id, held.attempt)
            self._put(arrival, sample, safe=True)
        elif item.stored and not self._is_safe(arrival.id, arrival.attempt):
            self._take_back(arrival.id, arrival.attempt)

    def _restored(self, id: str, attempt: int, ref: PayloadRef) -> Arrival:
        try:
            with run_folder_needed(self._log.folder):
                sample = self._limits.read(id, self._log.read(ref))
        except (PayloadDamaged, CodecError) as error:
            _log.warning("sample %s could not be restored: %s", id, error)
            return Arrival(id, attempt, "", error=str(error))
        arrival = Arrival(id, attempt, "", ref, _meta(sample))
        if not self._put(arrival, sample, safe=True) and not self._is_safe(id, attempt):
            return Arrival(id, attempt, "", error=f"the store holds another attempt of {id!r}")
        return arrival

    def _forget(self, ids: frozenset[str]) -> None:
        """Forget samples that the store has cleared; runs on any thread."""
        with self._held_lock:
            for id in ids:
                self._held.pop(id, None)


def _stored_by(id: str, attempt: int) -> str:
    return f"{id}#{attempt}"


def _meta(sample: SequenceSample) -> list[bytes]:
    return [bytes(frame) for frame in encode_sample(sample.meta())]


NOTIFY_TIMEOUT_S = 60.0


class StreamHost:
    """Owns the worker's ``StreamDataset``: ``open`` makes it, the other handlers pass calls on to it."""

    def __init__(self, run_id: str, worker: str, folder: Path, store: TensorStore, network: Network = LOOPBACK) -> None:
        self._network = network
        self._run_id, self._worker, self._folder, self._store = run_id, worker, folder, store
        self._master: BlockingServiceClient | None = None
        self._dataset: StreamDataset | None = None

    def handlers(self) -> dict[str, Callable[[Any], Any]]:
        """Return the handlers of the immediate lane, by name."""
        return dict(
            [
                STREAM_OPEN.served_by(self.open),
                STREAM_RESTORE.served_by(lambda asked: RestoreStreamAnswer(self._opened().restore(asked.items))),
                STREAM_PRUNE.served_by(self._prune),
                STREAM_CHECK.served_by(self._check),
            ]
        )

    def open(self, request: OpenStreamRequest) -> OpenStreamAnswer:
        """Make the dataset and its connection to the master, unless there is one already."""
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
        """Close the connection to the master and the dataset, if ``open`` made them."""
        if self._master is not None:
            self._master.close()
        if self._dataset is not None:
            self._dataset.close()

    def _prune(self, request: PruneStreamRequest) -> Nothing:
        self._opened().prune(request.alive, request.newest, request.ranks)
        return Nothing()

    def _check(self, request: Nothing) -> Nothing:
        self._opened().check()
        return request

    def _opened(self) -> StreamDataset:
        if self._dataset is None:
            raise RuntimeError("the stream is not open")
        return self._dataset

    def _notify(self, arrivals: Sequence[Arrival]) -> Sequence[str]:
        assert self._master is not None
        return self._master.ask(ARRIVED, ArrivedRequest(list(arrivals)), timeout_s=NOTIFY_TIMEOUT_S).answers


_FLOATS = ("f16", "bf16", "f32", "f64")


@dataclass(frozen=True)
class SampleLimits:
    """Says what a finished sample must look like. Exactly the keys in ``keys`` must be there, with their dtype,
    trailing shape and length rule, one of them ``packed_input_ids``; every sample has ``min_sequences`` to
    ``max_sequences`` sequences of at most ``max_tokens`` tokens, in at most ``max_bytes`` bytes."""

    keys: tuple[KeySpec, ...]
    min_sequences: int = 1
    max_sequences: int = 1024
    max_tokens: int = 1 << 20
    max_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        if "packed_input_ids" not in {spec.name for spec in self.keys}:
            raise ValueError("samples of a stream need the key packed_input_ids")

    def read(self, id: str, frames: Sequence[Any]) -> SequenceSample:
        """Decode the sample with this id from these frames. Raises CodecError that says what is wrong."""
        nbytes = sum(memoryview(frame).nbytes for frame in frames)
        if nbytes > self.max_bytes:
            raise CodecError(f"sample {id!r} has {nbytes} bytes, allowed are {self.max_bytes}")
        sample = decode_sample(frames)
        if sample.ids != (id,):
            raise CodecError(f"sample {id!r} came with the ids {sample.ids!r:.100}")
        if sample.data is None:
            raise CodecError(f"sample {id!r} came without data")
        odd = sorted(sample.keys ^ {spec.name for spec in self.keys})
        if odd:
            raise CodecError(f"sample {id!r}: keys {odd} are missing or not expected")
        tokens: list[int] = sample.lengths("packed_input_ids").values.tolist()
        if not self.min_sequences <= len(tokens) <= self.max_sequences:
            raise CodecError(
                f"sample {id!r} has {len(tokens)} sequences, allowed are {self.min_sequences} to {self.max_sequences}"
            )
        if tokens and not 1 <= min(tokens) <= max(tokens) <= self.max_tokens:
            raise CodecError(f"sample {id!r} has a sequence of no or more than {self.max_tokens} tokens")
        expected = {"L": tokens, "L-1": [n - 1 for n in tokens], "1": [1] * len(tokens)}
        dtypes = sample.dtypes
        lengths = _length_lists(sample)
        for spec in self.keys:
            _check_key(sample, spec, dtypes[spec.name], lengths[spec.name], expected)
        return sample


def _check_key(
    sample: SequenceSample, spec: KeySpec, dtype: str, lengths: list[int], expected: dict[str, list[int]]
) -> None:
    """Raise CodecError unless the key is as its specification says. ``lengths`` are those of the key's sequences,
    ``expected`` what the length rule gives."""
    tensor = sample[spec.name]
    shape = tuple(tensor.shape[1:])
    if dtype != spec.dtype or shape != spec.trailing:
        raise CodecError(f"{_where(sample, spec)}: {dtype} {shape}, expected {spec.dtype} {spec.trailing}")
    if spec.rule != "free" and lengths != expected[spec.rule]:
        raise CodecError(f"{_where(sample, spec)}: lengths {lengths!r:.80} do not fit {expected['L']!r:.80} tokens")
    if spec.dtype in _FLOATS and not _finite(tensor) and not _finite(_without_failures(sample, spec)):
        raise CodecError(f"{_where(sample, spec)}: a value is not finite")


def _finite(tensor: Tensor) -> bool:
    """Return whether all values are finite, in one pass: their sum is finite exactly when all of them are, short of an
    overflow."""
    total = tensor.sum() if tensor.element_size() >= 4 else tensor.double().sum()
    return math.isfinite(total.item())


def _without_failures(sample: SequenceSample, spec: KeySpec) -> Tensor:
    """Return the key's values of the rollouts that succeeded, where it has one per rollout: a failed one has no reward,
    which is written as NaN."""
    tensor = sample[spec.name]
    alike = spec.rule == "1" and "outcome" in sample.keys and sample["outcome"].shape == tensor.shape
    return tensor[sample["outcome"] == 0] if alike else tensor


def _length_lists(sample: SequenceSample) -> dict[str, list[int]]:
    """Return the lengths of the sequences by key; keys that share them share the list."""
    columns = {key: sample.lengths(key) for key in sample.keys}
    lists = {id(column): column.values.tolist() for column in columns.values()}
    return {key: lists[id(column)] for key, column in columns.items()}


def _where(sample: SequenceSample, spec: KeySpec) -> str:
    return f"sample {sample.ids[0]!r}, key {spec.name!r}"
