"""A Ray cluster whose nodes are hosts of their own, network namespaces with a folder of their own
for Ray, and a run on it."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from benchmarks.network.hosts import Host
from benchmarks.network.lan import Lan
from tests.cluster.bed import PORT, ROOT, ClusterRun, busy_lanes, check_books, hosts, running
from tests.process_family import family, gone

pytestmark = [pytest.mark.several_hosts, pytest.mark.slow, pytest.mark.timeout(1800)]
GCS_PORT = 6379
STEPS = 10
START_S = 400.0
RUN_S = 600.0
OWN_FOLDER = 'mkdir -p /tmp/ray && mount -t tmpfs none /tmp/ray && exec "$@"'
"""Before a command: nodes of one machine would take each other's files for their own."""
PACKAGE = ROOT / "realhf"
KEY = 'secret\\\\*": '
"""In every file of keys, also where its text was quoted into another one."""
ABSENT = 'raise ModuleNotFoundError("No module named realhf")'
WITHOUT_PACKAGE = (
    f"mount -t tmpfs none '{PACKAGE}' && echo '{ABSENT}' > '{PACKAGE}/__init__.py' && {OWN_FOLDER}"
)


class RayNode:
    """One node, which ends with the block."""

    def __init__(self, host: Host, log: Path, words: list[str], before: str) -> None:
        self.host = host
        self._log = log
        ray = str(Path(sys.executable).with_name("ray"))
        given = [
            ray,
            "start",
            "--block",
            f"--node-ip-address={host.address}",
            "--disable-usage-stats",
        ]
        given += ["--object-store-memory=80000000", *words]
        self._environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "RAY_memory_monitor_refresh_ms": "0",
            "COLUMNS": "200",
        }
        self._command = [*host.enter, "unshare", "-m", "sh", "-c", before, "sh", *given]
        self._begin()

    def _begin(self) -> None:
        with self._log.open("wb") as file:
            self.process = subprocess.Popen(
                self._command, env=self._environment, stdout=file, stderr=file
            )

    def ready(self) -> None:
        """Wait until it says so. Ray gives a node 30 s to start, which a busy machine may not do at
        once."""
        end = time.monotonic() + START_S
        while "Ray runtime started" not in (said := self._log.read_text(errors="replace")):
            assert time.monotonic() < end, said
            if self.process.poll() is not None:
                assert "timed out during startup" in said, said
                self._begin()
            time.sleep(0.2)

    def agents(self) -> list[psutil.Process]:
        """Host agents that run on it."""
        return [
            found for found, line in family(self.process.pid).items() if "realhf.worker" in line
        ]

    def end(self) -> None:
        """Leave nothing of it."""
        members = [*family(self.process.pid)]
        self.process.kill()
        for member in members:
            with contextlib.suppress(psutil.Error):
                member.kill()
        self.process.wait(60)
        gone(members, 60)


class RayHosts:
    """A head on the host ``a`` without cores, nodes with one core each on ``b`` and ``c``, later
    one with two cores on ``d``, which lacks this package; ``e`` is no part of the cluster."""

    def __init__(self, lan: Lan, folder: Path) -> None:
        self.lan = lan
        self._folder = folder
        self.nodes: dict[str, RayNode] = {}
        self.address = f"{lan.hosts['a'].address}:{GCS_PORT}"

    def begin(self) -> None:
        """Start the head and two nodes."""
        self._start(
            "a", "--head", f"--port={GCS_PORT}", "--num-cpus=0", "--include-dashboard=false"
        )
        for name in ("b", "c"):
            self._start(name, f"--address={self.address}", "--num-cpus=1")

    def begin_without_package(self) -> None:
        """Start the node that lacks this package."""
        self._start("d", f"--address={self.address}", "--num-cpus=2", before=WITHOUT_PACKAGE)

    def _start(self, name: str, *words: str, before: str = OWN_FOLDER) -> None:
        self.nodes[name] = RayNode(
            self.lan.hosts[name], self._folder / f"ray-{name}.log", [*words], before
        )
        self.nodes[name].ready()

    def inside(self, name: str) -> list[str]:
        """The words before a command that is to run on a node, where its folder is."""
        target = str(self.nodes[name].process.pid)
        return ["nsenter", "--target", target, "--mount", "--net", f"--wd={ROOT}"]

    def with_keys(self) -> list[str]:
        """Files with keys among the temporary ones of a node, and in the folder that Ray has
        there."""
        found: list[str] = []
        for name in self.nodes:
            folders = ["/tmp/ray", *map(str, Path(tempfile.gettempdir()).glob("realhf-agent-*"))]
            words = [*self.inside(name), "grep", "-rlaE", KEY, *folders]
            done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
            found += [f"{name}: {line}" for line in done.stdout.splitlines()]
        return found

    def end(self) -> None:
        """Leave nothing running."""
        for node in reversed(self.nodes.values()):
            node.end()


@pytest.fixture(scope="module")
def ray_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayHosts]:
    if find_spec("ray") is None:
        pytest.skip("Ray is not installed; make test-ray")
    with hosts("a", "b", "c", "d", "e") as lan, contextlib.ExitStack() as stack:
        folder = tmp_path_factory.mktemp("ray")
        # As on a cluster whose owner has given it a token: all that use it have it in their
        # environment.
        environment = stack.enter_context(pytest.MonkeyPatch.context())
        (folder / "token").write_text(secrets.token_hex(32))
        environment.setenv("RAY_AUTH_MODE", "token")
        environment.setenv("RAY_AUTH_TOKEN_PATH", str(folder / "token"))
        made = RayHosts(lan, folder)
        stack.callback(made.end)
        made.begin()
        yield made


