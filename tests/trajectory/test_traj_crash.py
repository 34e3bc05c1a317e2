"""Servers that are killed while they work lose nothing: specification tests 27, 31. The long run is
``python -m tests.trajectory.crash_ledger``."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.trajectory.crash_ledger import Ledger, compare, run, start_servers


@pytest.mark.parametrize("store", ["sqlite", "redis"])
def test_the_books_balance(tmp_path: Path, store: str):
    if store == "redis" and shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    with ExitStack() as stack:
        servers = start_servers(store, tmp_path, stack)
        ledger = asyncio.run(run(servers, pushes=240, producers=8, trainers=2, duration_s=5, kill_every_s=1.0, seed=5))
        assert sum(server.kills for server in servers) >= 3
        assert compare(servers) == []
    assert ledger.balance() == []
    assert len(ledger.pushed) == 240


def test_the_ledger_sees_what_goes_wrong():
    ledger = Ledger(pushed={1, 2, 3, 4, 5, 6, 7, 8})
    ledger.receive(0, [1, 2, 3, 3])
    ledger.acked.update([1, 2])
    ledger.receive(1, [2, 9])
    ledger.receive(1, [4])
    text = "\n".join(ledger.balance())
    for problem in ("twice in one batch", "1 groups came again", "two different batches", "4 acknowledged groups",
                    "1 delivered groups were never pushed"):  # fmt: skip
        assert problem in text
