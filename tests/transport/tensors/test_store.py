"""Memory for what is fetched: used again when the last tensor in it is gone, never before, and kept
within a limit."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from realhf.api.sample import SequenceSample
from realhf.transport.bulk import Piece, fetch_pieces
from realhf.transport.errors import DataMissing, DuplicateDataError
from realhf.transport.shared_memory import KEPT_FROM_BYTES, TargetMemory
from realhf.transport.tensor_store import TensorStore

torch.set_num_threads(1)


def batch(ids: str, key: str = "x", rows: int = 2, offset: int = 0) -> SequenceSample:
    tensor = torch.arange(len(ids) * rows) + offset
    return SequenceSample.from_tensors(
        list(ids), {key: tensor}, {key: [[rows]] * len(ids)}, {"m": list(ids)}
    )


def test_get_joins_batches_and_keys_in_the_asked_order():
    store = TensorStore()
    store.put(batch("abc"))
    store.put(batch("de", offset=100))
    store.put(batch("edcba", key="y", rows=1))
    got = store.get(["d", "b", "a"], ["y", "x"])
    assert got.ids == ("d", "b", "a")
    assert got["x"].tolist() == [100, 101, 2, 3, 0, 1]
    assert got["y"].tolist() == [1, 3, 4]
    assert got.metadata == {"m": ["d", "b", "a"]}


def test_a_whole_batch_comes_back_without_a_copy():
    store = TensorStore()
    sample = batch("abc")
    store.put(sample)
    assert store.get(sample.ids, ["x"])["x"].data_ptr() == sample["x"].data_ptr()
    assert store.get(["b", "c"], ["x"])["x"].data_ptr() == sample["x"][2:].data_ptr()


def test_missing_values_are_listed():
    store = TensorStore("worker-1")
    store.put(batch("ab"))
    with pytest.raises(DataMissing, match="worker-1 does not hold y of a") as caught:
        store.get(["a", "z"], ["x", "y"])
    assert sorted(caught.value.missing) == [("a", "y"), ("z", "x"), ("z", "y")]


def test_duplicates():
    store = TensorStore()
    store.put(batch("ab"), producer="call-1")
    store.put(batch("ab", offset=9), producer="call-1")
    assert store.get(["a"], ["x"])["x"].tolist() == [0, 1]
    for producer in ("call-2", ""):
        with pytest.raises(DuplicateDataError, match="x of b"):
            store.put(batch("cb"), producer=producer)
    assert not store.has("c", "x"), "a refused put stores nothing"
    unnamed = TensorStore()
    unnamed.put(batch("a"))
    with pytest.raises(DuplicateDataError):
        unnamed.put(batch("a"))


def test_what_one_producer_stored_is_taken_back_and_the_rest_stays():
    store = TensorStore()
    heard = []
    store.on_clear(heard.append)
    store.put(batch("ab"), producer="stream")
    store.put(batch("a", key="y", rows=3), producer="call")
    before = store.nbytes
    store.discard("a", "nobody")
    store.discard("z", "stream")
    assert store.nbytes == before
    store.discard("a", "stream")
    assert not store.has("a", "x") and store.has("a", "y") and store.has("b", "x") and not heard
    assert store.nbytes == before - 16 and len(store) == 2
    store.discard("a", "call")
    assert len(store) == 1 and store.nbytes == 16
    store.put(batch("a", offset=5), producer="stream again")
    assert store.get(["a"], ["x"])["x"].tolist() == [5, 6]


def test_clear_returns_the_bytes_and_tells_listeners():
    store = TensorStore()
    heard = []
    store.on_clear(heard.append)
    store.put(batch("ab"))
    store.put(batch("ab", key="y"))
    assert (store.nbytes, len(store)) == (64, 2)
    assert store.clear(["a", "unknown"]) == 32
    assert (store.nbytes, len(store)) == (32, 1)
    assert store.clear() == 32
    assert (store.nbytes, len(store)) == (0, 0)
    assert heard == [{"a", "unknown"}, {"b"}]


def test_metadata_only_samples_are_refused():
    with pytest.raises(ValueError, match="with data"):
        TensorStore().put(batch("a").meta())


SIZE = KEPT_FROM_BYTES + 12_800


def place(array: np.ndarray) -> int:
    return array.ctypes.data


@pytest.mark.slow
def test_memory_is_used_again_once_the_last_tensor_is_gone():
    memory = TargetMemory(1 << 30)

    def fill(lane: int, piece: Piece, into: memoryview) -> None:
        into[:] = b"\x07" * piece.length

    frames = fetch_pieces([100, SIZE - 128], fill, memory.take)
    tensor = torch.frombuffer(frames[1], dtype=torch.uint8)
    row = tensor[5:10]
    where = tensor.data_ptr()
    del frames, tensor
    gc.collect()
    assert memory.idle_bytes == 0, "a view of a tensor still needs it"
    other = memory.take(SIZE)
    other[:] = 1
    assert row.tolist() == [7] * 5
    del row
    gc.collect()
    assert memory.idle_bytes >= SIZE
    again = memory.take(SIZE - 50)
    assert place(again) <= where < place(again) + SIZE and memory.idle_bytes == 0


def test_memory_that_is_kept_is_written_and_read_like_any_other():
    """The kernel may take pages of idle memory, but none that was written since."""
    memory = TargetMemory(1 << 30)
    for value in range(3):
        taken = memory.take(SIZE)
        taken[:] = value
        assert taken.nbytes == SIZE and not taken.ctypes.data % 64
        assert bool((taken == value).all())
        del taken
    assert memory.idle_bytes >= SIZE


def test_what_is_idle_has_a_limit_and_fits_what_it_is_used_for():
    memory = TargetMemory(3 * SIZE)
    taken = [memory.take(SIZE) for _ in range(4)]
    places = [place(each) for each in taken]
    while taken:
        del taken[0]
    assert 2 * SIZE <= memory.idle_bytes <= 3 * SIZE
    assert place(memory.take(SIZE)) in places[1:], (
        "the one that has been idle for longest was given up"
    )
    kept = memory.idle_bytes
    large = memory.take(3 * SIZE)
    assert memory.idle_bytes == kept and len(large) == 3 * SIZE
    small = memory.take(KEPT_FROM_BYTES - 1)
    del small
    assert memory.idle_bytes == kept
    held = memory.take(SIZE)
    memory.close()
    assert memory.idle_bytes == 0
    held[:] = 9
    assert int(held.sum()) == 9 * SIZE
    del held, large
    assert memory.idle_bytes == 0


def test_memory_that_there_is_not_is_an_error():
    with pytest.raises(MemoryError, match="there are no"):
        TargetMemory(1).take(1 << 62)
