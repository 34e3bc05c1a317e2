"""A scheduler and real host agents on the loopback: what they start, report and survive."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import zmq

from realhf.base.process import start_time
from realhf.cluster.messages import OperatorOrder
from realhf.cluster.options import ClusterOptions
from realhf.cluster.placement import ClusterError
from realhf.cluster.scheduler import ClusterScheduler
from realhf.scheduler.base import (
    Notice,
    WorkerEvent,
    WorkerExit,
    WorkerLine,
    WorkerSpec,
    WorkersWanted,
)
from realhf.transport.network import connect_encrypted
from tests.cluster.key_ring import KeyRing, log_of, run_folder
from tests.process_family import gone

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
LONG_S = 120.0
SLEEPER = """
import os, sys, time
print(f"pid {os.getpid()}", flush=True)
print("last words", file=sys.stderr, flush=True)
time.sleep(float(sys.argv[1]))
sys.exit(3)
"""
STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("stays", flush=True)
time.sleep(60)
"""


class Cluster:
    """A launcher's scheduler in this process, and agents that join it."""

    def __init__(self, folder: Path, **options: object) -> None:
        self.folder = folder
        self.keys = folder / "cluster.key"
        self.ring = KeyRing(self.keys)
        (folder / "sleeper.py").write_text(SLEEPER)
        self.run = run_folder(folder)
        given = {
            "address": "127.0.0.1",
            "port": 0,
            "key_file": str(self.keys),
            "dead_after_s": 7.0,
            **options,
        }
        self.said: list[str] = []
        self.scheduler = ClusterScheduler(ClusterOptions(**given), say=self.said.append)  # pyright: ignore
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.events: list[WorkerEvent] = []

    @property
    def door(self) -> str:
        opened = self.scheduler._open_endpoint()
        return opened.endpoint

    def join(
        self,
        name: str,
        *options: str,
        keys: Path | None = None,
        before: Sequence[str] = (),
        folder: str = "",
    ) -> subprocess.Popen[bytes]:
        """Start an agent; ``before`` are words before its command, ``folder`` is its own if another
        has its name."""
        given = [
            "--join",
            self.door,
            "--key-file",
            str(keys or self.ring.file_of(name)),
            "--name",
            name,
        ]
        given += ["--linger-s", "2", "--folder", str(self.folder / f"host-{folder or name}")]
        given += options or ("--host-agent", "--no-prepare")
        command = [*before, sys.executable, "-m", "realhf.worker", *given]
        # An agent is no process of the launcher's, which kills what it finds of its own in the end.
        with (
            (self.folder / f"{name}.log").open("wb") as log,
            self.scheduler._local.preserve_children(),
        ):
            self.agents[name] = subprocess.Popen(command, stdout=log, stderr=log)
        return self.agents[name]

    def start(self, name: str, seconds: float = LONG_S, **more: object) -> None:
        """Start a worker that sleeps."""
        self.scheduler.start(
            WorkerSpec(name, "sleeper", (str(seconds),), log_of(self.run, name), **more)
        )  # pyright: ignore

    def where(self, name: str) -> str:
        """The host of a worker."""
        return self.scheduler._table.workers[name].host

    def until(self, what: Callable[[WorkerEvent], bool]) -> WorkerEvent:
        """Wait for an event."""
        end = time.monotonic() + LONG_S
        while True:
            for event in [*self.events]:
                if what(event):
                    self.events.remove(event)
                    return event
            assert time.monotonic() < end, self.events
            self.events += self.scheduler.wait(0.5)

    def exit_of(self, name: str) -> WorkerExit:
        """Wait for the end of a worker."""
        found = self.until(lambda event: isinstance(event, WorkerExit) and event.name == name)
        assert isinstance(found, WorkerExit)
        return found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the module that workers run lies, too."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{Path(__file__).resolve().parents[2]}")
    return tmp_path


@pytest.fixture
def clusters(folder: Path) -> Iterator[Callable[..., Cluster]]:
    made: list[Cluster] = []

    def make(**options: object) -> Cluster:
        made.append(Cluster(folder, **options))
        return made[-1]

    yield make
    for cluster in made:
        cluster.scheduler.stop(1.0)
        for agent in cluster.agents.values():
            agent.kill()
            agent.wait()


