"""A whole run that the page follows takes minutes: ``make test-view`` asks for it."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-view", action="store_true", help="follow a run of the launcher in a browser")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--run-view"):
        return
    skipped = pytest.mark.skip(reason="a whole run takes minutes; make test-view runs it")
    for item in items:
        if "whole_run" in item.keywords:
            item.add_marker(skipped)
