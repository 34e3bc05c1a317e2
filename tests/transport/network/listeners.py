"""Who listens in a network, and whether they take somebody without a key."""

from __future__ import annotations

from pathlib import Path

import zmq
from zmq.utils.monitor import recv_monitor_message

from realhf.transport.sockets import FAILED

ANSWERS_WITHIN_S = 20.0
LISTENS = "0A"
"""State of a TCP socket in /proc/net/tcp."""


def listeners(process: str) -> dict[int, str]:
    """Ports on which anybody listens in the network of a process of /proc, with their addresses."""
    found = {}
    for line in Path(f"/proc/{process}/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, *_ = line.split()
        if state == LISTENS:
            host, port = local.split(":")
            found[int(port, 16)] = ".".join(str(part) for part in reversed(bytes.fromhex(host)))
    assert f" {LISTENS} " not in Path(f"/proc/{process}/net/tcp6").read_text()
    return found


def takes_a_stranger(address: str, port: int) -> bool:
    """Whether a ZeroMQ listener shakes hands with somebody who has no key. Raises TimeoutError when
    it says neither."""
    context = zmq.Context()
    client = context.socket(zmq.DEALER)
    client.setsockopt(zmq.LINGER, 0)
    monitor = client.get_monitor_socket(FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
    try:
        client.connect(f"tcp://{address}:{port}")
        if not monitor.poll(int(ANSWERS_WITHIN_S * 1000)):
            raise TimeoutError(f"{address}:{port} says nothing")
        return recv_monitor_message(monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
    finally:
        client.disable_monitor()
        context.destroy(0)
