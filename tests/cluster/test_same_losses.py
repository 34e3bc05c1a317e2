"""One YAML and one seed: a synchronous run computes the same to the last bit, whoever has started its workers."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from benchmarks.network.hosts import NoNamespaces
from benchmarks.network.schedulers import losses, policy, run

pytestmark = [pytest.mark.several_hosts, pytest.mark.slow, pytest.mark.timeout(1800)]
STEPS = 5


@pytest.fixture(scope="module")
def actor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return policy(tmp_path_factory.mktemp("actor"))


@pytest.fixture(scope="module")
def of_one_machine(tmp_path_factory: pytest.TempPathFactory, actor: Path) -> list[dict[str, Any]]:
    found = losses(run("local", tmp_path_factory.mktemp("local"), actor, STEPS))
    assert len(found) == STEPS and any(row["policy/loss"] for row in found), "something is learnt"
    return found


@pytest.mark.parametrize("way", ["join", "hosts", "ray"])
def test_losses_are_identical_to_the_bit(way: str, tmp_path: Path, actor: Path, of_one_machine: list[dict[str, Any]]):
    """The trainer runs below an agent on the loopback, on another host over an encrypted network, and below Ray."""
    if way == "ray" and find_spec("ray") is None:
        pytest.skip("Ray is not installed; make test-ray")
    try:
        found = losses(run(way, tmp_path, actor, STEPS))
    except NoNamespaces as error:
        pytest.skip(str(error))
    assert found == of_one_machine
