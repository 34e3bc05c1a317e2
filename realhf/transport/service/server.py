"""Answers requests of many clients to one process, in any order: admission at the master, tokens at a generation
worker.

``realhf.transport.rpc.master`` goes the other way, it calls; see docs/reference/dataflow.md 6 and 9. A message is a
header (``kind`` request, ``id`` of the client's choice, ``method``) and one msgpack payload.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq

from realhf.transport import envelope
from realhf.transport.envelope import pack_header, pack_payload, unpack_payload
from realhf.transport.errors import ProtocolError, TransportError
from realhf.transport.inbox import take_all
from realhf.transport.network.network import LOOPBACK, Network
from realhf.transport.waker import Waker

_log = logging.getLogger(__name__)
_CLOSE_S = 5.0
LINGER_MS = 500


class Request:
    """Is one request. Answer it once, with ``reply`` or ``fail``, from any thread unless the server's docstring says
    otherwise. Answering a client that has gone is not an error."""

    def __init__(
        self, server: ServiceListener, identity: bytes, number: int, client: str, method: str, payload: Any
    ) -> None:
        self.client, self.method, self.payload = client, method, payload
        self._server, self._identity, self._number = server, identity, number

    def reply(self, value: Any) -> None:
        """Send ``value`` (msgpack-able) as the answer."""
        self._server.send(self._identity, "reply", self._number, value)

    def fail(self, error: BaseException) -> None:
        """Answer with the type of an error and its message, up to 10 000 characters."""
        self._server.send(
            self._identity, "error", self._number, {"type": type(error).__name__, "message": str(error)[:10_000]}
        )


class ServiceListener:
    """Holds what all servers share: a socket of ``network`` and the reading of messages. ``handle`` receives every
    request of this run; what it raises goes to the client."""

    def __init__(self, name: str, run_id: str, handle: Callable[[Request], None], bind: str, network: Network) -> None:
        self._name, self._run_id, self._handle = name, run_id, handle
        self._context = network.context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._socket.setsockopt(zmq.SNDHWM, envelope.HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.RCVHWM, envelope.HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.MAXMSGSIZE, envelope.MAX_PAYLOAD_BYTES)
        try:
            self.endpoint = network.listen(self._socket, bind)
        except TransportError:
            self._context.destroy(0)
            raise
        self.dropped_messages = 0

    def send(self, identity: bytes, kind: str, number: int, value: Any) -> None:
        """Send an answer."""
        raise NotImplementedError

    def _answer(self, identity: bytes, kind: str, number: int, value: Any) -> list[bytes]:
        """Return the frames of an answer."""
        try:
            payload = pack_payload(value)
        except ProtocolError as error:
            kind, payload = "error", pack_payload({"type": "ProtocolError", "message": str(error)})
        return [identity, pack_header(kind, self._run_id, b"", id=number), payload]

    def _receive_all(self) -> None:
        take_all(self._socket, self._accept, self._drop)

    def _drop(self, why: str) -> None:
        self.dropped_messages += 1
        _log.warning("service %s dropped a message: %s", self._name, why)

    def _accept(self, identity: bytes, header: dict[str, Any], payload: list[bytes]) -> None:
        number = envelope.field(header, "id", int)
        if header.get("run") != self._run_id:
            text = f"this is run {self._run_id!r}, the request is of run {header.get('run')!r}"
            self.send(identity, "error", number, {"type": "ProtocolError", "message": text})
            return
        request = Request(
            self,
            identity,
            number,
            envelope.field(header, "client", str),
            envelope.field(header, "method", str),
            unpack_payload(payload),
        )
        try:
            self._handle(request)
        except Exception as error:
            request.fail(error)


class ServiceServer(ServiceListener):
    """Listens in ``network``; ``handle(request)`` runs on the server's thread and must not wait. ``failure`` holds why
    the thread ended, if it did."""

    def __init__(
        self,
        name: str,
        run_id: str,
        handle: Callable[[Request], None],
        *,
        bind: str = "",
        network: Network = LOOPBACK,
    ) -> None:
        super().__init__(name, run_id, handle, bind, network)
        self.failure: BaseException | None = None
        self._answers: deque[list[bytes]] = deque()
        self._waker = Waker()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"service {name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening; answers given before are still sent."""
        self._closing = True
        self._waker.wake()
        self._thread.join(_CLOSE_S)
        self._waker.close()

    def send(self, identity: bytes, kind: str, number: int, value: Any) -> None:
        """Queue an answer. May be called from any thread."""
        self._answers.append(self._answer(identity, kind, number, value))
        if threading.current_thread() is not self._thread:
            self._waker.wake()

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            self.failure = error
            _log.exception("service %s ended", self._name)
        finally:
            self._context.destroy(LINGER_MS)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._waker.fileno(), zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._waker.fileno() in ready:
                self._waker.clear()
            self._receive_all()
            while self._answers:
                self._socket.send_multipart(self._answers.popleft())
            if self._closing:
                return
