"""Which processes a run has, which of them are started again, and what is said about one that
failed."""

from __future__ import annotations

import json
import os
import signal
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from realhf.api.config import AsyncConfig
from realhf.api.environment import EnvironmentService
from realhf.launch import processes
from realhf.launch import run as launch_run
from realhf.launch.build import build_experiment
from realhf.launch.compose import compose_config
from realhf.launch.processes import (
    EXIT_AFTER_LEAVING_S,
    MAX_ERRORS,
    MAX_QUICK_DEATHS,
    QUICK_DEATH_S,
    ElasticWorkers,
    KillOrder,
    LaunchError,
    WorkerFailed,
    WorkerSupervisor,
    failure_message,
    run_workers,
    worker_specs,
)
from realhf.monitor.display import Display
from realhf.monitor.run_files import read_deaths
from realhf.scheduler.base import WorkerExit, WorkerLine, WorkerSpec, WorkersWanted
from realhf.transport.errors import LOST_MASTER, NetworkError
from realhf.transport.network import RunKeys

QUIET = Display(Console(quiet=True))


def begun(root, *options):
    """An experiment with its run folder."""
    built = build_experiment(compose_config(["experiment=grpo_aws", f"fileroot={root}", *options]))
    built.spec.run_dir.mkdir(parents=True)
    return built


class ScriptedScheduler:
    """Starts nothing; workers end when the script says so, which real ones on a busy machine do
    not. ``started`` is called with what would be."""

    def __init__(self, *script, started=lambda spec: None):
        self._script = list(script)
        self._started = started
        self.killed: list[tuple[str, str, int, int]] = []

    def start(self, spec):
        self._started(spec)

    def wait(self, timeout_s):
        return [self._script.pop(0)] if self._script else []

    def kill(self, name, cause, *, pid=0, started=0):
        self.killed.append((name, cause, pid, started))
        self._script.append(WorkerExit(name, -9, Path("none.log"), 0, cause))

    def stop(self, grace_s=8.0): ...


def test_the_marked_cause_wins_over_what_was_logged_after_it(tmp_path):
    log = tmp_path / "m.log"
    log.write_text("Traceback (most recent call last):\n  ...\nFATAL: the cause\nlater noise\n")
    assert failure_message(WorkerExit("master", 1, log)) == f"master failed: the cause (log: {log})"


def test_a_flag_of_a_server_is_named_as_the_option_that_sets_it(tmp_path):
    log = tmp_path / "e.log"
    log.write_text("FATAL: --pool-size is too large\n")
    for section in ("env", "env.of.aws"):
        server = EnvironmentService("some.module", section=section)
        message = failure_message(WorkerExit("env/0", 1, log), server)
        assert message == f"env/0 failed: {section}.pool_size is too large (log: {log})"


def test_a_killed_process_is_shown_with_the_end_of_its_log(tmp_path):
    log = tmp_path / "w.log"
    log.write_text("".join(f"line {i}\n" for i in range(20)))
    first, *tail = failure_message(WorkerExit("model_worker/0", -9, log)).splitlines()
    assert (
        first
        == f"model_worker/0 ended before the run did: killed by SIGKILL (log: {log}); its log ends:"
    )
    assert tail == [f"  | line {i}" for i in range(12, 20)]


def test_what_a_predecessor_logged_is_not_blamed(tmp_path):
    log = tmp_path / "w.log"
    log.write_text("FATAL: the cause before\n")
    before = log.stat().st_size
    assert "cause before" not in failure_message(WorkerExit("master", -9, log, before))
    with log.open("a") as more:
        more.write("FATAL: the cause now\n")
    assert (
        failure_message(WorkerExit("master", 1, log, before))
        == f"master failed: the cause now (log: {log})"
    )


