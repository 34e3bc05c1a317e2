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
CONFTEST = """
from tests.opt_in import pytest_addoption, skip_opt_in


def pytest_collection_modifyitems(config, items):
    skip_opt_in(config, items)
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


def test_a_case_that_is_named_runs(pytester: pytest.Pytester) -> None:
    """Any number of them; of the others there is a sample."""
    pytester.makeini("[pytest]\nmarkers =\n    sampled: x\n    nightly: x\n")
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_file=FILE)
    named = [f"test_file.py::test_many[{case}]" for case in range(9)]
    pytester.inline_run(*named).assertoutcome(passed=9)
    pytester.inline_run("test_file.py").assertoutcome(passed=5, skipped=18)


def test_without_git_there_is_a_sample_too(pytester: pytest.Pytester) -> None:
    assert commit_id(pytester.path) == ""
