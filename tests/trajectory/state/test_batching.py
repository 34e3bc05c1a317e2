"""Batch forming: sums, fairness, minimums, and that nothing jams. Source:
docs/reference/trajectory.md 2.7, 3.3 to 3.6.

The references below are slow and written from that page's sentences, not from the code under test.
"""

from __future__ import annotations

from collections import Counter
from heapq import heappush
from itertools import combinations
from math import lcm
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.trajectory.records import Encoding, GroupPlace, GroupRecord, Payload
from realhf.trajectory.state import batching
from realhf.trajectory.state.batching import (
    FairShare,
    Selected,
    select_batch,
    select_exact,
    select_with_minimums,
)
from realhf.trajectory.state.push import find_set
from realhf.trajectory.state.queue_index import Lane, QueueIndex

PAYLOAD = Payload(b"", 10, Encoding.JSON, 0, 0)


def group(size: int, env_id: int | None = None, number: int = 0) -> dict[str, Any]:
    return {"tokens": [[1]] * size, "env_id": env_id, "number": number}


def numbered(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [item | {"number": number} for number, item in enumerate(groups)]


def env(
    number: int, weight: float = 1.0, minimum: float | None = None, connected: bool = True
) -> dict[str, Any]:
    return {
        "registered_id": number,
        "weight": weight,
        "min_batch_allocation": minimum,
        "connected": connected,
    }


def sizes(batch: list[Any] | None) -> list[int]:
    assert batch is not None
    return [len(item["tokens"]) for item in batch]


def index_of(units: list[tuple[int, int | None]]) -> QueueIndex:
    index = QueueIndex()
    for order, (size, env_id) in enumerate(units):
        index.add(GroupRecord(order, order, GroupPlace.QUEUE, env_id, size, PAYLOAD, 0, 0.0))
    return index


queues = st.lists(
    st.tuples(st.sampled_from([1, 2, 3, 4, 5, 6, 8, 12, 16]), st.sampled_from([None, 0, 1, 2, 9])),
    max_size=40,
)
batch_sizes = st.sampled_from([1, 2, 4, 6, 8, 12, 16, 24])
allocations = st.sampled_from([None, 0.0, 0.1, 0.25, 0.5, 0.9])


@pytest.mark.nightly
@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(
    queue=queues,
    batch_size=batch_sizes,
    minimums=st.tuples(allocations, allocations),
    strict=st.booleans(),
)
def test_a_batch_sums_exactly_and_nothing_is_lost_or_reordered(queue, batch_size, minimums, strict):
    groups = numbered([group(size, env_id) for size, env_id in queue])
    envs = [env(0, 1.0, minimums[0]), env(1, 3.0, minimums[1]), env(2)]
    batch, rest, reason = select_batch(groups, batch_size, envs, strict=strict)
    if batch is None:
        assert rest == groups
        assert reason
        return
    assert sum(sizes(batch)) == batch_size
    assert sorted([*batch, *rest], key=lambda item: item["number"]) == groups
    assert rest == [item for item in groups if item in rest], "what stays keeps its order"
    if not strict:
        for lane in {(item["env_id"], len(item["tokens"])) for item in batch}:
            first = [
                item["number"] for item in groups if (item["env_id"], len(item["tokens"])) == lane
            ]
            mine = [
                item["number"] for item in batch if (item["env_id"], len(item["tokens"])) == lane
            ]
            assert mine == sorted(mine)
            if minimums != (None, None):
                assert mine == first[: len(mine)], "oldest of its kind first"
        for number, minimum in enumerate(minimums):
            taken = sum(len(item["tokens"]) for item in batch if item["env_id"] == number)
            demanded = sum(int(batch_size * (other or 0) + 1e-9) for other in minimums)
            if minimum is not None and demanded <= batch_size:
                assert taken >= int(batch_size * minimum + 1e-9)


def packable(queue: list[tuple[int, int | None]], batch_size: int) -> bool:
    """Whether 3.3 can form a batch: some set of sizes, largest ones left out, has enough complete
    packs."""
    present = sorted({size for size, _ in queue if batch_size % size == 0})
    while present:
        unit = lcm(*present)
        packs = sum(sum(size == wanted for size, _ in queue) * wanted // unit for wanted in present)
        if packs * unit >= batch_size:
            return True
        present.pop()
    return False


@pytest.mark.nightly
@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(queue=queues, batch_size=batch_sizes)
def test_there_is_a_batch_exactly_when_packs_suffice(queue, batch_size):
    batch, _, _ = select_batch([group(size, env_id) for size, env_id in queue], batch_size)
    assert (batch is not None) == packable(queue, batch_size)


def original_rule(queue: list[int], batch_size: int) -> list[int] | None:
    """The original, word by word: indices of the batch or None."""
    if sum(queue) < batch_size or not queue:
        return None
    largest = max(queue)
    waiting = {}
    ready = []
    for index, size in enumerate(queue):
        waiting.setdefault(size, []).append(index)
        if len(waiting[size]) * size == largest:
            ready += waiting.pop(size)
    chosen = []
    total = 0
    for index in ready:
        chosen.append(index)
        total += queue[index]
        if total >= batch_size:
            break
    return chosen if total == batch_size else None


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    queue=st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), max_size=30),
    batch_size=st.sampled_from([8, 12, 16, 24]),
)
def test_strict_is_the_originals_rule(queue, batch_size):
    batch, _, _ = select_batch(
        numbered([group(size, index % 3) for index, size in enumerate(queue)]),
        batch_size,
        strict=True,
    )
    expected = original_rule(queue, batch_size)
    assert (None if batch is None else [item["number"] for item in batch]) == expected


