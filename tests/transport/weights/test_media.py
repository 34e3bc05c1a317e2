"""Weights over every medium within one process: what arrives, what is refused, what is left
behind."""

from __future__ import annotations

import json
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from realhf.api.generation import WeightsManifest
from realhf.api.keys import ITEMSIZE, TORCH_NAMES
from realhf.base.messages import from_payload, to_payload
from realhf.transport import bulk
from realhf.transport.bulk import BulkConnection, Piece
from realhf.transport.errors import PeerLost
from realhf.transport.network import Network, RunKeys
from realhf.transport.weights import (
    Medium,
    WeightPublisher,
    WeightsError,
    WeightsGone,
    WeightsTimeout,
    receive,
)
from tests.transport.shared_segments import named_segments

torch.set_num_threads(1)
MEDIA: list[Medium] = ["shm", "disk", "fetch"]
TENSORS = {
    "a": torch.arange(24.0).reshape(4, 6),
    "b": torch.arange(7, dtype=torch.int16),
    "c": torch.ones(300).half(),
}


def descriptors() -> Iterator[str]:
    """What this process has open, each by its number and what it leads to."""
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing itself
            yield f"{number} {os.readlink(f'/proc/self/fd/{number}')}"


@contextmanager
def publishing(medium: Medium) -> Iterator[WeightPublisher]:
    with TemporaryDirectory() as folder:
        publisher = WeightPublisher("run", "model_worker/0", Path(folder), medium)
        try:
            yield publisher
        finally:
            publisher.close()


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(got: dict[str, torch.Tensor], sent: dict[str, torch.Tensor]) -> None:
    assert list(got) == list(sent)
    for name, tensor in sent.items():
        assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape)
        assert raw(got[name]) == raw(tensor)


@st.composite
def tensors(draw: Any) -> torch.Tensor:
    """Any bits, any supported type, up to three dimensions, also empty, scalar and with foreign
    strides."""
    tag = draw(st.sampled_from(sorted(ITEMSIZE)))
    shape = draw(st.lists(st.integers(0, 9), max_size=3))
    tensor = torch.empty(shape, dtype=getattr(torch, TORCH_NAMES[tag]))
    if tensor.numel():
        bits = np.random.default_rng(draw(st.integers(0, 99))).bytes(tensor.numel() * ITEMSIZE[tag])
        if tag == "bool":
            bits = bytes(byte % 2 for byte in bits)
        tensor = torch.frombuffer(bytearray(bits), dtype=tensor.dtype).reshape(shape)
    return tensor.transpose(0, -1) if len(shape) > 1 and draw(st.booleans()) else tensor


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("medium", MEDIA)
def test_any_tensors_arrive_bit_by_bit(medium: Medium) -> None:
    @settings(max_examples=40, deadline=None)
    @given(st.dictionaries(st.text(max_size=8), tensors(), max_size=6))
    def check(sent: dict[str, torch.Tensor]) -> None:
        nonlocal version
        version += 1
        manifest = from_payload(WeightsManifest, to_payload(publisher.publish(version, sent)))
        assert all(slot.offset % 64 == 0 for slot in manifest.slots)
        assert_same(receive(manifest, 60.0), sent)

    version = -1
    with publishing(medium) as publisher:
        check()


@pytest.mark.slow
@pytest.mark.parametrize("medium", MEDIA)
def test_the_last_two_versions_are_kept_and_what_is_received_is_the_receivers_own(
    medium: Medium,
) -> None:
    with publishing(medium) as publisher:
        assert publisher.latest is None
        old = [
            publisher.publish(version, {"x": torch.full((50,), float(version))})
            for version in range(4)
        ]
        assert publisher.latest == old[3]
        for manifest in old[:2]:
            with pytest.raises(WeightsGone, match=f"version {manifest.version} by {medium}"):
                receive(manifest, 60.0)
        mine = receive(old[3], 60.0)["x"]
        mine += 1
        assert receive(old[3], 60.0)["x"].unique().tolist() == [3.0]
        held = receive(old[2], 60.0)["x"]
        publisher.retire(2)
        publisher.retire(2)
        assert held.unique().tolist() == [2.0]
    with pytest.raises(WeightsGone):
        receive(old[3], 60.0)


@pytest.mark.parametrize("medium", MEDIA)
def test_a_closed_publisher_leaves_nothing_behind(medium: Medium, tmp_path: Path) -> None:
    def held() -> set[str]:
        return {*descriptors(), *named_segments(), *os.listdir(tmp_path)}

    threads = set(threading.enumerate())
    before = held()
    publisher = WeightPublisher("run", "w", tmp_path, medium)
    for version in range(3):
        receive(publisher.publish(version, TENSORS), 60.0)
    publisher.close()
    assert not [
        thread
        for thread in set(threading.enumerate()) - threads
        if thread.name.startswith("weights-")
    ]
    deadline = time.monotonic() + 60
    while held() - before and time.monotonic() < deadline:
        time.sleep(0.05)
    # fewer, where an earlier test's threads were still closing what it had open
    assert held() <= before


