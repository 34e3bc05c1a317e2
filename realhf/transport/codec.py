"""Wire encoding of samples as frames (docs/reference/dataflow.md 2).

Frame 0 is a msgpack header ``{fmt, ids, metadata, keys: [{k, dtype, trailing, lens_frame,
lens_offset, sequences, frame, offset, nbytes}]}``; a metadata-only sample has no ``frame``. Lengths
are sent as int64 (values, then sample offsets). Tensors are raw little-endian bytes: those of 4 KiB
and more in separate frames without a copy; all other buffers share frame 1 at 64-byte steps.
Dtypes are never converted. Metadata that would make the header large (transcripts) goes into a
separate frame, ``metadata_frame``: a msgpack map of columns. The reader knows the number of
samples, so it never allocates more objects than the frame has bytes for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgpack
import numpy as np

from realhf.api.keys import ITEMSIZE, TORCH_NAMES
from realhf.api.sample import IntArray, Lengths, SequenceSample
from realhf.transport.envelope import MAX_HEADER_BYTES, field, unpack_map
from realhf.transport.errors import CodecError, ProtocolError

if TYPE_CHECKING:
    from torch import Tensor


FORMAT = 1
"""Version of the encoding, in the header field ``fmt``."""
MAX_FRAMES = 4096
MAX_FRAME_BYTES = 1 << 30
MAX_MESSAGE_BYTES = 4 << 30
MAX_TRAILING_DIMS = 8
"""Maximum number of dimensions of a key's values after the sequence dimension."""
SHARED_BELOW = 4096
"""Size in bytes below which a tensor is put into the shared frame."""
ALIGNMENT = 64
"""Offsets in the shared frame are multiples of this many bytes, the size of a cache line."""
_ENTRY: dict[str, type] = {
    "k": str,
    "dtype": str,
    "trailing": list,
    "sequences": int,
    "lens_frame": int,
    "lens_offset": int,
}
"""Fields of each entry of ``keys``, with their types."""
_ENTRY_TYPES = tuple(_ENTRY.values())
_ENTRY_FIELDS = itemgetter(*_ENTRY)
_EMPTY = memoryview(b"")


def encode_sample(sample: SequenceSample) -> list[bytes | memoryview]:
    """Encode a sample as frames.

    Large tensors become views of the sample's own storage, so send them before it is freed. Raises
    CodecError if a limit of docs/reference/dataflow.md 6 is exceeded.
    """
    shared = _SharedFrame()
    frames: list[bytes | memoryview] = []
    keys: list[dict[str, Any]] = []
    # Keys whose values have equal lengths share one Lengths object, which is written once.
    offset_of_lengths: dict[int, int] = {}
    data = sample.data
    dtypes = sample.dtypes
    trailing = sample.trailing_shapes
    for key in sorted(sample.keys):
        lengths = sample.lengths(key)
        lens_offset = offset_of_lengths.get(id(lengths))
        if lens_offset is None:
            lens = (
                np.concatenate([lengths.values, lengths.offsets])
                .astype("<i8", copy=False)
                .tobytes()
            )
            lens_offset = offset_of_lengths[id(lengths)] = shared.add(lens)
        entry: dict[str, Any] = {
            "k": key,
            "dtype": dtypes[key],
            "trailing": list(trailing[key]),
            "lens_frame": 1,
            "lens_offset": lens_offset,
            "sequences": len(lengths.values),
        }
        if data is not None:
            raw = tensor_bytes(data[key])
            entry["nbytes"] = raw.nbytes
            if raw.nbytes < SHARED_BELOW:
                entry["frame"] = 1
                entry["offset"] = shared.add(raw)
            else:
                frames.append(raw)
                entry["frame"] = len(frames) + 1
                entry["offset"] = 0
        keys.append(entry)
    fields = {"fmt": FORMAT, "ids": list(sample.ids), "metadata": sample.metadata, "keys": keys}
    if data is None:
        fields["meta_only"] = True
    header = cast(bytes, msgpack.packb(fields))
    if len(header) > INLINE_BYTES:
        frames.append(pack_metadata(sample.metadata))
        header = cast(
            bytes, msgpack.packb({**fields, "metadata": {}, "metadata_frame": len(frames) + 1})
        )
    encoded = [header, shared.frame(), *frames]
    _check_limits([memoryview(frame).nbytes for frame in encoded])
    return encoded


