"""The tensors a worker holds, by sample id and key (dataflow spec section 7)."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from realhf.api.keys import ITEMSIZE
from realhf.api.sample import SequenceSample
from realhf.transport.errors import DataMissing, DuplicateDataError

__all__ = ["DataMissing", "DuplicateDataError", "TensorStore"]


@dataclass(frozen=True, slots=True)
class _Entry:
    """Where a value is: a batch with this one key, and the position of the sample in it."""

    batch: SequenceSample
    position: int
    producer: str
    nbytes: int


class TensorStore:
    """Thread-safe. Batches are kept as they came, so getting a whole batch back costs no copy; the memory
    of a batch is released when its last sample has been cleared."""

    def __init__(self, name: str = "store") -> None:
        self._name = name
        self._entries: dict[str, dict[str, _Entry]] = {}
        self._nbytes = 0
        self._lock = threading.Lock()
        self._listeners: list[Callable[[frozenset[str]], None]] = []

    def put(self, sample: SequenceSample, producer: str = "") -> None:
        """Keep a sample's tensors. A value that exists raises DuplicateDataError and nothing is stored,
        unless the same non-empty ``producer`` (an id of the call) stored it: then it is left as it is.
        Raises ValueError on a metadata-only sample."""
        if sample.data is None:
            raise ValueError("only samples with data can be stored")
        columns = _columns(sample)
        with self._lock:
            known = [(i, key) for i in sample.ids for key in columns if key in self._entries.get(i, ())]
            for sample_id, key in known:
                before = self._entries[sample_id][key].producer
                if not producer or before != producer:
                    raise DuplicateDataError(
                        f"{self._name}: {key} of {sample_id} is stored already (by {before or 'unnamed'!r}, again"
                        f" by {producer or 'unnamed'!r})"
                    )
            for position, sample_id in enumerate(sample.ids):
                entries = self._entries.setdefault(sample_id, {})
                for key, (batch, tokens, row_bytes) in columns.items():
                    if key not in entries:
                        entries[key] = _Entry(batch, position, producer, tokens[position] * row_bytes)
                        self._nbytes += entries[key].nbytes

    def get(self, ids: Sequence[str], keys: Iterable[str]) -> SequenceSample:
        """The values of these keys for these ids, in this order. Raises DataMissing with the list."""
        names = sorted(set(keys))
        with self._lock:
            missing = self._missing(ids, names)
            if missing:
                raise DataMissing(self._name, missing)
            columns = {name: [self._entries[i][name] for i in ids] for name in names}
        out: SequenceSample | None = None
        for entries in columns.values():
            column = _column(entries)
            out = column if out is None else out.update(column)
        if out is None:
            raise ValueError("get needs at least one key")
        return out

    def has(self, sample_id: str, key: str) -> bool:
        with self._lock:
            return key in self._entries.get(sample_id, ())

    def missing(self, ids: Sequence[str], keys: Iterable[str]) -> list[tuple[str, str]]:
        """The (id, key) pairs of these that are not stored."""
        names = list(keys)
        with self._lock:
            return self._missing(ids, names)

    def _missing(self, ids: Sequence[str], names: Sequence[str]) -> list[tuple[str, str]]:
        return [(i, name) for i in ids for name in names if name not in self._entries.get(i, ())]

    def clear(self, ids: Iterable[str] | None = None) -> int:
        """Forget these samples (all when None); unknown ids are ignored. Returns the bytes given up."""
        with self._lock:
            gone = frozenset(self._entries if ids is None else ids)
            freed = 0
            for sample_id in gone:
                freed += sum(entry.nbytes for entry in self._entries.pop(sample_id, {}).values())
            self._nbytes -= freed
            listeners = list(self._listeners)
        for listener in listeners:
            listener(gone)
        return freed

    def on_clear(self, listener: Callable[[frozenset[str]], None]) -> None:
        """Call ``listener(ids)`` after every clear, on the thread that clears."""
        with self._lock:
            self._listeners.append(listener)

    @property
    def nbytes(self) -> int:
        """Bytes of all values held."""
        with self._lock:
            return self._nbytes

    def __len__(self) -> int:
        """Samples of which at least one key is held."""
        with self._lock:
            return len(self._entries)


def _columns(sample: SequenceSample) -> dict[str, tuple[SequenceSample, list[int], int]]:
    """By key: the sample with that key alone, the rows of every id, and the bytes of a row."""
    trailing, dtypes = sample.trailing_shapes, sample.dtypes
    rows: dict[int, list[int]] = {}
    out = {}
    for key, dtype in dtypes.items():
        lengths = sample.lengths(key)
        tokens = rows.get(id(lengths))
        if tokens is None:
            tokens = rows[id(lengths)] = sample.sample_tokens(key).tolist()
        out[key] = (sample.select([key]), tokens, math.prod(trailing[key]) * ITEMSIZE[dtype])
    return out


def _column(entries: Sequence[_Entry]) -> SequenceSample:
    """One key for these entries, in order; entries of one batch that follow each other are cut at once."""
    parts: list[SequenceSample] = []
    for _, group in groupby(entries, key=lambda entry: id(entry.batch)):
        run = list(group)
        parts.append(run[0].batch.select_ids([entry.position for entry in run]))
    return parts[0] if len(parts) == 1 else SequenceSample.gather(parts, allow_metadata_loss=True)
