"""Connects a consumer to the data plane of one peer."""

from __future__ import annotations

import threading
import time
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from realhf.transport.envelope import field, unpack_header
from realhf.transport.errors import FetchTimeout, NetworkError, PeerLost
from realhf.transport.network.handshake import FAILED, refusal
from realhf.transport.network.network import LOOPBACK, Network
from realhf.transport.network.sockets import dealer

CONNECT_TIMEOUT_S = 8.0
"""How long a peer may take to accept a connection."""


class PeerConnection:
    """Sends requests to one endpoint, one at a time. The socket's own event stream reports when the peer is gone, so a
    dead peer ends a request at once instead of at its deadline. After an error the connection is ``broken``."""

    def __init__(self, context: zmq.Context[Any], endpoint: str, network: Network = LOOPBACK) -> None:
        self._endpoint = endpoint
        self._lock = threading.Lock()
        self._socket = dealer(context, most_bytes=1 << 30)
        self._socket.setsockopt(zmq.RCVHWM, 4)
        # A peer listens before anyone learns its endpoint, so a refused connection (closed) means a dead peer too.
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | FAILED
        )
        try:
            network.connect(self._socket, endpoint)
        except NetworkError:
            self._end()
            raise
        self._connected = False
        self.broken = False

    def exchange(self, request_id: bytes, message: list[bytes], deadline: float) -> list[Any]:
        """Send a message and wait for the answer: header frame and payload frames, as buffers. Raises PeerLost or
        FetchTimeout."""
        if not self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise FetchTimeout(f"{self._endpoint} was busy with another fetch until the deadline")
        try:
            if self.broken:
                raise PeerLost(f"{self._endpoint} closed the connection")
            self._socket.send_multipart(message)
            return self._receive(request_id, deadline)
        except BaseException:
            self.broken = True
            raise
        finally:
            self._lock.release()

    def _receive(self, request_id: bytes, deadline: float) -> list[Any]:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        started = time.monotonic()
        connect_by = min(deadline, started + CONNECT_TIMEOUT_S)
        while True:
            limit = deadline if self._connected else connect_by
            ready = dict(poller.poll(int(max(0.0, limit - time.monotonic()) * 1000)))
            if self._socket in ready:
                frames = [frame.buffer for frame in self._socket.recv_multipart(copy=False)]
                if field(unpack_header(frames[0]), "id", bytes) == request_id:
                    return frames
            elif self._monitor in ready:
                event = recv_monitor_message(self._monitor)
                if event["event"] != zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    why = refusal(event["event"], event["value"]) or "refused or closed the connection"
                    raise PeerLost(f"{self._endpoint} {why}")
                self._connected = True
            elif not self._connected and time.monotonic() < deadline:
                raise PeerLost(f"{self._endpoint} did not accept a connection within {CONNECT_TIMEOUT_S:g} s")
            elif time.monotonic() >= limit:
                waited = time.monotonic() - started
                raise FetchTimeout(f"{self._endpoint} did not answer a fetch within {waited:.1f} s")

    def close(self) -> None:
        """Close the connection after waiting for a request in flight."""
        with self._lock:
            self.broken = True
            self._end()

    def _end(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)
