"""A run over hosts that are network namespaces: its launcher, its host agents, and what befalls
them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.network.hosts import Host, NoNamespaces
from benchmarks.network.lan import Lan, lan
from realhf.api.trace import STEP, WAIT
from realhf.dataflow.journal.audit import JournalTally, audit_folder
from realhf.monitor.run_files import HostLanes
from realhf.monitor.trace import COMPLETE, INSTANT, TRACE_FILE, trace_files
from realhf.view.report import REPORT_FILE
from tests.cluster.key_ring import KeyRing
from tests.process_family import family

ROOT = Path(__file__).resolve().parents[2]
PORT = 7788
OPTIONS = (
    "experiment=grpo_async",
    "env=sql",
    "dataset.train_bs_n_seqs=2",
    "ppo.group_size=2",
    "gen.max_new_tokens=8",
    "rollout.sessions=4",
    "rollout.max_turns=1",
    "rollout.max_total_tokens=640",
    "async_rl.max_head_offpolicyness=2",
    "async_rl.keep_journal=true",
    "async_rl.recover_retries=5",
    "evaluation.episodes_per_task=0",
    "evaluation.greedy_episodes_per_task=0",
    "exp_ctrl.ckpt_freq_steps=2",
    "torch_threads=1",
    "monitor.trackers=[]",
    "monitor.progress=false",
)
STALENESS = 2


@contextlib.contextmanager
def hosts(*names: str) -> Iterator[Lan]:
    """Hosts with these names; the test is skipped where they cannot be made."""
    try:
        with lan(names) as found:
            yield found
    except NoNamespaces as error:
        pytest.skip(str(error))


class ClusterRun:
    """One run whose launcher is on the first host of a network."""

    def __init__(self, network: Lan, folder: Path, policy: Path) -> None:
        self.lan = network
        self.folder = folder
        self._policy = policy
        self.scheduler = "join"
        self.enter, self.bind = [*self.first.enter], self.first.address
        self.door = f"tcp://{self.first.address}:{PORT}"
        self.keys = folder / "cluster.key"
        self.ring = KeyRing(self.keys)
        self.log = folder / "launcher.log"
        self.launcher: subprocess.Popen[bytes] | None = None
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.run_dir = folder / "runs" / "grpo_async" / "default"

    @property
    def first(self) -> Host:
        return next(iter(self.lan.hosts.values()))

    def launch(self, *options: str) -> None:
        """Start the launcher."""
        where = (f"scheduler={self.scheduler}", f"network.bind={self.bind}")
        where += (f"scheduler.key_file={self.keys}",)
        given = (
            *OPTIONS,
            *where,
            f"fileroot={self.folder / 'runs'}",
            "trial_name=default",
            f"actor.path={self._policy}",
            *options,
        )
        command = [*self.enter, sys.executable, "-m", "realhf.launch", *given]
        self.launcher = self._started(command, self.log)

    def join(self, name: str, *options: str, before: tuple[str, ...] = ()) -> None:
        """Start the agent of a host; ``before`` are words before its command."""
        given = [
            "--join",
            self.door,
            "--key-file",
            str(self.ring.file_of(name)),
            "--name",
            name,
            "--linger-s",
            "5",
        ]
        given += ["--folder", str(self.folder / f"host-{name}"), *(options or ("--host-agent",))]
        command = [
            *self.lan.hosts[name].enter,
            *before,
            sys.executable,
            "-m",
            "realhf.worker",
            *given,
        ]
        self.agents[name] = self._started(command, self.folder / f"agent-{name}.log")

    @staticmethod
    def _started(command: list[str], log: Path) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        with log.open("ab") as file:
            return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file)

    def kill(self, name: str) -> None:
        """Kill everything that runs on a host at once."""
        agent = self.agents.pop(name)
        for process in [*family(agent.pid), psutil.Process(agent.pid)]:
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        agent.wait(60)

    def operator(self, *arguments: str) -> str:
        """What ``python -m realhf.cluster`` prints on the first host."""
        words = [*arguments, "--join", self.door, "--key-file", str(self.keys)]
        return self.first.run(sys.executable, "-m", "realhf.cluster", *words)

    def said(self) -> str:
        """What the launcher has printed."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def rows(self) -> list[dict[str, Any]]:
        """The metrics of the steps so far. The last line may not be whole yet."""
        path = self.run_dir / "metrics.jsonl"
        whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
        return [json.loads(line) for line in whole.splitlines()]

    def until(self, what: Callable[[], object], within_s: float) -> float:
        """Wait for a condition; how long it took, in seconds. Fails with the launcher's words when
        it is late or the run ends before."""
        began = time.monotonic()
        while not what():
            assert self.launcher is not None and self.launcher.poll() is None, self.said()[-4000:]
            assert time.monotonic() - began < within_s, (
                f"not within {within_s:g} s; {self.said()[-4000:]}"
            )
            time.sleep(0.1)
        return time.monotonic() - began

    def ended(self, within_s: float) -> str:
        """Wait for the end of the run, which must be a good one; what the launcher said."""
        assert self.launcher is not None
        try:
            code = self.launcher.wait(within_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the run did not end within {within_s:g} s: {self.said()[-4000:]}")
        assert code == 0, self.said()[-4000:]
        return self.said()

    def keep_report(self, name: str) -> Path:
        """Copy the run's report and its trace to where they outlive the test, and say where."""
        kept = ROOT / "out" / "cluster" / name
        shutil.rmtree(kept, ignore_errors=True)
        kept.mkdir(parents=True)
        for file in (REPORT_FILE, TRACE_FILE):
            shutil.copy(self.run_dir / file, kept / file)
        print(f"report: {kept / REPORT_FILE}")
        return kept

    def tally(self) -> JournalTally:
        """The audit of the journal."""
        return audit_folder(self.run_dir / "journal")

    def end(self) -> None:
        """Leave nothing running."""
        for process in [self.launcher, *self.agents.values()]:
            if process is not None and process.poll() is None:
                process.terminate()
        for process in [self.launcher, *self.agents.values()]:
            if process is not None:
                try:
                    process.wait(60)
                except subprocess.TimeoutExpired:
                    for child in [*family(process.pid), psutil.Process(process.pid)]:
                        with contextlib.suppress(psutil.Error):
                            child.kill()


@contextlib.contextmanager
def running(network: Lan, folder: Path, policy: Path) -> Iterator[ClusterRun]:
    """A run, which is ended however the test does."""
    run = ClusterRun(network, folder, policy)
    try:
        yield run
    finally:
        run.end()


def check_books(run: ClusterRun, steps: int) -> None:
    """Every sample was trained once, and none too late."""
    tally = run.tally()
    assert tally.ended and tally.complete and tally.is_balanced, tally
    assert (tally.steps, tally.outstanding, tally.accepted) == (steps, 0, 0), tally
    assert tally.head_staleness_max <= STALENESS, tally
    assert len(run.rows()) == steps


def busy_lanes(run: ClusterRun, steps: int) -> dict[str, set[str]]:
    """The processes that were at work in the last steps, by host."""
    events = [
        json.loads(line)
        for file in trace_files(run.run_dir)
        for line in file.read_bytes().splitlines()
    ]
    names = {
        event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"
    }
    ends = sorted(
        event["ts"] for event in events if event["ph"] == INSTANT and event["name"] == STEP
    )
    began = ends[-steps - 1] if len(ends) > steps else 0
    hosts = HostLanes(run.run_dir)
    found = {}
    for event in events:
        working = event["ph"] == COMPLETE and event["name"].partition("/")[0] != WAIT
        if working and event["ts"] < ends[-1] and event["ts"] + event.get("dur", 0) > began:
            process = names[event["pid"]]
            found.setdefault(hosts.host_at(process, event["ts"]), set()).add(process)
    return found
