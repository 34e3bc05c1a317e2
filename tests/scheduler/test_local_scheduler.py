"""The local scheduler against real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from realhf.base.process import start_time
from realhf.scheduler.base import WorkerEvent, WorkerExit, WorkerLine, WorkerSpec
from realhf.scheduler.local import LocalScheduler
from realhf.scheduler.process import (
    adopt_orphans,
    describe_failure,
    find_failure_cause,
    read_log_lines,
)
from tests.process_family import family, gone

STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
inner = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", inner], start_new_session=True)
print("child", child.pid, flush=True)
time.sleep(600)
"""

STARTER = """
import os, subprocess, sys, time
from pathlib import Path
from realhf.base.process import share_niceness
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
share_niceness(child.pid)
pids = [os.getpid(), child.pid]
sessions = [Path(f"/proc/{pid}/autogroup") for pid in pids]
levels = [path.read_text().split()[-1] for path in sessions if path.exists()]
print(*(os.getpriority(os.PRIO_PROCESS, pid) for pid in pids), *levels, flush=True)
time.sleep(600)
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Write a module that a worker can be started from."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def write(name: str, code: str) -> str:
        (tmp_path / f"{name}.py").write_text(code)
        return name

    return write


@pytest.fixture
def scheduler():
    scheduler = LocalScheduler()
    yield scheduler
    scheduler.stop(grace_s=0.2)


def spec(tmp_path: Path, name: str, module: str, *argv: str, events: bool = False) -> WorkerSpec:
    return WorkerSpec(
        name, module, argv, tmp_path / "logs" / f"{name.replace('/', '-')}.log", events
    )


def collect(scheduler: LocalScheduler, until: type, deadline_s: float = 60.0) -> list:
    events: list = []
    end = time.monotonic() + deadline_s
    while not any(isinstance(event, until) for event in events):
        assert time.monotonic() < end, f"no {until.__name__} in {deadline_s} s: {events}"
        events += scheduler.wait(0.5)
    return events


def test_lines_come_before_the_exit_and_both_are_reported(tmp_path, modules, scheduler):
    modules(
        "talker",
        "import sys; print('a'); print('b', sys.argv[1]); print('oops', file=sys.stderr); "
        "sys.exit(3)",
    )
    scheduler.start(spec(tmp_path, "talker/0", "talker", "x", events=True))
    events = collect(scheduler, WorkerExit)
    assert [event.text for event in events if isinstance(event, WorkerLine)] == ["a", "b x"]
    assert isinstance(events[-1], WorkerExit)
    assert (events[-1].name, events[-1].exit_code, events[-1].reason) == (
        "talker/0",
        3,
        "exit code 3",
    )
    assert read_log_lines(events[-1].log, 5) == ["oops"]
    scheduler.start(spec(tmp_path, "talker/0", "talker", "y", events=True))
    again = collect(scheduler, WorkerExit)[-1]
    assert read_log_lines(again.log, 5) == ["oops", "oops"] and read_log_lines(
        again.log, 5, again.log_from
    ) == ["oops"]


def test_a_killed_worker_is_seen_at_once(tmp_path, modules, scheduler):
    modules("sleeper", "import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    scheduler.start(spec(tmp_path, "sleeper/0", "sleeper", events=True))
    line = collect(scheduler, WorkerLine)[0]
    os.kill(int(line.text), signal.SIGKILL)
    began = time.monotonic()
    found: list[WorkerEvent] = []
    while not found:
        found = scheduler.wait(60.0)
    assert time.monotonic() - began < 30, "its end wakes who waits"
    exit_ = found[0]
    assert isinstance(exit_, WorkerExit)
    assert exit_.reason == "killed by SIGKILL"


@pytest.mark.slow
def test_a_frozen_worker_is_killed_with_what_it_has_started_and_the_cause_is_told(
    tmp_path, modules, scheduler
):
    modules("starter", STARTER)
    scheduler.start(spec(tmp_path, "starter/0", "starter", events=True))
    collect(scheduler, WorkerLine)
    pid = scheduler._children["starter/0"].process.pid
    relatives = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    os.kill(pid, signal.SIGSTOP)
    scheduler.kill("starter/0", "of another", pid=pid, started=start_time(pid) + 1)
    scheduler.kill("starter/0", "of another", pid=pid + 1, started=start_time(pid))
    assert scheduler.wait(0.1) == [], "that was a process before it"
    scheduler.kill("starter/0", "killed: it was silent", pid=pid, started=start_time(pid))
    exit_ = collect(scheduler, WorkerExit)[-1]
    assert (exit_.exit_code, exit_.reason) == (-9, "killed: it was silent")
    assert len(relatives) > 1 and not psutil.wait_procs(relatives, timeout=30)[1]
    scheduler.kill("starter/0", "it has ended")


@pytest.mark.slow
@pytest.mark.parametrize("niceness", [0, 7])
def test_a_worker_steps_back_with_its_session_and_what_it_starts_in_another(
    tmp_path, modules, scheduler, niceness
):
    modules("starter", STARTER)
    scheduler.start(replace(spec(tmp_path, "starter/0", "starter", events=True), niceness=niceness))
    seen = collect(scheduler, WorkerLine)[0].text.split()
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    assert [int(word) for word in seen[:2]] == [mine + niceness] * 2
    if weighed := [int(word) for word in seen[2:]]:
        assert weighed == [mine + niceness if niceness else 0, mine + niceness]


@pytest.mark.slow
def test_stop_kills_what_ignores_sigterm_with_descendants_in_other_sessions(tmp_path, modules):
    modules("stubborn", STUBBORN)
    scheduler = LocalScheduler()
    scheduler.start(spec(tmp_path, "stubborn/0", "stubborn", events=True))
    child = int(collect(scheduler, WorkerLine)[0].text.split()[1])
    began = time.monotonic()
    scheduler.stop(grace_s=0.5)
    assert time.monotonic() - began < 60
    assert gone([child], 60)
    scheduler.stop()


@pytest.mark.slow
def test_stop_leaves_alone_what_the_process_has_started_for_itself(tmp_path, modules):
    """A program with servers of its own may train with the launcher inside it, one run after the
    other; another one comes while a scheduler is there."""
    modules("stubborn", STUBBORN)
    wait = "import time; time.sleep(600)"
    server = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {wait!r}])"
    stranger = subprocess.Popen([sys.executable, "-c", server], start_new_session=True)
    later: list[subprocess.Popen[bytes]] = []
    try:
        deadline = time.monotonic() + 60
        while not any(line[-1] == wait for line in family(stranger.pid).values()):
            assert time.monotonic() < deadline, "the server did not start its child"
            time.sleep(0.05)
        before = family(stranger.pid)
        with adopt_orphans():
            scheduler = LocalScheduler(adopts_orphans=True)
            with scheduler.preserve_children():
                later.append(subprocess.Popen(["sleep", "600"]))
            scheduler.start(spec(tmp_path, "stubborn/0", "stubborn", events=True))
            child = int(collect(scheduler, WorkerLine)[0].text.split()[1])
            scheduler.stop(grace_s=0.2)
        assert gone([child], 60)
        assert stranger.poll() is None and family(stranger.pid) == before
        assert later[0].poll() is None
    finally:
        for process in later:
            process.kill()
            process.wait(60)
        for process in family(stranger.pid):
            process.kill()
        stranger.wait(60)


def test_stop_lets_a_worker_leave_through_its_finally_blocks(tmp_path, modules):
    modules(
        "tidy",
        "import pathlib, sys, time\n"
        "from realhf.scheduler.process import run_guarded\n"
        "def work():\n"
        "    try:\n        print('up', flush=True); time.sleep(600)\n"
        "    finally:\n        pathlib.Path(sys.argv[1]).write_text('clean')\n"
        "sys.exit(run_guarded(work))\n",
    )
    scheduler = LocalScheduler()
    scheduler.start(spec(tmp_path, "tidy/0", "tidy", str(tmp_path / "mark"), events=True))
    collect(scheduler, WorkerLine)
    scheduler.stop(grace_s=60)
    assert (tmp_path / "mark").read_text() == "clean"


@pytest.mark.slow
def test_workers_end_when_the_launching_process_is_killed(tmp_path, modules):
    modules("orphan", "import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    launcher = (
        "import sys, time\nfrom pathlib import Path\n"
        "from realhf.scheduler.base import WorkerSpec\nfrom realhf.scheduler.local import "
        "LocalScheduler\n"
        f"log = Path({str(tmp_path)!r}) / 'o.log'\n"
        "s = LocalScheduler(); s.start(WorkerSpec('orphan/0', 'orphan', (), log, True))\n"
        "events = []\n"
        "while not events: events = s.wait(1)\n"
        "print(events[0].text, flush=True); time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", launcher], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    pid = int(process.stdout.readline())
    process.kill()
    process.wait()
    assert gone([pid], 60)


def test_an_error_leaves_its_traceback_and_one_line_about_the_cause(tmp_path, modules, scheduler):
    modules(
        "failing",
        "import sys\nfrom realhf.scheduler.process import run_guarded\n"
        "def work(): raise OSError(28, 'No space left on device', '/somewhere/x')\n"
        "sys.exit(run_guarded(work))\n",
    )
    scheduler.start(spec(tmp_path, "failing/0", "failing"))
    exit_ = collect(scheduler, WorkerExit)[-1]
    assert exit_.exit_code == 1
    assert (
        find_failure_cause(exit_.log)
        == "no space left on the device of /somewhere/x; free space, then run again"
    )
    assert any(line.startswith("Traceback") for line in read_log_lines(exit_.log, 50))


def test_describe_keeps_the_first_line_and_names_foreign_types():
    assert describe_failure(RuntimeError("first\nsecond")) == "first"
    assert describe_failure(KeyError("x")) == "KeyError: 'x'"
    assert describe_failure(ValueError()) == "ValueError"
    assert describe_failure(FileNotFoundError(2, "No such file", "/x")).startswith(
        "FileNotFoundError: "
    )
    assert (
        describe_failure(type("PortTaken", (OSError,), {})("cannot listen on 1"))
        == "cannot listen on 1"
    )


def test_a_name_is_used_once(tmp_path, modules, scheduler):
    modules("sleeper2", "import time; time.sleep(600)")
    scheduler.start(spec(tmp_path, "a", "sleeper2"))
    with pytest.raises(ValueError, match="started already"):
        scheduler.start(spec(tmp_path, "a", "sleeper2"))


def test_a_worker_leaves_without_taking_down_its_interpreter(tmp_path, modules, scheduler):
    modules(
        "leaver",
        "import atexit, sys\nclass Slow:\n    def __del__(self): print('taken down', flush=True)\n"
        "kept = Slow()\natexit.register(print, 'at exit')\nprint('last line')\nsys.exit(7)\n",
    )
    scheduler.start(spec(tmp_path, "leaver/0", "leaver"))
    exit_ = collect(scheduler, WorkerExit)[-1]
    assert exit_.exit_code == 7 and read_log_lines(exit_.log, 5) == ["last line", "at exit"]


@pytest.mark.slow
def test_a_worker_that_does_not_unwind_is_ended(tmp_path, modules, scheduler):
    modules(
        "stubborn",
        "import signal, sys, time\nfrom realhf.scheduler import process as "
        "failure\nfailure.STOP_WITHIN_S = 1\n"
        "def work():\n    try:\n        print('up', flush=True); time.sleep(60)\n"
        "    finally:\n        time.sleep(60)\n"
        "sys.exit(failure.run_guarded(work))\n",
    )
    scheduler.start(spec(tmp_path, "stubborn/0", "stubborn", events=True))
    collect(scheduler, WorkerLine)
    [worker] = [child for child, line in family(os.getpid()).items() if "stubborn" in line]
    worker.terminate()
    exit_ = collect(scheduler, WorkerExit)[-1]
    assert exit_.reason == "killed by SIGALRM"


@pytest.mark.slow
def test_the_cause_is_known_although_the_log_takes_nothing(tmp_path, modules, scheduler):
    """What a worker prints when it fails fails itself on a full disk, for the one that exits with a
    text, too."""
    modules(
        "failing",
        "import sys\nfrom realhf.scheduler.process import run_guarded\n"
        "def work(): raise ValueError('x' * 9000 if sys.argv[2:] else 'the cause')\n"
        "sys.exit('said at the end' if sys.argv[1] == 'exits' else run_guarded(work))\n",
    )
    for words, expected in (
        ("fails", "the cause"),
        ("fails long", "x" * 4096),
        ("exits", "said at the end"),
    ):
        scheduler.start(WorkerSpec("failing/0", "failing", tuple(words.split()), Path("/dev/full")))
        exit_ = collect(scheduler, WorkerExit)[-1]
        assert (exit_.exit_code, exit_.last_words) == (1, expected)
        assert find_failure_cause(exit_.log, exit_.log_from, exit_.last_words) == expected
    log = tmp_path / "log"
    log.write_text("FATAL: what the log says\nmore\n")
    assert find_failure_cause(log, 0, "words") == "what the log says"
