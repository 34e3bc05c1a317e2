"""An environment in processes of its own: what ends one of them costs its sessions, and never the
server."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from realhf.env.server.spec.processes import Processes, ProcessPlayer
from realhf.env.server.wire import WireError

ODD = f"{Path(__file__).with_name('odd_environment.py')}:ODD"
GO = {"content": "go"}


@pytest.fixture(scope="module")
def pool() -> Iterator[Processes]:
    found = Processes(ODD, {}, 2, 8, 5.0, info=False)
    yield found
    found.stop()


def _of_group(group: int) -> list[psutil.Process]:
    found = []
    for each in psutil.process_iter():
        with suppress(OSError):
            found += [each] * (os.getpgid(each.pid) == group)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("fork", [False, True])
def test_a_crash_ends_the_sessions_of_one_process_with_one_clear_error(
    pool: Processes, fork: bool
) -> None:
    """Two sessions share a process and one is in the other: the error names cause and line, also in
    the session that was idle; the other process goes on; the next reset is played in a new process.
    A fork that the environment left holds the channel open and keeps nobody waiting."""
    deaths = pool.metrics()["process_deaths"]
    players = [pool.acquire() for _ in range(3)]
    for number, player in enumerate(players):
        player.reset(
            {"task": {"step": "crash" if number == 0 else "", "fork": fork}, "seed": number}
        )
    assert pool.metrics()["processes"] == 2
    group = players[0]._seat[0].forked.pid  # type: ignore[index]
    with pytest.raises(WireError) as crashed:
        players[0].step(GO)
    told = crashed.value
    assert (told.code, told.kind) == ("EXECUTION_ERROR", "lost")
    assert told.message.startswith(
        "environment odd: step: its process has crashed: Segmentation fault ("
    )
    assert "odd_environment.py, line" in told.message and "1 other session ended" in told.message
    assert players[1].step(GO)[1] == 0.25
    with pytest.raises(WireError, match="step: its process has crashed: Segmentation fault"):
        players[2].step(GO)
    assert pool.metrics()["process_deaths"] == deaths + 1
    assert not psutil.wait_procs(_of_group(group), timeout=20)[1]
    with pytest.raises(WireError, match="no episode is open"):
        players[0].step(GO)
    for player in (players[0], players[2]):
        assert player.reset({"seed": 5})[0]["messages"][-1]["content"] == "seed 5"
    for player in players:
        pool.release(player)
    assert pool.free_count == 8


@pytest.mark.slow
def test_a_process_that_does_not_answer_is_ended(
    pool: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code that holds the interpreter, or a stopped process, cannot end its own call."""
    player = pool.acquire()
    player.reset({"task": {"step": "freeze"}, "seed": 1})
    monkeypatch.setattr(pool, "limit_s", 0.3)
    with pytest.raises(
        WireError, match=r"its process did not answer for 0\.3 s and was ended"
    ) as silent:
        player.step(GO)
    assert silent.value.kind == "timeout"
    monkeypatch.undo()
    assert player.reset({"seed": 2})[2] is False
    pool.release(player)


def test_a_call_is_broken_off_from_another_thread(pool: Processes) -> None:
    player = pool.acquire()
    player.reset({"task": {"step": "hang"}})
    threading.Timer(0.1, player.kill).start()
    with pytest.raises(WireError, match="step: the call was cancelled") as broken:
        player.step(GO)
    assert broken.value.kind == "lost" and pool.metrics()["failures"]["lost"] >= 1
    pool.release(player)


def test_nobody_waits_until_a_frozen_process_reads(pool: Processes) -> None:
    """The event loop breaks calls off, again and again while they do not end; a new session takes
    another process."""
    player = pool.acquire()
    player.reset({})
    (process,) = [each for each in pool._processes if each.sessions]
    os.kill(process.forked.pid, signal.SIGSTOP)
    found: list[Exception] = []

    def ask() -> None:
        for _ in range(3000):
            player.kill()
        try:
            process.open()
        except OSError as error:
            found.append(error)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(20)
    told = [*found]
    process.end()
    pool.release(player)
    assert [type(error) for error in told] == [BlockingIOError]


def test_os_exit_ends_a_call_and_not_its_process(pool: Processes) -> None:
    deaths = pool.metrics()["process_deaths"]
    player = pool.acquire()
    player.reset({"task": {"step": "exit hard"}})
    with pytest.raises(WireError, match=r"os._exit\(3\) would end its process") as ended:
        player.step(GO)
    assert ended.value.kind == "internal" and pool.metrics()["process_deaths"] == deaths
    pool.release(player)


@pytest.mark.slow
def test_resets_that_name_nothing_play_the_next_of_all_processes() -> None:
    """Each of the processes would count by itself."""
    pool = Processes(ODD, {}, 2, 4, 5.0, info=False)
    players = [pool.acquire() for _ in range(4)]
    try:
        assert [player.reset({})[0]["messages"][-1]["content"] for player in players] == [
            f"seed {n}" for n in range(4)
        ]
        assert pool.metrics()["processes"] == 2 and pool.free_count == 0
        with pytest.raises(RuntimeError, match="no session slot is free"):
            pool.acquire()
    finally:
        pool.stop()


@pytest.mark.slow
def test_sessions_that_begin_at_once_get_no_more_processes_than_there_may_be() -> None:
    """A trainer opens all its sessions in one moment; each process loads the environment, which may
    be large."""
    pool = Processes(ODD, {}, 2, 16, 5.0, info=False)
    players, begin = [pool.acquire() for _ in range(16)], threading.Barrier(16)

    def play(player: ProcessPlayer) -> None:
        begin.wait(30)
        player.reset({})

    threads = [threading.Thread(target=play, args=(player,)) for player in players]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert pool.metrics()["processes"] == 2
    finally:
        pool.stop()


@pytest.mark.slow
def test_no_process_holds_a_listening_socket_and_none_is_left() -> None:
    """What an environment forks lives in its process: it cannot keep the port, and ends with the
    pool."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        before = {*psutil.Process().children(recursive=True)}
        pool = Processes(ODD, {}, 1, 1, 5.0, info=False)
        player = pool.acquire()
        player.reset({})
        family = {*psutil.Process().children(recursive=True)} - before
        assert len(family) == 2
        socket_of_the_port = os.readlink(f"/proc/self/fd/{listener.fileno()}")
        for each in family:
            assert socket_of_the_port not in [
                os.readlink(entry) for entry in Path(f"/proc/{each.pid}/fd").iterdir()
            ]
        pool.release(player)
        pool.stop()
        assert not psutil.wait_procs([*family], timeout=60)[1]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("x = 1", "the file defines nothing of"),
        (
            "import faulthandler; faulthandler._sigsegv()",
            "while it was loaded, its process has crashed: Segmentation",
        ),
        ("import os; os._exit(3)", "while it was loaded, its process has ended"),
    ],
)
def test_what_is_wrong_with_an_environment_is_said_at_the_start(
    tmp_path: Path, code: str, says: str
) -> None:
    """Also when it ends the process that loads it."""
    (tmp_path / "wrong.py").write_text(code)
    with pytest.raises(ValueError, match=says):
        Processes(str(tmp_path / "wrong.py"), {}, 1, 1, 5.0, info=False)
