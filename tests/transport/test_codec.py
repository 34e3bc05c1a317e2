"""Wire round trips of samples, and refusal of everything malformed. What the control messages of a
run may hold. Transcripts and other large metadata travel with their samples, within limits that are
checked before allocation."""

from __future__ import annotations

import tracemalloc

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.api.keys import ITEMSIZE, TORCH_NAMES
from realhf.api.sample import SequenceSample
from realhf.transport import envelope
from realhf.transport.codec import MAX_METADATA_BYTES, decode_sample, encode_sample, unpack_metadata
from realhf.transport.data_plane import DataPlane
from realhf.transport.envelope import (
    COUNTED_FROM_BYTES,
    MAX_HEADER_BYTES,
    pack_payload,
    unpack_payload,
)
from realhf.transport.errors import CodecError, ProtocolError
from realhf.transport.tensor_store import TensorStore

torch.set_num_threads(1)


def random_bits(tag: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Any bit pattern of the type, NaNs included."""
    count = int(np.prod(shape, dtype=int))
    if not count:
        return torch.empty(shape, dtype=getattr(torch, TORCH_NAMES[tag]))
    raw = np.random.default_rng(seed).integers(0, 256, count * ITEMSIZE[tag], dtype=np.uint8)
    if tag == "bool":
        raw &= 1
    return torch.from_numpy(raw).view(getattr(torch, TORCH_NAMES[tag])).reshape(shape)


def one_key(
    tag: str, lengths: list[list[int]], trailing: tuple[int, ...], seed: int = 0
) -> SequenceSample:
    tensor = random_bits(tag, (sum(map(sum, lengths)), *trailing), seed)
    ids = [f"s{i}" for i in range(len(lengths))]
    return SequenceSample.from_tensors(
        ids, {"x": tensor}, {"x": lengths}, {"task": ids, "n": [None] * len(ids)}
    )


def as_bytes(frames) -> list[bytes]:
    return [bytes(frame) for frame in frames]


@pytest.mark.nightly
@pytest.mark.parametrize("tag", sorted(ITEMSIZE))
@pytest.mark.parametrize("rows", [0, 1, 7, 5000])
@pytest.mark.parametrize("trailing", [(), (3,), (0,)])
def test_round_trip_of_every_type(tag, rows, trailing):
    sample = one_key(tag, [[rows], [0, 0]], trailing)
    assert decode_sample(encode_sample(sample)) == sample
    assert decode_sample(as_bytes(encode_sample(sample))) == sample
    assert decode_sample(encode_sample(sample.meta())) == sample.meta()


@pytest.mark.slow
@given(
    st.lists(st.lists(st.integers(0, 40), max_size=3), min_size=1, max_size=6),
    st.lists(st.sampled_from(sorted(ITEMSIZE)), min_size=0, max_size=4),
    st.integers(0, 2**32),
)
@settings(max_examples=80, deadline=None)
def test_round_trip_of_many_keys(lengths, tags, seed):
    keys = {
        f"{tag}{i}": random_bits(tag, (sum(map(sum, lengths)), i), seed)
        for i, tag in enumerate(tags)
    }
    ids = [f"é{i}" for i in range(len(lengths))]
    sample = SequenceSample.from_tensors(ids, keys, {key: lengths for key in keys})
    assert decode_sample(encode_sample(sample)) == sample


def test_integers_beyond_float_precision_are_exact():
    values = torch.tensor([2**24 + 1, 2**53 + 1, -(2**63), 2**63 - 1])
    sample = SequenceSample.from_tensors(["a"], {"x": values}, {"x": [[4]]})
    assert decode_sample(encode_sample(sample))["x"].tolist() == values.tolist()


def test_large_tensors_are_not_copied_and_small_ones_share_a_frame():
    tensors = {"big": torch.arange(1000), "one": torch.arange(3), "two": torch.arange(4)}
    lengths = {key: [[len(tensor)]] for key, tensor in tensors.items()}
    frames = encode_sample(SequenceSample.from_tensors(["a"], tensors, lengths))
    assert len(frames) == 3
    assert np.frombuffer(frames[2], dtype=np.int64).ctypes.data == tensors["big"].data_ptr()


def test_views_and_misaligned_frames():
    base = torch.arange(4000)
    sample = SequenceSample.from_tensors(["a"], {"x": base[1:-1]}, {"x": [[3998]]})
    frames = as_bytes(encode_sample(sample))
    shifted = [memoryview(bytearray(b"\0" + frame))[1:] for frame in frames]
    assert decode_sample(shifted) == sample


def header_of(frames) -> dict:
    return msgpack.unpackb(frames[0])


def set_key(name, value):
    def change(header):
        header["keys"][0][name] = value

    return change


def set_header(name, value):
    def change(header):
        header[name] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        set_header("fmt", 2),
        set_header("ids", []),
        set_header("ids", ["a", "a"]),
        set_header("ids", ["a"]),
        set_header("ids", "ab"),
        set_header("keys", {}),
        set_header("keys", [1]),
        set_header("metadata", {"m": [1]}),
        set_header("metadata", {"m": 3}),
        set_header("metadata", {"m": [{}, {}]}),
        set_key("dtype", "object"),
        set_key("dtype", "f32"),
        set_key("dtype", ["f32"]),
        set_key("trailing", [2]),
        set_key("trailing", [-1]),
        set_key("trailing", [2**62, 2**62]),
        set_key("trailing", [1] * 9),
        set_key("trailing", [1.0]),
        set_key("sequences", -1),
        set_key("sequences", 2**60),
        set_key("sequences", True),
        set_key("sequences", 1),
        set_key("lens_frame", 0),
        set_key("lens_frame", -1),
        set_key("lens_frame", 9),
        set_key("lens_offset", -8),
        set_key("lens_offset", 2**63),
        set_key("nbytes", 2**62),
        set_key("nbytes", 0),
        set_key("frame", 0),
        set_key("frame", 77),
        set_key("offset", 8),
        set_key("offset", -1),
        lambda header: header["keys"].append(header["keys"][0]),
        lambda header: header.pop("keys"),
        lambda header: header["keys"][0].pop("offset"),
    ],
)
def test_malformed_headers_are_refused(change):
    frames = as_bytes(encode_sample(one_key("i64", [[1000], [500]], ())))
    header = header_of(frames)
    change(header)
    with pytest.raises(CodecError):
        decode_sample([msgpack.packb(header), *frames[1:]])


@pytest.mark.parametrize(
    "numbers", [[-1, 1501, 0, 1, 2], [2**62, 2**62, 0, 1, 2], [1000, 500, 0, 2, 1]]
)
def test_malformed_lengths_are_refused(numbers):
    frames = as_bytes(encode_sample(one_key("i64", [[1000], [500]], ())))
    frames[1] = np.array(numbers, dtype="<i8").tobytes() + frames[1][40:]
    with pytest.raises(CodecError):
        decode_sample(frames)


@pytest.mark.slow
@given(st.data())
@settings(max_examples=300, deadline=None)
def test_fuzzed_frames_decode_or_raise_codec_error(data):
    frames = [
        bytearray(f) for f in as_bytes(encode_sample(one_key("i32", [[600, 700], [3]], (1,))))
    ]
    for _ in range(data.draw(st.integers(1, 4))):
        frame = frames[data.draw(st.integers(0, 1))]
        position = data.draw(st.integers(0, len(frame) - 1))
        action = data.draw(st.sampled_from(["set", "cut", "insert"]))
        if action == "set":
            frame[position] = data.draw(st.integers(0, 255))
        elif action == "cut":
            del frame[position : position + data.draw(st.integers(1, 40))]
        else:
            frame[position:position] = data.draw(st.binary(min_size=1, max_size=9))
        if not frame:
            break
    try:
        decode_sample(frames)
    except CodecError as error:
        assert str(error)


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"\xc1"],
        [b"\x93\x01"],
        [b"\x01"],
        [b"\xdd\xff\xff\xff\xff" * 200],
        [b"\x91" * 100_000],
        [bytes(2 << 20)],
        [b"\x80"] * 5000,
    ],
)
def test_garbage_is_refused(frames):
    with pytest.raises(CodecError):
        decode_sample(frames)


def test_a_payload_of_empty_lists_is_refused_before_it_fills_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A byte each on the wire, 64 in memory: the limit of 64 MiB let one message take four
    gigabytes."""
    monkeypatch.setattr(envelope, "MAX_PAYLOAD_CONTAINERS", 1000)
    filling = "x" * COUNTED_FROM_BYTES
    with pytest.raises(ProtocolError, match="lists and maps"):
        unpack_payload([pack_payload([filling, *([] for _ in range(1000))])])
    with pytest.raises(ProtocolError):
        unpack_payload([b"\x91" * COUNTED_FROM_BYTES + b"\x90"])
    whole = [filling, *([] for _ in range(999))]
    assert unpack_payload([pack_payload(whole)]) == whole
    small = [[] for _ in range(2000)]
    assert unpack_payload([pack_payload(small)]) == small, (
        "what is small on the wire is small in memory"
    )


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
    a = DataPlane("a", "run", store, shm=False)
    b = DataPlane("b", "run", TensorStore("b"), shm=False)
    try:
        a.start()
        b.start()
        sample = told(64)
        store.put(sample)
        assert (
            b.fetch(a.endpoint, sample.ids, ["x"], 30.0).metadata["transcript"]
            == sample.metadata["transcript"]
        )
    finally:
        a.close()
        b.close()


@pytest.mark.slow
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
    header, shared, metadata = (
        bytearray(frame) for frame in encode_sample(told(2, "y" * 200_000).meta())
    )
    metadata[position] = value
    try:
        decode_sample([header, shared, metadata])
    except CodecError as error:
        assert str(error)
