"""Balanced parts, near to where the items are at home."""

from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.base.partition import balanced_parts, parts_near

COSTS = st.lists(st.integers(0, 50), min_size=1, max_size=30)


@st.composite
def batches(draw):
    costs, count = draw(COSTS), draw(st.integers(1, 5))
    homes = draw(st.lists(st.none() | st.integers(0, count - 1), min_size=len(costs), max_size=len(costs)))
    return costs, homes, count


def largest(costs, parts):
    return max(sum(costs[i] for i in part) for part in parts)


@settings(max_examples=200, deadline=None)
@given(batches())
def test_every_item_is_in_one_part_and_no_part_is_larger_than_without_homes(batch):
    costs, homes, count = batch
    parts = parts_near(costs, homes, count)
    assert len(parts) == count and sorted(i for part in parts for i in part) == list(range(len(costs)))
    assert parts == [sorted(part) for part in parts]
    if len(costs) >= count:
        plain = balanced_parts(costs, count)
        assert sorted(i for part in plain for i in part) == list(range(len(costs)))
        loads = [sum(costs[i] for i in part) for part in plain]
        assert max(loads) - min(loads) <= max(costs)
        assert all(parts) and largest(costs, parts) <= largest(costs, plain)


def test_items_stay_at_home_where_that_is_balanced():
    assert parts_near([5, 4, 3, 2], [1, 0, 0, 1], 2) == [[1, 2], [0, 3]]
    assert parts_near([5, 4, 3, 2], [None] * 4, 2) == [[0, 3], [1, 2]], "nobody holds anything"


def test_what_is_too_much_for_its_home_goes_elsewhere():
    parts = parts_near([3] * 8, [0] * 6 + [1] * 2, 2)
    assert [len(part) for part in parts] == [4, 4] and parts[1][-2:] == [6, 7]


def test_parts_that_homes_would_unbalance_are_still_given_to_whom_most_of_them_is_at_home():
    costs, homes = [9, 8, 7, 2], [1, 0, 0, 1]
    parts = parts_near(costs, homes, 2)
    assert largest(costs, parts) == largest(costs, balanced_parts(costs, 2))
    moved = sum(costs[i] for part, held in enumerate(parts) for i in held if homes[i] != part)
    assert moved <= 8