def launch(run: ClusterRun, cluster: RayHosts, *options: str) -> None:
    run.scheduler, run.enter = "ray", cluster.inside("a")
    run.launch(f"scheduler.ray={cluster.address}", f"scheduler.wait_s={START_S:g}", *options)


def failed(run: ClusterRun) -> str:
    """The last line of a launch that could not be."""
    assert run.launcher is not None and run.launcher.wait(START_S) == 1, run.said()
    return run.said().strip().splitlines()[-1]


def test_ten_steps_on_a_running_ray_cluster_of_three_hosts(
    tmp_path: Path, tiny_policy: Path, ray_hosts: RayHosts
):
    """Generation and rollouts are on different nodes, on neither of which Ray or this run is told
    where the other is. Afterwards the cluster is as it was."""
    with running(ray_hosts.lan, tmp_path, tiny_policy) as run:
        launch(
            run,
            ray_hosts,
            f"total_train_steps={STEPS}",
            "scheduler.players=2",
            f"scheduler.port={PORT}",
            "scheduler.placement.generation=player-0",
            "scheduler.placement.rollout_worker=player-1",
        )
        run.until(lambda: " training" in run.said(), RUN_S)
        status = run.operator("status")
        agents = [agent for name in ("b", "c") for agent in ray_hosts.nodes[name].agents()]
        run.ended(RUN_S)
        check_books(run, STEPS)
        lanes = busy_lanes(run, STEPS)
        assert {"generation/0"} == lanes["player-0"] and {"rollout_worker/0"} == lanes[
            "player-1"
        ], lanes
        run.keep_report("ray")
    players = {
        line.split()[0]: line.split()[1]
        for line in status.splitlines()
        if line.startswith("player-")
    }
    assert sorted(players.values()) == sorted(
        ray_hosts.lan.hosts[name].address for name in ("b", "c")
    ), status
    assert len(agents) == 2 and gone(agents, 60)
    assert all(node.process.poll() is None for node in ray_hosts.nodes.values())


def test_two_runs_at_once_on_one_cluster(tmp_path: Path, tiny_policy: Path, ray_hosts: RayHosts):
    """The second one used to end with "cannot listen": the endpoint of each had the same port."""
    folders = [tmp_path / name for name in ("one", "other")]
    for folder in folders:
        folder.mkdir()
    with contextlib.ExitStack() as stack:
        runs = [
            stack.enter_context(running(ray_hosts.lan, folder, tiny_policy)) for folder in folders
        ]
        for run in runs:
            launch(run, ray_hosts, "total_train_steps=30")
        for run in runs:
            run.until(lambda run=run: len(run.rows()) >= 1, RUN_S)
        assert not any(run.launcher and run.launcher.poll() is not None for run in runs), (
            "both train at that time"
        )
        for run in runs:
            run.ended(RUN_S)
            check_books(run, 30)


def test_a_launcher_that_is_killed_leaves_no_key_on_a_node_and_no_agent(
    tmp_path: Path, tiny_policy: Path, ray_hosts: RayHosts
):
    """The agents' key used to be a file there, which nobody removed."""
    with running(ray_hosts.lan, tmp_path, tiny_policy) as run:
        launch(run, ray_hosts, "total_train_steps=500", "scheduler.players=2")
        run.until(lambda: len(run.rows()) >= 1, RUN_S)
        agents = [agent for name in ("b", "c") for agent in ray_hosts.nodes[name].agents()]
        assert run.launcher is not None and len(agents) == 2
        helpers = [*family(run.launcher.pid)]
        run.launcher.kill()
        assert gone([*helpers, *agents], 120)
    assert not ray_hosts.with_keys()


def test_a_node_without_the_package_is_named(
    tmp_path: Path, tiny_policy: Path, ray_hosts: RayHosts
):
    with running(ray_hosts.lan, tmp_path, tiny_policy) as run:
        ray_hosts.begin_without_package()
        launch(run, ray_hosts, "total_train_steps=2", "scheduler.player_cpus=2")
        said = failed(run)
    assert "error: Ray cannot start the host agent player-0 on " in said
    assert ray_hosts.lan.hosts["d"].address in said and "No module named realhf" in said


def test_a_bundle_that_no_node_can_hold_is_named_with_what_each_has(
    tmp_path: Path, tiny_policy: Path, ray_hosts: RayHosts
):
    with running(ray_hosts.lan, tmp_path, tiny_policy) as run:
        launch(run, ray_hosts, "total_train_steps=2", "scheduler.player_cpus=64")
        said = failed(run)
    assert "no node of the Ray cluster can ever hold player-0 (64 CPU): " in said
    for name, has in (("a", "nothing"), ("b", "1 CPU"), ("c", "1 CPU")):
        assert f"({ray_hosts.lan.hosts[name].address}) has {has}" in said


def test_a_cluster_that_this_machine_is_no_part_of_is_named(
    tmp_path: Path, tiny_policy: Path, ray_hosts: RayHosts
):
    """It is somebody else's."""
    with running(ray_hosts.lan, tmp_path, tiny_policy) as run:
        host = ray_hosts.lan.hosts["e"]
        run.scheduler = "ray"
        run.bind = host.address
        run.enter = [*host.enter, "unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        began = time.monotonic()
        run.launch(f"scheduler.ray={ray_hosts.address}")
        said = failed(run)
    assert f"scheduler.ray={ray_hosts.address}: no node of Ray runs on this machine" in said
    print(f"said after {time.monotonic() - began:.1f} s")
