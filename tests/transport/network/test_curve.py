"""Strangers who hold connections of a listener and never show a key."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from realhf.transport.network import Network, RunKeys

GREETING = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0CURVE" + bytes(47)
LIMIT = 256
STRANGERS = 400
WAIT_S = 60.0
LISTENER = f"""
import json, os, resource, sys, time
from pathlib import Path
import zmq
from realhf.transport.network import RunKeys
from realhf.transport.network import Network

resource.setrlimit(resource.RLIMIT_NOFILE, ({LIMIT}, {LIMIT}))
network = Network(keys=RunKeys.read(Path(sys.argv[1])))
router = network.context().socket(zmq.ROUTER)
print(network.listen(router), flush=True)
while True:
    sender, _ = router.recv_multipart()
    began, cpu = time.monotonic(), time.process_time()
    time.sleep(0.3)
    cpu = (time.process_time() - cpu) / (time.monotonic() - began)
    try:
        held = len(os.listdir("/proc/self/fd"))
    except OSError as error:
        held = {LIMIT}
    router.send_multipart([sender, json.dumps([held, cpu]).encode()])
"""


@contextlib.contextmanager
def listener(folder: Path) -> Iterator[tuple[Network, str]]:
    """A process that listens, with few descriptors; a network that reaches it, and its endpoint."""
    keys = RunKeys.make()
    keys.write(folder / "keys")
    with subprocess.Popen(
        [sys.executable, "-c", LISTENER, str(folder / "keys")], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        try:
            yield Network(keys=keys), process.stdout.readline().decode().strip()
        finally:
            process.kill()


def asked(context: zmq.Context, network: Network, endpoint: str) -> tuple[int, float]:
    """The answer of the listener to a friend who has just come: how many descriptors it holds, and
    how busy it is."""
    with context.socket(zmq.DEALER) as friend:
        friend.setsockopt(zmq.LINGER, 0)
        network.connect(friend, endpoint)
        friend.send(b"well?")
        assert friend.poll(int(WAIT_S * 1000)), "a friend finds no way in"
        held, cpu = json.loads(friend.recv())
        return held, cpu


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    "first_words",
    [b"", b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0CURVE" + bytes(47)],
    ids=["silent", "greet"],
)
def test_strangers_leave_descriptors_and_a_way_in_for_friends(tmp_path: Path, first_words: bytes):
    """They used to take all descriptors of the master in seconds, after which it ended, or a core
    of it span. Friends who came before the strangers stay."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 2 * STRANGERS), hard), hard))
    held: list[socket.socket] = []
    with (
        listener(tmp_path) as (network, endpoint),
        zmq.Context() as context,
        contextlib.ExitStack() as stack,
    ):
        port = int(endpoint.rpartition(":")[2])
        early = stack.enter_context(context.socket(zmq.DEALER))
        early.setsockopt(zmq.LINGER, 0)
        network.connect(early, endpoint)
        early.send(b"first")
        assert early.poll(int(WAIT_S * 1000)) and early.recv()
        broken = early.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        try:
            for _ in range(STRANGERS):
                held.append(socket.create_connection(("127.0.0.1", port), timeout=WAIT_S))
                held[-1].sendall(first_words)
            deadline = time.monotonic() + WAIT_S
            while (seen := asked(context, network, endpoint))[
                0
            ] > LIMIT // 2 and time.monotonic() < deadline:
                pass
            assert seen[0] <= LIMIT // 2 and seen[1] < 0.5, seen
            early.send(b"still here")
            assert early.poll(int(WAIT_S * 1000)) and not broken.poll(0), (
                "a friend was taken for a stranger"
            )
        finally:
            early.disable_monitor()
            for connection in held:
                connection.close()
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
