"""Serves weights to generation workers that share neither memory nor a folder with the trainer: the receiver asks for
pieces, and the sockets are those of the run, encrypted wherever they leave the loopback.

A version stays until it is retired. A receiver has few pieces on the way, so a slow one fills no memory here.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
import time
from typing import Any, cast

import msgpack
import numpy as np
import zmq

from realhf.api.generation import WeightsManifest
from realhf.transport.envelope import field, unpack_map
from realhf.transport.errors import NetworkError, ProtocolError
from realhf.transport.network.network import Network
from realhf.transport.waker import Waker
from realhf.transport.weights.deadline import staging_s, transfer_s
from realhf.transport.weights.errors import WeightsError, WeightsGone, WeightsTimeout
from realhf.transport.weights.flat_buffer import Buffer, checksum

_log = logging.getLogger(__name__)
PIECE_BYTES = 4 << 20
ON_THE_WAY = 4
"""Pieces that a receiver has asked for and not got yet."""
REQUEST_BYTES = 512
SEALED_BYTES = 1024
"""By at most so much encryption makes a message longer."""
LOST = zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_DISCONNECTED
"""What happens to the connection of a receiver whose publisher has ended."""


class WeightServer:
    """Listens with the keys of the run and answers with pieces of the versions that are there, on a thread of its
    own."""

    def __init__(self, network: Network) -> None:
        self._context = network.context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, REQUEST_BYTES + SEALED_BYTES)
        try:
            self.endpoint = network.listen(self._socket)
        except BaseException:
            self._context.destroy(0)
            raise
        self._buffers: dict[str, Buffer] = {}
        self._closing = False
        self._waker = Waker()
        self._thread = threading.Thread(target=self._run, name="weights", daemon=True)
        self._thread.start()

    def offer(self, buffer: Buffer) -> str:
        """Serve a buffer, which nobody may write to from now on; return the ticket for it."""
        ticket = secrets.token_hex(8)
        self._buffers[ticket] = buffer
        return ticket

    def withdraw(self, ticket: str) -> None:
        """Serve a buffer no longer. Pieces that are on their way arrive."""
        self._buffers.pop(ticket, None)

    def close(self) -> None:
        """Serve nothing more and release the port."""
        self._closing = True
        self._waker.wake()
        self._thread.join(5.0)
        self._context.destroy(0)
        self._waker.close()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._waker.fileno(), zmq.POLLIN)
        while not self._closing:
            if self._socket not in dict(poller.poll()):
                continue
            identity, *frames = self._socket.recv_multipart()
            try:
                head, data = self._piece(frames)
                self._socket.send_multipart([identity, head, data], zmq.NOBLOCK, copy=False)
            except ProtocolError as error:
                _log.warning("request for weights dropped: %s", error)
            except zmq.ZMQError as error:
                _log.debug("a piece of weights was not sent: %s", error)
        self._socket.close(0)

    def _piece(self, frames: list[bytes]) -> tuple[bytes, Any]:
        """Return the answer to a request. Raises ProtocolError for one that nobody of the run sends."""
        if len(frames) != 1:
            raise ProtocolError(f"{len(frames)} frames")
        asked = unpack_map(frames[0], REQUEST_BYTES)
        ticket, start = field(asked, "ticket", str), field(asked, "start", int)
        buffer = self._buffers.get(ticket)
        if buffer is None:
            return cast(bytes, msgpack.packb({"start": -1})), b""
        if not 0 <= start < len(buffer):
            raise ProtocolError(f"byte {start} of {len(buffer)}")
        piece = memoryview(cast(Any, buffer))[start : start + PIECE_BYTES]
        return cast(bytes, msgpack.packb({"start": start})), piece


class ServedVersion:
    """Owns one version's buffer at a server."""

    def __init__(self, server: WeightServer, buffer: Buffer) -> None:
        self.checksum = checksum(buffer)
        self._server, self._ticket = server, server.offer(buffer)
        self.location = f"{server.endpoint}#{self._ticket}"

    def close(self) -> None:
        """Free the buffer once nobody reads it."""
        self._server.withdraw(self._ticket)


