"""Which cases of a sampled test a plain run plays."""

from __future__ import annotations

import pytest

from tests.opt_in import commit_id, unsampled

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.slow

FILE = """
import pytest


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", range(20))
def test_many(case):
    pass


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_few(case):
    pass


def test_plain():
    pass
"""


@pytest.fixture
def items(pytester: pytest.Pytester) -> list[pytest.Item]:
    """The tests of ``FILE``."""
    pytester.makeini("[pytest]\nmarkers =\n    sampled: x\n    nightly: x\n")
    return pytester.getitems(FILE)


def names(items: list[pytest.Item]) -> set[str]:
    return {item.name for item in items}


def test_the_commit_draws_the_sample(items: list[pytest.Item]) -> None:
    """The same commit draws the same, commits together all; what is nightly is not counted."""
    left_out = names(unsampled(items, "commit 0"))
    assert len(left_out) == 17 and all(name.startswith("test_many") for name in left_out)
    assert names(unsampled(items, "commit 0")) == left_out
    ever = [names(items) - names(unsampled(items, f"commit {number}")) for number in range(40)]
    assert set.union(*ever) == names(items) and len({*map(frozenset, ever)}) > 30


def test_a_case_that_is_named_runs(items: list[pytest.Item]) -> None:
    for item in items:
        assert unsampled([item], "commit 0") == []


def test_without_git_there_is_a_sample_too(pytester: pytest.Pytester) -> None:
    assert commit_id(pytester.path) == ""
