"""The policy that every run of these tests has."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.harness.killed_run import make_policy


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("policy") / "policy")
