"""Journals of these tests sync at once."""

import pytest


@pytest.fixture(autouse=True)
def every_append_is_synced_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("realhf.dataflow.journal.journal.SYNC_INTERVAL_S", 0.0)
