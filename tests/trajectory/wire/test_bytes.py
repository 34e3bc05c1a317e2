"""Bodies, compression and MessagePack: docs/reference/trajectory.md 2.1, 3.8, 3.11."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import resource
import zlib
from collections.abc import AsyncIterator
from itertools import chain
from typing import Any

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.trajectory.records import Encoding, Incoming, Payload
from realhf.trajectory.wire import encode
from realhf.trajectory.wire.encode import encode_batch, encode_group
from realhf.trajectory.wire.intake import INLINE_BYTES, Offload, parse_groups
from realhf.web.bodies import MAX_MEMBERS, read_body
from realhf.web.refusal import Refusal
from tests.trajectory.driver import refused
from tests.trajectory.groups import EVERYTHING, binary, encoded, group, tensor

MSGPACK = "application/msgpack"


def read(
    body: bytes, encoding: str = "gzip", cap: int = 1 << 20, pieces: int = 1000, **options: Any
) -> bytes:
    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(body), pieces):
            yield body[start : start + pieces]

    return asyncio.run(read_body(chunks(), encoding=encoding, max_bytes=cap, **options))


def parse(body: bytes, content_type: str | None = None, listed: bool = False) -> list[Incoming]:
    return asyncio.run(
        parse_groups(body, content_type, listed=listed, int64=True, offload=Offload())
    )


def payload(incoming: Incoming) -> Payload:
    return Payload(0, len(incoming.data), incoming.encoding, incoming.present, incoming.crc)


def batch(incoming: list[Incoming], *, msgpack: bool = False, coding: str = "") -> bytes:
    pieces, used = asyncio.run(
        encode_batch(
            [payload(item) for item in incoming],
            [item.data for item in incoming],
            msgpack=msgpack,
            coding=coding,
            level=1,
        )
    )
    joined = b"".join(pieces)
    if used == "gzip":
        assert zlib.decompressobj(31).decompress(joined), (
            "one member: readers that stop after the first see it all"
        )
        return gzip.decompress(joined)
    return (
        zstandard.ZstdDecompressor().decompressobj(read_across_frames=True).decompress(joined)
        if used
        else joined
    )


@pytest.mark.parametrize("size", [0, 1, 999, 300_000])
@pytest.mark.parametrize("encoding", ["gzip", "x-gzip", "GZIP"])
def test_gzip_bodies(size, encoding):
    plain = b"ab" * size
    assert read(gzip.compress(plain), encoding) == plain
    assert read(gzip.compress(plain) + gzip.compress(b"more"), encoding) == plain + b"more"
    assert read(plain, "") == plain


@pytest.mark.parametrize("spoil", [
    lambda body: body[:-1], lambda body: body[: len(body) // 2], lambda body: body[:5], lambda body: b"nonsense",
    lambda body: body[:40] + bytes([body[40] ^ 0x55]) + body[41:], lambda body: body[:-6] + b"\0\0" + body[-4:],
    lambda body: body + b"rubbish",
])  # fmt: skip
@pytest.mark.parametrize("size", [300, 200_000])
def test_damaged_gzip_is_400(spoil, size):
    body = gzip.compress(json.dumps(list(range(size))).encode())
    with refused(400):
        read(spoil(body), cap=1 << 24)


@pytest.mark.slow
def test_a_bomb_is_413_and_is_not_inflated():
    deflater = zlib.compressobj(9, zlib.DEFLATED, 31)
    frame = zstandard.ZstdCompressor().compressobj()
    zeros = bytes(1 << 20)
    bombs = [
        b"".join(map(compressor.compress, [zeros] * 200)) + compressor.flush()
        for compressor in (deflater, frame)
    ]
    for encoding, body in zip(("gzip", "zstd"), bombs, strict=True):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with refused(413):
            read(body, encoding, cap=32 << 20, pieces=1 << 20, allow_zstd=True)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown < 3 * (32 << 10), "KiB; three times the cap, and half of what the body holds"
    with refused(413):
        read(b"x" * 100, "", cap=99)


def test_zstd_bodies():
    plain = b"abc" * 5000
    two = zstandard.compress(plain) + zstandard.compress(plain)
    assert read(two, "zstd", allow_zstd=True) == plain * 2
    assert read(b"plain", "zstd") == b"plain", "only the binary wire knows zstd"
    for bad in (two[:-3], b"nonsense"):
        with refused(400):
            read(bad, "zstd", allow_zstd=True)


@pytest.mark.slow
def test_floods_of_members_are_400():
    flood = [gzip.compress(b"") * (MAX_MEMBERS + 1), zstandard.compress(b"") * (MAX_MEMBERS + 1)]
    for encoding, body in zip(("gzip", "zstd"), flood, strict=True):
        with pytest.raises(Refusal) as refusal:
            read(body, encoding, cap=1 << 30, pieces=1 << 20, allow_zstd=True)
        assert (refusal.value.status, str(MAX_MEMBERS) in refusal.value.detail) == (400, True)


@pytest.mark.parametrize(
    "plain", [random.Random(1).randbytes(700_000), bytes(3 << 20), b"ab" * 130_000]
)
def test_members_end_anywhere_in_a_body(plain):
    parts = [plain[:1], plain[1:300_000], b"", plain[300_000:]]
    assert read(b"".join(map(gzip.compress, parts)), cap=1 << 22, pieces=1 << 20) == plain
    packed = b"".join(map(zstandard.compress, parts))
    assert read(packed, "zstd", cap=1 << 22, pieces=1 << 20, allow_zstd=True) == plain


def test_batches_are_the_groups_joined():
    first = encoded(EVERYTHING)
    second = encoded(group(seed=2))
    groups = parse(first) + parse(second)
    for coding in ("", "gzip"):
        items = json.loads(batch(groups, coding=coding))["batch"]
        assert items[0] == EVERYTHING
        assert len(items[1]) == 14
    assert json.loads(batch([]))["batch"] == []


def test_small_answers_are_not_compressed():
    pieces, used = asyncio.run(encode_batch([], [], msgpack=False, coding="gzip", level=1))
    assert (used, b"".join(pieces)) == ("", b'{"batch":[]}')


@settings(max_examples=25, deadline=None)
@given(pieces=st.lists(st.binary(max_size=3000), max_size=5), level=st.integers(0, 3))
@pytest.mark.slow
def test_joined_deflate_segments_are_one_gzip_member(pieces, level):
    whole = b"".join(asyncio.run(encode.gzip_pieces(pieces, level)))
    reader = zlib.decompressobj(31)
    assert reader.decompress(whole) == b"".join(pieces)
    assert reader.eof
    assert not reader.unused_data


@pytest.mark.parametrize("integers", ["i4", "i8"])
@pytest.mark.parametrize("floats", ["f2", "f4", "f8"])
def test_binary_groups_in_every_dtype(integers, floats):
    plain = group(3, 5, advantages=[[0.5], [], [1.5, -2.0]], env_id=2, policy_version=4)
    [incoming] = parse(binary(plain, integers, floats), MSGPACK)
    assert (incoming.size, incoming.env_id, incoming.policy_version) == (3, 2, 4)
    item = msgspec.msgpack.decode(encode.msgpack_group((incoming.present, incoming.data)))
    assert np.frombuffer(item["tokens"]["data"], f"<{integers}").tolist() == [
        *chain(*plain["tokens"])
    ]
    assert len(item) == 15
    assert item["messages"] is None
    seen = json.loads(asyncio.run(encode_group(payload(incoming), incoming.data, msgpack=False)))
    assert seen["tokens"] == plain["tokens"]
    assert seen["advantages"] == plain["advantages"]
    exact = [
        [float(np.dtype(floats).type(number)) for number in row]
        for row in plain["inference_logprobs"]
    ]
    assert seen["inference_logprobs"] == exact


@pytest.mark.slow
def test_large_binary_lists():
    small = binary(group(8, 512))
    large = binary(group(8, 70_000))
    head = b"\xdc" + (100).to_bytes(2, "big")
    assert len(small) * 100 > INLINE_BYTES
    assert len(large) > INLINE_BYTES
    assert parse(head + small * 100, MSGPACK, listed=True) == parse(small, MSGPACK) * 100
    first, second = parse(b"\x92" + small + large, MSGPACK, listed=True)
    assert first == parse(small, MSGPACK)[0]
    assert second == parse(large, MSGPACK)[0]


def test_ragged_and_empty_rows():
    plain = {"tokens": [[], [1], []], "masks": [], "scores": []}
    [incoming] = parse(binary(plain), MSGPACK)
    assert incoming.size == 3
    assert json.loads(encode.to_json(incoming.present, incoming.data)) == plain


def spoiled(**changed: Any) -> bytes:
    value = {"tokens": tensor([[1, 2]], "i4"), "masks": [[1, 2]], "scores": [1.0]}
    value["tokens"] |= changed
    return msgspec.msgpack.encode(value)


@pytest.mark.parametrize("body", [
    spoiled(lens=b"\x03\0\0\0"), spoiled(lens=b"\x01\0\0"), spoiled(data=b"\0" * 7), spoiled(dtype="f4"),
    spoiled(dtype="u4"), spoiled(x=1), spoiled(__t__=2), spoiled(lens=b"\xff" * 8),
    msgspec.msgpack.encode({"tokens": [[1]], "masks": [[1]]}), msgspec.msgpack.encode([1]), b"", b"\xc1", b"\x81",
    msgspec.msgpack.encode({"tokens": [[1]], "masks": [["x"]], "scores": [1.0]}),
    msgspec.msgpack.encode({"tokens": [[1]], "masks": [[2**63]], "scores": [1.0]}),
    msgspec.msgpack.encode({"tokens": [[1]], "masks": [[1]], "scores": [1.0], "images": b"raw"}),
    msgspec.msgpack.encode({"tokens": [[1]], "masks": [[1]], "scores": [1.0], "images": {1: 2}}),
    msgspec.msgpack.encode({"tokens": [[1]], "masks": [[1]], "scores": [1.0], "messages": [[{"role": 1}]]}),
    b"\x91" * 5000,
])  # fmt: skip
def test_bad_binary_groups_are_422(body):
    for listed, sent in ((False, body), (True, b"\x91" + body)):
        with pytest.raises(Refusal) as refusal:
            parse(sent, MSGPACK, listed=listed)
        assert refusal.value.status == 422
        json.dumps(refusal.value.detail)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
def test_binary_numbers_are_finite(bad, dtype):
    places = [
        {"inference_logprobs": tensor([[1.0, bad]], dtype)},
        {"scores": [bad]},
        {"images": {"a": [bad]}},
        {"distill_logprobs": [[[bad]]]},
        {"advantages": [[bad]]},
    ]
    for place in places:
        with pytest.raises(Refusal):
            parse(
                msgspec.msgpack.encode({"tokens": [[1]], "masks": [[1]], "scores": [1.0]} | place),
                MSGPACK,
            )


@pytest.mark.parametrize(
    "plain", [EVERYTHING, group(policy_version=3), group(4, 1, env_id=None, images=None)]
)
def test_json_to_binary_and_back_is_the_same(plain):
    [incoming] = parse(encoded(plain))
    packed = msgspec.msgpack.decode(batch([incoming], msgpack=True))["batch"][0]
    again = parse(msgspec.msgpack.encode(packed), MSGPACK)[0]
    assert again.encoding is Encoding.MSGPACK
    seen = json.loads(batch([again]))["batch"][0]
    assert {name: seen[name] for name in plain} == plain


def test_integers_that_messagepack_cannot_say_become_text():
    [incoming] = parse(encoded(group(images=[10**30, 1])))
    packed = msgspec.msgpack.decode(batch([incoming], msgpack=True))["batch"][0]
    assert packed["images"] == [str(10**30), 1]


@pytest.mark.parametrize("depth", [10, 600, 930])
def test_whatever_was_accepted_can_be_pulled(depth):
    """A pull that fails would come back to the head of the queue for ever."""
    nest = "[" * depth + str(10**30) + "]" * depth
    plain = (
        f'{{"tokens": [[1]], "masks": [[1]], "scores": [1], "advantages": [[{10**25}]], "images": '
        f"{nest}}}"
    )
    [incoming] = parse(plain.encode())
    packed = msgspec.msgpack.decode(batch([incoming], msgpack=True))["batch"][0]
    assert np.frombuffer(packed["advantages"]["data"], "<f8").tolist() == [1e25]


def test_integers_of_float_fields_are_floats_in_binary_too():
    """Both ways: pushed in binary and read as JSON, and the other way round."""
    plain = group(2, 3, scores=[1, 0], advantages=[[1], [0]], distill_logprobs=[[[0, -2]]])
    names = ("scores", "advantages", "distill_logprobs")
    for body, kind in ((encoded(plain), None), (msgspec.msgpack.encode(plain), MSGPACK)):
        [incoming] = parse(body, kind)
        packed = msgspec.msgpack.decode(batch([incoming], msgpack=True))["batch"][0]
        seen = json.loads(
            asyncio.run(encode_group(payload(incoming), incoming.data, msgpack=False))
        )
        if isinstance(packed["advantages"], dict):
            packed["advantages"] = [np.frombuffer(packed["advantages"]["data"], "<f8").tolist()]
        for found in (packed, seen):
            assert all(
                "." in each for name in names for each in repr(found[name]).strip("[]").split(",")
            ), found


def test_tokens_beyond_64_bits_become_text_for_binary_readers():
    body = encoded({"tokens": [[2**70, 5]], "masks": [[1, 2]], "scores": [1]})
    [incoming] = asyncio.run(parse_groups(body, None, listed=False, int64=False, offload=Offload()))
    packed = msgspec.msgpack.decode(batch([incoming], msgpack=True))["batch"][0]
    assert packed["tokens"] == [[str(2**70), 5]]
    assert packed["masks"]["dtype"] == "i4"


def test_mixed_encodings_in_one_batch():
    plain = group(2, 600)
    both = parse(encoded(plain)) + parse(binary(plain, floats="f8"), MSGPACK)
    for coding in ("", "gzip"):
        one, two = json.loads(batch(both, coding=coding))["batch"]
        assert one == two
    for coding in ("", "gzip", "zstd"):
        one, two = msgspec.msgpack.decode(batch(both, msgpack=True, coding=coding))["batch"]
        assert one["tokens"] == two["tokens"]
