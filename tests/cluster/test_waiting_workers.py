"""What an agent is asked to start while it imports for its workers waits, and can be taken back."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from realhf.cluster.agent import HostAgent
from realhf.cluster.messages import OF_AGENT, EndWorker, Exited, StartWorker, unpacked
from realhf.scheduler.base import WorkerSpec
from realhf.transport.envelope import unpack_header
from tests.cluster.key_ring import KeyRing


class Wire:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[object] = []

    def send_multipart(self, frames: list[bytes], *_: object) -> None:
        self.sent.append(unpacked(unpack_header(frames[0])["kind"], frames[1:], OF_AGENT))


def test_workers_wait_for_imports_and_one_that_is_not_wanted_any_more_never_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    agent, wire, started = HostAgent("tcp://127.0.0.1:1", KeyRing(tmp_path / "key").of("a"), "a", tmp_path), Wire(), []
    importing = True

    def start(spec: WorkerSpec) -> None:
        started.append(spec.name)

    monkeypatch.setattr(agent._prepared, "importing", lambda: importing)
    monkeypatch.setattr(agent._local, "start", start)
    for name in ("generation/0", "rollout_worker/0"):
        agent._do(wire, StartWorker(name, "m", [], str(tmp_path / "log"), False, 0, None))  # pyright: ignore
    assert not started
    agent._do(wire, EndWorker("generation/0", 1.0))  # pyright: ignore
    assert wire.sent == [Exited("generation/0", -signal.SIGTERM, str(tmp_path / "log"), 0, b"")]
    importing = False
    agent._start_waiting(wire)  # pyright: ignore
    agent._start_waiting(wire)  # pyright: ignore
    assert started == ["rollout_worker/0"]
