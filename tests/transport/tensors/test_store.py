from __future__ import annotations

import pytest
import torch

from realhf.api.sample import SequenceSample
from realhf.transport.tensor_store import DataMissing, DuplicateDataError, TensorStore

torch.set_num_threads(1)


def batch(ids: str, key: str = "x", rows: int = 2, offset: int = 0) -> SequenceSample:
    tensor = torch.arange(len(ids) * rows) + offset
    return SequenceSample.from_tensors(list(ids), {key: tensor}, {key: [[rows]] * len(ids)}, {"m": list(ids)})


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
    store, sample = TensorStore(), batch("abc")
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
    store, heard = TensorStore(), []
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
    store, heard = TensorStore(), []
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
