"""SequenceSample: a batch of samples as packed tensors, or only their metadata
(docs/reference/dataflow.md 2).

Vocabulary: a *sample* is one prompt with its group of sequences; a *key* names one field. A key is
one tensor without padding: sample 0 sequence 0, sample 0 sequence 1, ..., sample 1 sequence 0, ...

Instances are immutable. Operations never write to tensors and may share storage between samples, so
a tensor must not be written to once it is in a sample. torch is imported only by operations that
use tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from realhf.api.keys import ITEMSIZE, dtype_tag

if TYPE_CHECKING:
    from torch import Tensor

IntArray = np.ndarray[Any, np.dtype[np.int64]]
"""NumPy array of int64."""


class Lengths:
    """Lengths of the sequences of all samples, in flat immutable arrays.

    ``values``, int64 (n sequences,), contains the number of rows of each sequence. ``offsets``,
    int64 (n samples + 1,), contains the index of each sample's first sequence, followed by the
    number of sequences. Raises ValueError for a negative length, or for offsets that do not rise
    from 0 to ``len(values)``.
    """

    __slots__ = ("_row_offsets", "offsets", "values")

    def __init__(self, values: IntArray, offsets: IntArray) -> None:
        if values.size and np.minimum.reduce(values) < 0:
            raise ValueError("sequence lengths must be >= 0")
        ends_fit = offsets.size and offsets[0] == 0 and offsets[-1] == len(values)
        if not ends_fit or (len(offsets) > 2 and (np.diff(offsets) < 0).any()):
            raise ValueError("offsets of sequences must rise from 0 to the number of sequences")
        self.values = values
        self.offsets = offsets
        self._row_offsets: IntArray | None = None

    @staticmethod
    def of(nested: Sequence[Sequence[int]]) -> Lengths:
        """Build from nested lists, which contain the lengths of the sequences of each sample."""
        flat = np.array([int(length) for inner in nested for length in inner], dtype=np.int64)
        return Lengths(
            flat, _cumulative_sums(np.array([len(inner) for inner in nested], dtype=np.int64))
        )

    @staticmethod
    def join(parts: Sequence[Lengths]) -> Lengths:
        """Concatenate the lengths of several batches of samples."""
        values = [part.values for part in parts]
        if all(len(part.offsets) == 2 for part in parts):
            counts = np.array([len(column) for column in values], dtype=np.int64)
        else:
            counts = np.concatenate([np.diff(part.offsets) for part in parts])
        return Lengths(np.concatenate(values), _cumulative_sums(counts))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Lengths):
            return NotImplemented
        return np.array_equal(self.values, other.values) and np.array_equal(
            self.offsets, other.offsets
        )

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def nested(self) -> list[list[int]]:
        """Return the lengths as nested lists, with the lengths of the sequences of each sample."""
        values = self.values.tolist()
        return [values[a:b] for a, b in pairwise(self.offsets.tolist())]

    def total(self) -> int:
        """Return the number of rows of the packed tensor."""
        return int(self.row_offsets()[-1])

    def row_offsets(self) -> IntArray:
        """Return the index of each sequence's first row, followed by the number of rows: int64 (n
        sequences + 1,)."""
        if self._row_offsets is None:
            self._row_offsets = _cumulative_sums(self.values)
        return self._row_offsets

    def sample_row_offsets(self) -> IntArray:
        """Return the index of each sample's first row, followed by the number of rows: int64 (n
        samples + 1,)."""
        return self.row_offsets()[self.offsets]

    def take(self, samples: IntArray) -> Lengths:
        """Return the lengths of the samples at these positions."""
        starts = self.offsets[samples]
        counts = self.offsets[samples + 1] - starts
        return Lengths(self.values[ranges(starts, counts)], _cumulative_sums(counts))

    def row_indices(self, samples: IntArray) -> IntArray:
        """Return the row indices of the samples at these positions, in the order of the
        positions."""
        starts = self.row_offsets()[self.offsets[samples]]
        return ranges(starts, self.row_offsets()[self.offsets[samples + 1]] - starts)

    def row_span(self, first: int, last: int) -> tuple[int, int]:
        """Return the range of rows (start, end) of the samples ``first`` to ``last`` inclusive."""
        rows = self.row_offsets()
        return int(rows[self.offsets[first]]), int(rows[self.offsets[last + 1]])


def join_lengths(parts: Sequence[Mapping[str, Lengths]]) -> dict[str, Lengths]:
    """Concatenate the lengths of every key over all parts.

    Keys that share a ``Lengths`` object in every part also share one in the result.
    """
    joined: dict[tuple[int, ...], Lengths] = {}
    out: dict[str, Lengths] = {}
    for key in parts[0]:
        columns = [part[key] for part in parts]
        known = tuple(map(id, columns))
        if known not in joined:
            joined[known] = Lengths.join(columns)
        out[key] = joined[known]
    return out


def ranges(starts: IntArray, counts: IntArray) -> IntArray:
    """Concatenate ``arange(start, start + count)`` over all pairs."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total, dtype=np.int64) + np.repeat(starts - (ends - counts), counts)