def decode_sample(frames: Sequence[Any]) -> SequenceSample:
    """Decode a sample from frames, which may be any buffers.

    Tensors are views of frames that are writable and aligned, and copies otherwise. Raises
    CodecError on anything malformed, before memory is allocated for it.
    """
    views = [memoryview(frame).cast("B") for frame in frames]
    _check_limits([view.nbytes for view in views])
    try:
        header = unpack_map(views[0], MAX_HEADER_BYTES)
        if header.get("fmt") != FORMAT:
            raise CodecError(f"sample format {header.get('fmt')!r}, expected {FORMAT}")
        ids = field(header, "ids", list)
        metadata = field(header, "metadata", dict)
        if "metadata_frame" in header:
            metadata = unpack_metadata(
                _metadata_frame(views, field(header, "metadata_frame", int)), len(ids)
            )
        meta_only = header.get("meta_only", False)
        known: dict[bytes | tuple[int, int, int], Lengths] = {}
        entries = [
            _TensorEntry.read(item, len(ids), views, bool(meta_only), known)
            for item in field(header, "keys", list)
        ]
        if len({entry.key for entry in entries}) != len(entries):
            raise CodecError("a key occurs twice")
        if not all(isinstance(column, list) for column in metadata.values()):
            raise CodecError("metadata must map names to lists")
        return SequenceSample.from_lengths(
            ids,
            {entry.key: entry.lengths for entry in entries},
            {entry.key: entry.dtype for entry in entries},
            {entry.key: entry.trailing for entry in entries},
            None if meta_only else {entry.key: entry.tensor() for entry in entries},
            metadata,
        )
    except CodecError:
        raise
    except (ProtocolError, ValueError) as error:
        raise CodecError(f"malformed sample: {error}") from None


class _TensorEntry(NamedTuple):
    """One key of the header, validated against the frames."""

    key: str
    dtype: str
    trailing: tuple[int, ...]
    """Shape of the values after the sequence dimension."""
    lengths: Lengths
    raw: memoryview
    """Raw little-endian bytes of the tensor; empty for a metadata-only sample."""

    @staticmethod
    def read(
        item: Any,
        samples: int,
        views: Sequence[memoryview],
        meta_only: bool,
        known: dict[bytes | tuple[int, int, int], Lengths],
    ) -> _TensorEntry:
        """Parse and validate one entry. Raises CodecError.

        known: Lengths of keys that were read before, by location and by bytes, so that keys of
        equal lengths share them.
        """
        if not isinstance(item, dict):
            raise CodecError("an entry of keys is not a map")
        key, dtype, trailing, sequences, lens_frame, lens_offset = _read_fields(item)
        if dtype not in ITEMSIZE:
            raise CodecError(f"key {key!r}: dtype {dtype!r} is not allowed")
        if trailing and (
            len(trailing) > MAX_TRAILING_DIMS
            or not all(type(d) is int and d >= 0 for d in trailing)
        ):
            raise CodecError(f"key {key!r}: bad trailing shape {trailing!r:.60}")
        if sequences < 0:
            raise CodecError(f"key {key!r}: {sequences} sequences")
        place = (lens_frame, lens_offset, sequences)
        lengths = known.get(place)
        if lengths is None:
            lens = bytes(_slice_frame(views, *place[:2], 8 * (sequences + samples + 1), key))
            lengths = known[place] = known[lens] = known.get(lens) or _decode_lengths(
                lens, sequences, key
            )
        if meta_only:
            return _TensorEntry(key, dtype, tuple(trailing), lengths, _EMPTY)
        expected = lengths.total() * math.prod(trailing) * ITEMSIZE[dtype]
        nbytes = field(item, "nbytes", int)
        if nbytes != expected:
            raise CodecError(f"key {key!r}: {nbytes} bytes, lengths and shape give {expected}")
        raw = _slice_frame(
            views, field(item, "frame", int), field(item, "offset", int), nbytes, key
        )
        return _TensorEntry(key, dtype, tuple(trailing), lengths, raw)

    def tensor(self) -> Tensor:
        """Return the tensor that the entry describes."""
        shape = (self.lengths.total(), *self.trailing)
        return bytes_tensor(self.raw, self.dtype, shape)


class _SharedFrame:
    """Builder of one frame from small buffers, each at a multiple of ALIGNMENT."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0

    def add(self, raw: bytes | memoryview) -> int:
        """Append bytes at the next aligned offset; return the offset."""
        offset = self._size
        padding = -len(raw) % ALIGNMENT
        self._parts += [bytes(raw), bytes(padding)]
        self._size += len(raw) + padding
        return offset

    def frame(self) -> bytes:
        """Return the whole frame."""
        return b"".join(self._parts)


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return a view of a tensor's raw bytes, without a copy if it is contiguous on the CPU."""
    import torch

    # not on the CPU, of a dtype that numpy lacks, or part of a gradient's graph
    try:
        array: Any = tensor.numpy()
    except (
        TypeError,
        RuntimeError,
    ):
        array = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    if not array.size:
        return memoryview(b"")
    if not array.ndim or not array.flags.c_contiguous:
        array = np.ascontiguousarray(array).reshape(-1)
    return memoryview(array).cast("B")


def bytes_tensor(raw: memoryview, tag: str, shape: Sequence[int]) -> Tensor:
    """Build a tensor over raw bytes, which the tensor keeps alive. Read-only or misaligned bytes
    are copied.

    tag: Dtype as in ``realhf.api.keys``.
    """
    import torch

    dtype = getattr(torch, TORCH_NAMES[tag])
    if not raw.nbytes:
        return torch.empty(tuple(shape), dtype=dtype)
    flat = torch.frombuffer(bytearray(raw) if raw.readonly else raw, dtype=dtype)
    if flat.data_ptr() % ITEMSIZE[tag]:
        flat = torch.frombuffer(bytearray(raw), dtype=dtype)
    return flat if len(shape) == 1 else flat.reshape(tuple(shape))