@pytest.mark.nightly
def test_workers_run_on_the_hosts_that_were_waited_for_and_end_with_the_run(
    clusters: Callable[..., Cluster],
):
    """A worker that was declared dead is killed, then a host; one comes later and is removed by an
    operator."""
    cluster = clusters(hosts=["a", "b"], placement={"generation": "a"})
    agents = [cluster.join(name) for name in ("a", "b")]
    cluster.start("master", events=True)
    for name in ("generation/0", "rollout_worker/0"):
        cluster.start(name, events=True)
    cluster.start("rollout_worker/1", 0.1)
    assert [cluster.where(f"{name}/0") for name in ("generation", "rollout_worker")] == ["a", "b"]
    pids = [
        int(said(cluster, name).split()[1])
        for name in ("master", "generation/0", "rollout_worker/0")
    ]
    ended = cluster.exit_of("rollout_worker/1")
    assert (ended.exit_code, ended.reason) == (3, "exit code 3")
    assert "last words" in ended.log.read_text()

    cluster.start("rollout_worker/3", events=True)
    silent = int(said(cluster, "rollout_worker/3").split()[1])
    os.kill(silent, signal.SIGSTOP)
    for pid, cause in (
        (silent + 1, "killed: of another"),
        (silent, "killed: no heartbeat for 8.1 s"),
    ):
        cluster.scheduler.kill("rollout_worker/3", cause, pid=pid, started=start_time(silent))
    ended = cluster.exit_of("rollout_worker/3")
    assert (ended.exit_code, ended.reason) == (-9, "killed: no heartbeat for 8.1 s"), (
        "its agent has done it"
    )
    assert gone([silent], LONG_S)

    agents[0].kill()
    lost = cluster.exit_of("generation/0")
    assert lost.exit_code < 0 and lost.reason.startswith(
        "its host a was lost: nothing was heard of it for "
    )
    assert gone([pids[1]], LONG_S), "its workers end with an agent"

    cluster.join("c", "--kind", "rollout_worker", "--count", "2")
    assert cluster.until(lambda event: isinstance(event, WorkersWanted)) == WorkersWanted(
        "c", "rollout_worker", 2
    )
    cluster.start("rollout_worker/2", host="c")
    operator = Operator(cluster)
    assert "rollout_worker/2" in operator.says("status")
    assert operator.says("add", OperatorOrder("x", "generation", 1)) == "no host x; there are b, c"
    assert (
        operator.says("remove", OperatorOrder("c", "", 0))
        == "c is removed; its workers end: rollout_worker/2"
    )
    assert cluster.exit_of("rollout_worker/2").reason == "removed with its host c"
    assert cluster.agents["c"].wait(LONG_S) == 0, "an agent that was sent away ends in peace"

    cluster.scheduler.stop(2.0)
    assert gone(pids, 60)
    assert agents[1].wait(LONG_S) == 0, "and so does one whose run is over"


@pytest.mark.nightly
def test_an_agent_whose_workers_end_slowly_hears_that_the_run_is_over(
    clusters: Callable[..., Cluster],
):
    """While it waited for them it said nothing: the launcher took it for lost and did not tell it,
    and it waited ten minutes for a launcher that it took for lost."""
    cluster = clusters(hosts=["a"], dead_after_s=6.0)
    agent = cluster.join("a")
    cluster.start("master")
    (cluster.folder / "sleeper.py").write_text(STUBBORN)
    cluster.start("rollout_worker/0", events=True)
    said(cluster, "rollout_worker/0")
    cluster.scheduler.stop(9.0)
    assert agent.wait(LONG_S) == 0
    assert "nothing heard" not in (cluster.folder / "a.log").read_text()


def said(cluster: Cluster, name: str) -> str:
    found = cluster.until(lambda event: isinstance(event, WorkerLine) and event.name == name)
    assert isinstance(found, WorkerLine)
    return found.text


