"""Request-reply service with one server process, many clients, and answers in any order.

For calls from the master to its workers see ``realhf.transport.rpc_master``
(docs/reference/dataflow.md 6 and 9). A message is a header (``kind`` request, ``id`` chosen by the
client, ``method``) and one msgpack payload.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

import zmq

from realhf.base import event_loops
from realhf.base.messages import Call, Message
from realhf.transport import envelope
from realhf.transport.envelope import pack_header, pack_payload, unpack_payload
from realhf.transport.errors import PeerLost, ProtocolError, RpcTimeout, TransportError
from realhf.transport.network import LOOPBACK, Network
from realhf.transport.sockets import Frame, Listener, LoopDealer, LoopListener


class ServiceRequest:
    """One request of a client.

    Answer it once, with ``reply`` or ``fail``, from any thread unless the server's docstring says
    otherwise. Answering a client that has disconnected is not an error.
    """

    def __init__(
        self, answer: Callable[[str, Any], None], header: dict[str, Any], payload: Any
    ) -> None:
        self.client = envelope.field(header, "client", str)
        self.method = envelope.field(header, "method", str)
        self.header = header
        self.payload = payload
        self._answer = answer

    def reply(self, value: Any) -> None:
        """Send ``value`` (any value that msgpack can encode) as the answer."""
        self._answer("reply", value)

    def fail(self, error: BaseException) -> None:
        """Answer with the type and message of an error, up to 10 000 characters."""
        self._answer("error", {"type": type(error).__name__, "message": str(error)[:10_000]})


class Requests:
    """Dispatcher of a listener's messages to a request handler.

    handle: Receives each request of run ``run_id``. send: Function (identity, header, payload) ->
    None that sends an answer. unpack: Decodes the payload frames.
    """

    def __init__(
        self,
        run_id: str,
        handle: Callable[[ServiceRequest], None],
        send: Callable[[bytes, bytes, bytes], None],
        *,
        unpack: Callable[[list[Any]], Any] = unpack_payload,
    ) -> None:
        self._run_id = run_id
        self._handle = handle
        self._send = send
        self._unpack = unpack

    def dispatch(self, identity: bytes, header: dict[str, Any], payload: list[Any]) -> None:
        """Pass a request to ``handle``, and answer with its exception if it raises.

        Raises ProtocolError for a malformed request.
        """
        number = envelope.field(header, "id", int)

        def answer(kind: str, value: Any) -> None:
            try:
                packed = pack_payload(value)
            except ProtocolError as error:
                kind = "error"
                packed = pack_payload({"type": "ProtocolError", "message": str(error)})
            self._send(identity, pack_header(kind, self._run_id, b"", id=number), packed)

        if header.get("run") != self._run_id:
            text = f"this is run {self._run_id!r}, the request is of run {header.get('run')!r}"
            answer("error", {"type": "ProtocolError", "message": text})
            return
        request = ServiceRequest(answer, header, self._unpack(payload))
        try:
            self._handle(request)
        except Exception as error:
            request.fail(error)


class ServiceServer(Listener):
    """Server with its own thread, on which ``handle(request)`` runs; ``handle`` must not block.

    ``failure`` is the exception that ended the thread, None if there was none.
    """

    def __init__(
        self,
        name: str,
        run_id: str,
        handle: Callable[[ServiceRequest], None],
        *,
        network: Network = LOOPBACK,
    ) -> None:
        requests = Requests(run_id, handle, self.send)
        super().__init__(name, network.context(), network.listen, requests.dispatch)
        self.start()


class LoopServiceServer(LoopListener):
    """Server on the running event loop. ``handle(request)`` runs on the loop, and every answer must
    be given on it."""

    def __init__(
        self,
        name: str,
        run_id: str,
        handle: Callable[[ServiceRequest], None],
        *,
        network: Network = LOOPBACK,
    ) -> None:
        requests = Requests(run_id, handle, self.send)
        super().__init__(name, network.context(), network.listen, requests.dispatch)


_GRACE_S = 5.0
"""Seconds that a BlockingServiceClient adds to a timeout, so that the client's own error comes
first."""
Q = TypeVar("Q", bound=Message)
A = TypeVar("A", bound=Message)


class ServiceError(TransportError):
    """Error: the server refused a request or failed; ``kind`` is the type name of its error."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


