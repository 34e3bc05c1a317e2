"""The handle of a forked process is that of the process that was asked for, whatever came late
before."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from realhf.env.containment.fork_server import ForkedProcess, ForkServer

_ROOT = str(Path(__file__).resolve().parents[3])


@pytest.fixture
def server() -> Iterator[ForkServer]:
    with tempfile.TemporaryFile() as log:
        served = ForkServer("tests.env.containment.pausing_zygote", log, {"PYTHONPATH": _ROOT})
        served.start()
        served.wait_ready(30.0)
        yield served
        served.stop()


def fork(server: ForkServer, word: str, writer: int, timeout_s: float = 30.0) -> ForkedProcess:
    try:
        return server.fork({"word": word}, [writer], word, timeout_s)
    finally:
        os.close(writer)


@pytest.mark.slow
def test_a_reply_that_came_too_late_belongs_to_nobody_else(server: ForkServer) -> None:
    """Its process, which nobody has a handle of, is killed."""
    late, late_writer = os.pipe()
    now, now_writer = os.pipe()
    os.kill(server.pid, signal.SIGSTOP)
    with pytest.raises(TimeoutError, match="pausing_zygote"):
        fork(server, "late", late_writer, 0.05)
    os.kill(server.pid, signal.SIGCONT)
    child = fork(server, "now", now_writer)
    with open(now) as written, open(late) as written_late:
        assert written.readline() == f"now {child.pid}\n"
        assert [line.split()[0] for line in written_late] in (["late"], []), (
            "the text ends with the process"
        )
        assert child.alive()
        child.kill()
        assert written.read() == ""


@pytest.mark.slow
def test_a_child_that_ends_at_once_has_a_handle_too(server: ForkServer) -> None:
    """Nobody collects the children, so one that ended before its descriptor was opened could not be
    told from none."""
    for _ in range(30):
        read, write = os.pipe()
        child = fork(server, "brief", write)
        with open(read) as written:
            word, pid = written.read().split()
        assert word == "brief" and child.pid in (int(pid), -1), "-1: it has ended"
        child.kill()


@pytest.mark.slow
def test_a_child_that_was_killed_is_not_alive_while_its_threads_end(server: ForkServer) -> None:
    """Its descriptor says so milliseconds later, and a command that came sooner was blamed for its
    death."""
    for _ in range(10):
        read, write = os.pipe()
        child = fork(server, "threads", write)
        with open(read) as written:
            assert written.readline() == f"threads {child.pid}\n" and child.alive()
            os.kill(child.pid, signal.SIGKILL)
            assert not any(child.alive() for _ in range(20))
            child.kill()


@contextmanager
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_process_that_ended_is_not_the_one_that_got_its_pid() -> None:
    """It was alive for ever, and stopped when the other one was, if nobody had asked before."""
    with sleeper() as ended, sleeper() as other:
        pidfd = os.pidfd_open(ended.pid)
        ended.kill()
        ended.wait()
        os.kill(other.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, other.pid, os.WSTOPPED | os.WNOWAIT)
        process = ForkedProcess(other.pid, pidfd, "one whose pid another process has")
        assert not process.stopped() and not process.alive()
        process.kill()
        assert other.poll() is None, "nothing is sent to the other one"


def test_a_killed_process_leaves_no_file_open() -> None:
    """A question after the end used to open another file, for ever."""
    with sleeper() as program:
        before = os.listdir("/proc/self/fd")
        process = ForkedProcess(program.pid, os.pidfd_open(program.pid), "killed")
        assert process.alive() and not process.stopped()
        process.kill()
        assert not process.stopped() and not process.alive()
        assert os.listdir("/proc/self/fd") == before


@pytest.mark.slow
def test_a_question_during_a_kill_is_about_no_other_file() -> None:
    """Another thread's question may read a descriptor whose number has a new owner. Here that is a
    file with the status of a process that runs."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"State:\tT (stopped)\n")
        file.flush()
        for _ in range(20):
            with sleeper() as program:
                process = ForkedProcess(program.pid, os.pidfd_open(program.pid), "killed")
                assert process.alive()
                answers: list[bool] = []
                is_over = threading.Event()

                def ask(
                    process: ForkedProcess = process,
                    answers: list[bool] = answers,
                    is_over: threading.Event = is_over,
                ) -> None:
                    while not is_over.is_set():
                        answers.append(process.stopped())

                asker = threading.Thread(target=ask)
                asker.start()
                process.kill()
                opened = [os.open(file.name, os.O_RDONLY) for _ in range(3)]
                is_over.set()
                asker.join()
                for descriptor in opened:
                    os.close(descriptor)
                assert answers and not any(answers)


@pytest.mark.parametrize("room", [0, 1, 3], ids=["of the request", "of the pipe", "of the child"])
def test_a_child_that_the_zygote_cannot_watch_never_runs(server: ForkServer, room: int) -> None:
    """It used to live on without anybody who could end it, with the descriptors it was given. The
    zygote survives, with ``room`` descriptors beside the standard streams and its socket, which has
    a higher number."""
    limits = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (3 + room, limits[1]))
    read, write = os.pipe()
    with open(read) as written:
        with pytest.raises(
            RuntimeError, match=r"could not fork orphan: .*[tT]oo many (open )?files"
        ):
            fork(server, "orphan", write)
        assert written.read() == "", "nobody holds the other end any more"
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, limits)
    read, write = os.pipe()
    child = fork(server, "after", write)
    with open(read) as written:
        assert written.readline() == f"after {child.pid}\n"
    child.kill()


def test_a_child_whose_descriptor_the_owner_cannot_take_never_runs(server: ForkServer) -> None:
    read, write = os.pipe()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(read)
    os.close(free)
    with open(read) as written:
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        try:
            with pytest.raises(RuntimeError, match="too many files open"):
                fork(server, "orphan", write)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert written.read() == ""
