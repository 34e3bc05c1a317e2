"""One YAML and one seed: whoever has started the workers, and wherever they are, a run computes the
same."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from benchmarks.network.hosts import NoNamespaces
from benchmarks.network.schedulers import APART, losses, policy, run
from tests.cluster.bed import STALENESS, hosts, running
from tests.transport.network.listeners import listeners

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
def test_losses_are_identical_to_the_bit(
    way: str, tmp_path: Path, actor: Path, of_one_machine: list[dict[str, Any]]
):
    """The trainer runs below an agent on the loopback, on another host over an encrypted network,
    and below Ray."""
    if way == "ray" and find_spec("ray") is None:
        pytest.skip("Ray is not installed; make test-ray")
    try:
        found = losses(run(way, tmp_path, actor, STEPS))
    except NoNamespaces as error:
        pytest.skip(str(error))
    assert found == of_one_machine


RUN_S = 600.0


def ranks(backend: str) -> tuple[str, ...]:
    return ("actor.workers=[0,1]", f"actor.backend={backend}")


@pytest.mark.parametrize("backend", ["ddp", "fsdp2"])
def test_losses_of_two_hosts_are_those_of_one(backend: str, tmp_path: Path, actor: Path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    try:
        apart = losses(
            run(APART, tmp_path / "two", actor, STEPS, *ranks(backend), "network.trusted=true")
        )
    except NoNamespaces as error:
        pytest.skip(str(error))
    alone = losses(run("local", tmp_path / "one", actor, STEPS, *ranks(backend)))
    assert len(alone) == STEPS and any(row["policy/loss"] for row in alone), "something is learnt"
    for one, two in zip(alone, apart, strict=True):
        for name in ("policy/loss", "policy/grad_norm", "reward/mean", "batch/tokens"):
            assert two[name] == pytest.approx(one[name], rel=1e-5, abs=1e-7), name


def test_a_network_that_is_not_trusted_is_refused(tmp_path: Path, actor: Path):
    try:
        with pytest.raises(
            RuntimeError, match=r"must be on one host.*network\.trusted=true"
        ) as caught:
            run(APART, tmp_path, actor, STEPS, *ranks("ddp"))
    except NoNamespaces as error:
        pytest.skip(str(error))
    assert "model_worker/1 on" in str(caught.value)


def test_an_asynchronous_run_receives_samples_on_both_hosts(tmp_path: Path, tiny_policy: Path):
    with hosts("a", "b") as lan, running(lan, tmp_path, tiny_policy) as cluster:
        cluster.join("b")
        apart = (
            "scheduler.hosts=[b]",
            "scheduler.placement={model_worker/1:b}",
            "network.trusted=true",
        )
        cluster.launch(f"total_train_steps={2 * STEPS}", *ranks("ddp"), *apart)
        cluster.until(lambda: len(cluster.rows()) >= 2, RUN_S)
        for host in lan.hosts.values():
            with host.entered():
                addresses = set(listeners("thread-self").values())
            assert addresses <= {"127.0.0.1", host.address}, "nothing listens at all addresses"
        logs = cluster.run_dir / "stream"
        cluster.until(lambda: list((logs / "rank-1").glob("payload-*.log")), RUN_S)
        assert list(logs.glob("payload-*.log"))
        cluster.ended(RUN_S)
        tally = cluster.tally()
    assert tally.ended and tally.is_balanced and tally.complete, tally
    assert (tally.steps, tally.accepted, tally.outstanding) == (2 * STEPS, 0, 0), tally
    assert tally.head_staleness_max <= STALENESS