class ServiceClient:
    """Client of one server. Belongs to the running loop.

    peer: Name of the server in error messages. client: Name of this process for the server.

    When the server dies, its requests fail at once with PeerLost, and so do later ones: create a
    new client for its successor. The same applies to a server that refuses the keys of ``network``,
    and to one on another host that is not reached within ``REACHED_WITHIN_S``. A ``lasting`` client
    reconnects and repeats unanswered requests, so a server may receive a request twice.
    """

    def __init__(
        self,
        endpoint: str,
        peer: str,
        client: str,
        run_id: str,
        network: Network = LOOPBACK,
        *,
        lasting: bool = False,
    ) -> None:
        self.endpoint = endpoint
        self._peer = peer
        self._client = client
        self._run_id = run_id
        self._waiting: dict[int, tuple[asyncio.Future[Any], tuple[Frame, ...]]] = {}
        self._numbers = itertools.count(1)
        self.lost = False
        self._loss_reason = ""
        self._lasting = lasting
        self._dealer = LoopDealer(
            endpoint,
            network,
            self._answer,
            self._on_loss,
            connected=self._send_again if lasting else None,
        )

    def begin(self, method: str, *frames: Frame, **fields: Any) -> asyncio.Future[Any]:
        """Send a request; return a future for its answer.

        frames: The payload, which must not change before the answer. fields: Added to the header.
        The future fails with ServiceError or PeerLost. Raises PeerLost.
        """
        if self.lost or self._dealer.closed:
            raise PeerLost(f"{self._peer} at {self.endpoint} {self._loss_reason or 'is gone'}")
        number = next(self._numbers)
        header = pack_header(
            "request", self._run_id, b"", id=number, method=method, client=self._client, **fields
        )
        self._send(header, *frames)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda _: self._waiting.pop(number))
        self._waiting[number] = future, (header, *frames)
        return future

    def _send(self, *frames: Frame) -> None:
        try:
            self._dealer.send(*frames, copy=not self._lasting)
        except zmq.Again:
            if not self._lasting:  # a lasting client sends it on the next connection
                raise PeerLost(
                    f"{self._peer} at {self.endpoint} accepts no more requests"
                ) from None

    def _send_again(self) -> None:
        for future, frames in self._waiting.values():
            if not future.done():
                self._send(*frames)

    async def request(self, method: str, payload: Any, *, timeout_s: float) -> Any:
        """Send a request and return the answer. Raises ServiceError with the server's text,
        PeerLost or RpcTimeout."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self.begin(method, pack_payload(payload))
        except TimeoutError:
            raise RpcTimeout(
                f"{self._peer} did not answer {method} within {timeout_s:g} s"
            ) from None

    async def ask(self, call: Call[Q, A], request: Q, *, timeout_s: float) -> A:
        """Send a typed request and return the typed answer. Raises the errors of ``request``, and
        MessageError for a malformed answer."""
        payload = call.pack(request)
        return call.unpack_answer(
            await self.request(call.name, payload, timeout_s=timeout_s), self._peer
        )

    def close(self) -> None:
        """Close the connection; requests in flight fail with PeerLost."""
        if not self._dealer.closed:
            self._fail_all("was closed here")
            self._dealer.close()

    def _answer(self, header: dict[str, Any], payload: list[bytes]) -> None:
        future, _ = self._waiting.get(envelope.field(header, "id", int), (None, ()))
        if future is None or future.done():
            return
        value = unpack_payload(payload)
        if header.get("kind") == "reply":
            future.set_result(value)
        else:
            error = value if isinstance(value, dict) else {}
            future.set_exception(ServiceError(str(error.get("type")), str(error.get("message"))))

    def _on_loss(self, reason: str) -> None:
        self.lost = True
        self._loss_reason = self._loss_reason or reason
        self._fail_all(reason)

    def _fail_all(self, reason: str) -> None:
        for future, _ in self._waiting.values():
            if not future.done():
                future.set_exception(PeerLost(f"{self._peer} at {self.endpoint} {reason}"))


class BlockingServiceClient:
    """Thread-safe ``ServiceClient`` for blocking code, which runs its own event loop. It has the
    same arguments and errors."""

    def __init__(
        self, endpoint: str, peer: str, client: str, run_id: str, network: Network = LOOPBACK
    ) -> None:
        self._peer = peer
        self._lock = threading.Lock()
        self._closed = False
        self._loop = event_loops.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name=f"client of {peer}", daemon=True
        )
        self._thread.start()
        self._client = self._on_loop(
            self._create_client(endpoint, peer, client, run_id, network), _GRACE_S
        )

    def request(self, method: str, payload: Any, *, timeout_s: float) -> Any:
        """See ``ServiceClient.request``."""
        return self._on_loop(
            self._client.request(method, payload, timeout_s=timeout_s), timeout_s + _GRACE_S
        )

    def ask(self, call: Call[Q, A], request: Q, *, timeout_s: float) -> A:
        """See ``ServiceClient.ask``."""
        return self._on_loop(
            self._client.ask(call, request, timeout_s=timeout_s), timeout_s + _GRACE_S
        )

    def close(self) -> None:
        """Close the client; requests in flight fail with PeerLost."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            ended = asyncio.run_coroutine_threadsafe(self._shut_down(), self._loop)
        with contextlib.suppress(FutureTimeout):
            ended.result(_GRACE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_GRACE_S)
        if not self._thread.is_alive():
            self._loop.close()

    async def _shut_down(self) -> None:
        """Fail the requests in flight, and let their callers see the errors, before the loop
        stops."""
        self._client.close()
        requests = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*requests, return_exceptions=True)

    @staticmethod
    async def _create_client(
        endpoint: str, peer: str, client: str, run_id: str, network: Network
    ) -> ServiceClient:
        return ServiceClient(endpoint, peer, client, run_id, network)

    def _on_loop(self, coroutine: Any, timeout_s: float) -> Any:
        with self._lock:
            if self._closed:
                coroutine.close()
                raise PeerLost(f"the client of {self._peer} is closed")
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return event_loops.wait_for_future(future, timeout_s)
        except RpcTimeout:
            raise
        except FutureTimeout:
            raise RpcTimeout(f"{self._peer} did not answer within {timeout_s:g} s") from None
