"""Wire round trips of samples, and refusal of everything malformed."""

from __future__ import annotations

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.api.keys import ITEMSIZE, TORCH_NAMES
from realhf.api.sample import SequenceSample
from realhf.transport.codec import decode_sample, encode_sample
from realhf.transport.errors import CodecError

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


def one_key(tag: str, lengths: list[list[int]], trailing: tuple[int, ...], seed: int = 0) -> SequenceSample:
    tensor = random_bits(tag, (sum(map(sum, lengths)), *trailing), seed)
    ids = [f"s{i}" for i in range(len(lengths))]
    return SequenceSample.from_tensors(ids, {"x": tensor}, {"x": lengths}, {"task": ids, "n": [None] * len(ids)})


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


@given(
    st.lists(st.lists(st.integers(0, 40), max_size=3), min_size=1, max_size=6),
    st.lists(st.sampled_from(sorted(ITEMSIZE)), min_size=0, max_size=4),
    st.integers(0, 2**32),
)
@settings(max_examples=80, deadline=None)
def test_round_trip_of_many_keys(lengths, tags, seed):
    keys = {f"{tag}{i}": random_bits(tag, (sum(map(sum, lengths)), i), seed) for i, tag in enumerate(tags)}
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


@pytest.mark.parametrize("numbers", [[-1, 1501, 0, 1, 2], [2**62, 2**62, 0, 1, 2], [1000, 500, 0, 2, 1]])
def test_malformed_lengths_are_refused(numbers):
    frames = as_bytes(encode_sample(one_key("i64", [[1000], [500]], ())))
    frames[1] = np.array(numbers, dtype="<i8").tobytes() + frames[1][40:]
    with pytest.raises(CodecError):
        decode_sample(frames)


@pytest.mark.slow
@given(st.data())
@settings(max_examples=300, deadline=None)
def test_fuzzed_frames_decode_or_raise_codec_error(data):
    frames = [bytearray(f) for f in as_bytes(encode_sample(one_key("i32", [[600, 700], [3]], (1,))))]
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
