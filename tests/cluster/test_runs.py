"""Whole runs over several hosts, which are network namespaces with their own addresses at one
bridge."""

from __future__ import annotations

import random
import re
import time
from pathlib import Path

import pytest

from benchmarks.network.hosts import Host
from realhf.transport.network import RunKeys
from realhf.view.report import REPORT_FILE
from tests.cluster.bed import PORT, ClusterRun, busy_lanes, check_books, hosts, running
from tests.process_family import family
from tests.transport.network.listeners import listeners, takes_a_stranger
from tests.view.runs import kept_answers

pytestmark = [pytest.mark.several_hosts, pytest.mark.slow, pytest.mark.timeout(900)]
RUN_S = 600.0
STEPS = 10
FAULTS = 6
LONG_STEPS = 40
"""Of a run that is to see so many faults, on a fast machine too: none is more than a sixth of it
after the last one."""
FEW = 4
MANY = 120
NAMED_S = 30.0
NEW_ON_D = re.compile(r"(rollout_worker/\d+)[^\n]* started on d\b")
"""Its number depends on how often hosts have joined: an agent that is not answered soon says hello
anew."""


def refusing(host: Host) -> set[int]:
    """The ports on which anybody listens on a host, none of which takes a stranger."""
    with host.entered():
        found = {
            (port, address)
            for port, address in listeners("thread-self").items()
            if address != "127.0.0.1"
        }
        for port, address in found:
            assert not takes_a_stranger(address, port), f"{address}:{port} takes everybody"
    return {port for port, _ in found}


def test_ten_steps_over_three_hosts(tmp_path: Path, tiny_policy: Path):
    """Trainer, generation and rollouts are on different hosts."""
    with hosts("a", "b", "c") as lan, running(lan, tmp_path, tiny_policy) as run:
        for name in ("b", "c"):
            run.join(name)
        run.launch(
            f"total_train_steps={STEPS}",
            "scheduler.hosts=[b,c]",
            "scheduler.placement.generation=b",
            "scheduler.placement.rollout_worker=c",
        )
        run.until(lambda: " training" in run.said(), RUN_S)
        status = run.operator("status").splitlines()
        found = {name: refusing(host) for name, host in lan.hosts.items()}
        run.ended(RUN_S)
        check_books(run, STEPS)
        loads = [
            value
            for name, value in run.rows()[-1].items()
            if name.startswith("host/") and name.endswith("/cpu")
        ]
        assert len(loads) == 3 and all(0 < load <= 1 for load in loads), (
            "each host tells how busy it is"
        )
        assert PORT in found["a"] and found["b"], found
        assert not found["c"], "nobody asks a rollout worker anything: it listens nowhere"
        lanes = busy_lanes(run, STEPS)
        assert {"generation/0"} == lanes["b"] and {"rollout_worker/0"} == lanes["c"], lanes
        assert "model_worker/0" in lanes["launcher"], lanes
        about = kept_answers(run.keep_report("ten_steps") / REPORT_FILE)["/api/runs/0/about"]
        assert about["hosts"]["c"] == ["rollout_worker/0"]
        for name in ("b", "c"):
            assert run.agents[name].wait(60) == 0, "an agent ends with its run"
    assert [line.split()[0] for line in status[1:]] == [
        "launcher",
        "master",
        "model_worker/0",
        "b",
        "generation/0",
        "c",
        "rollout_worker/0",
    ], "the trainer is with its checkpoints"


HIDDEN = (
    "unshare",
    "-m",
    "sh",
    "-c",
    'mount -t tmpfs none "$0" && mount -t tmpfs none "$1" && shift && exec "$@"',
)
"""Before a command: it sees nothing in two folders."""