def _cumulative_sums(values: IntArray) -> IntArray:
    """Return 0 followed by the cumulative sums, int64 (n + 1,)."""
    out = np.zeros(len(values) + 1, dtype=np.int64)
    np.cumsum(values, out=out[1:])
    return out


def join_rows(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors along the rows. A single tensor is returned without a copy."""
    import torch

    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def take_rows(tensor: Tensor, lengths: Lengths, positions: IntArray) -> Tensor:
    """Return the rows of the samples at ``positions``. The result is a view if the positions are
    consecutive."""
    if len(positions) == 1 or bool((np.diff(positions) == 1).all()):
        begin, end = lengths.row_span(int(positions[0]), int(positions[-1]))
        return tensor[begin:end]
    import torch

    return tensor.index_select(
        0, torch.from_numpy(lengths.row_indices(positions)).to(tensor.device)
    )


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors of the same dtype and shape are bitwise equal, including NaN
    payloads."""
    import torch

    if not a.numel():
        return True
    flat_a = a.cpu().reshape(-1)
    flat_b = b.cpu().reshape(-1)
    return torch.equal(flat_a.view(torch.uint8), flat_b.view(torch.uint8))


MAX_ID_BYTES = 256
"""Maximum size of a sample's id in bytes of UTF-8."""


class DuplicateKeyError(ValueError):
    """Raised when a key is added to a sample that already has it."""


@dataclass(frozen=True)
class MicroBatchSpec:
    """How a batch is split into micro-batches of whole sequences."""

    n_mbs: int = 1
    """Minimum number of micro-batches."""
    max_tokens_per_mb: int | None = None
    """Maximum number of positions per micro-batch, padding included; None for no limit. A longer
    sequence forms its own micro-batch."""

    def __post_init__(self) -> None:
        if self.n_mbs < 1:
            raise ValueError(f"n_mbs must be at least 1, got {self.n_mbs}")
        if self.max_tokens_per_mb is not None and self.max_tokens_per_mb < 1:
            raise ValueError(
                f"max_tokens_per_mb must be positive or None, got {self.max_tokens_per_mb}"
            )


def inverse_perm(perm: Sequence[int]) -> list[int]:
    """Return the inverse of a permutation."""
    inverse = [0] * len(perm)
    for position, index in enumerate(perm):
        inverse[index] = position
    return inverse


class SequenceSample:
    """A batch of samples; ``data is None`` means metadata only.

    Raises ValueError for contradictory arguments (docs/reference/dataflow.md 2, the table of
    invariants).
    """

    __slots__ = ("_data", "_dtypes", "_ids", "_lengths", "_metadata", "_trailing")

    _ids: tuple[str, ...]
    _lengths: dict[str, Lengths]
    _dtypes: dict[str, str]
    _trailing: dict[str, tuple[int, ...]]
    _data: dict[str, Tensor] | None
    _metadata: dict[str, list[Any]]

    def __init__(
        self,
        ids: Sequence[Any],
        seqlens: Mapping[str, Sequence[Sequence[int]]],
        dtypes: Mapping[str, str],
        trailing_shapes: Mapping[str, Sequence[int]],
        data: Mapping[str, Tensor] | None = None,
        metadata: Mapping[str, Sequence[Any]] | None = None,
    ) -> None:
        self._ids = _check_ids(ids)
        for name, mapping in (
            ("dtypes", dtypes),
            ("trailing_shapes", trailing_shapes),
            ("data", data),
        ):
            if mapping is not None and set(mapping) != set(seqlens):
                odd = sorted(set(mapping) ^ set(seqlens))
                raise ValueError(f"keys of {name} differ from keys of seqlens: {odd}")
        self._lengths = {k: Lengths.of(v) for k, v in seqlens.items()}
        self._dtypes = dict(dtypes)
        self._trailing = {k: tuple(int(d) for d in v) for k, v in trailing_shapes.items()}
        self._metadata = {k: list(v) for k, v in (metadata or {}).items()}
        self._data = None if data is None else {k: v.contiguous() for k, v in data.items()}
        self._check()

    @classmethod
    def from_tensors(
        cls,
        ids: Sequence[Any],
        tensors: Mapping[str, Tensor],
        seqlens: Mapping[str, Sequence[Sequence[int]]],
        metadata: Mapping[str, Sequence[Any]] | None = None,
    ) -> SequenceSample:
        """Build a sample with data. Dtypes and trailing shapes are taken from the tensors."""
        dtypes = {k: dtype_tag(t.dtype) for k, t in tensors.items()}
        trailing = {k: tuple(t.shape[1:]) for k, t in tensors.items()}
        return cls(ids, seqlens, dtypes, trailing, data=tensors, metadata=metadata)

    @classmethod
    def from_lengths(
        cls,
        ids: Sequence[str],
        lengths: Mapping[str, Lengths],
        dtypes: Mapping[str, str],
        trailing_shapes: Mapping[str, tuple[int, ...]],
        data: Mapping[str, Tensor] | None,
        metadata: Mapping[str, Sequence[Any]],
    ) -> SequenceSample:
        """Build a sample from flat lengths, as the decoder provides them. Validates like the
        constructor."""
        self = cls._build(
            _check_ids(ids), dict(lengths), dict(dtypes), dict(trailing_shapes), None, {}
        )
        self._data = None if data is None else dict(data)
        self._metadata = {k: list(v) for k, v in metadata.items()}
        self._check()
        return self

    @classmethod
    def _build(
        cls,
        ids: tuple[str, ...],
        lengths: dict[str, Lengths],
        dtypes: dict[str, str],
        trailing: dict[str, tuple[int, ...]],
        data: dict[str, Tensor] | None,
        metadata: dict[str, list[Any]],
    ) -> SequenceSample:
        """Return a sample with these attributes, without validation."""
        self = object.__new__(cls)
        self._ids = ids
        self._lengths = lengths
        self._dtypes = dtypes
        self._trailing = trailing
        self._data = data
        self._metadata = metadata
        return self

    def _check(self) -> None:
        """Raise ValueError for contradictory attributes."""
        count = len(self._ids)
        for key, lengths in self._lengths.items():
            if len(lengths) != count:
                raise ValueError(f"key {key!r}: {len(lengths)} length lists for {count} ids")
            if self._dtypes[key] not in ITEMSIZE:
                raise ValueError(f"key {key!r}: unknown dtype tag {self._dtypes[key]!r}")
            if any(dim < 0 for dim in self._trailing[key]):
                raise ValueError(
                    f"key {key!r}: negative trailing dimension in {self._trailing[key]}"
                )
            if self._data is not None:
                self._check_tensor(key, self._data[key])
        self._check_metadata(self._metadata)

    def _check_metadata(self, metadata: Mapping[str, Sequence[Any]]) -> None:
        for key, column in metadata.items():
            if len(column) != len(self._ids):
                raise ValueError(
                    f"metadata {key!r} has {len(column)} items for {len(self._ids)} ids"
                )
            for item in column:
                if item is not None and not isinstance(item, (str, int, float, bool, bytes)):
                    raise ValueError(
                        f"metadata {key!r} holds a {type(item).__name__}; scalars only"
                    )

    def _check_tensor(self, key: str, tensor: Tensor) -> None:
        shape = (self.n_tokens(key), *self._trailing[key])
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"key {key!r}: tensor of shape {tuple(tensor.shape)}, lengths say {shape}"
            )
        if dtype_tag(tensor.dtype) != self._dtypes[key]:
            raise ValueError(f"key {key!r}: tensor of {tensor.dtype}, declared {self._dtypes[key]}")

    # ---- reading

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids of the samples, in order."""
        return self._ids

    @property
    def keys(self) -> frozenset[str]:
        """Names of the fields."""
        return frozenset(self._lengths)

    @property
    def seqlens(self) -> dict[str, list[list[int]]]:
        """Lengths of every key as nested lists, which each access builds again. ``lengths(key)``
        returns the flat form."""
        return {key: lengths.nested() for key, lengths in self._lengths.items()}

    @property
    def dtypes(self) -> dict[str, str]:
        """Dtype tag of every key."""
        return dict(self._dtypes)

    @property
    def trailing_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of one row of every key, () for scalars."""
        return dict(self._trailing)

    @property
    def data(self) -> dict[str, Tensor] | None:
        """Packed tensors by key; None for a metadata-only sample."""
        return None if self._data is None else dict(self._data)

    @property
    def metadata(self) -> dict[str, list[Any]]:
        """Metadata columns by name, each with one entry per sample."""
        return {key: list(column) for key, column in self._metadata.items()}

    def lengths(self, key: str) -> Lengths:
        """Return the flat lengths of a key. Raises KeyError if the sample does not have it."""
        return self._lengths[self._check_key(key)]

    def _check_key(self, key: str) -> str:
        """Return ``key``. Raises KeyError if the sample does not have it."""
        if key not in self._lengths:
            raise KeyError(f"sample has no key {key!r}; it has {sorted(self._lengths)}")
        return key

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, key: str) -> Tensor:
        """Return the packed tensor of a key. Raises ValueError for a metadata-only sample."""
        self._check_key(key)
        if self._data is None:
            raise ValueError(f"sample holds metadata only: no data for key {key!r}")
        return self._data[key]

    def __repr__(self) -> str:
        sizes = {key: self.n_tokens(key) for key in sorted(self._lengths)}
        kind = "meta" if self._data is None else "data"
        return f"SequenceSample({len(self)} samples, {kind}, rows={sizes})"

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __eq__(self, other: object) -> bool:
        """Return whether all attributes are equal. Tensors are compared bitwise, including NaN
        payloads."""
        if not isinstance(other, SequenceSample):
            return NotImplemented
        if (self._ids, self._dtypes, self._trailing, self._metadata) != (
            other._ids,
            other._dtypes,
            other._trailing,
            other._metadata,
        ) or (self._data is None) != (other._data is None):
            return False
        if self._lengths != other._lengths:
            return False
        return self._data is None or all(same_bits(t, other[k]) for k, t in self._data.items())

    def n_tokens(self, key: str) -> int:
        """Return the number of rows of the packed tensor of a key."""
        return self.lengths(key).total()

    def sample_tokens(self, key: str) -> IntArray:
        """Return the number of rows that each sample has under ``key``: int64 (n samples,)."""
        return np.diff(self.lengths(key).sample_row_offsets())

    def group_index(self, key: str) -> IntArray:
        """Return the index of the sample to which each sequence belongs: int64 (n sequences,)."""
        offsets = self.lengths(key).offsets
        return np.repeat(np.arange(len(self), dtype=np.int64), np.diff(offsets))

    # ---- choosing

    def meta(self) -> SequenceSample:
        """Return this sample without its tensors."""
        return self._build(
            self._ids, self._lengths, self._dtypes, self._trailing, None, self._metadata
        )

    def annotated(
        self, metadata: Mapping[str, Sequence[Any]], *, keep: bool = True
    ) -> SequenceSample:
        """Return this sample with these metadata columns. If ``keep``, its other columns are
        retained."""
        columns = {name: list(column) for name, column in metadata.items()}
        self._check_metadata(columns)
        merged = {**self._metadata, **columns} if keep else columns
        return self._build(
            self._ids, self._lengths, self._dtypes, self._trailing, self._data, merged
        )

    def select(self, keys: Iterable[str]) -> SequenceSample:
        """Return this sample with only these keys. Raises KeyError for a key that is absent."""
        names = sorted({self._check_key(key) for key in keys})
        return self._with_keys({name: name for name in names})

    def remap_keys(self, mapping: Mapping[str, str]) -> SequenceSample:
        """Return this sample with keys renamed by ``mapping`` (old -> new). Raises
        DuplicateKeyError if two keys would have the same name."""
        for key in mapping:
            self._check_key(key)
        targets = {key: mapping.get(key, key) for key in self._lengths}
        if len(set(targets.values())) != len(targets):
            raise DuplicateKeyError(f"renaming {dict(mapping)} gives two keys the same name")
        return self._with_keys(targets)

    def _with_keys(self, targets: Mapping[str, str]) -> SequenceSample:
        """Return this sample with only the keys in ``targets`` (old -> new name), renamed."""
        data = (
            None if self._data is None else {new: self._data[old] for old, new in targets.items()}
        )
        return self._build(
            self._ids,
            {new: self._lengths[old] for old, new in targets.items()},
            {new: self._dtypes[old] for old, new in targets.items()},
            {new: self._trailing[old] for old, new in targets.items()},
            data,
            self._metadata,
        )

    def select_ids(self, index: Sequence[int]) -> SequenceSample:
        """Return the samples at these positions, in this order. Raises ValueError for a repeated or
        invalid position."""
        positions = np.asarray(list(index), dtype=np.int64)
        if not len(positions) or len(np.unique(positions)) != len(positions):
            raise ValueError("positions must be non-empty and distinct")
        if positions.min() < 0 or positions.max() >= len(self):
            raise ValueError(f"positions {positions.tolist()} out of range for {len(self)} samples")
        data = None
        if self._data is not None:
            data = {k: take_rows(t, self._lengths[k], positions) for k, t in self._data.items()}
        by_identity = {id(lengths): lengths.take(positions) for lengths in self._distinct_lengths()}
        return self._build(
            tuple(self._ids[i] for i in positions),
            {k: by_identity[id(lengths)] for k, lengths in self._lengths.items()},
            self._dtypes,
            self._trailing,
            data,
            {k: [column[i] for i in positions] for k, column in self._metadata.items()},
        )

    def _distinct_lengths(self) -> Iterable[Lengths]:
        """Return the distinct ``Lengths`` objects. Keys with equal lengths often share one."""
        return {id(lengths): lengths for lengths in self._lengths.values()}.values()

    def reorder(self, perm: Sequence[int]) -> SequenceSample:
        """Return the samples in another order, with sample ``perm[i]`` at position ``i``. Raises
        ValueError unless ``perm`` is a permutation."""
        if len(perm) != len(self):
            raise ValueError(f"permutation of {len(perm)} for {len(self)} samples")
        return self.select_ids(perm)

    def to(self, device: Any) -> SequenceSample:
        """Return this sample with its tensors on ``device``."""
        data = None if self._data is None else {k: t.to(device) for k, t in self._data.items()}
        return self._build(
            self._ids, self._lengths, self._dtypes, self._trailing, data, self._metadata
        )

    # ---- joining and cutting

    def update(self, other: SequenceSample) -> SequenceSample:
        """Return this sample with the keys of another one added.

        Metadata columns of the other sample replace columns of the same name. Raises ValueError
        unless both samples have the same ids in the same order, and DuplicateKeyError for a key
        that this sample already has.
        """
        if self._ids != other._ids:
            raise ValueError("update needs the same ids in the same order; reorder first")
        repeated = sorted(self.keys & other.keys)
        if repeated:
            raise DuplicateKeyError(f"sample already has keys {repeated}")
        if (self._data is None) != (other._data is None):
            raise ValueError("cannot join a metadata-only sample with one that has data")
        data = None if self._data is None or other._data is None else {**self._data, **other._data}
        return self._build(
            self._ids,
            {**self._lengths, **other._lengths},
            {**self._dtypes, **other._dtypes},
            {**self._trailing, **other._trailing},
            data,
            {**self._metadata, **other._metadata},
        )

    @staticmethod
    def gather(
        samples: Sequence[SequenceSample],
        keys: Iterable[str] | None = None,
        *,
        allow_metadata_loss: bool = False,
    ) -> SequenceSample:
        """Concatenate samples. If ``keys`` is given, only these keys are included.

        Raises ValueError if ids repeat, or if samples differ in keys, dtypes, trailing shapes,
        presence of data or, unless ``allow_metadata_loss``, metadata columns.
        """
        if not samples:
            raise ValueError("gather needs at least one sample")
        parts = (
            list(samples)
            if keys is None
            else [s.select(names) for names in [set(keys)] for s in samples]
        )
        first = parts[0]
        shared = set(first._metadata)
        for part in parts[1:]:
            if part._dtypes != first._dtypes or part._trailing != first._trailing:
                raise ValueError(
                    f"parts disagree in keys, dtypes or trailing shapes: {first} and {part}"
                )
            if (part._data is None) != (first._data is None):
                raise ValueError("some parts hold data and some metadata only")
            if set(part._metadata) != shared and not allow_metadata_loss:
                raise ValueError(
                    f"parts disagree in metadata: {sorted(set(part._metadata) ^ shared)}"
                )
            shared &= set(part._metadata)
        ids = _check_ids([i for part in parts for i in part._ids])
        data = (
            None
            if first._data is None
            else {k: join_rows([p[k] for p in parts]) for k in first._data}
        )
        lengths = join_lengths([p._lengths for p in parts])
        metadata = {
            k: [x for p in parts for x in p._metadata[k]] for k in first._metadata if k in shared
        }
        return SequenceSample._build(ids, lengths, first._dtypes, first._trailing, data, metadata)

    def costs(self) -> list[int]:
        """Return the number of rows of each sample under the key that has the most rows; 1 for each
        sample if there are no keys."""
        if not self._lengths:
            return [1] * len(self)
        longest = max(sorted(self._lengths), key=self.n_tokens)
        return self.sample_tokens(longest).tolist()


