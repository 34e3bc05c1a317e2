"""Tests that take minutes each, or need what few machines have: a plain run skips them, an option
asks for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import pytest


class Asked(NamedTuple):
    """The option that asks for the tests with a mark, and the target of make that gives it."""

    option: str
    target: str
    what: str


BY_MARK: Mapping[str, Asked] = MappingProxyType(
    {
        "nightly": Asked("--run-nightly", "test-all", "the long half of the tests"),
        "several_hosts": Asked(
            "--run-cluster", "test-cluster", "whole runs over hosts in network namespaces"
        ),
        "whole_run": Asked(
            "--run-view", "test-view", "a run of the launcher, followed in a browser"
        ),
        "documented": Asked("--run-docs", "test-docs", "what the pages print, as it stands"),
        "compiles": Asked("--run-compile", "test-compile", "tests that compile a model"),
    }
)


def pytest_addoption(parser: pytest.Parser) -> None:
    for asked in BY_MARK.values():
        parser.addoption(asked.option, action="store_true", help=f"run {asked.what}")


def skip_unasked(config: pytest.Config, items: Iterable[pytest.Item]) -> None:
    """Skip the tests whose option was not given, with a word about what runs them."""
    for mark, asked in BY_MARK.items():
        if config.getoption(asked.option):
            continue
        skipped = pytest.mark.skip(reason=f"{asked.what}, which takes minutes: make {asked.target}")
        for item in items:
            if mark in item.keywords:
                item.add_marker(skipped)