def read_served(manifest: WeightsManifest, timeout_s: float, network: Network) -> Buffer:
    """Fetch the buffer of a manifest. Raises WeightsGone when its publisher has retired it, WeightsTimeout when nothing
    arrives for ``timeout_s`` or all of it takes too long, and WeightsError for an answer that is none."""
    endpoint, _, ticket = manifest.location.partition("#")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, PIECE_BYTES + SEALED_BYTES)
    monitor = socket.get_monitor_socket(LOST)
    try:
        network.connect(socket, endpoint)
        return _Visit(manifest, socket, monitor, ticket, timeout_s).read()
    except (NetworkError, zmq.ZMQError) as error:
        raise WeightsError(manifest, f"location {manifest.location!r:.80}: {error}") from None
    except ProtocolError as error:
        raise WeightsError(manifest, f"{endpoint} is not its publisher: {error}") from None
    finally:
        socket.disable_monitor()
        monitor.close(0)
        context.destroy(0)


class _Visit:
    """Is one fetch."""

    def __init__(
        self,
        manifest: WeightsManifest,
        socket: zmq.Socket[bytes],
        monitor: zmq.Socket[bytes],
        ticket: str,
        timeout_s: float,
    ) -> None:
        self._manifest, self._socket, self._ticket, self._silent_s = manifest, socket, ticket, timeout_s
        self._poller = zmq.Poller()
        for each in (socket, monitor):
            self._poller.register(each, zmq.POLLIN)
        self._buffer: Buffer = np.zeros(manifest.nbytes, dtype=np.uint8)
        self._asked: set[int] = set()

    def read(self) -> Buffer:
        """Ask for all pieces in turn, a few at a time."""
        whole_s = self._silent_s + max(staging_s(self._manifest.nbytes), transfer_s(self._manifest.nbytes))
        deadline = time.monotonic() + whole_s
        starts = iter(range(0, self._manifest.nbytes, PIECE_BYTES))
        for start in itertools.islice(starts, ON_THE_WAY):
            self._ask(start)
        while self._asked:
            left = min(self._silent_s, deadline - time.monotonic())
            ready = dict(self._poller.poll(int(1000 * max(left, 0.0))))
            if ready and self._socket not in ready:
                where = self._manifest.location.partition("#")[0]
                raise WeightsGone(self._manifest, f"nobody serves it at {where}, or the connection broke")
            if not ready:
                raise WeightsTimeout(
                    self._manifest,
                    f"{self._manifest.location.partition('#')[0]} sent nothing for {self._silent_s:g} s, or not "
                    f"everything within {whole_s:g} s",
                )
            self._take(self._socket.recv_multipart(copy=False))
            if (start := next(starts, None)) is not None:
                self._ask(start)
        return self._buffer

    def _ask(self, start: int) -> None:
        self._asked.add(start)
        self._socket.send(cast(bytes, msgpack.packb({"ticket": self._ticket, "start": start})))

    def _take(self, frames: list[Any]) -> None:
        if len(frames) != 2:
            raise ProtocolError(f"{len(frames)} frames in an answer")
        start = field(unpack_map(frames[0].buffer, REQUEST_BYTES), "start", int)
        if start == -1:
            raise WeightsGone(self._manifest, "its publisher serves it no more")
        piece = frames[1].buffer
        if start not in self._asked or piece.nbytes != min(PIECE_BYTES, self._manifest.nbytes - start):
            raise ProtocolError(f"a piece of {piece.nbytes} bytes at {start}, which was not asked for")
        self._asked.discard(start)
        self._buffer[start : start + piece.nbytes] = np.frombuffer(piece, dtype=np.uint8)
