"""Workers that are forked from a process that has imported what they need behave like those that
were started."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from realhf.scheduler.base import WorkerExit, WorkerLine, WorkerSpec
from realhf.scheduler.local import LocalScheduler, PreparedWorkers
from realhf.scheduler.process import adopt_orphans
from tests.process_family import family, gone

LIMIT_S = 60.0
WORKER = """
import os, signal, sys, time
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
print("marker" in sys.modules, os.getppid(), os.getsid(0) == os.getpid(), sys.argv[1:], flush=True)
print(os.environ.get("CUDA_VISIBLE_DEVICES"), file=sys.stderr, flush=True)
time.sleep(float(sys.argv[1]))
sys.exit(3)
"""


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PreparedWorkers]:
    """One of its modules cannot be imported."""
    (tmp_path / "marker.py").write_text("")
    (tmp_path / "broken.py").write_text("raise RuntimeError('no')")
    (tmp_path / "forked.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{Path(__file__).resolve().parents[2]}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    found = PreparedWorkers(["broken", "marker"])
    yield found
    found.stop()


@pytest.fixture
def scheduler(prepared: PreparedWorkers) -> Iterator[LocalScheduler]:
    with adopt_orphans():
        found = LocalScheduler(adopts_orphans=True, prepared=prepared)
        with found.preserve_children():
            prepared.start()
        until(lambda: not prepared.is_importing())
        yield found
        found.stop(1.0)


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def spec(folder: Path, name: str, seconds: float, **more: object) -> WorkerSpec:
    return WorkerSpec(name, "forked", (str(seconds),), folder / f"{name}.log", **more)  # pyright: ignore


def events_of(scheduler: LocalScheduler, name: str) -> tuple[list[str], WorkerExit]:
    """The lines of a worker, and its end."""
    lines = []
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        for found in scheduler.wait(0.5):
            if isinstance(found, WorkerLine):
                lines.append(found.text)
            elif isinstance(found, WorkerExit) and found.name == name:
                return lines, found
    raise AssertionError(f"{name} has not ended")


@pytest.mark.slow
def test_a_worker_is_forked_says_its_lines_and_ends_with_its_code(
    tmp_path: Path, scheduler: LocalScheduler
):
    scheduler.start(spec(tmp_path, "a", 0.0, events=True, gpu=1))
    lines, end = events_of(scheduler, "a")
    assert lines == [f"True {os.getpid()} True ['0.0']"] and end.exit_code == 3
    assert end.log.read_text() == "7\n"


@pytest.mark.parametrize("events", [True, False])
def test_the_cause_reaches_the_starter_of_a_forked_worker_past_a_full_disk(
    tmp_path: Path, scheduler: LocalScheduler, events: bool
):
    (tmp_path / "failing.py").write_text(
        "import sys\nfrom realhf.scheduler.process import run_guarded\n"
        "def work(): raise ValueError('the cause')\n"
        "sys.exit(run_guarded(work))\n"
    )
    scheduler.start(WorkerSpec("w", "failing", (), Path("/dev/full"), events))
    _, end = events_of(scheduler, "w")
    assert (end.exit_code, end.last_words) == (1, "the cause")


@pytest.mark.slow
def test_workers_are_ended_and_their_server_stays_for_the_next_run(
    tmp_path: Path, scheduler: LocalScheduler
):
    for number in range(2):
        for name in ("a", "b"):
            scheduler.start(spec(tmp_path, name, 600.0))
        logs = [tmp_path / f"{name}.log" for name in ("a", "b")]
        until(
            lambda logs=logs, number=number: all(
                log.read_text().count("4,7") > number for log in logs
            )
        )
        pids = [child.process.pid for child in scheduler._children.values()]
        scheduler.terminate("a")
        _, end = events_of(scheduler, "a")
        assert end.exit_code == -signal.SIGTERM
        scheduler.stop(1.0)
        assert gone(pids, 0.0)
    assert (tmp_path / "b.log").read_text().count(f"True {os.getpid()} True") == 2


@pytest.mark.slow
def test_without_the_server_workers_are_started_as_ever(
    tmp_path: Path, scheduler: LocalScheduler, prepared: PreparedWorkers
):
    (server,) = [
        found
        for found, line in family(os.getpid()).items()
        if "realhf.scheduler.prepared_server" in line
    ]
    server.kill()
    assert gone([server], LIMIT_S)
    scheduler.start(spec(tmp_path, "a", 0.0, events=True))
    lines, _ = events_of(scheduler, "a")
    assert lines == [f"False {os.getpid()} True ['0.0']"]
    with scheduler.preserve_children():
        prepared.start()
    assert prepared.is_importing() or prepared._ready, "the next run has one again"