@pytest.mark.parametrize("queue", [
    [16, 4, 4], [3, 4, 4], [3, 3, 4, 4, 3], [4, 4, 8, 2], [8, 1, 4, 4], [4, 2, 4, 2, 2], [5, 4, 7, 4],
])  # fmt: skip
def test_odd_neighbours_do_not_block(queue):
    batch, _, _ = select_batch([group(size) for size in queue], 8)
    assert sum(sizes(batch)) == 8


def test_a_late_large_group_does_not_make_a_ready_batch_unready():
    batch, _, _ = select_batch([group(2), group(2), group(2), group(2), group(8)], 8)
    assert sizes(batch) in ([2, 2, 2, 2], [8])
    batch, _, _ = select_batch([group(4), group(4), group(8, 1), group(2)], 8)
    assert sizes(batch) == [4, 4]


def test_left_overs_of_several_environments_are_packed_together():
    groups = numbered([group(4, 0), group(2, 0), group(2, 1), group(4, 3)])
    batch, rest, _ = select_batch(groups, 8)
    assert [item["number"] for item in batch or ()] == [0, 1, 2], (
        "the pack that 0 and 1 share is older than 3"
    )
    assert [item["number"] for item in rest] == [3]


def test_minimums_are_met_scaled_or_missed():
    many = [group(2, 0)] * 10 + [group(2, 1)] * 10
    batch, _, _ = select_batch(many, 8, [env(0, 1.0), env(1, 1.0, 0.75)])
    assert Counter(item["env_id"] for item in batch or ())[1] >= 3
    batch, _, _ = select_batch(many, 8, [env(0, 1.0, 0.9), env(1, 1.0, 0.9)])
    assert Counter(item["env_id"] for item in batch or ()) == {0: 2, 1: 2}, "scaled to the batch"
    assert select_batch([group(2, 0)] * 10, 8, [env(0), env(1, 1.0, 0.5)])[2] == "min_unmet:1"
    assert select_batch([group(8, 0), group(2, 1)], 8, [env(1, 1.0, 0.5)])[2] == "min_unmet:1"
    assert select_batch([group(2, 0)] * 4, 8, [env(1, 1.0, 0.05)])[0], (
        "a need that rounds to nothing"
    )
    assert select_batch([group(2, 0)] * 4, 8, [env(1, 1.0, 0.5, connected=False)])[0]
    assert select_batch([group(2, None)] * 4 + [group(2, 1)] * 4, 8, [env(1, 1.0, 0.25)])[0], (
        "nobody's groups fill"
    )


