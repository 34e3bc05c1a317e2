"""What a launcher makes of agents that have its keys and do not do what an agent does."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from realhf.base.files import digest_folders
from realhf.cluster import control_endpoint, file_transfer, own_host
from realhf.cluster import operator as operator_desk
from realhf.cluster import scheduler as scheduler_module
from realhf.cluster.cluster_keys import LauncherKeys
from realhf.cluster.messages import (
    Exited,
    FilePiece,
    FileReceipt,
    FolderProbeRequest,
    HelloRefusal,
    Lines,
    OperatorOrder,
    OperatorReport,
    ProbeAnswer,
    StartWorker,
)
from realhf.cluster.options import ClusterOptions
from realhf.cluster.placement import ClusterError
from realhf.cluster.scheduler import ClusterScheduler
from realhf.monitor.run_files import HostLanes
from realhf.scheduler.base import (
    Notice,
    RestartRequest,
    WorkerEvent,
    WorkerExit,
    WorkerLine,
    WorkerSpec,
    WorkersWanted,
)
from realhf.transport.sockets import raise_descriptor_limit
from tests.cluster.key_ring import ASYNCHRONOUS, KeyRing, log_of, run_folder
from tests.cluster.strange_agent import ANSWER_S, StrangeAgent

SILENT = {"dead_after_s": 40.0}
"""Strange agents give no signs of life."""


class Bench:
    """A launcher's scheduler with a run folder, and strange agents."""

    def __init__(self, folder: Path, rollout: object = ASYNCHRONOUS, **more: Any) -> None:
        self.run, self.folder, self.keys = (
            run_folder(folder, rollout),
            folder,
            KeyRing(folder / "cluster.key"),
        )
        given = {
            "address": "127.0.0.1",
            "port": 0,
            "key_file": str(folder / "cluster.key"),
            **SILENT,
            **more,
        }
        self.scheduler = ClusterScheduler(ClusterOptions(**given), say=lambda text: None)
        self.agents: list[StrangeAgent] = []
        self.events: list[WorkerEvent] = []

    def agent(self, name: str = "a") -> StrangeAgent:
        self.agents.append(StrangeAgent(self.scheduler._open_endpoint().endpoint, self.keys, name))
        return self.agents[-1]

    def operator(self) -> StrangeAgent:
        """Who has the launcher's own keys."""
        key = LauncherKeys.read(self.keys.file).operator_key
        self.agents.append(StrangeAgent(self.scheduler._open_endpoint().endpoint, key, "operator"))
        return self.agents[-1]

    def begin(self) -> None:
        """Start a master, which ends at once."""
        self.start("master", "platform")

    def start(self, name: str, module: str = "none", *argv: str, events: bool = False) -> None:
        self.scheduler.start(WorkerSpec(name, module, argv, log_of(self.run, name), events=events))

    def until(self, wanted: type[WorkerEvent] | tuple[type, ...], about: str = "") -> WorkerEvent:
        """Wait for an event of a kind whose text holds ``about``."""
        end = time.monotonic() + ANSWER_S
        while time.monotonic() < end:
            for event in self.events:
                if isinstance(event, wanted) and about in str(event):
                    self.events.remove(event)
                    return event
            self.events += self.scheduler.wait(0.1)
        raise AssertionError(f"no {wanted} about {about!r}, only {self.events}")

    def served_until(self, condition: Callable[[], object]) -> None:
        """Serve hosts until a condition holds."""
        end = time.monotonic() + ANSWER_S
        while not condition():
            assert time.monotonic() < end, self.events
            self.events += self.scheduler.wait(0.05)

    def heard_until(self, agent: StrangeAgent, last: str) -> list[str]:
        """Serve hosts until an agent hears this; the kinds of all that it heard."""
        heard: list[str] = []

        def is_heard() -> bool:
            while (found := agent.heard()) is not None:
                heard.append(found[0])
            return last in heard

        self.served_until(is_heard)
        return heard

    def close(self) -> None:
        for agent in self.agents:
            agent.close()
        self.scheduler._table.hosts.clear()  # none of them would say that it has ended its workers
        self.scheduler.stop(0.1)


