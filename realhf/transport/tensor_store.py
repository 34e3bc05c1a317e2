"""Keeps the tensors that a worker holds, by sample id and key (docs/reference/dataflow.md 7)."""

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
class _Entry:
    """Says where the values of one put are: the batch, and the position of the sample in it. Its keys share it."""

    batch: SequenceSample
    position: int
    producer: str


class TensorStore:
    """Stores tensors, thread-safe. Batches are kept as they came, so getting a whole batch back costs no copy; the
    memory of a batch is released when its last sample has been cleared."""

    def __init__(self, name: str = "store") -> None:
        self._name = name
        self._entries: dict[str, dict[str, _Entry]] = {}
        self._sizes: dict[str, int] = {}
        self._nbytes = 0
        self._lock = threading.Lock()
        self._listeners: list[Callable[[frozenset[str]], None]] = []

    def put(self, sample: SequenceSample, producer: str = "") -> None:
        """Keep a sample's tensors.

        When a value exists already, DuplicateDataError is raised and nothing is stored, unless the same non-empty
        ``producer`` (an id of the call) stored it: then the value is left as it is. Raises ValueError on a
        metadata-only sample.
        """
        if sample.data is None:
            raise ValueError("only samples with data can be stored")
        sizes = _sizes(sample)
        with self._lock:
            known = [(i, key) for i in sample.ids for key in sizes if key in self._entries.get(i, ())]
            for sample_id, key in known:
                before = self._entries[sample_id][key].producer
                if not producer or before != producer:
                    raise DuplicateDataError(
                        f"{self._name}: {key} of {sample_id} is stored already (by {before or 'unnamed'!r}, again"
                        f" by {producer or 'unnamed'!r})"
                    )
            for position, sample_id in enumerate(sample.ids):
                entries = self._entries.setdefault(sample_id, {})
                entry = _Entry(sample, position, producer)
                fresh = [key for key in sizes if key not in entries]
                entries.update(dict.fromkeys(fresh, entry))
                nbytes = sum(sizes[key][position] for key in fresh)
                self._sizes[sample_id] = self._sizes.get(sample_id, 0) + nbytes
                self._nbytes += nbytes

    def get(self, ids: Sequence[str], keys: Iterable[str]) -> SequenceSample:
        """Return the values of these keys for these ids, in this order. Raises DataMissing with the list."""
        names = sorted(set(keys))
        with self._lock:
            missing = self._missing(ids, names)
            if missing:
                raise DataMissing(self._name, missing)
            columns = [tuple(self._entries[i][name] for i in ids) for name in names]
        if not names:
            raise ValueError("get needs at least one key")
        together: dict[tuple[int, ...], tuple[list[str], Sequence[_Entry]]] = {}
        for name, entries in zip(names, columns, strict=True):
            together.setdefault(tuple(map(id, entries)), ([], entries))[0].append(name)
        out, *others = (_rows(keys, entries) for keys, entries in together.values())
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
        """Forget these samples (all when None) and return the bytes given up; unknown ids are ignored."""
        with self._lock:
            gone = frozenset(self._entries if ids is None else ids)
            for sample_id in gone:
                self._entries.pop(sample_id, None)
            freed = sum(self._sizes.pop(sample_id, 0) for sample_id in gone)
            self._nbytes -= freed
            listeners = list(self._listeners)
        for listener in listeners:
            listener(gone)
        return freed

    def discard(self, sample_id: str, producer: str) -> None:
        """Forget what ``producer`` stored of this sample; its other values stay, and listeners are not called."""
        with self._lock:
            entries = self._entries.get(sample_id, {})
            for key in [key for key, entry in entries.items() if entry.producer == producer]:
                entry = entries.pop(key)
                nbytes = _sizes(entry.batch.select([key]))[key][entry.position]
                self._sizes[sample_id] -= nbytes
                self._nbytes -= nbytes
            if not entries:
                self._entries.pop(sample_id, None)
                self._sizes.pop(sample_id, None)

    def on_clear(self, listener: Callable[[frozenset[str]], None]) -> None:
        """Call ``listener(ids)`` after every clear, on the thread that clears."""
        with self._lock:
            self._listeners.append(listener)

    @property
    def nbytes(self) -> int:
        """Count the bytes of all values held."""
        with self._lock:
            return self._nbytes

    def __len__(self) -> int:
        """Count the samples of which at least one key is held."""
        with self._lock:
            return len(self._entries)


def _sizes(sample: SequenceSample) -> dict[str, list[int]]:
    """Return the bytes of every id, by key."""
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


def _rows(keys: Sequence[str], entries: Sequence[_Entry]) -> SequenceSample:
    """Assemble these keys for these entries, in order; entries of one batch that follow each other are cut at once."""
    parts: list[SequenceSample] = []
    for _, group in groupby(entries, key=lambda entry: id(entry.batch)):
        run = list(group)
        batch = run[0].batch.select(keys)
        positions = [entry.position for entry in run]
        parts.append(batch if positions == list(range(len(batch))) else batch.select_ids(positions))
    return parts[0] if len(parts) == 1 else SequenceSample.gather(parts, allow_metadata_loss=True)
