"""Servers that are killed, and stores that fail, lose nothing unsaid: docs/reference/trajectory.md
5. The long runs are ``make crash-ledger``."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import ExitStack

import pytest

from tests.trajectory.crash_ledger import LOSS, Ledger, compare, run, start_servers, untold

pytestmark = pytest.mark.slow

needs_redis = pytest.mark.skipif(
    shutil.which("redis-server") is None, reason="redis-server is not installed"
)


@pytest.mark.nightly
@pytest.mark.parametrize("store", ["sqlite", pytest.param("redis", marks=needs_redis)])
def test_the_books_balance(tmp_path, store):
    with ExitStack() as stack:
        servers, _ = start_servers(store, tmp_path, stack)
        ledger = asyncio.run(
            run(
                servers, pushes=120, producers=8, trainers=2, duration_s=3, kill_every_s=1.0, seed=5
            )
        )
        assert sum(server.kills for server in servers) >= 1
        assert compare(servers) == []
    assert ledger.balance() == []
    assert len(ledger.pushed) == 120


@pytest.mark.nightly
def test_a_store_that_fails_at_random_loses_nothing(tmp_path):
    """The long run kills the server between the failures, too."""
    with ExitStack() as stack:
        servers, _ = start_servers("sqlite", tmp_path, stack, fault_rate=0.04)
        ledger = asyncio.run(
            run(servers, pushes=80, producers=8, trainers=2, duration_s=1, kill_every_s=1e6, seed=5)
        )
        assert compare(servers) == []
        assert servers[0].said("fault that was set off") >= 1
    assert ledger.balance() == []
    assert len(ledger.pushed) == 80


@pytest.mark.nightly
@needs_redis
def test_a_redis_that_comes_back_empty_is_told_and_ends_the_epoch(tmp_path):
    """What was acknowledged since is delivered."""
    with ExitStack() as stack:
        servers, redis = start_servers("redis", tmp_path, stack, forgetful=True)
        ledger = asyncio.run(
            run(
                servers,
                pushes=120,
                producers=8,
                trainers=2,
                duration_s=3,
                kill_every_s=1.0,
                seed=5,
                redis=redis,
            )
        )
        assert redis is not None
        assert redis.restarts >= 1
        assert compare(servers) == []
        assert untold(servers, ledger) == []
        assert servers[0].said(LOSS) >= 1
    assert ledger.balance() == []
    assert 120 <= len(ledger.pushed) < 124
    assert len(ledger.epochs) > 1


def test_the_ledger_sees_what_goes_wrong():
    ledger = Ledger(pushed=dict.fromkeys(range(1, 9), 0))
    ledger.receive(0, [1, 2, 3, 3])
    ledger.acknowledge([1, 2])
    ledger.receive(1, [2, 9])
    ledger.receive(1, [4])
    text = "\n".join(ledger.balance())
    for problem in (
        "twice in one batch",
        "1 groups came again",
        "two different batches",
        "4 acknowledged groups",
        "1 delivered groups were never pushed",
    ):
        assert problem in text


def test_the_ledger_forgives_only_what_an_ended_epoch_lost():
    ledger = Ledger(pushed={1: 0, 2: 0, 3: 1, 4: 1}, epochs={0, 1})
    ledger.receive(0, [1], epoch=0)
    ledger.receive(0, [3], epoch=1)
    assert ledger.forgotten() == 1
    assert ledger.balance() == ["1 acknowledged groups were never delivered"]