def test_minimums_do_not_jam_on_units_that_leave_a_gap():
    batch, _, _ = select_batch(
        [group(2, 1)] * 2 + [group(3, 0)] * 4, 6, [env(0, 1.0, 0.5), env(1, 5.0)]
    )
    assert sizes(batch) == [3, 3]


def exhaustive(groups: list[dict[str, Any]], batch_size: int, needs: dict[int, int]) -> bool:
    """Whether any subset of complete packs (all sizes present) sums to the batch and meets the
    needs."""
    usable = [item for item in groups if batch_size % len(item["tokens"]) == 0]
    kinds = Counter((item["env_id"], len(item["tokens"])) for item in usable)
    unit = lcm(*{size for _, size in kinds}) if kinds else 1
    reach = {(0, *(0 for _ in needs))}
    for (env_id, size), number in kinds.items():
        number -= number % (unit // size)
        step = [index + 1 for index, other in enumerate(needs) if other == env_id]
        grown = set(reach)
        for state in reach:
            for taken in range(1, number + 1):
                if state[0] + taken * size <= batch_size:
                    more = list(state)
                    more[0] += taken * size
                    for index in step:
                        more[index] += taken * size
                    grown.add(tuple(more))
        reach = grown
    return any(
        state[0] == batch_size
        and all(got >= need for got, need in zip(state[1:], needs.values(), strict=True))
        for state in reach
    )


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    queue=st.lists(
        st.tuples(st.sampled_from([1, 2, 3, 4, 6]), st.sampled_from([0, 1, 2])), max_size=14
    ),
    minimum=st.sampled_from([0.25, 0.5, 0.75]),
)
def test_one_minimum_is_met_whenever_packs_allow_it(queue, minimum):
    groups = [group(size, env_id) for size, env_id in queue]
    batch, _, _ = select_batch(groups, 12, [env(0, 1.0, minimum), env(1), env(2)])
    if exhaustive(groups, 12, {0: int(12 * minimum)}):
        assert batch is not None


def test_rounding_of_minimums():
    index = index_of([(1, 0)] * 8 + [(1, 1)] * 8)
    fair = FairShare({0: 0.99, 1: 0.01}, {}, 0.0, 0.01)
    taken = {}
    for rounding in ("floor", "ceil"):
        selected = select_with_minimums(index, 8, fair, [(1, 0.3)], rounding=rounding)
        assert isinstance(selected, Selected)
        taken[rounding] = selected.ledger.served[1]
    assert taken["floor"] == 2
    assert taken["ceil"] == 3


def test_an_idle_heavy_environment_never_blocks():
    batch, _, _ = select_batch([group(4, 0), group(4, 0)], 8, [env(0, 0.1), env(1, 1000.0)])
    assert sizes(batch) == [4, 4]


def test_one_environment_is_first_in_first_out():
    batch, _, _ = select_batch(
        numbered([group(2, 0), group(4, 0), group(2, 0), group(4, 0)]), 8, [env(0)]
    )
    assert [item["number"] for item in batch or ()] == [0, 2, 1]


class CountingLane(Lane):
    """A lane that counts the units it is asked for."""

    __slots__ = ("seen",)

    def __iter__(self):
        for unit in super().__iter__():
            self.seen = getattr(self, "seen", 0) + 1
            yield unit


