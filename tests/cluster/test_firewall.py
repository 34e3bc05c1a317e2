"""A host and a launcher that are cut off from each other in one direction: it is named soon, with
the host."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.network.hosts import Host, NoNamespaces, two_hosts
from realhf.cluster.placement import ClusterError
from realhf.scheduler.base import Notice
from tests.cluster.test_agents import LONG_S, Cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
NAMED_S = 45.0
"""It takes 7 to 8 s where others do not compute; TCP itself notices after minutes."""


@pytest.fixture
def pair() -> Iterator[tuple[Host, Host]]:
    try:
        with two_hosts() as found:
            yield found
    except NoNamespaces as error:
        pytest.skip(str(error))


@pytest.fixture
def cluster(
    tmp_path: Path, pair: tuple[Host, Host], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Cluster]:
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{Path(__file__).resolve().parents[2]}")
    made = Cluster(tmp_path, address=pair[0].address, hosts=["b"], wait_s=12.0, dead_after_s=7.0)
    with pair[0].entered():
        _ = made.door
    yield made
    made.scheduler.stop(1.0)
    for agent in made.agents.values():
        agent.kill()
        agent.wait()


def until_said(cluster: Cluster, text: str) -> None:
    """Wait until the agent says something in its log."""
    end = time.monotonic() + LONG_S
    while text not in (cluster.folder / "b.log").read_text():
        assert time.monotonic() < end, (cluster.folder / "b.log").read_text()
        time.sleep(0.1)


@pytest.mark.nightly
def test_a_firewall_before_the_start_is_told_at_both_ends(
    cluster: Cluster, pair: tuple[Host, Host]
):
    """The agent's packets arrive, and those of the launcher do not."""
    here, there = pair
    with here.cut_off_from(there):
        cluster.join("b", before=there.enter)
        with pytest.raises(
            ClusterError, match=r"host b did not join tcp://.* within 12 s; .*scheduler\.hosts"
        ):
            cluster.start("master")
        until_said(cluster, "was not reached within 8 s: nothing answers there, or a firewall lies")


@pytest.mark.nightly
@pytest.mark.parametrize("sender", ["launcher", "host"])
def test_one_that_comes_later_is_told_with_the_host(
    cluster: Cluster, pair: tuple[Host, Host], sender: str
):
    """Nothing that ``sender`` says arrives any more. What runs there ends."""
    here, there = pair
    agent = cluster.join("b", before=there.enter)
    cluster.start("master")
    cluster.start("rollout_worker/0")
    began = time.monotonic()
    one, other = (here, there) if sender == "launcher" else (there, here)
    with one.cut_off_from(other):
        cluster.until(
            lambda event: (
                isinstance(event, Notice) and "host b was lost: nothing was heard" in event.text
            )
        )
        named = time.monotonic() - began
        assert cluster.exit_of("rollout_worker/0").exit_code < 0
        until_said(cluster, "its workers end")
        assert agent.poll() is None
    print(f"named after {named:.1f} s")
    assert named < NAMED_S