@pytest.mark.slow
@pytest.mark.parametrize("order", [("model_worker/0", "master"), ("master", "model_worker/0")])
def test_a_worker_that_was_sent_away_is_not_the_cause(tmp_path, order):
    (tmp_path / "master.log").write_text("FATAL: the cause\n")
    built = begun(tmp_path)
    ends = {
        "master": WorkerExit("master", 1, tmp_path / "master.log"),
        "model_worker/0": WorkerExit("model_worker/0", 0, tmp_path / "none.log"),
    }
    scheduler = ScriptedScheduler(*(ends[name] for name in order))
    with pytest.raises(LaunchError, match="master failed: the cause"):
        run_workers(built.plan(built.spec, 0.0), scheduler, QUIET)


@pytest.mark.slow
def test_only_the_master_reports_for_the_run(tmp_path):
    """Whatever another process prints, it is not the end of the run."""
    (tmp_path / "master.log").write_text("FATAL: the cause\n")
    built = begun(tmp_path)
    done = '{"kind": "done", "summary": {"steps": 1}}'
    scheduler = ScriptedScheduler(
        WorkerLine("rollout_worker/0", done), WorkerExit("master", 1, tmp_path / "master.log")
    )
    with pytest.raises(LaunchError, match="master failed: the cause"):
        run_workers(built.plan(built.spec, 0.0), scheduler, QUIET)


@pytest.mark.slow
def test_a_worker_of_any_run_that_the_master_declares_dead_is_killed_and_named(tmp_path):
    built = begun(tmp_path)
    said = {
        "kind": "lost",
        "name": "env/0",
        "pid": 7,
        "started": 70,
        "reason": "no heartbeat for 8.1 s",
        "left": False,
    }
    scheduler = ScriptedScheduler(WorkerLine("master", json.dumps(said)))
    with pytest.raises(
        LaunchError, match="env/0 ended before the run did: killed: no heartbeat for"
    ):
        run_workers(built.plan(built.spec, 0.0), scheduler, QUIET)
    assert scheduler.killed == [("env/0", "killed: no heartbeat for 8.1 s", 7, 70)]
    assert [(death.process, death.then) for death in read_deaths(built.spec.run_dir)] == [
        ("env/0", "the run cannot continue without it")
    ]


@pytest.mark.slow
def test_a_ctrl_c_during_the_clean_up_waits_for_its_end_and_does_not_hide_the_cause(
    tmp_path, capsys, monkeypatch
):
    """It ended the clean-up: a worker that was stopped outlived the launcher, which told of the
    signal alone."""
    built = build_experiment(compose_config(["experiment=grpo_aws", f"fileroot={tmp_path}"]))
    ended: list[str] = []

    class Impatient(ScriptedScheduler):
        def stop(self, grace_s=8.0):
            for number in (signal.SIGINT, signal.SIGTERM):
                os.kill(os.getpid(), number)
            ended.append("all of them")

    def run(built, *_):
        scheduler = Impatient(WorkerExit("model_worker/0", -9, tmp_path / "none.log"))
        return run_workers(built.plan(built.spec, 0.0), scheduler, QUIET)

    monkeypatch.setattr(launch_run, "_run_with_display", run)
    assert launch_run.run_to_the_end(built, [], 0.0) == 128 + signal.SIGINT
    assert ended == ["all of them"]
    said = capsys.readouterr().err
    assert (
        "model_worker/0 ended before the run did: killed by SIGKILL" in said
        and "stopped by SIGINT" in said
    )


def test_an_early_clean_exit_is_a_failure_too(tmp_path):
    text = failure_message(WorkerExit("env/0", 0, tmp_path / "none.log"))
    assert text.startswith("env/0 ended before the run did: exit code 0")


def test_flags_of_the_environment_server_are_named_as_options(tmp_path):
    log = tmp_path / "e.log"
    log.write_text("env_worker: cannot listen on 127.0.0.1:1 (--ministack-base-port): in use\n")
    assert "(env.ministack_base_port)" in failure_message(WorkerExit("env/0", 1, log))
    log.write_text("FATAL: cannot listen on 127.0.0.1:1 (--port): in use\n")
    assert "(stream.port)" in failure_message(WorkerExit("trajectory/0", 1, log))
    assert "(--port)" in failure_message(WorkerExit("model_worker/0", 1, log))


