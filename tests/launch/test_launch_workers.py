"""What is said about a worker that failed."""

from __future__ import annotations

from pathlib import Path

from realhf.launch_workers import failure_message
from realhf.scheduler.base import WorkerExit


def test_the_marked_cause_wins_over_what_was_logged_after_it(tmp_path: Path):
    log = tmp_path / "m.log"
    log.write_text("Traceback (most recent call last):\n  ...\nFATAL: the cause\nlater noise\n")
    assert failure_message(WorkerExit("master", 1, log)) == f"master failed: the cause (log: {log})"


def test_a_killed_process_is_shown_with_the_end_of_its_log(tmp_path: Path):
    log = tmp_path / "w.log"
    log.write_text("".join(f"line {i}\n" for i in range(20)))
    first, *tail = failure_message(WorkerExit("model_worker/0", -9, log)).splitlines()
    assert first == f"model_worker/0 ended before the run did: killed by SIGKILL (log: {log}); its log ends:"
    assert tail == [f"  | line {i}" for i in range(12, 20)]


def test_what_a_predecessor_logged_is_not_blamed(tmp_path: Path):
    log = tmp_path / "w.log"
    log.write_text("FATAL: the cause before\n")
    before = log.stat().st_size
    assert "cause before" not in failure_message(WorkerExit("master", -9, log, before))
    with log.open("a") as more:
        more.write("FATAL: the cause now\n")
    assert failure_message(WorkerExit("master", 1, log, before)) == f"master failed: the cause now (log: {log})"


def test_an_early_clean_exit_is_a_failure_too(tmp_path: Path):
    text = failure_message(WorkerExit("env/0", 0, tmp_path / "none.log"))
    assert text.startswith("env/0 ended before the run did: exit code 0")


def test_flags_of_the_environment_server_are_named_as_options(tmp_path: Path):
    log = tmp_path / "e.log"
    log.write_text("env_worker: cannot listen on 127.0.0.1:1 (--ministack-base-port): in use\n")
    assert "(env.ministack_base_port)" in failure_message(WorkerExit("env/0", 1, log))
    log.write_text("FATAL: cannot listen on 127.0.0.1:1 (--port): in use\n")
    assert "(stream.port)" in failure_message(WorkerExit("trajectory/0", 1, log))
    assert "(--port)" in failure_message(WorkerExit("model_worker/0", 1, log))
