"""An agent by itself: its messages, its own folder, and the workers that wait while it imports for
them."""

from __future__ import annotations

import re
import signal
import tempfile
from pathlib import Path
from typing import Any

import msgpack
import pytest

from realhf.cluster.agent import MARK, PREFIX, HostAgent, create_temporary_folder, lock_folder
from realhf.cluster.messages import (
    OF_AGENT,
    OF_LAUNCHER,
    TAIL_BYTES,
    EndWorker,
    Exited,
    HostHello,
    StartWorker,
    pack_message,
    unpack_message,
)
from realhf.cluster.placement import ClusterError
from realhf.scheduler.base import WorkerExit, WorkerSpec
from realhf.scheduler.process import find_fatal_line
from realhf.transport.envelope import unpack_header
from realhf.transport.errors import ProtocolError
from tests.cluster.key_ring import KeyRing

HELLO = {
    "name": "b",
    "cores": 2,
    "memory_gib": 1.0,
    "gpus": [],
    "address": "10.0.0.2",
    "machine": "m",
    "clock": 0.0,
    "folder": "/x",
    "wants": {"rollout_worker": 2},
    "made_of": {"source": "0123"},
}
EXITED = {"name": "generation/0", "exit_code": -9, "log": "/l", "log_from": 0, "tail": b"x"}


def take(kind: str, value: Any) -> Any:
    return unpack_message(kind, [msgpack.packb(value)], OF_AGENT)


def test_messages_arrive_as_they_were_sent():
    hello = HostHello(**HELLO)
    header, payload = pack_message("hello", b"s" * 16, hello, node="n")
    assert unpack_header(header)["node"] == "n"
    assert unpack_message("hello", [payload], OF_AGENT) == hello == take("hello", HELLO)
    assert take("exited", EXITED) == Exited("generation/0", -9, "/l", 0, b"x")


@pytest.mark.parametrize(
    ("kind", "changed", "says"),
    [
        ("hello", {"name": "../etc"}, "name"),
        ("hello", {"name": "a" * 64}, "name"),
        ("hello", {"name": "a\n"}, "name"),
        ("hello", {"address": "\x1b[2J"}, "address"),
        ("hello", {"cores": 0}, "cores"),
        ("hello", {"cores": True}, "cores"),
        ("hello", {"memory_gib": float("nan")}, "memory_gib"),
        ("hello", {"gpus": ["g"] * 65}, "gpus"),
        ("hello", {"folder": "relative"}, "folder"),
        ("hello", {"wants": {"rollout_worker": 10**9}}, "wants"),
        ("hello", {"wants": {"rollout_worker": -1}}, "wants"),
        ("hello", {"more": 1}, "more"),
        ("exited", {"name": "a/b/c"}, "name"),
        ("exited", {"exit_code": 10**6}, "exit_code"),
        ("exited", {"tail": b"x" * (TAIL_BYTES + 1)}, "tail"),
        ("exited", {"log_from": -1}, "log_from"),
    ],
)
def test_what_has_not_its_form_is_refused_by_its_field(
    kind: str, changed: dict[str, Any], says: str
):
    with pytest.raises(ProtocolError, match=re.escape(says)):
        take(kind, {**(HELLO if kind == "hello" else EXITED), **changed})


def test_neither_end_takes_what_the_other_should_send():
    for kind, known in (("start", OF_AGENT), ("hello", OF_LAUNCHER), ("nonsense", OF_AGENT)):
        with pytest.raises(ProtocolError, match="unknown message kind"):
            unpack_message(kind, [msgpack.packb({})], known)
    with pytest.raises(ProtocolError):
        unpack_message("ping", [b"\xc1"], OF_AGENT)
    with pytest.raises(ProtocolError):
        unpack_message("ping", [b"\x80", b"\x80"], OF_AGENT)


def test_a_folder_with_files_of_others_is_refused_and_they_stay(tmp_path: Path):
    """Somebody's home, for instance, with keys of theirs."""
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "id_rsa").write_text("mine")
    key = KeyRing(tmp_path / "key").of("a")
    agent = HostAgent("tcp://127.0.0.1:1", key, "a", tmp_path, patience_s=0.1, prepare=False)
    with pytest.raises(
        ClusterError, match=rf"--folder {tmp_path}: it contains files of something else"
    ):
        agent.run()
    assert (tmp_path / "keys" / "id_rsa").read_text() == "mine"
    agent._context.destroy(0)


def test_two_agents_do_not_share_a_folder_and_one_may_have_it_after_the_other(tmp_path: Path):
    """One would remove the other's keys when its run is over."""
    folder = tmp_path / "host"
    with lock_folder(folder):
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "keys").mkdir()
        with (
            pytest.raises(ClusterError, match="another host agent uses it; give this"),
            lock_folder(folder),
        ):
            pass
    with lock_folder(folder):
        pass


def test_a_temporary_folder_goes_with_its_agent_and_those_of_killed_agents_with_the_next(
    tmp_path: Path, monkeypatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed = tmp_path / f"{PREFIX}killed"
    strange = tmp_path / f"{PREFIX}strange"
    for folder in (killed, strange):
        (folder / "carried").mkdir(parents=True)
    (killed / MARK).touch()
    with (
        create_temporary_folder() as running,
        lock_folder(running),
        create_temporary_folder() as other,
    ):
        assert running.exists() and other.exists() and not killed.exists()
    assert [*tmp_path.iterdir()] == [strange], "who has no mark is no agent's"


class Wire:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[object] = []

    def send_multipart(self, frames: list[bytes], *_: object) -> None:
        self.sent.append(unpack_message(unpack_header(frames[0])["kind"], frames[1:], OF_AGENT))


def test_workers_wait_for_imports_and_one_that_is_not_wanted_any_more_never_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    agent, wire, started = (
        HostAgent("tcp://127.0.0.1:1", KeyRing(tmp_path / "key").of("a"), "a", tmp_path),
        Wire(),
        [],
    )
    importing = True

    def start(spec: WorkerSpec) -> None:
        started.append(spec.name)

    monkeypatch.setattr(agent._prepared, "is_importing", lambda: importing)
    monkeypatch.setattr(agent._local, "start", start)
    for name in ("generation/0", "rollout_worker/0"):
        agent._dispatch(wire, StartWorker(name, "m", [], str(tmp_path / "log"), False, 0, None))  # pyright: ignore
    assert not started
    agent._dispatch(wire, EndWorker("generation/0", 1.0))  # pyright: ignore
    assert wire.sent == [Exited("generation/0", -signal.SIGTERM, str(tmp_path / "log"), 0, b"")]
    importing = False
    agent._start_waiting(wire)  # pyright: ignore
    agent._start_waiting(wire)  # pyright: ignore
    assert started == ["rollout_worker/0"]


@pytest.mark.parametrize("logged", [b"", b"a line\n" * TAIL_BYTES, b"FATAL: the cause\n"])
def test_the_cause_that_a_full_disk_kept_out_of_the_log_is_sent_with_its_end(
    tmp_path: Path, logged: bytes
):
    agent = HostAgent("tcp://127.0.0.1:1", KeyRing(tmp_path / "key").of("a"), "a", tmp_path)
    wire = Wire()
    log = tmp_path / "log"
    log.write_bytes(logged)
    agent._report(wire, [WorkerExit("w", 1, log, 0, last_words="the cause")])  # pyright: ignore
    (sent,) = wire.sent
    assert isinstance(sent, Exited) and find_fatal_line(sent.tail) == "the cause"
    assert sent.tail.count(b"FATAL") == 1 and len(sent.tail) <= TAIL_BYTES
    agent._context.destroy(0)