@pytest.fixture
def benches(tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    """Makes a bench with further options; it is closed when the test is over."""
    with contextlib.ExitStack() as stack:

        def make(**more: Any) -> Bench:
            made = Bench(tmp_path, **more)
            stack.callback(made.close)
            return made

        yield make


@pytest.fixture
def bench(benches: Callable[..., Bench]) -> Bench:
    return benches()


class Answers(threading.Thread):
    """Says for an agent that it shares nothing, and that it keeps parts of files, or its
    ``problem`` with them. It ends when a worker is to be started."""

    def __init__(self, agent: StrangeAgent) -> None:
        super().__init__(daemon=True)
        self._agent = agent
        self.problem = ""
        self.start()

    def run(self) -> None:
        end = time.monotonic() + ANSWER_S
        while time.monotonic() < end:
            if (found := self._agent.heard()) is None:
                self._agent.socket.poll(20)
            elif isinstance(found[1], FolderProbeRequest):
                self._agent.say("probed", ProbeAnswer(found[1].number, "", []))
            elif isinstance(found[1], StartWorker):
                return
            elif isinstance(piece := found[1], FilePiece):
                self._agent.say(
                    "kept", FileReceipt(piece.path, piece.offset + len(piece.data), self.problem)
                )


@pytest.mark.nightly
def test_a_host_that_never_says_what_it_shares_is_waited_for_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(scheduler_module, "PROBE_S", 0.3)
    bench.agent().join()
    bench.begin()
    waits: list[bool] = []
    monkeypatch.setattr(bench.scheduler, "_start_on_host", lambda *given: waits.append(True))
    bench.start("rollout_worker/0")
    bench.until(Notice, "host a did not report within 0.3 s what it shares; files are sent to it")
    asked = bench.scheduler._probes  # pyright: ignore[reportPrivateUsage]
    bench.start("rollout_worker/1")
    assert bench.scheduler._probes == asked and len(waits) == 2  # pyright: ignore[reportPrivateUsage]


def agent_with_a_worker(bench: Bench) -> StrangeAgent:
    """Return an agent below which rollout_worker/0 runs."""
    agent = bench.agent().join()
    bench.begin()
    thread = Answers(agent)
    bench.start("rollout_worker/0")
    bench.served_until(lambda: not thread.is_alive())
    return agent


def test_lines_of_a_worker_that_reports_none_are_nobodys(bench: Bench):
    """They would be taken for the master's: the end of the run, for instance."""
    agent = agent_with_a_worker(bench)
    agent.say("lines", Lines("rollout_worker/0", [json.dumps({"kind": "done", "summary": {}})]))
    agent.say("leave")
    bench.until(WorkerExit, "rollout_worker/0")
    assert not [
        event for event in bench.events if isinstance(event, WorkerLine) and event.name != "master"
    ]


def test_nonsense_is_told_with_the_name_of_the_host_and_once(bench: Bench):
    agent = bench.agent().join()
    bench.begin()
    for payload in ({"name": "../x"}, ["no map"], {"name": "a/b", "exit_code": 10**9}):
        agent.babble("exited", payload)
    agent.babble("dance", {})
    bench.until(Notice, "host a: its agent sent an invalid message: ")
    agent.say("leave")
    bench.until(Notice, "its agent was stopped")
    assert "no agent says" not in str(bench.events)


def test_a_hello_that_cannot_be_understood_is_refused_with_its_field(bench: Bench):
    agent = bench.agent()
    agent.babble("hello", {"name": "a/b"})
    found = agent.next()
    assert found[0] == "refused" and "field" in found[1].reason  # pyright: ignore


def test_an_agent_of_another_version_is_refused_with_both_and_its_host(bench: Bench):
    agent = bench.agent()
    agent.hello(versions={"realhf": "99.0", "Python": "2.7"})
    reason = agent.hears(HelloRefusal).reason
    assert (
        reason.startswith("versions differ: realhf 99.0 on its-node, ")
        and "Python 2.7 on its-node" in reason
    )
    assert not bench.scheduler.wait(0.1)


UNLIKE = {"source": "0123", "torch": "1.0+cpu"}


def test_a_host_with_other_files_of_the_package_or_another_torch_is_refused_with_both(
    benches: Callable[..., Bench],
):
    """One changed line of a host of the same version gave rewards of 7.0, and was trained on. Who
    waits for the host learns of it at once."""
    bench = benches(hosts=["a"])
    agent = bench.agent()
    agent.hello(unlike=UNLIKE)
    with pytest.raises(ClusterError) as found:
        bench.begin()
    reason = agent.hears(HelloRefusal).reason
    own = own_host.installed_versions()
    assert reason == (
        f"it has the package's files with the digest 0123, here {own['source']}; torch 1.0+cpu, "
        f"here {own['torch']} "
        "(scheduler.differing_hosts=warn takes it)"
    )
    assert f": a is refused: {reason};" in str(found.value)


@pytest.mark.nightly
def test_a_host_that_differs_may_be_taken_with_a_warning_and_what_each_is_made_of_is_kept(
    tmp_path: Path, benches: Callable[..., Bench]
):
    """The build of a package, such as one for a GPU, is no difference."""
    bench = benches(differing_hosts="warn", hosts=["a"])
    bench.agent().join(unlike=UNLIKE)
    bench.until(Notice, "host a has the package's files with the digest 0123, here ")
    bench.begin()
    torch = own_host.installed_versions()["torch"].partition("+")[0]
    bench.agent("b").join(unlike={"torch": f"{torch}+other"})
    bench.until(Notice, "host b (127.0.0.1) joins")
    assert "host b has" not in str(bench.events)
    rows = [
        json.loads(line)
        for line in (tmp_path / "exp" / "run" / "placements.jsonl").read_text().splitlines()
    ]
    assert [(row["host"], row["made_of"]["torch"]) for row in rows if "made_of" in row] == [
        ("a", "1.0+cpu"),
        ("b", f"{torch}+other"),
    ]
    assert not HostLanes(tmp_path / "exp" / "run").lost


def test_the_digest_is_of_every_file_of_the_package_and_of_none_that_is_compiled(tmp_path: Path):
    (tmp_path / "p" / "__pycache__").mkdir(parents=True)
    (tmp_path / "p" / "a.py").write_text("x = 1\n")
    (tmp_path / "p" / "b.yaml").write_text("x: 1\n")
    before = digest_folders(tmp_path, ["p"])
    (tmp_path / "p" / "__pycache__" / "a.pyc").write_text("compiled")
    (tmp_path / "p" / ".a.py.swp").write_text("an editor's")
    assert digest_folders(tmp_path, ["p"]) == before
    (tmp_path / "p" / "b.yaml").write_text("x: 2\n")
    assert digest_folders(tmp_path, ["p"]) != before


@pytest.mark.nightly
def test_too_few_devices_are_told_with_what_each_host_has(benches: Callable[..., Bench]):
    bench = benches(placement={"model_worker": "a"})
    bench.agent().join(gpus=1)
    bench.begin()
    bench.scheduler._table.hosts["a"].shared = True
    bench.start("model_worker/0")
    with pytest.raises(ClusterError) as found:
        bench.start("model_worker/1")
    said = str(found.value)
    assert said.startswith(
        "model_worker/1: needs a GPU of its own on a, which has 1, all used by model_worker/0 ("
    )
    assert said.endswith("; a: 2 cores, 0 of 1 GPUs free, 1 workers")


def test_a_port_that_is_taken_is_named_with_its_option_when_the_launch_begins(
    benches: Callable[..., Bench],
):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        bench = benches(port=port)
        with pytest.raises(
            ClusterError, match=rf"\(.*scheduler\.port, .* tcp://127.0.0.1:{port}: "
        ):
            bench.start("job/demonstrations", "platform")


def test_an_order_that_cannot_be_understood_is_answered(bench: Bench):
    operator = bench.operator()
    operator.say("add", OperatorOrder("a/b", "generation", 1))
    report = operator.hears(OperatorReport)
    assert report.failed and "field host" in report.lines[0]
    operator.say("add", OperatorOrder("a", "generation", -1))
    assert "field count" in operator.hears(OperatorReport).lines[0]


@pytest.mark.nightly
def test_what_a_host_cannot_keep_is_told_with_its_name_and_brought_again_next_time(bench: Bench):
    agent = bench.agent().join()
    bench.begin()
    thread = Answers(agent)
    thread.problem = "No space left on device"
    bench.start("rollout_worker/0")
    end = bench.until(WorkerExit, "rollout_worker/0")
    assert isinstance(end, WorkerExit) and end.exit_code == 1
    assert re.match(
        r"host a cannot keep /nowhere/runs/.*/plan\.json: No space left on device \(--folder",
        end.reason,
    )
    assert "rollout_worker/0" not in bench.scheduler._table.workers
    thread.problem = ""
    bench.start("rollout_worker/0")
    bench.served_until(lambda: not thread.is_alive())
    assert bench.scheduler._table.workers["rollout_worker/0"].host == "a"


def large_file(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file of fifty parts, which every host is brought."""
    monkeypatch.setattr("realhf.cluster.file_transfer.PIECE_BYTES", 100)
    (bench.folder / "large").write_bytes(b"x" * 5000)
    bench.scheduler._table.hosts["a"].shared = True
    return str(bench.folder / "large")


@pytest.mark.nightly
def test_no_more_is_sent_than_a_host_keeps(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    """A large file does not pile up in the launcher, which goes on; a host that keeps nothing is
    named."""
    monkeypatch.setattr(file_transfer, "RECEIPT_S", 0.5)
    agent = bench.agent().join()
    bench.begin()
    large = large_file(bench, monkeypatch)
    bench.start("rollout_worker/0", "none", "--key-file", large)
    assert bench.scheduler._table.hosts["a"].transfers._queue, (
        "it did not wait until all was there, or the host given up"
    )
    assert "host a has kept no part of a file for 0.5 s" in str(
        bench.until(WorkerExit, "rollout_worker/0")
    )
    parts = 0
    while (found := agent.heard()) is not None:
        parts += isinstance(found[1], FilePiece)
    assert parts == file_transfer.MAX_IN_FLIGHT


@pytest.mark.nightly
def test_workers_begin_in_order_when_what_they_need_is_there(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
):
    agent = bench.agent().join()
    bench.begin()
    large = large_file(bench, monkeypatch)
    for number in range(2):
        bench.start(f"rollout_worker/{number}", "none", "--key-file", large)
    kept = 0
    started = list[str]()

    def serve() -> bool:
        nonlocal kept
        while (found := agent.heard()) is not None:
            if isinstance(piece := found[1], FilePiece):
                assert piece.offset == kept
                kept += len(piece.data)
                agent.say("kept", FileReceipt(piece.path, kept, ""))
            elif isinstance(found[1], StartWorker):
                assert kept == 5000
                started.append(found[1].name)
        return len(started) == 2

    bench.served_until(serve)
    assert started == ["rollout_worker/0", "rollout_worker/1"], "the file is brought once"


def test_workers_of_a_host_that_is_lost_while_files_come_are_told_of(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
):
    agent = bench.agent().join()
    bench.begin()
    large = large_file(bench, monkeypatch)
    bench.start("rollout_worker/0", "none", "--key-file", large)
    agent.say("leave")
    assert "its host a was lost: its agent was stopped" in str(
        bench.until(WorkerExit, "rollout_worker/0")
    )
    assert "rollout_worker/0" not in bench.scheduler._table.workers


def test_a_host_is_removed_while_files_come(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    """The worker that waits for them never begins."""
    agent = bench.agent().join()
    operator = bench.operator()
    bench.begin()
    bench.start("rollout_worker/0", "none", "--key-file", large_file(bench, monkeypatch))
    operator.say("remove", OperatorOrder("a", "", 0))
    assert "removed with its host a" in str(bench.until(WorkerExit, "rollout_worker/0"))
    assert operator.hears(OperatorReport).lines == [
        "a is removed; its workers end: rollout_worker/0"
    ]
    assert "start" not in bench.heard_until(agent, "leave")


@pytest.mark.slow
def test_a_removed_host_that_does_not_say_how_its_workers_end_is_sent_away(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
):
    """It would keep its key and a place in the run for as long as it liked."""
    monkeypatch.setattr(operator_desk, "REMOVAL_TIMEOUT_S", 0.3)
    agent = bench.agent().join()
    operator = bench.operator()
    bench.begin()
    bench.scheduler._table.hosts["a"].shared = True
    bench.start("rollout_worker/0")
    operator.say("remove", OperatorOrder("a", "", 0))
    assert "was removed, and did not say how" in str(bench.until(WorkerExit, "rollout_worker/0"))
    assert operator.hears(OperatorReport).lines == [
        "a is removed; its workers end: rollout_worker/0"
    ]
    agent.say("ping")
    bench.heard_until(agent, "leave")
    assert not bench.scheduler._table.hosts


def test_a_host_that_leaves_for_new_keys_makes_the_run_begin_again(bench: Bench):
    """Also the host of the trainer, which a run cannot do without otherwise."""
    bench.agent().join()
    operator = bench.operator()
    bench.begin()
    bench.scheduler._table.hosts["a"].shared = True
    bench.scheduler._options.placement["model_worker"] = "a"
    bench.start("model_worker/0")
    operator.say("remove", OperatorOrder("a", "", 0))
    bench.served_until(lambda: operator.socket.poll(0))
    assert "which the run cannot continue without" in operator.hears(OperatorReport).lines[0]
    operator.say("remove", OperatorOrder("a", "", 0, new_keys=True))
    assert "a was removed, and the run gets new keys" in str(bench.until(RestartRequest))
    assert not bench.scheduler._table.hosts


@pytest.mark.nightly
def test_a_worker_is_not_started_in_the_next_life_of_a_host(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
):
    """The launcher has not heard yet that the agent was started anew; two workers of one name would
    run there."""
    monkeypatch.setattr(control_endpoint, "SILENT_PINGS", 0)
    bench.agent().join()
    bench.begin()
    bench.scheduler._table.hosts["a"].shared = True
    second = bench.agent().join()
    bench.start("rollout_worker/0")
    assert "its host a was lost: its agent was restarted" in str(
        bench.until(WorkerExit, "rollout_worker/0")
    )
    bench.scheduler.wait(0.2)
    assert second.heard() is None


@pytest.mark.nightly
def test_a_host_whose_connection_broke_has_to_begin_anew(bench: Bench):
    """It says that it lives, and nothing that is said to it would arrive."""
    agent = bench.agent().join()
    bench.begin()
    agent.close()
    agent.connect()
    agent.say("ping")
    bench.until(Notice, "host a was lost: its connection broke")
    found = agent.next()
    assert found[0] == "again"
    agent.join()
    assert "a" in bench.scheduler._control._hosts  # pyright: ignore


@pytest.mark.nightly
def test_the_end_of_a_log_that_cannot_be_kept_does_not_end_the_run(bench: Bench):
    """On a full disk, for instance; here there is a file where the logs should be."""
    agent = agent_with_a_worker(bench)
    shutil.rmtree(bench.folder / "exp" / "run" / "logs")
    (bench.folder / "exp" / "run" / "logs").touch()
    agent.say("exited", Exited("rollout_worker/0", 3, "/there", 0, b"last words"))
    end = bench.until(WorkerExit, "rollout_worker/0")
    assert isinstance(end, WorkerExit) and end.exit_code == 3


@pytest.mark.nightly
def test_a_synchronous_run_says_that_it_takes_no_more_workers(benches: Callable[..., Bench]):
    bench = benches(rollout=None)
    bench.agent().join(wants={"rollout_worker": 2})
    bench.begin()
    bench.until(Notice, "host a: a synchronous run cannot get more workers")
    bench.scheduler._table.hosts["a"].shared = True
    bench.start("env/0")
    bench.agent("b").join(wants={"generation": 1})
    bench.until(Notice, "host b: a synchronous run cannot get more workers")
    assert not [
        event for event in bench.events if isinstance(event, WorkersWanted) and event.host == "b"
    ]
    operator = bench.operator()
    operator.say("add", OperatorOrder("a", "generation", 1))
    bench.scheduler.wait(1.0)
    report = operator.hears(OperatorReport)
    assert report.failed and report.lines == [
        "this run is synchronous: it cannot get more workers while it runs"
    ]


MANY_AGENTS = """
import resource, sys, time
from pathlib import Path
resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
from realhf.cluster.options import ClusterOptions
from realhf.cluster.scheduler import ClusterScheduler
scheduler = ClusterScheduler(ClusterOptions(address="127.0.0.1", port=0, key_file=sys.argv[1], dead_after_s=40))
print(scheduler._open_endpoint().endpoint, flush=True)
end = time.monotonic() + float(sys.argv[3])
while len(scheduler._table.hosts) < int(sys.argv[2]) and time.monotonic() < end:
    scheduler.wait(0.2)
print(len(scheduler._table.hosts), flush=True)
"""


@pytest.mark.nightly
@pytest.mark.slow
def test_a_launcher_takes_more_agents_than_a_process_usually_has_descriptors(tmp_path: Path):
    """All at once, and each goes on to say hello until it is welcome."""
    many = 300
    keys = KeyRing(tmp_path / "key")
    words = [sys.executable, "-c", MANY_AGENTS, str(tmp_path / "key"), str(many), str(3 * ANSWER_S)]
    launcher = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 2 * many)
    raise_descriptor_limit()
    try:
        assert launcher.stdout is not None
        door = launcher.stdout.readline().strip()
        agents = [StrangeAgent(door, keys, f"a{number}", context=context) for number in range(many)]
        while launcher.poll() is None:
            for agent in agents:
                agent.hello()
            time.sleep(0.5)
        assert launcher.stdout.read().strip() == str(many)
    finally:
        launcher.kill()
        launcher.wait()
        context.destroy(0)
