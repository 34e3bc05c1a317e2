"""Sends the first message of a connection and waits for the answer."""

from __future__ import annotations

import time

import zmq

from realhf.transport.errors import NetworkError, RpcTimeout
from realhf.transport.network.handshake import REACHED_WITHIN_S, HandshakeWatch, unreached
from realhf.transport.network.network import Network


def greeted(
    network: Network, socket: zmq.Socket[bytes], endpoint: str, hello: bytes, name: str, timeout_s: float
) -> list[bytes]:
    """Connect ``socket`` to the master, send ``hello`` for the worker ``name`` and return the frames of the answer.
    Raises RpcTimeout when there is none within ``timeout_s``, and in a network with keys NetworkError as soon as the
    master refuses them, or when it was not reached within ``REACHED_WITHIN_S``."""
    watch = HandshakeWatch(socket) if network.protected else None
    try:
        network.connect(socket, endpoint)
        socket.send(hello)
        if not _arrives(socket, watch, endpoint, name, timeout_s):
            why = f": {watch.why}" if watch is not None and watch.why else ""
            raise RpcTimeout(f"the master at {endpoint} did not answer worker {name!r} within {timeout_s:g} s{why}")
        return socket.recv_multipart()
    except (RpcTimeout, NetworkError):
        socket.setsockopt(zmq.LINGER, 0)
        raise
    finally:
        if watch is not None:
            watch.close()


def _arrives(
    socket: zmq.Socket[bytes], watch: HandshakeWatch | None, endpoint: str, name: str, timeout_s: float
) -> bool:
    """Wait for the answer; return whether it is there."""
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    if watch is None:
        return bool(poller.poll(int(timeout_s * 1000)))
    poller.register(watch.monitor, zmq.POLLIN)
    began = time.monotonic()
    while (waited := time.monotonic() - began) < timeout_s:
        limit_s = timeout_s if watch.reached else min(timeout_s, REACHED_WITHIN_S)
        if socket in dict(poller.poll(max(1, int(1000 * (limit_s - waited))))):
            return True
        watch.look()
        if watch.refused:
            raise NetworkError(f"worker {name!r}: the master at {endpoint} {watch.refused}")
        if not watch.reached and time.monotonic() - began >= REACHED_WITHIN_S:
            raise NetworkError(f"worker {name!r}: the master at {endpoint} {unreached()}")
    return False
