"""Host agents that Ray places: they start ordinary processes, and what cannot be placed is
named."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from realhf.base.loopback import free_port
from realhf.cluster.cluster_keys import KnownHosts
from realhf.cluster.control_endpoint import ControlEndpoint
from realhf.cluster.engines import ray as engine
from realhf.cluster.engines.ray import RayOptions
from realhf.cluster.engines.ray_agent import RayAgent
from realhf.cluster.placement import ClusterError
from realhf.cluster.scheduler import ClusterScheduler
from realhf.scheduler.base import WorkerSpec
from tests.cluster.engines.bench_of_one import LIMIT_S, refusal, started
from tests.cluster.key_ring import KeyRing, run_folder

own_cluster = pytest.mark.several_hosts
"""Ray takes seconds to start, a minute where others compute."""


def made(folder: Path, **options: object) -> ClusterScheduler:
    given = {
        "address": "127.0.0.1",
        "port": 0,
        "key_file": str(folder / "k"),
        "wait_s": LIMIT_S,
        **options,
    }
    return engine.make_scheduler(RayOptions(**given))  # pyright: ignore[reportArgumentType]


def master(folder: Path) -> WorkerSpec:
    return WorkerSpec("master", "platform", (), run_folder(folder, None) / "logs" / "master.log")


def of_ray() -> list[psutil.Process]:
    """Processes below this one that belong to Ray or to an agent."""
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            words = " ".join(child.cmdline())
        except psutil.Error:
            continue
        if any(
            word in words
            for word in ("raylet", "gcs_server", "ray::", "realhf.worker", "default_worker")
        ):
            found.append(child)
    return found


def listening(processes: Iterable[psutil.Process]) -> set[str]:
    """The addresses at which processes listen."""
    found = set[str]()
    for process in processes:
        with contextlib.suppress(psutil.Error):
            there = [
                each.laddr.ip
                for each in process.net_connections("inet")
                if each.status == psutil.CONN_LISTEN
            ]
            found |= {address.removeprefix("::ffff:") for address in there}
    return found


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_trainers_are_packed_and_players_are_spread():
    options = RayOptions(players=2, player_cpus=3, trainer_cpus=8, trainer_gpus=4)
    assert options.domains() == [
        ("STRICT_PACK", {"trainer": {"CPU": 8.0, "GPU": 4.0}}),
        ("SPREAD", {"player-0": {"CPU": 3.0}, "player-1": {"CPU": 3.0}}),
    ]
    scheduler = engine.make_scheduler(options)
    assert scheduler._options.hosts == ["trainer", "player-0", "player-1"]
    assert scheduler._options.placement == {"model_worker": "trainer"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ray": "auto"}, "scheduler.ray=auto: give HOST:PORT"),
        ({"ray": "ray://host:1"}, "scheduler.ray=ray://host:1: give HOST:PORT"),
        ({"players": 0}, "scheduler.players=0: no host is requested from Ray"),
        ({"trainer_gpus": 1}, "scheduler.trainer_gpus=1: has no effect without"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, said):
    (problem,) = RayOptions(**options).problems("scheduler")
    assert problem.startswith(said)


@pytest.mark.parametrize("name", ["job/demonstrations", "master"])
def test_an_address_without_a_cluster_is_named_at_once(tmp_path, name):
    """Also where Ray is not installed; what comes before the run may take an hour."""
    port = free_port()
    assert re.search(
        rf"scheduler\.ray=127.0.0.1:{port}: no Ray cluster is reached there",
        refusal(made(tmp_path, ray=f"127.0.0.1:{port}"), replace(master(tmp_path), name=name)),
    )


def test_a_launch_without_ray_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "find_spec", lambda name: None)
    assert re.search(
        r"Ray is not installed here: pip install -e '.*\[ray\]'",
        refusal(made(tmp_path), master(tmp_path)),
    )


@pytest.mark.slow
def test_an_agent_that_cannot_serve_is_told_in_one_line(tmp_path):
    """Its keys are not those of the endpoint."""
    others = KeyRing(tmp_path / "others").keys_of("player-0")
    door = ControlEndpoint(KnownHosts(None), "tcp://127.0.0.1:0", 7.0)
    agent = RayAgent("player-0")
    try:
        node = agent.start(door.endpoint, others.text())
        until(agent.problem)
        line = agent.problem()
        assert line.startswith(
            f"host agent player-0 on {node} failed: host player-0: the launcher at {door.endpoint} "
        )
        assert "\n" not in line
    finally:
        agent.stop()
        door.close()


@own_cluster
@pytest.mark.timeout(900)
def test_a_worker_runs_below_ray_and_nothing_is_left(tmp_path):
    """The worker is a plain process that knows nothing of Ray. The same scheduler starts a second
    run."""
    pytest.importorskip("ray")
    before = {*Path("/tmp").glob("realhf-ray-*")}
    scheduler = made(tmp_path)
    try:
        for attempt in ("first", "second"):
            said, end = started(scheduler, run_folder(tmp_path / attempt, None), "player-0")
            assert end.exit_code == 3 and said.endswith("ray False")
            assert of_ray()
            assert listening(of_ray()) == {"127.0.0.1"}, "who reaches Ray runs programs as its user"
            head = next(process for process in of_ray() if "gcs_server" in process.name())
            token = head.environ()["RAY_AUTH_TOKEN_PATH"]
            assert Path(token).stat().st_mode & 0o777 == 0o600
            scheduler.stop(3.0)
            until(lambda: not of_ray())
        assert {*Path("/tmp").glob("realhf-ray-*")} <= before
    finally:
        scheduler.stop(3.0)


@own_cluster
@pytest.mark.timeout(900)
def test_a_host_that_is_never_there_is_named_with_what_there_is(tmp_path):
    pytest.importorskip("ray")
    cores = len(os.sched_getaffinity(0))
    scheduler = made(tmp_path, player_cpus=4096)
    try:
        with pytest.raises(
            ClusterError, match=rf"can ever hold player-0 \(4096 CPU\): .* has {cores} CPU"
        ):
            scheduler.start(master(tmp_path))
        until(lambda: not of_ray())
    finally:
        scheduler.stop(1.0)
    assert re.search(
        r"no room for player-0 .* in time \(scheduler.wait_s\); free now: ",
        refusal(
            made(tmp_path, players=cores + 1, wait_s=60.0, key_file=str(tmp_path / "k2")),
            master(tmp_path / "crowded"),
        ),
    )


@own_cluster
@pytest.mark.timeout(900)
def test_an_agent_that_cannot_serve_is_named_with_its_last_words(tmp_path, monkeypatch):
    """Its keys are not those of the endpoint, as if another run had answered."""
    pytest.importorskip("ray")
    others = KeyRing(tmp_path / "others").keys_of("player-0")
    monkeypatch.setattr(KnownHosts, "generate", lambda self, names: others)
    assert re.search(
        r"player-0 did not join .*host agent player-0 on .* failed: host ",
        refusal(made(tmp_path), master(tmp_path)),
    )