def test_a_run_whose_hosts_share_no_folder(tmp_path: Path, tiny_policy: Path):
    """Plan, policy and keys come to the hosts, weights too; what fails there is told here; nothing
    secret stays."""
    with hosts("a", "b", "c") as lan, running(lan, tmp_path, tiny_policy) as run:
        (tmp_path / "runs").mkdir()
        for name in ("b", "c"):
            run.join(name, before=(*HIDDEN, str(tmp_path / "runs"), str(tiny_policy)))
        run.launch(
            f"total_train_steps={FEW}",
            "scheduler.hosts=[b,c]",
            "scheduler.placement.generation=b",
            "scheduler.placement.rollout_worker=c",
        )
        run.until(lambda: len(run.rows()) >= 1, RUN_S)
        assert run.operator("status").count("does not share fileroot") == 2
        run.ended(RUN_S)
        check_books(run, FEW)
        for name in ("b", "c"):
            assert run.agents[name].wait(60) == 0
            assert not list((tmp_path / f"host-{name}" / "keys").glob("*"))
            assert list((tmp_path / f"host-{name}" / "runs").rglob("logs/*.log"))
            assert list((tmp_path / f"host-{name}" / "carried").rglob("tokenizer.json"))
        assert "on host b" in (run.run_dir / "logs" / "generation-0.log").read_text()


def plays(run: ClusterRun, worker: str) -> bool:
    """Whether the master has given a sample to this rollout worker."""
    wanted = f"{worker}:".encode()
    return any(wanted in path.read_bytes() for path in (run.run_dir / "journal").rglob("*.log"))


def test_a_cut_link_a_killed_host_and_one_that_joins(tmp_path: Path, tiny_policy: Path):
    """The run goes on through all of it. What is lost is named."""
    with hosts("a", "b", "c", "d") as lan, running(lan, tmp_path, tiny_policy) as run:
        for name in ("b", "c"):
            run.join(name)
        run.launch(
            f"total_train_steps={MANY}",
            "scheduler.hosts=[b,c]",
            "scheduler.placement.generation=b",
            "scheduler.placement.rollout_worker=c",
        )
        run.until(lambda: len(run.rows()) >= 2, RUN_S)
        lan.unplug("c")
        named = run.until(
            lambda: "host c was lost: nothing was heard of it for" in run.said(), RUN_S
        )
        steps = len(run.rows())
        run.until(lambda: len(run.rows()) >= steps + 3, RUN_S)
        lan.plug("c")
        back = run.until(lambda: "started on c" in run.said(), RUN_S)

        run.join("d")
        told = run.until(lambda: NEW_ON_D.search(run.said()), RUN_S)
        found = NEW_ON_D.search(run.said())
        assert found is not None
        joined = told + run.until(lambda: plays(run, found[1]), RUN_S)

        run.kill("b")
        run.until(lambda: "host b was lost" in run.said(), RUN_S)
        run.ended(RUN_S)
        check_books(run, MANY)
        assert named < NAMED_S, (
            "on a machine that is not overloaded it takes 8 s, and half a second to look"
        )
        run.keep_report("cut_killed_joined")
        print(
            f"cut named after {named:.1f} s, back after {back:.1f} s, a new host plays after "
            f"{joined:.1f} s"
        )


def test_the_host_of_the_trainer_is_lost(tmp_path: Path, tiny_policy: Path):
    """The run begins again from its last checkpoint on what is left. Its hosts share a folder."""
    with hosts("a", "b", "c") as lan, running(lan, tmp_path, tiny_policy) as run:
        for name in ("b", "c"):
            run.join(name)
        run.launch(
            "total_train_steps=12",
            "scheduler.hosts=[b,c]",
            "scheduler.placement.model_worker=b",
            "scheduler.placement.generation=c",
        )
        run.until(lambda: len(run.rows()) >= 5, RUN_S)
        run.kill("b")
        run.until(lambda: "begins again from its last checkpoint" in run.said(), RUN_S)
        run.ended(RUN_S)
        assert "host b was lost" in run.said() or "worker 'model_worker/0' died" in run.said(), (
            run.said()
        )
        assert run.tally().resumes == 1
        check_books(run, 12)


def key_file_of_the_run(run: ClusterRun) -> Path:
    """Where processes of the run on the launcher's machine read its keys. Waits for its master:
    where the run begins again there is none for a moment, and a forked one has the words of its
    parent at first."""
    found: list[list[str]] = []

    def master() -> bool:
        assert run.launcher is not None
        found[:] = [
            list(words)
            for words in family(run.launcher.pid).values()
            if "workers.master_worker" in words
        ]
        return len(found) == 1

    run.until(master, RUN_S)
    (words,) = found
    return Path(words[words.index("--key-file") + 1])


