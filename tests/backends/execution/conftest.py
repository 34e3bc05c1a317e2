"""What is compiled anew on a machine takes minutes, so it is tried only when asked for: ``make test-compile``."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-compile", action="store_true", help="run the tests that compile a model")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--run-compile", default=False):
        skipped = pytest.mark.skip(reason="compiles for minutes; make test-compile runs it")
        for item in items:
            if "compiles" in item.keywords:
                item.add_marker(skipped)
