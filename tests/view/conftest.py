"""One browser for all tests of a module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.chromium import Chromium


@pytest.fixture(scope="module")
def chromium() -> Iterator[Chromium]:
    with closing(Chromium()) as browser:
        browser.look(1280, 800)
        yield browser