@pytest.mark.slow
@pytest.mark.parametrize("niceness", [0, 10])
def test_whoever_feeds_the_trainer_steps_back_behind_it(niceness):
    built = build_experiment(
        compose_config(["experiment=grpo_aws_async", f"async_rl.niceness={niceness}"])
    )
    workers = worker_specs(built.plan(built.spec, 0.0), "run", "tcp://127.0.0.1:1")
    assert {worker.name: worker.niceness for worker in workers} == {
        "env/0": niceness,
        "generation/0": niceness,
        "rollout_worker/0": niceness,
        "model_worker/0": 0,
    }


@pytest.mark.slow
def test_who_trains_is_started_before_who_generates():
    """Of a host with one GPU the trainer needs that one; it was refused it, as an engine had it
    already."""
    built = build_experiment(compose_config(["experiment=grpo_aws_async"]))
    names = [
        worker.name
        for worker in worker_specs(built.plan(built.spec, 0.0), "run", "tcp://127.0.0.1:1")
    ]
    assert names.index("model_worker/0") < names.index("generation/0")


@pytest.mark.slow
def test_without_rollout_workers_nobody_steps_back():
    built = build_experiment(compose_config(["experiment=grpo_aws"]))
    workers = worker_specs(built.plan(built.spec, 0.0), "run", "tcp://127.0.0.1:1")
    assert {worker.name: worker.niceness for worker in workers} == {"env/0": 0, "model_worker/0": 0}


@pytest.mark.slow
@pytest.mark.parametrize("bind", ["", "127.0.0.1", "10.0.0.1"])
def test_keys_are_in_the_launchers_memory_and_on_no_disk_or_command_line(tmp_path, bind):
    """Beyond the loopback the launcher makes keys before the first process. They lie in no folder,
    so that a launcher that is killed leaves none behind."""
    options = [
        "experiment=grpo_aws",
        f"fileroot={tmp_path}",
        *([f"network.bind={bind}"] if bind else []),
    ]
    built = build_experiment(compose_config(options))
    folder = built.spec.run_dir
    folder.mkdir(parents=True)
    seen: dict[Path, RunKeys] = {}

    def look(spec):
        files = [
            Path(spec.argv[at + 1]) for at, text in enumerate(spec.argv) if text == "--key-file"
        ]
        seen.update({file: RunKeys.read(file) for file in files})
        written = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
        assert any("grpo_aws" in text for text in written)
        for keys in seen.values():
            secrets = (keys.server_secret, keys.client_secret, keys.token)
            assert not [
                secret for secret in secrets for text in (*written, *spec.argv) if secret in text
            ]

    scheduler = ScriptedScheduler(WorkerExit("master", 1, tmp_path / "none.log"), started=look)
    with pytest.raises(LaunchError):
        run_workers(built.plan(built.spec, 0.0), scheduler, QUIET)
    assert len(seen) == (bind == "10.0.0.1")
    for file in seen:
        with pytest.raises(NetworkError):
            RunKeys.read(file)
    workers = worker_specs(built.plan(built.spec, 0.0), "run", "tcp://10.0.0.1:1", Path("/file"))
    assert all(worker.argv[-2:] == ("--key-file", "/file") for worker in workers)


class FakeClock:
    """Stands in for the clock of the process."""

    def __init__(self):
        self.now = 0.0


