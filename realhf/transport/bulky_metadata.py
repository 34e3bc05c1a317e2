"""Carries metadata of samples that is too large for a header: a msgpack map of columns in a frame of its own.

The frame is read column by column with the number of samples known, so that reading never builds more than the frame
has bytes for: no nested value, no column longer or shorter than the samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgpack

from realhf.transport.errors import CodecError

INLINE_BYTES = 256 << 10
"""Size up to which a header holds the metadata itself."""
MAX_METADATA_BYTES = 32 << 20
MAX_COLUMNS = 1024


def pack_metadata(metadata: Mapping[str, Sequence[Any]]) -> bytes:
    """Encode the columns as one frame. Raises CodecError when they exceed the limits, with the column that is
    largest."""
    packed = cast(bytes, msgpack.packb(dict(metadata)))
    if len(metadata) > MAX_COLUMNS:
        raise CodecError(f"metadata of {len(metadata)} columns, allowed are {MAX_COLUMNS}")
    if len(packed) > MAX_METADATA_BYTES:
        largest = max(metadata, key=lambda name: len(cast(bytes, msgpack.packb(metadata[name]))))
        raise CodecError(f"metadata of {len(packed)} bytes exceeds {MAX_METADATA_BYTES}; most of it is {largest!r}")
    return packed


def unpack_metadata(frame: memoryview, samples: int) -> dict[str, list[Any]]:
    """Decode the columns, each with one value per sample. Raises CodecError on anything else."""
    if frame.nbytes > MAX_METADATA_BYTES:
        raise CodecError(f"metadata of {frame.nbytes} bytes exceeds {MAX_METADATA_BYTES}")
    unpacker = msgpack.Unpacker(max_buffer_size=MAX_METADATA_BYTES, max_array_len=0, max_map_len=0, max_ext_len=0)
    try:
        unpacker.feed(frame)
        names = unpacker.read_map_header()
        if names > MAX_COLUMNS:
            raise CodecError(f"metadata of {names} columns, allowed are {MAX_COLUMNS}")
        columns: dict[str, list[Any]] = {}
        for _ in range(names):
            name, count = unpacker.unpack(), unpacker.read_array_header()
            if not isinstance(name, str) or name in columns:
                raise CodecError(f"{name!r:.60} is no name of a metadata column, or there twice")
            if count != samples:
                raise CodecError(f"metadata {name!r:.60} has {count} items for {samples} samples")
            columns[name] = [unpacker.unpack() for _ in range(count)]
    except (ValueError, msgpack.UnpackException) as error:
        raise CodecError(f"metadata is not valid msgpack: {error or type(error).__name__}") from None
    if unpacker.tell() != frame.nbytes:
        raise CodecError(f"{frame.nbytes - unpacker.tell()} bytes after the metadata")
    return columns
