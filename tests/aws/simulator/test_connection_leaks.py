"""A thousand refused, half-open and killed connections leave nothing behind; a killed client's slot comes back."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from realhf.aws.server.program import EnvServerProcess

pytestmark = pytest.mark.sim
BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
POOL, CONNECTIONS = 8, 1000


@pytest.mark.nightly
def test_a_thousand_bad_connections_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    connections = importlib.import_module("env_connections")
    with EnvServerProcess(POOL, "--web", "off") as server:
        connections.storm(server, POOL, 10 * POOL)
        before = connections.rested(server, POOL)
        assert before.free_slots == POOL
        assert connections.storm(server, POOL, CONNECTIONS) == CONNECTIONS // 2, "each got 503 and Retry-After"
        assert connections.rested(server, POOL, before) == before
        (freed,) = connections.freed_after_s(server, 1)
        assert freed < 20
