"""Weights between processes, some of which are killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from realhf.api.generation import WeightsManifest
from realhf.base.messages import from_payload, to_payload
from realhf.transport.weights import Medium, WeightPublisher, WeightsGone, receive
from tests.transport.shared_segments import named_segments
from tests.transport.weights.weights_process import values

pytestmark = pytest.mark.slow

torch.set_num_threads(1)
SCRIPT = str(Path(__file__).with_name("weights_process.py"))
MEDIA: list[Medium] = ["shm", "disk", "fetch"]


class Peer:
    """Another process."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(60)
        self._pid = struct.unpack(
            "iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        )[0]
        self._lines = connection.makefile("rw")

    def tell(self, *command: Any) -> None:
        self._lines.write(json.dumps(command) + "\n")
        self._lines.flush()

    def answer(self) -> Any:
        return json.loads(self._lines.readline())

    def ask(self, *command: Any) -> Any:
        self.tell(*command)
        return self.answer()

    def wait_dead(self) -> None:
        assert self._lines.readline() == ""

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        self.wait_dead()

    def end(self) -> None:
        self._lines.close()


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Peer]]:
    """Two processes, one of them to be killed."""
    path = str(tmp_path_factory.mktemp("crowd") / "socket")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        listener.settimeout(60)
        mother = subprocess.Popen([sys.executable, SCRIPT, path], stdin=subprocess.PIPE, text=True)
        assert mother.stdin is not None
        mother.stdin.write("\n" * 2)
        mother.stdin.flush()
        peers = [Peer(listener.accept()[0]) for _ in range(2)]
    yield peers
    for peer in peers:
        with contextlib.suppress(BrokenPipeError):
            peer.end()
    mother.stdin.close()
    assert mother.wait(timeout=300) == 0


@pytest.mark.parametrize("medium", MEDIA)
def test_weights_reach_another_process(medium: Medium, crowd: list[Peer], tmp_path: Path) -> None:
    publisher = WeightPublisher("run", "model_worker/0", tmp_path, medium)
    for version in (1, 2):
        assert (
            crowd[0].ask("take", to_payload(publisher.publish(version, values(version)))) == "same"
        )
    gone = to_payload(publisher.publish(3, values(3)))
    publisher.close()
    assert crowd[0].ask("take", gone).startswith(f"WeightsGone: weights version 3 by {medium}")


@pytest.mark.nightly
@pytest.mark.parametrize("medium", ["shm", "disk"])
def test_a_receiver_reads_to_the_end_what_is_retired_meanwhile(
    medium: Medium, tmp_path: Path
) -> None:
    from realhf.transport.weights import read_memory_file, read_weight_file, unpack

    publisher = WeightPublisher("run", "model_worker/0", tmp_path, medium)
    manifest = publisher.publish(1, values(1))
    buffer = (read_memory_file if medium == "shm" else read_weight_file)(manifest)
    publisher.close()
    assert all(
        torch.equal(tensor, values(1)[name]) for name, tensor in unpack(manifest, buffer).items()
    )


@pytest.mark.nightly
def test_a_killed_publisher_leaves_nothing_that_its_successor_does_not_remove(
    crowd: list[Peer], tmp_path: Path
) -> None:
    shared = named_segments()
    manifests = {}
    for medium in MEDIA:
        manifests[medium] = from_payload(
            WeightsManifest, crowd[1].ask("publish", medium, str(tmp_path), 4)
        )
        assert torch.equal(receive(manifests[medium], 60.0)["layer.0"], values(4)["layer.0"])
    other = WeightPublisher("run", "model_worker/1", tmp_path, "disk")
    other.publish(1, values(1))
    assert len(list(tmp_path.iterdir())) == 2
    (tmp_path / "notes.txt").write_text("not ours")
    (tmp_path / f"{Path(manifests['disk'].location).name}.partial").write_text("half")
    crowd[1].kill()
    for medium in ("shm", "fetch"):
        with pytest.raises(WeightsGone, match=f"version 4 by {medium}"):
            receive(manifests[medium], 60.0)
    receive(manifests["disk"], 60.0)
    successor = WeightPublisher("run", "model_worker/0", tmp_path, "disk")
    with pytest.raises(WeightsGone, match="version 4 by disk"):
        receive(manifests["disk"], 60.0)
    assert other.latest is not None and torch.equal(
        receive(other.latest, 60.0)["layer.0"], values(1)["layer.0"]
    )
    other.close()
    successor.close()
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    assert named_segments() == shared
