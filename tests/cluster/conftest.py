"""Options of the tests over several hosts; ``tests/opt_in.py`` has the one that asks for
them."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--jobset-crd", help="file with the definition of the resource JobSet")
    parser.addoption("--schedules", type=int, default=2, help="how many random schedules of faults")
