"""The order of the tests, what they cost, and what many of them share: a pool of real simulators, a
policy.

``pytest -n 2 --dist loadfile --no-loadscope-reorder`` shares out files in this order, and files
with ranks together (``tests/sharing.py``). Property tests draw the same examples every time, so
that a change is judged by what it does; ``--hypothesis-profile=random`` draws others.
"""

from __future__ import annotations

import functools
import gc
import json
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx._config as httpx_config
import httpx._transports.default as httpx_transports
import pytest
from hypothesis import settings

from realhf.aws.episode.episode import Episode
from realhf.aws.simulator.pool import MiniStackPool, Slot
from realhf.aws.tasks.loader import instantiate, load_templates
from realhf.base.process import collect_garbage_rarely
from tests.costs import pytest_runtest_call, summarize_costs
from tests.opt_in import (
    deselect_opt_in,
    pytest_addoption,
    pytest_sessionfinish,
    pytest_testnodedown,
    summarize_deselected,
)
from tests.sharing import place, pytest_xdist_make_scheduler

__all__ = [
    "pytest_addoption",
    "pytest_runtest_call",
    "pytest_sessionfinish",
    "pytest_testnodedown",
    "pytest_xdist_make_scheduler",
]

POOL_SIZE = 4
PATIENCE_S = 60.0
"""How long a client of httpx waits that says no time of its own: five seconds by default, as long
as a busy machine may stand still."""
settings.register_profile("same", derandomize=True, print_blob=True, deadline=None)
settings.register_profile("random", print_blob=True, deadline=None)
settings.load_profile("same")


def pytest_configure() -> None:
    """Read the certificates of this machine once: httpx does so for every client, which takes 27
    ms. Let its clients be patient. Heed Ctrl-C, also in processes that tests start: what a shell
    starts in the background ignores it, and so would they."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    httpx_transports.create_ssl_context = functools.cache(httpx_transports.create_ssl_context)
    for name in ("connect", "read", "write", "pool"):
        setattr(httpx_config.DEFAULT_TIMEOUT_CONFIG, name, PATIENCE_S)
    collect_garbage_rarely()


def pytest_collection_finish() -> None:
    """Leave modules and test items out of what the collector walks through while the tests run. It
    goes on collecting rarely: by Python's own thresholds it is a tenth of what the tests cost, more
    in a process that has run many."""
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_unconfigure() -> None:
    """Collect garbage once, so that its warnings are printed, and leave the rest out. At its end
    pytest collects ten times, which takes seconds in a process that has run thousands of tests."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Slow files come first, lest one process ends with them while the other has nothing left to
    do; mixed if several processes share them. Tests that were not asked for are deselected."""
    deselect_opt_in(config, items)
    several = hasattr(config, "workerinput")
    items.sort(
        key=lambda item: place(
            item.nodeid, slow=item.get_closest_marker("slow") is not None, mixed=several
        )
    )


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print which tests cost too much for their marks, and how many were left out."""
    summarize_costs(terminalreporter)
    if line := summarize_deselected(config):
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def tiny_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small built-in policy, untaught, for whole runs that need no warm start of
    their own. Its tokenizer was made from tasks and their solutions."""
    from realhf.api.config import BuiltinModelConfig
    from realhf.backends.builtin_policy import build_builtin_policy

    folder = tmp_path_factory.mktemp("tiny_policy")
    tasks = [instantiate(template.task_id, 1) for template in load_templates(["warmup"])]
    talks = [
        {
            "messages": [
                {"role": "user", "content": task.description},
                {"role": "assistant", "content": task.solution[0]},
            ]
        }
        for task in tasks
    ]
    (folder / "talks.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    sizes = BuiltinModelConfig(
        vocab_size=400, hidden_size=32, num_layers=2, num_heads=2, intermediate_size=64
    )
    build_builtin_policy(folder / "talks.jsonl", folder / "policy", sizes, seed=3)
    return folder / "policy"


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
