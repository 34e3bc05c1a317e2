"""Sends requests to a ``ServiceServer``, many at once, from one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import Any, TypeVar

import zmq
from zmq.utils.monitor import recv_monitor_message

from realhf.base.messages import Call, Message
from realhf.transport import envelope
from realhf.transport.envelope import pack_header, pack_payload, unpack_header, unpack_payload
from realhf.transport.errors import NetworkError, PeerLost, ProtocolError, RpcTimeout, TransportError
from realhf.transport.network.handshake import FAILED, REACHED_WITHIN_S, refusal, unreached
from realhf.transport.network.network import LOOPBACK, Network

Q = TypeVar("Q", bound=Message)
A = TypeVar("A", bound=Message)


class ServiceError(TransportError):
    """Is raised when the server refused or failed; ``kind`` is the type of its error."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


class ServiceClient:
    """Sends requests to one server. It belongs to the running loop.

    ``peer`` names the server in messages, ``client`` names this process to the server. When the server dies, its
    requests fail at once with PeerLost, and so do later ones: make a new client for its successor. The same holds for
    a server that refuses the keys of ``network``, or on another host is not reached within ``REACHED_WITHIN_S``.
    """

    def __init__(self, endpoint: str, peer: str, client: str, run_id: str, network: Network = LOOPBACK) -> None:
        self.endpoint, self._peer, self._client, self._run_id = endpoint, peer, client, run_id
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count(1)
        self.lost = False
        self._closed = self._reached = False
        self._why = ""
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, envelope.HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.RCVHWM, envelope.HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.MAXMSGSIZE, envelope.MAX_PAYLOAD_BYTES)
        # A server listens before anyone learns its endpoint, so a refused connection (closed) means a dead server too.
        watched = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
        if network.protected:
            watched |= FAILED | zmq.EVENT_CONNECTED
        self._monitor = self._socket.get_monitor_socket(watched)
        try:
            network.connect(self._socket, endpoint)
        except NetworkError:
            self._end()
            raise
        self._loop.add_reader(self._socket.FD, self._drain)
        self._loop.add_reader(self._monitor.FD, self._watch)
        self._loop.call_soon(self._watch)
        self._deadline = self._loop.call_later(REACHED_WITHIN_S, self._too_late) if network.protected else None

    async def request(self, method: str, payload: Any, *, timeout_s: float) -> Any:
        """Send a request and return the answer. Raises ServiceError with the server's own text, PeerLost or
        RpcTimeout."""
        if self.lost or self._closed:
            raise PeerLost(f"{self._peer} at {self.endpoint} {self._why or 'is gone'}")
        number = next(self._numbers)
        future: asyncio.Future[Any] = self._loop.create_future()
        self._waiting[number] = future
        header = pack_header("request", self._run_id, b"", id=number, method=method, client=self._client)
        try:
            self._socket.send_multipart([header, pack_payload(payload)], zmq.NOBLOCK)
            self._after_send()
            async with asyncio.timeout(timeout_s):
                return await future
        except zmq.Again:
            raise PeerLost(f"{self._peer} at {self.endpoint} takes no more requests") from None
        except TimeoutError:
            raise RpcTimeout(f"{self._peer} did not answer {method} within {timeout_s:g} s") from None
        finally:
            self._waiting.pop(number, None)

    async def ask(self, call: Call[Q, A], request: Q, *, timeout_s: float) -> A:
        """``request`` with a typed message and answer; raises MessageError for an answer of another form."""
        payload = call.pack(request)
        return call.unpack_answer(await self.request(call.name, payload, timeout_s=timeout_s), self._peer)

    def close(self) -> None:
        """Close the connection; requests in flight fail with PeerLost."""
        if self._closed:
            return
        self._closed = True
        self._fail_all("was closed here")
        if self._deadline is not None:
            self._deadline.cancel()
        self._loop.remove_reader(self._socket.FD)
        self._loop.remove_reader(self._monitor.FD)
        self._end()

    def _end(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)
        self._context.term()

    def _after_send(self) -> None:
        # Sending may consume the event by which the descriptor announces an incoming message.
        if self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:  # pyright: ignore[reportOperatorIssue]
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        while not self._closed:
            try:
                frame, *payload = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            with contextlib.suppress(ProtocolError):
                self._answer(unpack_header(frame), payload)

    def _answer(self, header: dict[str, Any], payload: list[bytes]) -> None:
        future = self._waiting.get(envelope.field(header, "id", int))
        if future is None or future.done():
            return
        value = unpack_payload(payload)
        if header["kind"] == "reply":
            future.set_result(value)
        else:
            future.set_exception(ServiceError(str(value["type"]), str(value["message"])))

    def _watch(self) -> None:
        while not self._closed:
            try:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
            except zmq.Again:
                return
            self._reached = True
            if event["event"] == zmq.EVENT_CONNECTED:
                continue
            self._why = self._why or refusal(event["event"], event["value"])
            self._drain()
            self._lose(self._why or "closed the connection")

    def _too_late(self) -> None:
        self._watch()
        if not self._reached:
            self._why = unreached()
            self._lose(self._why)

    def _lose(self, reason: str) -> None:
        self.lost = True
        self._fail_all(reason)

    def _fail_all(self, reason: str) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(PeerLost(f"{self._peer} at {self.endpoint} {reason}"))
