"""The handle of a forked process is that of the process that was asked for, whatever came late before."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
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
        assert [line.split()[0] for line in written_late] in (["late"], []), "the text ends with the process"
        assert child.alive()
        child.kill()
        assert written.read() == ""


def test_a_child_that_ends_at_once_has_a_handle_too(server: ForkServer) -> None:
    """Nobody collects the children, so one that ended before its descriptor was opened could not be told from none."""
    for _ in range(30):
        read, write = os.pipe()
        child = fork(server, "brief", write)
        with open(read) as written:
            word, pid = written.read().split()
        assert word == "brief" and child.pid in (int(pid), -1), "-1: it has ended"
        child.kill()
