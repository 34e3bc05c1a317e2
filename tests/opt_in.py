"""Tests that a plain run leaves out: those with a mark of ``BY_MARK``, and all but a sample of the
cases of a test marked ``sampled``.

A sample is drawn by the commit, so that another commit plays other cases; ``--run-nightly`` plays
all, and a case whose node id is on the command line runs. Every process of a parallel run draws the
same sample.
"""

from __future__ import annotations

import random
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest

SAMPLED = "sampled"
"""Mark of a parametrized test of which a plain run plays ``n`` cases: ``sampled(n)``."""


class OptIn(NamedTuple):
    """How the tests with a mark are asked for."""

    option: str
    """Option of pytest."""
    target: str
    """Target of make that gives the option."""
    content: str
    """What these tests are, for the reason of the skip."""


NIGHTLY = OptIn("--run-nightly", "test-all", "the long half of the tests")
BY_MARK: Mapping[str, OptIn] = MappingProxyType(
    {
        "nightly": NIGHTLY,
        "several_hosts": OptIn(
            "--run-cluster", "test-cluster", "whole runs over hosts in network namespaces"
        ),
        "whole_run": OptIn(
            "--run-view", "test-view", "a run of the launcher, followed in a browser"
        ),
        "documented": OptIn("--run-docs", "test-docs", "what the pages print, as it stands"),
        "compiles": OptIn("--run-compile", "test-compile", "tests that compile a model"),
    }
)


def pytest_addoption(parser: pytest.Parser) -> None:
    for opt_in in BY_MARK.values():
        parser.addoption(opt_in.option, action="store_true", help=f"run {opt_in.content}")


def skip_opt_in(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Skip the tests whose option was not given, with a reason that names the target of make."""
    for mark, opt_in in BY_MARK.items():
        if config.getoption(opt_in.option):
            continue
        skipped = pytest.mark.skip(
            reason=f"{opt_in.content}, which takes minutes: make {opt_in.target}"
        )
        for item in items:
            if mark in item.keywords:
                item.add_marker(skipped)
    if not config.getoption(NIGHTLY.option):
        skipped = pytest.mark.skip(reason=f"not in this commit's sample: make {NIGHTLY.target}")
        chosen = [item for item in items if item.nodeid not in config.args]
        for item in unsampled(chosen, commit_id(config.rootpath)):
            item.add_marker(skipped)


def unsampled(items: Iterable[pytest.Item], seed: str) -> list[pytest.Item]:
    """Return the cases of tests marked ``sampled(n)`` beyond the ``n`` that ``seed`` draws of each.

    Cases that another mark leaves out are not drawn.
    """
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if SAMPLED in item.keywords and not any(mark in item.keywords for mark in BY_MARK):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out = []
    for name, group in cases.items():
        mark = group[0].get_closest_marker(SAMPLED)
        assert mark is not None
        (n,) = mark.args
        drawn = random.Random(f"{seed} {name}").sample(range(len(group)), min(n, len(group)))
        left_out += [item for index, item in enumerate(group) if index not in drawn]
    return left_out


def commit_id(root: Path) -> str:
    """Return the id of the commit that is checked out; an empty string without git."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
