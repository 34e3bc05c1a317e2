"""Ownership and transfer plans; merging of statistics."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realhf.dataflow.model_function_call import merge_stats
from realhf.dataflow.storage_map import DataLost, Fetch, StorageMap, make_transfer_plan

HOSTS = {"a": "h1", "b": "h1", "c": "h2", "d": "h2"}


def test_owners_are_cleared_once() -> None:
    storage = StorageMap()
    storage.record(["x", "y"], ["ids", "rewards"], "a")
    storage.record(["y"], ["values"], "b")
    storage.record(["y"], ["ids"], "b")
    assert storage.owners("y", "ids") == ("a", "b") and storage.owners("z", "ids") == ()
    assert storage.forget(["x", "y", "z"]) == {"a": ["x", "y"], "b": ["y"]}
    assert len(storage) == 0 and storage.forget(["x"]) == {}


def test_local_values_stay_and_transfers_of_a_pair_are_merged() -> None:
    storage = StorageMap()
    storage.record(["x", "y"], ["ids"], "a")
    storage.record(["x", "y"], ["rewards"], "b")
    storage.record(["z"], ["ids", "rewards"], "b")
    plan = storage.plan({"a": ["x", "y", "z"]}, ["ids", "rewards"], HOSTS)
    assert plan == [
        Fetch("a", "b", ("x", "y"), ("rewards",)),
        Fetch("a", "b", ("z",), ("ids", "rewards")),
    ]


def test_the_same_host_comes_first_then_the_least_planned() -> None:
    ownership = {"x": {"k": ["c", "b"]}, "y": {"k": ["c", "d"]}, "z": {"k": ["c", "d"]}}
    plan = make_transfer_plan(ownership, {"a": ["x", "y", "z"]}, ["k"], HOSTS)
    assert plan == [
        Fetch("a", "b", ("x",), ("k",)),
        Fetch("a", "c", ("y",), ("k",)),
        Fetch("a", "d", ("z",), ("k",)),
    ]


def test_a_value_nobody_living_holds_is_named() -> None:
    with pytest.raises(DataLost, match=r"key 'k' of sample 'x'"):
        make_transfer_plan({"x": {"k": ["gone"]}}, {"a": ["x"]}, ["k"], HOSTS)


OWNERSHIP = st.dictionaries(
    st.sampled_from("stuvw"),
    st.fixed_dictionaries(
        {key: st.lists(st.sampled_from("abcd"), min_size=1, unique=True) for key in "kl"}
    ),
    min_size=1,
)


@pytest.mark.slow
@given(OWNERSHIP, st.sampled_from(["abcd", "ab", "c"]))
def test_every_worker_ends_up_with_every_value_exactly_once(ownership: dict, workers: str) -> None:
    placement = {worker: sorted(ownership) for worker in workers}
    plan = make_transfer_plan(ownership, placement, ["k", "l"], HOSTS)
    assert plan == make_transfer_plan(ownership, placement, ["k", "l"], HOSTS)
    moved = [(f.dst, i, key) for f in plan for i in f.ids for key in f.keys]
    local = [
        (w, i, key) for w in workers for i in ownership for key in "kl" if w in ownership[i][key]
    ]
    assert sorted(moved + local) == sorted(
        (w, i, key) for w in workers for i in ownership for key in "kl"
    )
    for fetch in plan:
        assert all(fetch.src in ownership[i][key] for i in fetch.ids for key in fetch.keys)


def test_statistics_of_shards_and_of_calls() -> None:
    parts = [
        {
            "loss": 1.0,
            "env_seconds": 3.0,
            "n_tokens": 10,
            "episodes": ["a"],
            "skipped": 1.0,
            "name": "x",
        },
        {
            "loss": 4.0,
            "env_seconds": 2.0,
            "n_tokens": 5,
            "episodes": ["b"],
            "skipped": 0.0,
            "name": "y",
        },
    ]
    expected = {"loss": 3.0, "n_tokens": 15, "episodes": ["a", "b"], "skipped": 1.0, "name": "x"}
    assert merge_stats(parts, [1, 2], parallel=True) == {**expected, "env_seconds": 3.0}
    assert merge_stats(parts, [1, 2], parallel=False) == {**expected, "env_seconds": 5.0}
