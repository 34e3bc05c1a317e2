"""Tensors between real processes, by shared memory and by TCP."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest
import torch
import zmq

from realhf.api.sample import SequenceSample
from realhf.transport.data_plane import DataPlane
from realhf.transport.envelope import pack_header
from realhf.transport.errors import DataError, DataMissing, FetchTimeout, PeerLost
from realhf.transport.network import Network, RunKeys
from realhf.transport.shared_memory import MappingCache, Segment, SegmentPool
from realhf.transport.tensor_store import TensorStore
from tests.process_family import freeze
from tests.transport.shared_segments import named_segments

pytestmark = pytest.mark.slow

torch.set_num_threads(1)
SCRIPT = str(Path(__file__).with_name("store_process.py"))
ROWS = 50_000


class Owner:
    """A store in another process."""

    def __init__(self, mode: str = "shm") -> None:
        self.process = subprocess.Popen(
            [sys.executable, SCRIPT, mode], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.endpoint = self._read()

    def _read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, line: str) -> list[int]:
        """Bytes stored and number of memory files afterwards."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return [int(word) for word in self._read().split()]


def owned() -> Iterator[Owner]:
    made = Owner()
    yield made
    made.process.send_signal(signal.SIGCONT)
    made.process.kill()
    made.process.communicate(timeout=300)


long_lived = pytest.fixture(scope="module", name="long_lived")(owned)
fresh_owner = pytest.fixture(name="fresh_owner")(owned)


@pytest.fixture
def owner(long_lived: Owner) -> Owner:
    """The same process for many tests, its store emptied."""
    long_lived.tell("clear " + " ".join(map(str, range(10))))
    return long_lived


@pytest.fixture
def planes():
    made = [DataPlane(mode, "run", TensorStore(mode), shm=mode == "shm") for mode in ("shm", "tcp")]
    for plane in made:
        plane.start()
    yield made
    for plane in made:
        plane.close()


