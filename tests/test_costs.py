"""What is said about tests that cost too much: only of those without a mark, and only of what they
did themselves."""

import pytest

from tests.costs import COST, LIMIT_S, pytest_runtest_call, unmarked

DEAR = 2 * LIMIT_S
CHEAP = LIMIT_S / 2


def report(name, cost, *marks, when="call"):
    return pytest.TestReport(
        name,
        ("", None, ""),
        dict.fromkeys(marks, 1),
        "passed",
        None,
        when,
        user_properties=[(COST, cost)],
    )


def test_the_dearest_come_first_and_marked_and_cheap_ones_not_at_all():
    found = unmarked(
        [
            report("dear", DEAR),
            report("dearer", 2 * DEAR),
            report("cheap", CHEAP),
            report("slow", DEAR, "slow"),
            report("simulated", DEAR, "sim"),
            report("prepared", DEAR, when="setup"),
        ]
    )
    assert found == [(2 * DEAR, "dearer"), (DEAR, "dear")]


def test_a_test_is_measured_while_it_runs(request):
    """The hook around this very test has not ended yet, so another one is put around some work."""
    item = request.node
    around = pytest_runtest_call(item)
    next(around)
    sum(range(5_000_000))
    with pytest.raises(StopIteration):
        next(around)
    name, cost = item.user_properties.pop()
    assert name == COST and cost > 0