@pytest.mark.slow
@pytest.mark.parametrize("medium", ["shm", "disk"])
def test_without_room_nothing_is_published_and_the_version_before_stays(
    medium: Medium, tmp_path: Path
) -> None:
    publisher = WeightPublisher("run", "w", tmp_path, medium)
    first = publisher.publish(1, TENSORS)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    files = os.listdir(tmp_path)
    before = set(descriptors())
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            publisher.publish(2, {"x": torch.ones(5000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    deadline = time.monotonic() + 60
    while set(descriptors()) - before and time.monotonic() < deadline:
        time.sleep(0.05)  # what runs beside the tests in this process opens and closes files, too
    assert os.listdir(tmp_path) == files and set(descriptors()) <= before
    assert publisher.latest == first
    assert_same(receive(first, 60.0), TENSORS)
    assert_same(receive(publisher.publish(2, TENSORS), 60.0), TENSORS)
    publisher.close()


def test_versions_only_rise_and_settings_have_an_effect(tmp_path: Path) -> None:
    with publishing("shm") as publisher:
        publisher.publish(3, TENSORS)
        for version in (3, 2, -1):
            with pytest.raises(ValueError, match=f"weights version {version} after version 3"):
                publisher.publish(version, TENSORS)
        with pytest.raises(ValueError, match="complex64 is not supported"):
            publisher.publish(4, {"x": torch.zeros(2, dtype=torch.complex64)})
        with pytest.raises(ValueError, match="__metadata__"):
            publisher.publish(4, {"__metadata__": torch.zeros(2)})
        assert publisher.publish(4, TENSORS).version == 4
    with pytest.raises(ValueError, match="medium 'pigeon' of weights, one of shm, disk, fetch"):
        WeightPublisher("run", "w", tmp_path, "pigeon")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("medium", MEDIA)
def test_a_manifest_that_contradicts_itself_or_the_bytes_is_refused(medium: Medium) -> None:
    with publishing(medium) as publisher:
        good = publisher.publish(1, TENSORS)
        first = good.slots[0]
        for slot in (
            replace(first, shape=(4, 7)),
            replace(first, dtype="f8"),
            replace(first, offset=8),
            replace(first, offset=1 << 40),
            replace(first, shape=(-4, -6)),
            replace(first, name="b"),
        ):
            with pytest.raises(WeightsError, match=f"version 1 by {medium}: .*tensor"):
                receive(replace(good, slots=(slot, *good.slots[1:])), 60.0)
        with pytest.raises(WeightsError, match="version 1 by"):
            receive(replace(good, checksum="0" * 32), 60.0)
        for location in ("", "nowhere", "1:2:3:4", "-1:0:0", "127.0.0.1:99999999"):
            with pytest.raises(WeightsError):
                receive(replace(good, location=location), 60.0)
        with pytest.raises(WeightsError, match="no such medium"):
            receive(replace(good, medium="pigeon"), 60.0)
        assert_same(receive(good, 60.0), TENSORS)


def test_memory_that_was_published_cannot_be_changed() -> None:
    with publishing("shm") as publisher:
        pid, number, *_ = publisher.publish(1, TENSORS).location.split(":")
        descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
        with pytest.raises(PermissionError):
            os.pwrite(descriptor, b"x", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, 0)
        os.close(descriptor)


@pytest.mark.slow
def test_a_damaged_file_is_never_handed_out() -> None:
    with publishing("disk") as publisher:
        manifest = publisher.publish(1, TENSORS)
        path = Path(manifest.location)
        whole = path.read_bytes()
        data = len(whole) - sum(slot.nbytes for slot in manifest.slots)

        @settings(max_examples=150, deadline=None)
        @given(st.integers(0, len(whole) - 1), st.integers(1, 255))
        def flipped(place: int, bits: int) -> None:
            path.write_bytes(whole[:place] + bytes([whole[place] ^ bits]) + whole[place + 1 :])
            try:
                got = receive(manifest, 60.0)
            except WeightsError:
                return
            assert place < data  # e.g. a blank of the header
            assert_same(got, TENSORS)

        @settings(max_examples=50, deadline=None)
        @given(st.integers(0, len(whole) - 1))
        def cut(size: int) -> None:
            path.write_bytes(whole[:size])
            with pytest.raises(WeightsError, match="version 1 by disk"):
                receive(manifest, 60.0)

        flipped()
        cut()


def test_files_are_safetensors_both_ways(tmp_path: Path) -> None:
    with publishing("disk") as publisher:
        flags = torch.tensor([True, False, True])
        manifest = publisher.publish(
            7, {"flags": flags, **TENSORS, 'é\n"': torch.tensor(5, dtype=torch.bfloat16)}
        )
        loaded = load_file(manifest.location)
        content = Path(manifest.location).read_bytes()
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        assert header.pop("__metadata__")["version"] == "7"
        assert all(
            header[name]["data_offsets"][0] % loaded[name].element_size() == 0 for name in header
        )
        assert_same(
            receive(manifest, 60.0), {slot.name: loaded[slot.name] for slot in manifest.slots}
        )
        save_file(loaded, tmp_path / "theirs.safetensors")
        theirs = receive(replace(manifest, location=str(tmp_path / "theirs.safetensors")), 60.0)
        assert_same(theirs, {slot.name: loaded[slot.name] for slot in manifest.slots})


@pytest.mark.nightly
def test_a_fetch_from_somebody_who_says_nothing_ends_at_the_deadline() -> None:
    with publishing("fetch") as publisher:
        manifest = publisher.publish(1, TENSORS)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        location = f"127.0.0.1:{silent.getsockname()[1]}#{'0' * 32}"
        with pytest.raises(
            WeightsTimeout, match=f"version 1 by fetch: {location[:-33]} sent nothing"
        ):
            receive(replace(manifest, location=location), 0.1)


@pytest.mark.nightly
@pytest.mark.parametrize("trusted", [False, True], ids=["encrypted", "trusted"])
def test_fetched_weights_come_in_pieces_over_the_bulk_lanes_with_the_keys_of_the_run_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trusted: bool
) -> None:
    """They came through sockets that encrypt 0.3 GB in a second."""
    monkeypatch.setattr("realhf.transport.bulk.PIECE_BYTES", 100_000)
    keys = RunKeys.make()
    network = Network("127.0.0.1", "127.0.0.1", keys, trusted=trusted)
    publisher = WeightPublisher("run", "w", tmp_path, "fetch", network=network)
    sent = {"a": torch.arange(100_001, dtype=torch.int64), "b": torch.ones(3)}
    lanes: set[int] = set()
    fetch = BulkConnection.fetch
    monkeypatch.setattr(
        BulkConnection, "fetch", lambda self, *given: (lanes.add(id(self)), fetch(self, *given))[1]
    )
    try:
        manifest = publisher.publish(1, sent)
        assert_same(receive(manifest, 30.0, network=network), sent)
        assert len(lanes) > 1, "several connections share the pieces"
        for other in (Network(keys=RunKeys.make()), Network()):
            with pytest.raises(WeightsError):
                receive(manifest, 60.0, network=other)
        with pytest.raises(WeightsGone, match="serves it no more"):
            publisher.retire(1)
            receive(manifest, 30.0, network=network)
    finally:
        publisher.close()
    with pytest.raises(WeightsGone, match=r"no process serves it at 127\.0\.0\.1:"):
        receive(manifest, 30.0, network=network)


@pytest.mark.slow
def test_a_fetch_goes_on_after_a_connection_broke(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks for the pieces that are missing, and not for all of them again."""
    monkeypatch.setattr("realhf.transport.bulk.PIECE_BYTES", 50_000)
    asked: list[int] = []
    fetch = BulkConnection.fetch

    def breaks(self: BulkConnection, ticket: bytes, piece: Piece, *given: Any) -> None:
        asked.append(piece.start)
        if len(asked) % 5 == 0:
            self.close()
            raise PeerLost("cut")
        fetch(self, ticket, piece, *given)

    monkeypatch.setattr(BulkConnection, "fetch", breaks)
    sent = {"a": torch.arange(125_000, dtype=torch.int64)}
    with publishing("fetch") as publisher:
        assert_same(receive(publisher.publish(1, sent), 30.0), sent)
    assert len(set(asked)) == 20 and 20 < len(asked) <= 26


def test_a_server_of_weights_goes_on_after_nonsense(tmp_path: Path) -> None:
    with publishing("fetch") as publisher:
        manifest = publisher.publish(1, TENSORS)
        endpoint, _, ticket = manifest.location.partition("#")
        host, _, port = endpoint.rpartition(":")
        number = bytes.fromhex(ticket)
        asked = [
            (number, 1, 0, 8),
            (number, 0, 1 << 60, 8),
            (number, 0, 0, 0),
            (number, 0, 0, manifest.nbytes + 1),
        ]
        for each in (b"", b"\xff" * 99, *(bulk.REQUEST.pack(*said) for said in asked)):
            with socket.create_connection((host, int(port)), timeout=30.0) as stranger:
                stranger.sendall(each)
        for location in (
            "",
            "#",
            f"{endpoint}#00",
            f"{endpoint}#{'z' * 32}",
            f"192.0.2.1:7#{ticket}",
        ):
            with pytest.raises(WeightsError, match=r"location|no such"):
                receive(replace(manifest, location=location), 1.0)
        assert_same(receive(manifest, 30.0), TENSORS)
