"""Store of a worker's tensors by sample id and key (docs/reference/dataflow.md 7)."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from realhf.api.keys import ITEMSIZE
from realhf.api.sample import SequenceSample
from realhf.transport.errors import DataMissing, DuplicateDataError


@dataclass(frozen=True, slots=True)
class _StoredSample:
    """Location of the values that one ``put`` stored for one sample, shared by its keys."""

    batch: SequenceSample
    position: int
    """Index of the sample in the batch."""
    producer: str
    """Id of the call that stored it."""


class TensorStore:
    """Thread-safe store of tensors.

    Batches are kept whole, so reading a whole batch costs no copy; the memory of a batch is
    released when its last sample has been cleared.
    """

    def __init__(self, name: str = "store") -> None:
        self._name = name
        self._entries: dict[str, dict[str, _StoredSample]] = {}
        self._sample_nbytes: dict[str, int] = {}
        self._nbytes = 0
        self._lock = threading.Lock()
        self._listeners: list[Callable[[frozenset[str]], None]] = []

    def put(self, sample: SequenceSample, producer: str = "") -> None:
        """Store the tensors of a batch.

        producer: Id of the call that produced them. Raises DuplicateDataError, and stores nothing,
        if a value already exists, unless it was stored by the same non-empty ``producer``. In that
        case the existing value is kept, and the others are stored. Raises ValueError for a
        metadata-only sample.
        """
        if sample.data is None:
            raise ValueError("only samples with data can be stored")
        sizes = _value_sizes(sample)
        with self._lock:
            existing = [
                (i, key) for i in sample.ids for key in sizes if key in self._entries.get(i, ())
            ]
            for sample_id, key in existing:
                previous_producer = self._entries[sample_id][key].producer
                if not producer or previous_producer != producer:
                    raise DuplicateDataError(
                        f"{self._name}: {key} of {sample_id} is stored already (by "
                        f"{previous_producer or 'unnamed'!r}, again"
                        f" by {producer or 'unnamed'!r})"
                    )
            for position, sample_id in enumerate(sample.ids):
                entries = self._entries.setdefault(sample_id, {})
                entry = _StoredSample(sample, position, producer)
                new_keys = [key for key in sizes if key not in entries]
                entries.update(dict.fromkeys(new_keys, entry))
                nbytes = sum(sizes[key][position] for key in new_keys)
                self._sample_nbytes[sample_id] = self._sample_nbytes.get(sample_id, 0) + nbytes
                self._nbytes += nbytes

    def get(self, ids: Sequence[str], keys: Iterable[str]) -> SequenceSample:
        """Return the values of these keys for these ids, in the order of the ids. Raises
        DataMissing with the list of missing values."""
        names = sorted(set(keys))
        with self._lock:
            missing = self._missing(ids, names)
            if missing:
                raise DataMissing(self._name, missing)
            columns = [tuple(self._entries[i][name] for i in ids) for name in names]
        if not names:
            raise ValueError("get needs at least one key")
        # Keys that the same puts stored are cut out of their batches together.
        key_groups: dict[tuple[int, ...], tuple[list[str], Sequence[_StoredSample]]] = {}
        for name, entries in zip(names, columns, strict=True):
            key_groups.setdefault(tuple(map(id, entries)), ([], entries))[0].append(name)
        out, *others = (_assemble(keys, entries) for keys, entries in key_groups.values())
        for other in others:
            out = out.update(other)
        return out

    def has(self, sample_id: str, key: str) -> bool:
        """Return whether a value is stored for this id and key."""
        with self._lock:
            return key in self._entries.get(sample_id, ())

    def _missing(self, ids: Sequence[str], names: Sequence[str]) -> list[tuple[str, str]]:
        return [(i, name) for i in ids for name in names if name not in self._entries.get(i, ())]

    def clear(self, ids: Iterable[str] | None = None) -> int:
        """Remove these samples (all if None); return the bytes released. Unknown ids are
        ignored."""
        with self._lock:
            removed_ids = frozenset(self._entries if ids is None else ids)
            for sample_id in removed_ids:
                self._entries.pop(sample_id, None)
            freed = sum(self._sample_nbytes.pop(sample_id, 0) for sample_id in removed_ids)
            self._nbytes -= freed
            listeners = list(self._listeners)
        for listener in listeners:
            listener(removed_ids)
        return freed

    def discard(self, sample_id: str, producer: str) -> None:
        """Remove the values of this sample that ``producer`` stored. Listeners are not called."""
        with self._lock:
            entries = self._entries.get(sample_id, {})
            for key in [key for key, entry in entries.items() if entry.producer == producer]:
                entry = entries.pop(key)
                nbytes = _value_sizes(entry.batch.select([key]))[key][entry.position]
                self._sample_nbytes[sample_id] -= nbytes
                self._nbytes -= nbytes
            if not entries:
                self._entries.pop(sample_id, None)
                self._sample_nbytes.pop(sample_id, None)

    def on_clear(self, listener: Callable[[frozenset[str]], None]) -> None:
        """Register ``listener(ids)``, which is called after every ``clear`` on the calling
        thread."""
        with self._lock:
            self._listeners.append(listener)

    @property
    def nbytes(self) -> int:
        """Total bytes of all stored values."""
        with self._lock:
            return self._nbytes

    def __len__(self) -> int:
        """Return the number of samples with at least one value."""
        with self._lock:
            return len(self._entries)


def _value_sizes(sample: SequenceSample) -> dict[str, list[int]]:
    """Return the size in bytes of each sample's value, by key, in the order of the ids."""
    trailing = sample.trailing_shapes
    rows: dict[int, list[int]] = {}
    out = {}
    for key, dtype in sample.dtypes.items():
        lengths = sample.lengths(key)
        if id(lengths) not in rows:
            rows[id(lengths)] = sample.sample_tokens(key).tolist()
        row_bytes = math.prod(trailing[key]) * ITEMSIZE[dtype]
        out[key] = [tokens * row_bytes for tokens in rows[id(lengths)]]
    return out


def _assemble(keys: Sequence[str], entries: Sequence[_StoredSample]) -> SequenceSample:
    """Build a sample from these keys of these entries, in order. Adjacent entries of one batch are
    sliced together."""
    parts: list[SequenceSample] = []
    for _, group in groupby(entries, key=lambda entry: id(entry.batch)):
        run = list(group)
        batch = run[0].batch.select(keys)
        positions = [entry.position for entry in run]
        parts.append(batch if positions == list(range(len(batch))) else batch.select_ids(positions))
    return parts[0] if len(parts) == 1 else SequenceSample.gather(parts, allow_metadata_loss=True)