def mapped_segments() -> int:
    """How many there are, without those that tests before left to the collector, which runs rarely
    here."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:realhf")


@pytest.mark.parametrize("rows", [0, 10, ROWS])
def test_both_paths_give_the_same(owner, planes, rows):
    owner.tell(f"put 7 {rows}")
    owner.tell(f"put 8 {rows + 3}")
    by_shm, by_tcp = (plane.fetch(owner.endpoint, ["8", "7"], ["m", "x"], 60) for plane in planes)
    assert by_shm == by_tcp
    assert by_shm.ids == ("8", "7")
    expected = torch.cat([torch.arange(rows + 3) + 8, torch.arange(rows) + 7])
    assert torch.equal(by_shm["x"], expected)
    assert by_shm["m"].dtype == torch.bool and by_shm.metadata == {"from": ["owner"] * 2}


def test_large_values_come_by_shared_memory_and_small_ones_do_not(owner, planes):
    owner.tell(f"put 1 {ROWS}")
    owner.tell("put 2 10")
    before = mapped_segments()
    small = planes[0].fetch(owner.endpoint, ["2"], ["x"], 60)
    assert mapped_segments() == before
    large = planes[0].fetch(owner.endpoint, ["1"], ["x"], 60)
    assert mapped_segments() == before + 1
    del small, large
    gc.collect()
    planes[0].close()
    assert mapped_segments() == before


def test_writing_to_a_fetched_tensor_stays_private(owner, planes):
    owner.tell(f"put 1 {ROWS}")
    for plane in planes:
        first = plane.fetch(owner.endpoint, ["1"], ["x"], 60)["x"]
        first.zero_()
        assert plane.fetch(owner.endpoint, ["1"], ["x"], 60)["x"][5] == 6


@pytest.mark.nightly
def test_memory_that_is_read_is_not_reused(fresh_owner, planes):
    held = []
    for i in range(5):
        fresh_owner.tell(f"put {i} {ROWS}")
        held.append(planes[0].fetch(fresh_owner.endpoint, [str(i)], ["x"], 60))
        assert fresh_owner.tell(f"clear {i}")[0] == 0
    for i, sample in enumerate(held):
        assert torch.equal(sample["x"], torch.arange(ROWS) + i)
    files = fresh_owner.tell("nbytes")[1]
    assert files == 5
    del held, sample
    gc.collect()
    for i in range(5, 9):
        fresh_owner.tell(f"put {i} {ROWS}")
        assert planes[0].fetch(fresh_owner.endpoint, [str(i)], ["x"], 60)["x"][0] == i
        assert fresh_owner.tell(f"clear {i}") == [0, files], "cleared segments are filled again"


def test_missing_values_are_listed(owner, planes):
    owner.tell("put 1 10")
    for plane in planes:
        with pytest.raises(DataMissing) as caught:
            plane.fetch(owner.endpoint, ["1", "2"], ["x"], 60)
        assert caught.value.missing == [("2", "x")]
        assert owner.endpoint in str(caught.value)
        assert plane.fetch(owner.endpoint, ["1"], ["x"], 60).ids == ("1",)
    owner.tell("clear 1")
    with pytest.raises(DataMissing):
        planes[0].fetch(owner.endpoint, ["1"], ["x"], 60)


def test_own_values_come_from_the_store(planes):
    sample = SequenceSample.from_tensors(["a"], {"x": torch.arange(9)}, {"x": [[9]]})
    planes[0]._store.put(sample)
    assert (
        planes[0].fetch(planes[0].endpoint, ["a"], ["x"], 1)["x"].data_ptr()
        == sample["x"].data_ptr()
    )


def test_two_busy_workers_serve_each_other(planes):
    a, b = planes
    for plane, name in ((a, "a"), (b, "b")):
        plane._store.put(
            SequenceSample.from_tensors([name], {"x": torch.arange(ROWS)}, {"x": [[ROWS]]})
        )
    results: list[SequenceSample] = []

    def work(plane: DataPlane, peer: DataPlane, name: str) -> None:
        results.extend(plane.fetch(peer.endpoint, [name], ["x"], 60) for _ in range(10))

    threads = [threading.Thread(target=work, args=args) for args in ((a, b, "b"), (b, a, "a")) * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == 40


@pytest.mark.nightly
def test_a_killed_owner_is_noticed_and_leaves_nothing(fresh_owner, planes):
    before = named_segments()
    fresh_owner.tell(f"put 1 {ROWS}")
    held = planes[0].fetch(fresh_owner.endpoint, ["1"], ["x"], 60)
    assert named_segments() == before, "segments have no name that could be left behind"
    freeze(fresh_owner.process.pid)
    timer = threading.Timer(0.3, fresh_owner.process.kill)
    timer.start()
    with pytest.raises(PeerLost, match=fresh_owner.endpoint):
        planes[0].fetch(fresh_owner.endpoint, ["2"], ["x"], 60)
    assert torch.equal(held["x"], torch.arange(ROWS) + 1), "what was fetched lives on"
    with pytest.raises(PeerLost):
        planes[0].fetch(fresh_owner.endpoint, ["2"], ["x"], 60)
    del held
    gc.collect()
    planes[0].close()
    assert mapped_segments() == 0


def test_a_frozen_owner_is_a_timeout(owner, planes):
    owner.tell("put 1 10")
    planes[0].fetch(owner.endpoint, ["1"], ["x"], 60)
    freeze(owner.process.pid)
    try:
        with pytest.raises(FetchTimeout, match=owner.endpoint):
            planes[0].fetch(owner.endpoint, ["1"], ["x"], 0.3)
    finally:
        owner.process.send_signal(signal.SIGCONT)
    assert planes[0].fetch(owner.endpoint, ["1"], ["x"], 60).ids == ("1",)


@pytest.mark.nightly
def test_close_gives_everything_up(fresh_owner, planes):
    fresh_owner.tell(f"put 1 {ROWS}")
    planes[0].fetch(fresh_owner.endpoint, ["1"], ["x"], 60)
    assert fresh_owner.tell("nbytes")[1] == 1
    assert fresh_owner.tell("quit") == [0]
    assert fresh_owner.process.wait(60) == 0
    planes[0].close()
    planes[0].close()
    with pytest.raises(DataError, match="closed"):
        planes[0].fetch(fresh_owner.endpoint, ["1"], ["x"], 1)


def test_strangers_are_not_served(owner):
    owner.tell("put 1 10")
    wish = msgpack.packb({"ids": ["1"], "keys": ["x"], "host": ""})
    with zmq.Context() as context, context.socket(zmq.DEALER) as rogue:
        rogue.connect(owner.endpoint)
        rogue.send_multipart([pack_header("fetch", "another run", b"", id=b"1" * 16), wish])
        rogue.send_multipart([b"\xc1"])
        for bad in (
            b"\x01",
            b"\xc1",
            msgpack.packb({"ids": 3, "keys": []}),
            msgpack.packb({"ids": [[]], "keys": ["x"]}),
        ):
            rogue.send_multipart([pack_header("fetch", "run", b"", id=b"2" * 16), bad])
            assert rogue.poll(60_000), "a malformed wish has an answer"
            answer = msgpack.unpackb(rogue.recv_multipart()[0])
            assert (answer["kind"], answer["id"]) == ("error", b"2" * 16)


def test_a_refilled_segment_cannot_be_taken_for_the_old_one():
    segment = Segment(100_000)
    cache = MappingCache(1 << 20)
    old = segment.fill([b"a" * 1000])
    assert old is not None
    views = cache.open(old)
    assert views is not None and bytes(views[0]) == b"a" * 1000
    assert segment.fill([b"b" * 1000]) is None, "a consumer uses it"
    del views
    new = segment.fill([b"b" * 1000, b"", b"c"])
    assert new is not None
    assert cache.open(old) is None
    again = cache.open(new)
    assert again is not None and [bytes(view) for view in again] == [b"b" * 1000, b"", b"c"]
    del again
    segment.close()
    assert cache.open(new) is None
    cache.close()
    assert mapped_segments() == 0


@pytest.mark.parametrize("write", [False, True])
def test_a_mapping_is_used_again_unless_it_was_written_to(write):
    segment = Segment(100_000)
    cache = MappingCache(1 << 20)
    addresses = []
    for letter in (b"a", b"b", b"c"):
        ref = segment.fill([letter * 90_000])
        assert ref is not None
        views = cache.open(ref)
        assert views is not None and bytes(views[0]) == letter * 90_000
        if write:
            views[0][50_000] = 0
        addresses.append(views[0].obj)
        assert mapped_segments() == (1 if letter == b"a" else 2), (
            "ours and the producer's, no third"
        )
        addresses.clear()
        del views
    segment.close()
    cache.close()


def test_idle_mappings_are_bounded():
    cache = MappingCache(100_000)
    segments = [Segment(40_000) for _ in range(4)]
    for segment in segments:
        ref = segment.fill([b"x" * 30_000])
        assert ref is not None
        assert cache.open(ref) is not None
    assert mapped_segments() == 2
    cache.close()
    assert mapped_segments() == 0
    for segment in segments:
        segment.close()


def test_spare_segments_are_bounded():
    pool = SegmentPool(spare_bytes=100_000)
    for name in range(5):
        assert pool.store(name, [bytes(40_000)]) is not None
    for name in range(5):
        pool.release(name)
    assert 0 < pool.nbytes <= 100_000
    pool.close()
    assert pool.nbytes == 0


def test_tensors_are_fetched_by_their_run_only():
    """With keys, a reader of the run gets values over an encrypted socket; one with other keys is
    refused by name."""
    ours = Network(keys=RunKeys.make())
    store = TensorStore("owner")
    store.put(SequenceSample.from_tensors(["a"], {"x": torch.arange(3)}, {"x": [[3]]}))
    owner = DataPlane("owner", "run", store, network=ours)
    reader = DataPlane("reader", "run", TensorStore("reader"), shm=False, network=ours)
    stranger = DataPlane(
        "stranger", "run", TensorStore("stranger"), network=Network(keys=RunKeys.make())
    )
    planes = (owner, reader, stranger)
    try:
        for plane in planes:
            plane.start()
        assert reader.fetch(owner.endpoint, ["a"], ["x"], 30.0).data["x"].tolist() == [0, 1, 2]
        with pytest.raises(PeerLost, match=f"{owner.endpoint} .*key"):
            stranger.fetch(owner.endpoint, ["a"], ["x"], 30.0)
    finally:
        for plane in planes:
            plane.close()


def test_beyond_the_loopback_large_values_come_in_pieces(monkeypatch):
    """A small piece stands for a large one: what is larger is cut, and the owner keeps nothing when
    all is there."""
    monkeypatch.setattr("realhf.transport.bulk.PIECE_BYTES", 10_000)
    monkeypatch.setattr("realhf.transport.data_plane.BULK_FROM_BYTES", 10_000)
    ours = Network(keys=RunKeys.make())
    store = TensorStore("owner")
    values = torch.arange(20_000)
    store.put(
        SequenceSample.from_tensors(
            ["a"], {"x": values, "y": values + 1}, {"x": [[20_000]], "y": [[20_000]]}
        )
    )
    owner = DataPlane("owner", "run", store, network=ours)
    reader = DataPlane("reader", "run", TensorStore("reader"), shm=False, network=ours)
    try:
        owner.start()
        reader.start()
        data = reader.fetch(owner.endpoint, ["a"], ["x", "y"], 30.0).data
        assert (
            data is not None
            and torch.equal(data["x"], values)
            and torch.equal(data["y"], values + 1)
        )
        assert not owner._outgoing
        store.clear(["a"])
        with pytest.raises(DataMissing):
            reader.fetch(owner.endpoint, ["a"], ["x"], 30.0)
    finally:
        owner.close()
        reader.close()
