"""One pool of real simulators for all tests of the environment."""

from collections.abc import Iterator

import pytest

from realhf.aws.episode.episode import Episode
from realhf.aws.simulator.pool import MiniStackPool, Slot

POOL_SIZE = 4


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
