"""Which cases of a sampled test a plain run plays."""

from __future__ import annotations

from pathlib import Path

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


@pytest.mark.parametrize("case", range(10))
def test_all(case):
    pass


@pytest.mark.nightly
def test_long():
    pass


def test_plain():
    pass
"""
CONFTEST = """
from tests.opt_in import deselect_opt_in, pytest_addoption, summarize_deselected


def pytest_collection_modifyitems(config, items):
    deselect_opt_in(config, items)


def pytest_terminal_summary(terminalreporter, config):
    terminalreporter.write_line(summarize_deselected(config))
"""


@pytest.fixture
def items(pytester: pytest.Pytester) -> list[pytest.Item]:
    """The tests of ``FILE``."""
    pytester.makeini("[pytest]\nmarkers =\n    sampled: x\n    nightly: x\n")
    return pytester.getitems(FILE)


def names(items: list[pytest.Item]) -> set[str]:
    return {item.name for item in items}


def test_the_commit_draws_the_sample(items: list[pytest.Item]) -> None:
    """One commit always draws the same cases; many commits together draw all."""
    left_out = names(unsampled(items, "commit 0"))
    assert len(left_out) == 17 and all(name.startswith("test_many") for name in left_out)
    assert names(unsampled(items, "commit 0")) == left_out
    ever = [names(items) - names(unsampled(items, f"commit {number}")) for number in range(40)]
    assert set.union(*ever) == names(items) and len({*map(frozenset, ever)}) > 30


def test_a_limit_holds_for_every_parametrized_test(items: list[pytest.Item]) -> None:
    """The smaller of the limit and the mark counts; a test without parameters always runs."""
    left_out = names(unsampled(items, "commit 0", 2))
    assert len(left_out) == 18 + 8
    assert len(names(unsampled(items, "commit 0", 5))) == 17 + 5
    assert names(unsampled(items, "commit 0", 20)) == names(unsampled(items, "commit 0"))


def test_named_tests_run_and_the_others_are_counted(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nmarkers =\n    sampled: x\n    nightly: x\n")
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_file=FILE)
    cases = [f"test_file.py::test_many[{case}]" for case in range(9)]
    run = pytester.inline_run(*cases, "test_file.py::test_long")
    run.assertoutcome(passed=10)
    run = pytester.runpytest_inprocess("test_file.py", "--max-cases", "4")
    run.assert_outcomes(passed=3 + 1 + 4 + 1, deselected=17 + 1 + 6 + 1)
    run.stdout.fnmatch_lines(["left out: 25 (make test-all)"])
    pytester.runpytest_inprocess("test_file.py", "--run-nightly").assert_outcomes(passed=34)


def test_a_parallel_run_counts_the_tests_left_out(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its processes deselect, and the one that prints the summary collects nothing."""
    pytester.makeini("[pytest]\nmarkers =\n    sampled: x\n    nightly: x\n")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    hooks = "pytest_addoption, pytest_sessionfinish, pytest_testnodedown"
    pytester.makeconftest(CONFTEST.replace("pytest_addoption", hooks))
    pytester.makepyfile(test_file=FILE)
    run = pytester.runpytest_subprocess("-n", "2", "test_file.py")
    run.stdout.fnmatch_lines(["left out: 19 (make test-all)"])


def test_without_git_there_is_a_sample_too(pytester: pytest.Pytester) -> None:
    assert commit_id(pytester.path) == ""
