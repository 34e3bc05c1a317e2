"""Whole runs over several hosts take minutes and need network namespaces: ``make test-cluster`` asks for them."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-cluster", action="store_true", help="run whole runs over hosts in network namespaces")
    parser.addoption("--jobset-crd", help="file with the definition of the resource JobSet")
    parser.addoption("--schedules", type=int, default=2, help="how many random schedules of faults")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--run-cluster"):
        return
    skipped = pytest.mark.skip(reason="a whole run over several hosts takes minutes; make test-cluster runs it")
    for item in items:
        if "several_hosts" in item.keywords:
            item.add_marker(skipped)
