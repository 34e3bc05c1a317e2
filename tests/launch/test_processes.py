"""Which processes a run has, and what is said about one that failed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from rich.console import Console

from realhf.launch import run as launch_run
from realhf.launch.build import build_experiment
from realhf.launch.compose import compose_config
from realhf.launch.processes import LaunchError, failure_message, run_workers, worker_specs
from realhf.monitor.display import Display
from realhf.monitor.run_files import deaths
from realhf.scheduler.base import WorkerExit, WorkerLine
from realhf.transport.errors import NetworkError
from realhf.transport.network import RunKeys


class ScriptedScheduler:
    """Starts nothing; workers end when the script says so, which real ones on a busy machine do not. ``started`` is
    called with what would be."""

    def __init__(self, *script, started=lambda spec: None):
        self._script, self._started = list(script), started
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


def test_a_killed_process_is_shown_with_the_end_of_its_log(tmp_path):
    log = tmp_path / "w.log"
    log.write_text("".join(f"line {i}\n" for i in range(20)))
    first, *tail = failure_message(WorkerExit("model_worker/0", -9, log)).splitlines()
    assert first == f"model_worker/0 ended before the run did: killed by SIGKILL (log: {log}); its log ends:"
    assert tail == [f"  | line {i}" for i in range(12, 20)]


def test_what_a_predecessor_logged_is_not_blamed(tmp_path):
    log = tmp_path / "w.log"
    log.write_text("FATAL: the cause before\n")
    before = log.stat().st_size
    assert "cause before" not in failure_message(WorkerExit("master", -9, log, before))
    with log.open("a") as more:
        more.write("FATAL: the cause now\n")
    assert failure_message(WorkerExit("master", 1, log, before)) == f"master failed: the cause now (log: {log})"


@pytest.mark.parametrize("order", [("model_worker/0", "master"), ("master", "model_worker/0")])
def test_a_worker_that_was_sent_away_is_not_the_cause(tmp_path, order):
    (tmp_path / "master.log").write_text("FATAL: the cause\n")
    built = build_experiment(compose_config(["experiment=grpo_aws", f"fileroot={tmp_path}"]))
    ends = {
        "master": WorkerExit("master", 1, tmp_path / "master.log"),
        "model_worker/0": WorkerExit("model_worker/0", 0, tmp_path / "none.log"),
    }
    built.spec.run_dir.mkdir(parents=True)
    scheduler = ScriptedScheduler(*(ends[name] for name in order))
    with pytest.raises(LaunchError, match="master failed: the cause"):
        run_workers(built.plan(built.spec, 0.0), scheduler, Display(Console(quiet=True)))


def test_only_the_master_reports_for_the_run(tmp_path):
    """Whatever another process prints, it is not the end of the run."""
    (tmp_path / "master.log").write_text("FATAL: the cause\n")
    built = build_experiment(compose_config(["experiment=grpo_aws", f"fileroot={tmp_path}"]))
    built.spec.run_dir.mkdir(parents=True)
    done = '{"kind": "done", "summary": {"steps": 1}}'
    scheduler = ScriptedScheduler(
        WorkerLine("rollout_worker/0", done), WorkerExit("master", 1, tmp_path / "master.log")
    )
    with pytest.raises(LaunchError, match="master failed: the cause"):
        run_workers(built.plan(built.spec, 0.0), scheduler, Display(Console(quiet=True)))


def test_a_worker_of_any_run_that_the_master_declares_dead_is_killed_and_named(tmp_path):
    built = build_experiment(compose_config(["experiment=grpo_aws", f"fileroot={tmp_path}"]))
    built.spec.run_dir.mkdir(parents=True)
    said = {"kind": "lost", "name": "env/0", "pid": 7, "started": 70, "reason": "no heartbeat for 8.1 s", "left": False}
    scheduler = ScriptedScheduler(WorkerLine("master", json.dumps(said)))
    with pytest.raises(LaunchError, match="env/0 ended before the run did: killed: no heartbeat for"):
        run_workers(built.plan(built.spec, 0.0), scheduler, Display(Console(quiet=True)))
    assert scheduler.killed == [("env/0", "killed: no heartbeat for 8.1 s", 7, 70)]
    assert [(death.process, death.then) for death in deaths(built.spec.run_dir)] == [
        ("env/0", "the run cannot go on without it")
    ]


def test_a_ctrl_c_during_the_clean_up_waits_for_its_end_and_does_not_hide_the_cause(tmp_path, capsys, monkeypatch):
    """It ended the clean-up: a worker that was stopped outlived the launcher, which told of the signal alone."""
    built = build_experiment(compose_config(["experiment=grpo_aws", f"fileroot={tmp_path}"]))
    ended: list[str] = []

    class Impatient(ScriptedScheduler):
        def stop(self, grace_s=8.0):
            for number in (signal.SIGINT, signal.SIGTERM):
                os.kill(os.getpid(), number)
            ended.append("all of them")

    def run(built, *_):
        scheduler = Impatient(WorkerExit("model_worker/0", -9, tmp_path / "none.log"))
        return run_workers(built.plan(built.spec, 0.0), scheduler, Display(Console(quiet=True)))

    monkeypatch.setattr(launch_run, "_with_display", run)
    assert launch_run.run_to_the_end(built, [], 0.0) == 128 + signal.SIGINT
    assert ended == ["all of them"]
    said = capsys.readouterr().err
    assert "model_worker/0 ended before the run did: killed by SIGKILL" in said and "stopped by SIGINT" in said


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


@pytest.mark.parametrize("niceness", [0, 10])
def test_whoever_feeds_the_trainer_steps_back_behind_it(niceness):
    built = build_experiment(compose_config(["experiment=grpo_aws_async", f"async_rl.niceness={niceness}"]))
    workers = worker_specs(built.plan(built.spec, 0.0), "run", "tcp://127.0.0.1:1")
    assert {worker.name: worker.niceness for worker in workers} == {
        "env/0": niceness,
        "generation/0": niceness,
        "rollout_worker/0": niceness,
        "model_worker/0": 0,
    }


def test_who_trains_is_started_before_who_generates():
    """Of a host with one GPU the trainer needs that one; it was refused it, as an engine had it already."""
    built = build_experiment(compose_config(["experiment=grpo_aws_async"]))
    names = [worker.name for worker in worker_specs(built.plan(built.spec, 0.0), "run", "tcp://127.0.0.1:1")]
    assert names.index("model_worker/0") < names.index("generation/0")


def test_without_rollout_workers_nobody_steps_back():
    built = build_experiment(compose_config(["experiment=grpo_aws"]))
    workers = worker_specs(built.plan(built.spec, 0.0), "run", "tcp://127.0.0.1:1")
    assert {worker.name: worker.niceness for worker in workers} == {"env/0": 0, "model_worker/0": 0}


@pytest.mark.parametrize("bind", ["", "127.0.0.1", "10.0.0.1"])
def test_keys_are_in_the_launchers_memory_and_on_no_disk_or_command_line(tmp_path, bind):
    """Beyond the loopback the launcher makes keys before the first process. They lie in no folder, so that a launcher
    that is killed leaves none behind."""
    options = ["experiment=grpo_aws", f"fileroot={tmp_path}", *([f"network.bind={bind}"] if bind else [])]
    built = build_experiment(compose_config(options))
    folder = built.spec.run_dir
    folder.mkdir(parents=True)
    seen: dict[Path, RunKeys] = {}

    def look(spec):
        files = [Path(spec.argv[at + 1]) for at, text in enumerate(spec.argv) if text == "--key-file"]
        seen.update({file: RunKeys.read(file) for file in files})
        written = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
        assert any("grpo_aws" in text for text in written)
        for keys in seen.values():
            secrets = (keys.server_secret, keys.client_secret, keys.token)
            assert not [secret for secret in secrets for text in (*written, *spec.argv) if secret in text]

    scheduler = ScriptedScheduler(WorkerExit("master", 1, tmp_path / "none.log"), started=look)
    with pytest.raises(LaunchError):
        run_workers(built.plan(built.spec, 0.0), scheduler, Display(Console(quiet=True)))
    assert len(seen) == (bind == "10.0.0.1")
    for file in seen:
        with pytest.raises(NetworkError):
            RunKeys.read(file)
    workers = worker_specs(built.plan(built.spec, 0.0), "run", "tcp://10.0.0.1:1", Path("/file"))
    assert all(worker.argv[-2:] == ("--key-file", "/file") for worker in workers)