class Operator:
    """Asks while the scheduler of this thread serves."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def says(self, kind: str, order: OperatorOrder | None = None) -> str:
        code = (
            "import sys; from pathlib import Path; from realhf.cluster.operator import "
            "ask_launcher\n"
            "from realhf.cluster.messages import OperatorOrder\n"
            "order = OperatorOrder(sys.argv[4], sys.argv[5], int(sys.argv[6])) if len(sys.argv) > "
            "4 else None\n"
            "print('\\n'.join(ask_launcher(sys.argv[1], Path(sys.argv[2]), sys.argv[3], "
            "order).lines))"
        )
        words = [self._cluster.door, str(self._cluster.keys), kind]
        words += [order.host, order.kind, str(order.count)] if order else []
        process = subprocess.Popen(
            [sys.executable, "-c", code, *words], stdout=subprocess.PIPE, text=True
        )
        end = time.monotonic() + LONG_S
        while process.poll() is None and time.monotonic() < end:
            self._cluster.events += self._cluster.scheduler.wait(0.1)
        process.kill()
        return process.communicate()[0].strip()


def test_who_does_not_join_is_named_and_how_to_join(clusters: Callable[..., Cluster]):
    cluster = clusters(hosts=["a", "b"], min_hosts=3, wait_s=0.5)
    with pytest.raises(
        ClusterError, match=r"hosts a, b and 1 more host did not join .*:\d+ within 0\.5 s"
    ):
        cluster.start("master")
    assert "python -m realhf.worker --join tcp://127.0.0.1:" in cluster.said[0]


def test_an_agent_with_other_keys_says_so_and_takes_no_part(clusters: Callable[..., Cluster]):
    cluster = clusters()
    agent = cluster.join("a", keys=KeyRing(cluster.folder / "other.key").file_of("a"))
    assert agent.wait(LONG_S) == 1
    assert (
        "FATAL: host a: the launcher at tcp://127.0.0.1:" in (cluster.folder / "a.log").read_text()
    )
    assert cluster.scheduler.wait(0.0) == []


@pytest.mark.nightly
def test_a_door_goes_on_after_nonsense_and_a_second_host_of_a_name_is_refused(
    clusters: Callable[..., Cluster],
):
    cluster = clusters(hosts=["a"])
    first = cluster.join("a")
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    key = cluster.ring.of("babbler")
    connect_encrypted(socket, cluster.door, key.server_public, key.own)
    for frames in ([b""], [b"\x81"], [b"\xff" * 100], [b"a", b"b", b"c"], [b"\x80", b"\x80"]):
        socket.send_multipart(frames)
    cluster.start("master")
    second = cluster.join("a", folder="another")
    assert second.wait(LONG_S) == 1
    assert (
        "a host named 'a' takes part already; name this one with --name"
        in (cluster.folder / "a.log").read_text()
    )
    assert first.poll() is None
    context.destroy(0)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_agent_that_a_person_stops_ends_its_workers_and_says_good_bye(
    clusters: Callable[..., Cluster], number: int, code: int
):
    cluster = clusters(hosts=["a"])
    agent = cluster.join("a")
    cluster.start("master")
    cluster.start("rollout_worker/0")
    agent.send_signal(number)
    lost = cluster.until(
        lambda event: isinstance(event, Notice) and "host a was lost" in event.text
    )
    assert "its agent was stopped" in str(lost), "it says so before it is missed"
    assert agent.wait(LONG_S) == code
    assert "Traceback" not in (cluster.folder / "a.log").read_text()


def test_clocks_that_are_apart_are_told(
    monkeypatch: pytest.MonkeyPatch, clusters: Callable[..., Cluster]
):
    now = time.time
    cluster = clusters(hosts=["a"])
    monkeypatch.setattr("realhf.cluster.host_table.time.time", lambda: now() - 60)
    cluster.join("a")
    notice = cluster.until(lambda event: isinstance(event, Notice))
    assert isinstance(notice, Notice)  # how long the greeting was under way is in it
    assert re.search(r"host a: its clock is (5\d|60) s ahead of the launcher's", notice.text)
