"""Tests that a plain run leaves out: those with a mark of ``BY_MARK``, and all but a sample of the
cases of a test marked ``sampled``.

A sample is drawn by the commit, so that another commit plays other cases; ``--run-nightly`` plays
all, and a case whose node id is on the command line runs. Every process of a parallel run draws the
same sample. ``--max-cases`` limits all parametrized tests in the same way.
"""

from __future__ import annotations

import os
import random
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

DESELECTED = pytest.StashKey[dict[str, int]]()
"""Numbers of deselected tests by the target of make that plays them."""
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
    parser.addoption(
        "--max-cases",
        type=int,
        default=0,
        help="run at most so many cases of each parametrized test, drawn by the commit (0: all)",
    )


def deselect_opt_in(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests whose option was not given and the cases outside the samples.

    A long test or a case whose node id is on the command line stays. Deselected tests are counted by target of
    make, for the summary (``pytest_terminal_summary``): a skip would cost as much as a short test.
    """
    named = {_node_id(argument) for argument in config.args}
    targets: dict[str, str] = {}
    for mark, opt_in in BY_MARK.items():
        if not config.getoption(opt_in.option):
            targets |= {
                item.nodeid: opt_in.target
                for item in items
                if mark in item.keywords and not (opt_in == NIGHTLY and item.nodeid in named)
            }
    if not config.getoption(NIGHTLY.option):
        drawn = [item for item in items if item.nodeid not in targets and item.nodeid not in named]
        limit = config.getoption("--max-cases") or 0
        left_out = unsampled(drawn, commit_id(config.rootpath), limit)
        targets |= {item.nodeid: NIGHTLY.target for item in left_out}
    deselected = [item for item in items if item.nodeid in targets]
    config.stash[DESELECTED] = dict(Counter(targets[item.nodeid] for item in deselected))
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = [item for item in items if item.nodeid not in targets]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send the counts from a process of a parallel run to the one that prints the summary."""
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["deselected"] = session.config.stash.get(DESELECTED, {})


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take the counts of a process that has ended. All processes have the same."""
    if counts := getattr(node, "workeroutput", {}).get("deselected"):
        node.config.stash[DESELECTED] = counts


def summarize_deselected(config: pytest.Config) -> str:
    """Return one line with the number of tests left out by target of make; "" if there are none."""
    counts = config.stash.get(DESELECTED, {})
    parts = [f"{count} (make {target})" for target, count in sorted(counts.items())]
    return f"left out: {', '.join(parts)}" if parts else ""


def _node_id(argument: str) -> str:
    """Return an argument of the command line in the form of a node id, relative to here."""
    path, colons, rest = argument.partition("::")
    return os.path.relpath(path) + colons + rest


def unsampled(items: Iterable[pytest.Item], seed: str, limit: int = 0) -> list[pytest.Item]:
    """Return the cases beyond the ``n`` that ``seed`` draws of each test marked ``sampled(n)``, and
    beyond ``limit`` of every parametrized test (0: no limit).
    """
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if "[" in item.nodeid and (limit or SAMPLED in item.keywords):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out = []
    for name, group in cases.items():
        mark = group[0].get_closest_marker(SAMPLED)
        limits = [*((limit,) if limit else ()), *(mark.args if mark else ())]
        n = min(limits)
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
