"""The order of the tests, with which ``pytest -n 2 --dist loadfile --no-loadscope-reorder`` shares out files."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow files come first, lest one process ends with them while the other has nothing left to do."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