@pytest.fixture
def clock(monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr(processes, "process_clock", SimpleNamespace(now=lambda: clock.now))
    return clock


def spec(name):
    return WorkerSpec(name, "module", (), Path("log"))


def end(name, code=-9):
    return WorkerExit(name, code, Path("log"))


def supervisor(*names):
    made = WorkerSupervisor()
    for name in names:
        made.on_start(spec(name))
    return made


def test_only_workers_that_hold_nothing_have_successors(clock):
    names = (
        "rollout_worker/1",
        "generation/0",
        "env/0",
        "model_worker/0",
        "master",
        "trajectory/0",
    )
    watch = supervisor(*names)
    clock.now = 2 * QUICK_DEATH_S
    again = [name for name in names if watch.successor(end(name)) == spec(name)]
    assert again == ["rollout_worker/1", "generation/0", "env/0"]
    assert watch.successor(end("rollout_worker/7")) is None, "a stranger"
    assert watch.restarts == {"rollout_worker": 1, "generation": 1, "env": 1}


def test_one_that_is_killed_now_and_then_is_started_for_ever(clock):
    watch = supervisor("generation/0")
    for _ in range(50):
        clock.now += QUICK_DEATH_S
        assert watch.successor(end("generation/0")) is not None
        watch.on_start(spec("generation/0"))


def test_one_that_dies_at_once_again_and_again_is_not(clock):
    watch = supervisor("generation/0", "generation/1")
    for _ in range(MAX_QUICK_DEATHS):
        clock.now += QUICK_DEATH_S / 2
        assert watch.successor(end("generation/0")) is not None
        watch.on_start(spec("generation/0"))
    clock.now += QUICK_DEATH_S / 2
    assert watch.successor(end("generation/0")) is None
    assert watch.successor(end("generation/1")) is not None, "each is counted for itself"


@pytest.mark.parametrize("code", [0, 1])
def test_one_that_fails_by_itself_may_do_so_a_few_times(clock, code):
    watch = supervisor("rollout_worker/0")
    for _ in range(MAX_ERRORS):
        clock.now += 2 * QUICK_DEATH_S
        assert watch.successor(end("rollout_worker/0", code)) is not None
        watch.on_start(spec("rollout_worker/0"))
    clock.now += 2 * QUICK_DEATH_S
    assert watch.successor(end("rollout_worker/0")) is not None, "being killed is no error"
    watch.on_start(spec("rollout_worker/0"))
    clock.now += 2 * QUICK_DEATH_S
    assert watch.successor(end("rollout_worker/0", code)) is None


def test_one_that_has_said_good_bye_ends_without_an_error(clock):
    watch = supervisor("generation/0")
    for _ in range(2 * MAX_ERRORS):
        clock.now += 2 * QUICK_DEATH_S
        watch.on_message(
            {
                "kind": "lost",
                "name": "generation/0",
                "pid": 1,
                "started": 1,
                "reason": "it left",
                "left": True,
            }
        )
        assert watch.successor(end("generation/0", 0)) is not None
        watch.on_start(spec("generation/0"))


def test_one_that_is_given_up_ends_the_run_only_when_no_other_of_its_kind_is_left(clock):
    watch = supervisor("generation/0", "generation/1", "env/0", "model_worker/0", "model_worker/1")
    for _ in range(MAX_QUICK_DEATHS):
        assert watch.successor(end("generation/0")) is not None
        watch.on_start(spec("generation/0"))
    assert watch.successor(end("generation/0")) is None and watch.is_dispensable("generation/0")
    assert watch.successor(end("env/0")) is not None and not watch.is_dispensable("env/0")
    assert watch.successor(end("model_worker/0")) is None and not watch.is_dispensable(
        "model_worker/0"
    )
    for _ in range(MAX_QUICK_DEATHS):
        assert watch.successor(end("generation/1")) is not None
        watch.on_start(spec("generation/1"))
    assert watch.successor(end("generation/1")) is None and not watch.is_dispensable("generation/1")


def test_only_deaths_of_the_last_hour_count_towards_the_new_beginnings(clock):
    options = AsyncConfig(recover_retries=2, recover_window_s=100.0)
    failures: deque[float] = deque()
    fates = []
    for clock.now in (0.0, 10.0, 105.0, 106.0, 300.0, 301.0):
        fates.append(processes._may_restart(failures, options))
    assert fates == [True, True, True, False, True, True]


def lost(name, *, left=False):
    reason = "it left" if left else "no heartbeat for 8.1 s (was idle)"
    return {"kind": "lost", "name": name, "pid": 7, "started": 70, "reason": reason, "left": left}


def test_whom_the_master_declares_dead_is_killed_and_only_that_process(clock):
    """A worker that was silent counted as dead for the master alone: nobody ended it, nobody took
    its place, and the run stood still for half an hour."""
    watch = supervisor("generation/0", "rollout_worker/0")
    assert watch.on_message({"kind": "joined", "name": "generation/0"}) and not watch.on_message(
        {"kind": "step"}
    )
    assert watch.on_message(lost("generation/0"))
    assert watch.pop_kill_orders() == [
        KillOrder("generation/0", "killed: no heartbeat for 8.1 s (was idle)", 7, 70)
    ]
    assert watch.pop_kill_orders() == []
    watch.on_message(lost("rollout_worker/0", left=True))
    assert watch.pop_kill_orders() == [], "its process may end by itself"
    clock.now = EXIT_AFTER_LEAVING_S
    assert [order.name for order in watch.pop_kill_orders()] == ["rollout_worker/0"]
    watch.on_message(lost("rollout_worker/0", left=True))
    watch.on_exit(end("rollout_worker/0"))
    clock.now = 2 * EXIT_AFTER_LEAVING_S
    assert watch.pop_kill_orders() == []


def test_a_worker_whose_start_was_put_off_has_its_whole_time_to_join(clock):
    """It waits until a host has rested, which may take longer than it may take to register."""
    watch = WorkerSupervisor(join_s=50.0)
    watch.on_start(spec("generation/0"))
    clock.now = 40.0
    watch.on_deferred_start("generation/0")
    watch.on_deferred_start("rollout_worker/7")
    clock.now = 60.0
    assert watch.pop_kill_orders() == []
    clock.now = 91.0
    assert [order.name for order in watch.pop_kill_orders()] == ["generation/0"]


def test_who_never_registers_is_killed_and_so_is_a_master_that_never_listens(clock):
    watch = WorkerSupervisor(join_s=50.0)
    for name in ("master", "generation/0", "generation/1"):
        watch.on_start(spec(name))
    watch.on_message({"kind": "joined", "name": "generation/0"})
    clock.now = 49.0
    assert watch.pop_kill_orders() == []
    clock.now = 50.0
    assert {order.name: (order.cause, order.pid) for order in watch.pop_kill_orders()} == {
        "master": ("killed: it did not begin to listen within 50 s", 0),
        "generation/1": ("killed: it did not register with the master within 50 s", 0),
    }
    watch.on_start(spec("master"))
    assert not watch.on_message({"kind": "endpoint", "address": "tcp://127.0.0.1:1"}), (
        "others take it as well"
    )
    clock.now = 200.0
    assert watch.pop_kill_orders() == []


def test_in_a_synchronous_run_nobody_has_a_successor(clock):
    watch = WorkerSupervisor(replaces=False)
    for name in ("env/0", "rollout_worker/0", "rollout_worker/1"):
        watch.on_start(spec(name))
    assert watch.successor(end("env/0")) is None and not watch.is_dispensable("rollout_worker/0")


class FullScheduler:
    """Has no room for a worker; what it has is in ``started``."""

    def __init__(self, *full):
        self._full = full
        self.started = list[WorkerSpec]()

    def start(self, spec):
        if spec.name in self._full or spec.host in self._full:
            raise OSError(f"{spec.name}: no host has room")
        self.started.append(spec)

    def wait(self, timeout_s):
        return []

    def kill(self, name, cause, *, pid=0, started=0): ...

    def stop(self, grace_s=8.0): ...


def test_a_successor_without_a_place_is_left_out_while_others_of_its_kind_run(clock, tmp_path):
    watch = supervisor("generation/0", "generation/1")
    display = QUIET
    scheduler = FullScheduler("generation/0")
    processes._replace_workers([end("generation/0")], scheduler, display, watch, tmp_path)
    assert scheduler.started == []
    with pytest.raises(
        WorkerFailed,
        match=r"generation/1 .*cannot be started again: generation/1: no host has room",
    ):
        processes._replace_workers(
            [end("generation/1")], FullScheduler("generation/1"), display, watch, tmp_path
        )
    assert [(death.process, death.then) for death in read_deaths(tmp_path)] == [
        (
            "generation/0",
            "it cannot be started again: generation/0: no host has room; the run continues without "
            "it",
        ),
        ("generation/1", "it cannot be started again: generation/1: no host has room"),
    ]


def test_nobody_gets_a_successor_where_the_run_ends_anyway(clock, tmp_path):
    """A master that stood still is lost by all its workers: rollout workers used to be started
    once, for nothing."""
    watch = supervisor("generation/0", "rollout_worker/0", "model_worker/0")
    display = QUIET
    scheduler = FullScheduler()
    with pytest.raises(WorkerFailed, match="model_worker/0 ended"):
        processes._replace_workers(
            [end("generation/0"), end("rollout_worker/0"), end("model_worker/0")],
            scheduler,
            display,
            watch,
            tmp_path,
        )
    assert scheduler.started == []
    assert [(death.process, death.then) for death in read_deaths(tmp_path)] == [
        ("generation/0", "the run cannot continue without model_worker/0"),
        ("rollout_worker/0", "the run cannot continue without model_worker/0"),
        ("model_worker/0", "the run cannot continue without it"),
    ]


def test_who_lost_the_master_is_judged_when_others_may_have_lost_it_too(tmp_path):
    log = tmp_path / "log"
    log.write_text(
        f"FATAL: worker 'rollout_worker/0' {LOST_MASTER} tcp://10.0.0.1:1: no answer for 10.0 s\n"
    )
    assert processes._may_follow_master(WorkerExit("rollout_worker/0", 1, log))
    log.write_text("FATAL: no space left\n")
    assert not processes._may_follow_master(WorkerExit("rollout_worker/0", 1, log))
    assert not processes._may_follow_master(WorkerExit("rollout_worker/0", -9, log))


@pytest.mark.slow
def test_a_host_that_joins_gets_workers_with_new_names_once_the_master_listens(tmp_path):
    built = build_experiment(compose_config(["experiment=grpo_aws_async", f"fileroot={tmp_path}"]))
    more = ElasticWorkers(built.plan(built.spec, 0.0), "run", tmp_path / "keys")
    more.requests = [
        WorkersWanted("b", "rollout_worker", 2),
        WorkersWanted("gone", "generation", 1),
    ]
    watch = WorkerSupervisor()
    scheduler = FullScheduler("gone")
    display = QUIET
    more.start_requested(scheduler, watch, display)
    assert scheduler.started == [] and more.requests
    more.master = "tcp://10.0.0.1:1"
    more.start_requested(scheduler, watch, display)
    assert [(made.name, made.host) for made in scheduler.started] == [
        ("rollout_worker/1", "b"),
        ("rollout_worker/2", "b"),
    ]
    assert scheduler.started[0].argv[-6:] == (
        "--run-id",
        "run",
        "--master",
        "tcp://10.0.0.1:1",
        "--key-file",
        f"{tmp_path / 'keys'}",
    )
    more.start_requested(scheduler, watch, display)
    assert len(scheduler.started) == 2, "they are started once"


@pytest.mark.slow
@pytest.mark.parametrize("reached", [[], [{"kind": "step", "step": 1, "total": 9, "metrics": {}}]])
def test_a_signal_asks_for_a_checkpoint_once_there_is_a_step_and_ends_the_launch_before(
    tmp_path, capsys, reached
):
    """A launch that waits for hosts, or loads models, has nothing to save."""
    built = begun(tmp_path)
    asked: list[str] = []
    script = [{"kind": "endpoint", "address": "tcp://here:1"}, *reached]

    class Signalled(ScriptedScheduler):
        def wait(self, timeout_s):
            if not self._script and not asked:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().wait(timeout_s)

        def interrupt(self, name):
            asked.append(name)
            self._script.append(
                WorkerLine(
                    "master", '{"kind": "stopped", "text": "a checkpoint of step 1 is saved"}'
                )
            )

    def run(built, launch, started_at, resumption, signals):
        scheduler = Signalled(*(WorkerLine("master", json.dumps(message)) for message in script))
        return run_workers(built.plan(built.spec, 0.0), scheduler, QUIET, signals)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch_run, "_run_with_display", run)
        assert launch_run.run_to_the_end(built, [], 0.0) == 128 + signal.SIGTERM
    said = capsys.readouterr().err
    assert asked == (["master"] if reached else [])
    assert "stopped by SIGTERM" in said and ("a checkpoint of step 1 is saved" in said) == bool(
        reached
    )
