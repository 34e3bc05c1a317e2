"""One browser for all tests of a module; each begins on an empty page, whatever became of the one
before."""

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


@pytest.fixture(autouse=True)
def empty_page(request: pytest.FixtureRequest) -> None:
    if "chromium" in request.fixturenames:
        browser = request.getfixturevalue("chromium")
        browser.open("about:blank")
        browser.look(1280, 800)
        browser.problems.clear()