def _check_ids(ids: Sequence[Any]) -> tuple[str, ...]:
    """Return the ids as strings. Raises ValueError if there are none, or for an id that repeats or
    is too long."""
    out = tuple(str(i) for i in ids)
    if not out:
        raise ValueError("a sample needs at least one id")
    if len(set(out)) != len(out):
        repeated = next(i for n, i in enumerate(out) if i in out[:n])
        raise ValueError(f"id {repeated!r} occurs twice")
    for i in out:
        if len(i) * 4 > MAX_ID_BYTES and len(i.encode()) > MAX_ID_BYTES:
            raise ValueError(f"id {i[:40]!r}... is longer than {MAX_ID_BYTES} bytes")
    return out


Bools = np.ndarray[Any, np.dtype[np.bool_]]
"""NumPy array of bool."""


def choose_sequences(sample: SequenceSample, keep: Bools) -> SequenceSample | None:
    """Return the sample with only the sequences for which ``keep``, bool (n sequences of
    ``packed_input_ids``,), is True; None if there are none.

    Samples of which no sequence remains are dropped with their metadata. Keys with one entry per
    sample keep the entries of the remaining samples. Raises ValueError for a key that has neither
    one entry per sequence nor one per sample.
    """
    if not keep.any():
        return None
    offsets = sample.lengths("packed_input_ids").offsets
    count = np.diff(np.cumsum(np.concatenate(([0], keep)))[offsets])
    member = count > 0
    ends = np.concatenate(([0], np.cumsum(count[member]))).astype(np.int64)
    tensors: dict[str, Tensor] = {}
    lengths: dict[str, Lengths] = {}
    for key in sorted(sample.keys):
        key_lengths = sample.lengths(key)
        if np.array_equal(key_lengths.offsets, offsets):
            kept_entries = keep
            new_offsets = ends
        elif len(key_lengths.values) == len(sample) and (np.diff(key_lengths.offsets) == 1).all():
            kept_entries = member
            new_offsets = np.arange(int(member.sum()) + 1, dtype=np.int64)
        else:
            raise ValueError(f"key {key!r} does not have one length per sequence")
        tensors[key] = _select_rows(sample[key], np.repeat(kept_entries, key_lengths.values))
        lengths[key] = Lengths(key_lengths.values[kept_entries], new_offsets)
    where = np.flatnonzero(member).tolist()
    return SequenceSample.from_lengths(
        [sample.ids[i] for i in where],
        lengths,
        sample.dtypes,
        sample.trailing_shapes,
        tensors,
        {name: [column[i] for i in where] for name, column in sample.metadata.items()},
    )


def _select_rows(packed: Tensor, chosen: Bools) -> Tensor:
    import torch

    return packed if chosen.all() else packed[torch.from_numpy(chosen).to(packed.device)]
