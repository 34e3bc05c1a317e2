"""Ctrl-C on a launcher whose workers run on hosts: nothing is left, here or there, whatever it was
about to do."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from realhf.base.loopback import free_port
from tests.cluster.bed import OPTIONS, ROOT
from tests.cluster.key_ring import KeyRing
from tests.process_family import family, gone

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
LONG_S = 300.0
ENDS_S = 60.0
"""Ten seconds for workers on hosts that do not answer, and what a busy machine takes."""


class Bench:
    """A launcher and an agent on the loopback."""

    def __init__(self, folder: Path, policy: Path) -> None:
        self.folder, self._policy, self.ring = folder, policy, KeyRing(folder / "key")
        self.port = free_port()
        self.running: list[subprocess.Popen[bytes]] = []

    def _started(self, log: str, *words: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        with (self.folder / log).open("wb") as file:
            command = [sys.executable, "-m", *words]
            self.running.append(
                subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file)
            )
        return self.running[-1]

    def launch(self) -> subprocess.Popen[bytes]:
        given = (
            *OPTIONS,
            "scheduler=join",
            "network.bind=127.0.0.1",
            f"scheduler.port={self.port}",
        )
        given += (
            f"scheduler.key_file={self.ring.file}",
            f"fileroot={self.folder / 'runs'}",
            "scheduler.hosts=[a]",
        )
        return self._started(
            "launch.log",
            "realhf.launch",
            *given,
            f"actor.path={self._policy}",
            "total_train_steps=50",
        )

    def join(self) -> subprocess.Popen[bytes]:
        given = (
            "--join",
            f"tcp://127.0.0.1:{self.port}",
            "--key-file",
            str(self.ring.file_of("a")),
            "--host-agent",
        )
        given += ("--folder", str(self.folder / "a"), "--linger-s", "2", "--no-prepare")
        return self._started("agent.log", "realhf.worker", *given)

    def says(self, log: str) -> str:
        path = self.folder / log
        return path.read_text(errors="replace") if path.exists() else ""

    def until(self, condition: Callable[[], object]) -> None:
        end = time.monotonic() + LONG_S
        while not condition():
            assert time.monotonic() < end, (
                self.says("launch.log")[-2000:] + self.says("agent.log")[-2000:]
            )
            assert all(process.poll() is None for process in self.running), self.says("launch.log")[
                -2000:
            ]
            time.sleep(0.05)


@pytest.fixture
def bench(tmp_path: Path, tiny_policy: Path) -> Iterator[Bench]:
    made = Bench(tmp_path, tiny_policy)
    yield made
    for process in made.running:
        process.kill()
        process.wait()


def interrupted(bench: Bench, launcher: subprocess.Popen[bytes]) -> None:
    """Interrupt a launcher, and see that it ends at once with nothing left."""
    below = [*family(launcher.pid)]
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(ENDS_S) == 130
    assert "error: stopped by SIGINT" in bench.says("launch.log")
    assert "Traceback" not in bench.says("launch.log")
    assert gone(below, 60)
    with socket.create_server(("127.0.0.1", bench.port)):
        pass


@pytest.mark.nightly
def test_while_it_waits_for_hosts(bench: Bench):
    launcher = bench.launch()
    bench.until(lambda: "for host a; on each:" in bench.says("launch.log"))
    interrupted(bench, launcher)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "stage", ["a takes part in the run", "rollout_worker/0 runs here", "generation/0 runs here"]
)
def test_while_it_starts_workers(bench: Bench, stage: str):
    """The agent has ended its workers, and the run's keys are gone from it."""
    agent = bench.join()
    launcher = bench.launch()
    bench.until(lambda: stage in bench.says("agent.log"))
    interrupted(bench, launcher)
    below = [*family(agent.pid)]
    assert agent.wait(2 * ENDS_S) == 0, bench.says("agent.log")
    assert gone(below, 60) and not [*(bench.folder / "a" / "keys").glob("*")]