@pytest.mark.parametrize("minimums", [[], [(0, 0.2), (1, 0.2)]])
def test_selection_does_not_grow_with_the_queue(minimums, monkeypatch):
    monkeypatch.setattr("realhf.trajectory.state.queue_index.Lane", CountingLane)
    seen = {}
    for length in (400, 40_000):
        index = index_of([(2 ** (number % 3), number % 4) for number in range(length)])
        fair = FairShare({0: 0.25, 1: 0.25, 2: 0.25, 3: 0.25}, {}, 0.0, 0.01)
        selected = (
            select_with_minimums(index, 64, fair, minimums)
            if minimums
            else select_exact(index, 64, fair)
        )
        assert isinstance(selected, Selected)
        seen[length] = sum(getattr(lane, "seen", 0) for lane in index.lanes.values())
    assert seen[40_000] <= seen[400] * 1.5 + 64


def test_turns_grow_with_the_batch_and_not_with_its_square(monkeypatch):
    pushes = 0

    def counted(heap: list[Any], item: Any) -> None:
        nonlocal pushes
        pushes += 1
        heappush(heap, item)

    monkeypatch.setattr(batching.heapq, "heappush", counted)
    index = index_of([(2 ** (number % 2), 0) for number in range(20_000)])
    seen = {}
    for batch_size in (256, 2048):
        pushes = 0
        assert isinstance(
            select_exact(index, batch_size, FairShare({0: 1.0}, {}, 0.0, 0.01)), Selected
        )
        seen[batch_size] = pushes
    assert seen[2048] <= seen[256] * 9


@pytest.mark.nightly
@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 2)), max_size=30), st.data())
def test_the_index_counts_what_is_there(units, data):
    index = QueueIndex()
    kept = []
    order = 0
    for size, env_id in units:
        if data.draw(st.booleans()) and kept:
            index.remove(kept.pop(data.draw(st.integers(0, len(kept) - 1))))
        members = data.draw(st.integers(1, 3))
        bundle = (order, members) if members > 1 else None
        for _ in range(members):
            record = GroupRecord(
                order, order, GroupPlace.QUEUE, env_id, size, PAYLOAD, 0, 0.0, bundle
            )
            index.add(record)
            kept.append(record)
            order += 1
    assert index.groups == len(kept)
    assert index.sequences == sum(record.size for record in kept)
    assert index.nbytes == 10 * len(kept)
    assert index.max_group_size() == max((record.size for record in kept), default=0)
    assert set(index.sizes()) == {record.size for record in kept}
    assert index.env_groups() == dict(Counter(record.env_id for record in kept))
    whole = Counter(record.bundle for record in kept if record.bundle)
    expected: dict[Any, list[int]] = {}
    for record in kept:
        if record.bundle is None:
            expected.setdefault((record.env_id, record.size), []).append(record.order)
        elif whole[record.bundle] == record.bundle[1] and record.order == record.bundle[0]:
            expected.setdefault((record.env_id, record.size * record.bundle[1]), []).append(
                record.order
            )
    assert {key: [unit.order for unit in lane] for key, lane in index.lanes.items()} == expected


@pytest.mark.parametrize(("sizes_", "target", "expected"), [
    ([4, 4], 8, [0, 1]), ([5, 3, 3, 4], 7, [2, 3]), ([3, 9, 3], 6, [0, 2]), ([2, 3, 5], 4, []), ([], 4, []),
    ([4], 0, []), ([1, 1, 1], 2, [0, 1]), ([6, 5, 5], 10, [1, 2]),
])  # fmt: skip
def test_sets_of_the_mix_buffer(sizes_, target, expected):
    assert find_set(sizes_, target) == expected


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(1, 9), max_size=9), st.integers(1, 20))
def test_a_set_is_found_exactly_when_there_is_one(sizes_, target):
    found = find_set(sizes_, target)
    exists = any(
        sum(some) == target
        for count in range(1, len(sizes_) + 1)
        for some in combinations(sizes_, count)
    )
    assert bool(found) == exists
    assert found == sorted(set(found))
    if found:
        assert sum(sizes_[index] for index in found) == target


def test_a_full_buffer_and_a_huge_target_cost_little():
    assert find_set([2] * 4095 + [1], 8191)
    assert find_set([3] * 4096, 10**12) == []