def test_a_host_that_is_not_trusted_any_more_can_do_nothing(tmp_path: Path, tiny_policy: Path):
    """It is removed, and what it knew of the cluster and of the run is void: it joins no more, and
    the run begins again with other keys. It used to be taken back under another name, and could act
    as the launcher."""
    with hosts("a", "b", "c") as lan, running(lan, tmp_path, tiny_policy) as run:
        for name in ("b", "c"):
            run.join(name)
        run.launch(
            f"total_train_steps={FEW + 8}",
            "scheduler.hosts=[b,c]",
            "scheduler.placement.generation=b",
        )
        run.until(lambda: len(run.rows()) >= 3, RUN_S)
        known = RunKeys.read(key_file_of_the_run(run))
        said = run.operator("remove", "--host", "c", "--new-keys")
        assert said.strip() == "c is removed, and the run restarts with new keys"
        assert run.agents["c"].wait(60) == 0
        run.join("c")
        assert run.agents["c"].wait(60) == 1
        run.until(lambda: run.said().count(" training") >= 2, RUN_S)
        others = RunKeys.read(key_file_of_the_run(run))
        run.ended(RUN_S)
        check_books(run, FEW + 8)
        tally = run.tally()
    assert "refused the key of this process" in (tmp_path / "agent-c.log").read_text()
    assert "host c was removed, and the run gets new keys" in run.said()
    assert tally.resumes == 1
    for name in ("server_secret", "client_secret", "client_public", "token", "certificate_key"):
        assert getattr(known, name) != getattr(others, name)


class Fate:
    """What befalls hosts of a run at random: links are cut and mended, hosts killed and started
    anew."""

    def __init__(self, run: ClusterRun, seed: int) -> None:
        self._run, self._random = run, random.Random(seed)
        self._cut: set[str] = set()
        self._gone: set[str] = {"d"}
        self.deeds: list[str] = []

    def strike(self) -> None:
        """Do one thing. One host at least is left as it is."""
        names = ("b", "c", "d")
        able = [name for name in names if name not in self._cut | self._gone]
        deeds = [(self._mend, name) for name in sorted(self._cut)] + [
            (self._join, name) for name in sorted(self._gone)
        ]
        if len(able) > 1:
            deeds += [(deed, name) for name in able for deed in (self._unplug, self._kill)]
        deed, name = self._random.choice(deeds)
        self.deeds.append(f"{deed.__name__.strip('_')} {name}")
        deed(name)

    def mend(self) -> None:
        """Connect every link again."""
        for name in sorted(self._cut):
            self._mend(name)

    def _mend(self, name: str) -> None:
        self._run.lan.plug(name)
        self._cut.discard(name)

    def _unplug(self, name: str) -> None:
        self._run.lan.unplug(name)
        self._cut.add(name)

    def _kill(self, name: str) -> None:
        self._run.kill(name)
        self._gone.add(name)

    def _join(self, name: str) -> None:
        self._run.join(name)
        self._gone.discard(name)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize(
            "seed", range(int(metafunc.config.getoption("--schedules", default=2) or 0))
        )


def test_the_books_balance_whatever_befalls_the_hosts(tmp_path: Path, tiny_policy: Path, seed: int):
    """Some seconds lie between one fault and the next, more or less than it takes to notice a lost
    host, but at most a few steps, so that all faults come before the run is over."""
    with hosts("a", "b", "c", "d") as lan, running(lan, tmp_path, tiny_policy) as run:
        fate = Fate(run, seed)
        pause = random.Random(1000 + seed)
        for name in ("b", "c"):
            run.join(name)
        run.launch(f"total_train_steps={LONG_STEPS}", "scheduler.hosts=[b,c]")
        run.until(lambda: len(run.rows()) >= 1, RUN_S)
        for _ in range(FAULTS):
            if len(run.rows()) >= LONG_STEPS - 5:
                break
            fate.strike()
            end = time.monotonic() + pause.uniform(1.0, 12.0)
            steps = len(run.rows()) + pause.randint(1, LONG_STEPS // 7)
            run.until(
                lambda end=end, steps=steps: time.monotonic() > end or len(run.rows()) >= steps,
                RUN_S,
            )
        fate.mend()
        run.ended(RUN_S)
        check_books(run, LONG_STEPS)
        print(f"seed {seed}: {', '.join(fate.deeds)}: {run.tally()}")