def _read_fields(item: dict[str, Any]) -> Sequence[Any]:
    """Return the values of an entry's required fields, in the order of ``_ENTRY``.

    Raises CodecError for a missing field, and ProtocolError for a value of another type.
    """
    try:
        values = _ENTRY_FIELDS(item)
    except KeyError as error:
        raise CodecError(f"an entry of keys has no {error}") from None
    if tuple(map(type, values)) != _ENTRY_TYPES:
        return [field(item, name, kind) for name, kind in _ENTRY.items()]
    return values


def _slice_frame(
    views: Sequence[memoryview], frame: int, offset: int, nbytes: int, key: str
) -> memoryview:
    if not 1 <= frame < len(views):
        raise CodecError(f"key {key!r}: frame {frame} of {len(views)}")
    if offset < 0 or offset + nbytes > views[frame].nbytes:
        raise CodecError(
            f"key {key!r}: bytes {offset}..{offset + nbytes} of a frame of {views[frame].nbytes} "
            f"bytes"
        )
    return views[frame][offset : offset + nbytes]


def _metadata_frame(views: Sequence[memoryview], frame: int) -> memoryview:
    if not 1 <= frame < len(views):
        raise CodecError(f"metadata in frame {frame} of {len(views)}")
    return views[frame]


def _decode_lengths(raw: bytes, sequences: int, key: str) -> Lengths:
    numbers: IntArray = np.frombuffer(raw, dtype="<i8").astype(np.int64)
    values = numbers[:sequences]
    offsets = numbers[sequences:]
    # Read as unsigned, a negative length is larger than the limit: one comparison finds both.
    if sequences and np.maximum.reduce(values.view(np.uint64)) > MAX_MESSAGE_BYTES:
        raise CodecError(f"key {key!r}: a sequence length is negative or absurd")
    return Lengths(values, offsets)


def _check_limits(sizes: Sequence[int]) -> None:
    if not 1 <= len(sizes) <= MAX_FRAMES:
        raise CodecError(f"{len(sizes)} frames, allowed 1 to {MAX_FRAMES}")
    if sizes[0] > MAX_HEADER_BYTES:
        raise CodecError(f"header of {sizes[0]} bytes exceeds {MAX_HEADER_BYTES}")
    if max(sizes) > MAX_FRAME_BYTES or sum(sizes) > MAX_MESSAGE_BYTES:
        raise CodecError(
            f"frames of up to {max(sizes)} bytes, {sum(sizes)} in all, exceed the limits"
        )


INLINE_BYTES = 256 << 10
"""Maximum header size in bytes for which the header itself contains the metadata."""
MAX_METADATA_BYTES = 32 << 20
MAX_COLUMNS = 1024


def pack_metadata(metadata: Mapping[str, Sequence[Any]]) -> bytes:
    """Encode the columns as one frame. Raises CodecError naming the largest column if they exceed
    the limits."""
    packed = cast(bytes, msgpack.packb(dict(metadata)))
    if len(metadata) > MAX_COLUMNS:
        raise CodecError(f"metadata of {len(metadata)} columns, allowed are {MAX_COLUMNS}")
    if len(packed) > MAX_METADATA_BYTES:
        largest = max(metadata, key=lambda name: len(cast(bytes, msgpack.packb(metadata[name]))))
        raise CodecError(
            f"metadata of {len(packed)} bytes exceeds {MAX_METADATA_BYTES}; most of it is "
            f"{largest!r}"
        )
    return packed


def unpack_metadata(frame: memoryview, samples: int) -> dict[str, list[Any]]:
    """Decode the columns, each with one value per sample. Raises CodecError if the frame is
    malformed."""
    if frame.nbytes > MAX_METADATA_BYTES:
        raise CodecError(f"metadata of {frame.nbytes} bytes exceeds {MAX_METADATA_BYTES}")
    unpacker = msgpack.Unpacker(
        max_buffer_size=MAX_METADATA_BYTES, max_array_len=0, max_map_len=0, max_ext_len=0
    )
    try:
        unpacker.feed(frame)
        names = unpacker.read_map_header()
        if names > MAX_COLUMNS:
            raise CodecError(f"metadata of {names} columns, allowed are {MAX_COLUMNS}")
        columns: dict[str, list[Any]] = {}
        for _ in range(names):
            name = unpacker.unpack()
            count = unpacker.read_array_header()
            if not isinstance(name, str) or name in columns:
                raise CodecError(
                    f"{name!r:.60} is not the name of a metadata column, or appears twice"
                )
            if count != samples:
                raise CodecError(f"metadata {name!r:.60} has {count} items for {samples} samples")
            columns[name] = [unpacker.unpack() for _ in range(count)]
    except (ValueError, msgpack.UnpackException) as error:
        raise CodecError(
            f"metadata is not valid msgpack: {error or type(error).__name__}"
        ) from None
    if unpacker.tell() != frame.nbytes:
        raise CodecError(f"{frame.nbytes - unpacker.tell()} bytes after the metadata")
    return columns
