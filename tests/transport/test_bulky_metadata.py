"""Transcripts and other large metadata travel with their samples, within limits that are checked before allocation."""

from __future__ import annotations

import tracemalloc

import msgpack
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.api.sample import SequenceSample
from realhf.transport.codec import MAX_METADATA_BYTES, decode_sample, encode_sample, unpack_metadata
from realhf.transport.data_plane import DataPlane
from realhf.transport.envelope import MAX_HEADER_BYTES
from realhf.transport.errors import CodecError
from realhf.transport.tensor_store import TensorStore

torch.set_num_threads(1)
TRANSCRIPT = "$ aws s3 ls é\n" * 1500
"""About 20 kB."""


def told(count: int, transcript: str = TRANSCRIPT) -> SequenceSample:
    ids = [f"s{i}" for i in range(count)]
    metadata = {
        "transcript": [f"{i} {transcript}" for i in range(count)],
        "task": ids,
        "none": [None] * count,
        "raw": [b"\0\xff"] * count,
        "score": [0.5] * count,
    }
    tensor = torch.arange(3000 * count)
    return SequenceSample.from_tensors(ids, {"x": tensor}, {"x": [[3000]] * count}, metadata)


def test_a_batch_of_samples_with_long_transcripts_makes_the_round_trip():
    sample = told(64)
    for sent in (sample, sample.meta()):
        frames = [bytes(frame) for frame in encode_sample(sent)]
        assert len(frames[0]) < MAX_HEADER_BYTES // 4
        assert decode_sample(frames) == sent


def test_small_metadata_stays_in_the_header():
    assert len(encode_sample(told(4, "short").meta())) == 2
    assert len(encode_sample(told(64).meta())) == 3


def test_it_travels_between_workers():
    store = TensorStore("a")
    a, b = DataPlane("a", "run", store, shm=False), DataPlane("b", "run", TensorStore("b"), shm=False)
    try:
        a.start()
        b.start()
        sample = told(64)
        store.put(sample)
        assert b.fetch(a.endpoint, sample.ids, ["x"], 30.0).metadata["transcript"] == sample.metadata["transcript"]
    finally:
        a.close()
        b.close()


def test_more_than_the_limit_is_refused_by_whoever_sends_and_names_the_column():
    with pytest.raises(CodecError, match=r"metadata of \d+ bytes exceeds .*'transcript'"):
        encode_sample(told(4, "x" * (MAX_METADATA_BYTES // 4)).meta())


def frame(value: object) -> memoryview:
    return memoryview(msgpack.packb(value))


@pytest.mark.parametrize(
    "value",
    [
        3,
        ["a"],
        {"a": 3},
        {"a": ["x"]},
        {"a": ["x", "y", "z"]},
        {"a": ["x", ["y"]]},
        {"a": ["x", {"y": 1}]},
        {1: ["x", "y"]},
        {"a": ["x", msgpack.ExtType(3, b"abc")]},
        {f"c{i}": ["x", "y"] for i in range(1025)},
    ],
)
def test_what_is_no_map_of_columns_is_refused(value: object):
    with pytest.raises(CodecError):
        unpack_metadata(frame(value), 2)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xc1",
        b"\xdf\xff\xff\xff\xff",
        b"\x81\xa1a\xdd\xff\xff\xff\xff",
        b"\x81\xa1a\x92\xdb\x7f\xff\xff\xffabc",
        b"\x80\x00",
        b"\x82\xa1a\x90\xa1a\x90",
        b"\x81\xa1a\x91" + b"\x91" * 200_000,
    ],
)
def test_garbage_is_refused_without_memory_for_what_it_claims(raw: bytes):
    tracemalloc.start()
    try:
        with pytest.raises(CodecError):
            unpack_metadata(memoryview(raw), 1 if b"\x91" in raw else 2)
        assert tracemalloc.get_traced_memory()[1] < (4 << 20)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("place", [0, -1, 3, 99, 2**70, True, "2", None])
def test_a_frame_that_is_not_there_is_refused(place: object):
    header, *rest = (bytes(frame) for frame in encode_sample(told(64).meta()))
    changed = {**msgpack.unpackb(header), "metadata_frame": place if place != 2**70 else 2**63}
    with pytest.raises(CodecError):
        decode_sample([msgpack.packb(changed), *rest])


def test_an_oversized_frame_is_refused_before_it_is_read():
    header, shared, _ = (bytes(frame) for frame in encode_sample(told(64).meta()))
    with pytest.raises(CodecError, match="exceeds"):
        decode_sample([header, shared, bytes(MAX_METADATA_BYTES + 1)])


@pytest.mark.slow
@given(st.integers(0, 4000), st.integers(0, 255))
@settings(max_examples=200, deadline=None)
def test_a_changed_byte_is_refused_or_read(position: int, value: int):
    header, shared, metadata = (bytearray(frame) for frame in encode_sample(told(2, "y" * 200_000).meta()))
    metadata[position] = value
    try:
        decode_sample([header, shared, metadata])
    except CodecError as error:
        assert str(error)
