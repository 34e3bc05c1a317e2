"""Says which tests cost more than the inner loop can bear and are not marked for it. It never fails
a test: on a busy machine everything costs more."""

from __future__ import annotations

import resource
from collections.abc import Iterable, Iterator

import pytest

LIMIT_S = 0.5
"""Three times what CONTRIBUTING.md asks to mark, so that what is listed is worth a look."""
MARKS = ("slow", "sim")
"""What `make test-fast` leaves out."""
COST = "cpu_s"
SHOWN = 20


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Note the CPU seconds of a test with those of the processes that it started and waited for, in
    its report."""
    before = _cpu_s()
    yield
    item.user_properties.append((COST, round(_cpu_s() - before, 2)))


def summarize_costs(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the tests that cost too much for what they are marked with, the dearest first."""
    found = unmarked(terminalreporter.getreports("passed"))
    if found:
        terminalreporter.section(f"not marked slow, yet above {LIMIT_S:g} s of CPU")
        for cost, name in found[:SHOWN]:
            terminalreporter.write_line(f"{cost:6.2f} s  {name}")


def unmarked(reports: Iterable[pytest.TestReport]) -> list[tuple[float, str]]:
    """Return cost and name of the tests above the limit without a mark, the dearest first."""
    costs = [
        (float(value), report.nodeid)
        for report in reports
        if report.when == "call" and not any(mark in report.keywords for mark in MARKS)
        for name, value in report.user_properties
        if name == COST and isinstance(value, (int, float))
    ]
    return sorted(((cost, name) for cost, name in costs if cost > LIMIT_S), reverse=True)


def _cpu_s() -> float:
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)
