"""Whole runs of every architecture take many minutes: ``make test-architectures`` asks for them."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--run-architectures", action="store_true", help="run whole runs of every architecture"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--run-architectures", default=False):
        return
    skipped = pytest.mark.skip(
        reason="whole runs take many minutes; make test-architectures runs them"
    )
    for item in items:
        if "architecture_run" in item.keywords:
            item.add_marker(skipped)
