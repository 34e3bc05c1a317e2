"""The order of the tests, and one pool of real simulators for all tests that ask for it.

``pytest -n 2 --dist loadfile --no-loadscope-reorder`` shares out files in this order. Property tests draw the same
examples every time, so that a change is judged by what it does; ``--hypothesis-profile=random`` draws others.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from realhf.aws.episode.episode import Episode
from realhf.aws.simulator.pool import MiniStackPool, Slot

POOL_SIZE = 4
settings.register_profile("same", derandomize=True, print_blob=True)
settings.register_profile("random", print_blob=True)
settings.load_profile("same")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow files come first, lest one process ends with them while the other has nothing left to do."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(scope="session")
def pool() -> Iterator[MiniStackPool]:
    pool = MiniStackPool(POOL_SIZE)
    pool.start()
    yield pool
    pool.stop()


@pytest.fixture
def slot(pool: MiniStackPool) -> Iterator[Slot]:
    slot = pool.acquire()
    yield slot
    pool.release(slot)


@pytest.fixture
def episode(slot: Slot) -> Episode:
    return Episode(slot)
