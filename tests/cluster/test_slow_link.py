"""A link of 3 Mbit/s between two hosts: what a worker needs arrives, once, whatever happens on the
way."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.network.hosts import Host, NoNamespaces, two_hosts
from realhf.scheduler.base import Notice, WorkerEvent, WorkerExit, WorkerLine
from tests.cluster.test_agents import LONG_S, Cluster

pytestmark = [pytest.mark.several_hosts, pytest.mark.slow, pytest.mark.timeout(900)]
MBIT_S = 3.0
LARGE = 20_000_000
HIDDEN = (
    "unshare",
    "-m",
    "sh",
    "-c",
    'mount -t tmpfs none "$0" && mount -t tmpfs none "$1" && shift && exec "$@"',
)


@pytest.fixture
def pair() -> Iterator[tuple[Host, Host]]:
    try:
        with two_hosts() as found:
            for host in found:
                host.slow_down(MBIT_S)
            yield found
    except NoNamespaces as error:
        pytest.skip(str(error))


@pytest.fixture
def cluster(
    tmp_path: Path, pair: tuple[Host, Host], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Cluster]:
    """A launcher whose run needs a model of 20 MB, which the host ``b`` does not have."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{Path(__file__).resolve().parents[2]}")
    made = Cluster(tmp_path, address=pair[0].address, hosts=["b"], dead_after_s=7.0)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_bytes(os.urandom(LARGE))
    plan = tmp_path / "exp" / "run" / "plan.json"
    found = json.loads(plan.read_text())
    found["spec"]["models"] = {"actor": {"path": str(tmp_path / "model")}}
    plan.write_text(json.dumps(found))
    with pair[0].entered():
        _ = made.door
    yield made
    made.scheduler.stop(1.0)
    for agent in made.agents.values():
        agent.kill()
        agent.wait()


def lost(event: WorkerEvent) -> bool:
    return isinstance(event, Notice) and "host b was lost" in event.text


def arrived(cluster: Cluster) -> int:
    """Bytes of the model that the host has."""
    return sum(
        path.stat().st_size
        for path in (cluster.folder / "host-b" / "carried").rglob("*")
        if path.is_file()
    )


def test_a_large_model_arrives_and_goes_on_where_a_cut_stopped_it(
    cluster: Cluster, pair: tuple[Host, Host]
):
    """The parts that were under way kept signs of life back, the host was lost every eleven
    seconds, and each time the file began again at its first byte."""
    here, there = pair
    cluster.join(
        "b",
        before=(*there.enter, *HIDDEN, str(cluster.folder / "exp"), str(cluster.folder / "model")),
    )
    cluster.start("master")
    before = there.received_bytes()
    began = time.monotonic()
    cluster.start("rollout_worker/0", 0.1, events=True)
    while arrived(cluster) < LARGE / 2:
        assert time.monotonic() - began < LONG_S, arrived(cluster)
        cluster.events += cluster.scheduler.wait(0.5)
        assert not any(map(lost, cluster.events)), f"after {time.monotonic() - began:.0f} s"
    with here.cut_off_from(there):
        cluster.until(lost)
        assert cluster.exit_of("rollout_worker/0").exit_code < 0
    there_before = arrived(cluster)
    end = time.monotonic() + LONG_S
    while "b" not in cluster.scheduler._table.hosts:
        assert time.monotonic() < end, (cluster.folder / "b.log").read_text()
        cluster.events += cluster.scheduler.wait(0.5)
    cluster.start("rollout_worker/0", 0.1, host="b", events=True)
    line = cluster.until(lambda event: isinstance(event, WorkerLine | WorkerExit))
    assert isinstance(line, WorkerLine) and line.text.startswith("pid "), line
    assert not any(map(lost, cluster.events))
    assert there_before > LARGE / 2 and arrived(cluster) == LARGE
    brought = there.received_bytes() - before
    print(
        f"{brought / 1e6:.1f} MB over the link for {LARGE / 1e6:.1f} MB, "
        f"{time.monotonic() - began:.0f} s"
    )
    assert brought < 1.3 * LARGE, "half of it was there when the link was cut"
