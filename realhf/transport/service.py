"""Answers requests of many clients to one process in any order, and sends such requests.

``realhf.transport.rpc_master`` goes the other way, it calls; see docs/reference/dataflow.md 6 and 9. A message is a
header (``kind`` request, ``id`` of the client's choice, ``method``) and one msgpack payload.
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


class Request:
    """Is one request. Answer it once, with ``reply`` or ``fail``, from any thread unless the server's docstring says
    otherwise. Answering a client that has gone is not an error."""

    def __init__(self, answer: Callable[[str, Any], None], header: dict[str, Any], payload: Any) -> None:
        self.client, self.method = (envelope.field(header, name, str) for name in ("client", "method"))
        self.header, self.payload, self._answer = header, payload, answer

    def reply(self, value: Any) -> None:
        """Send ``value`` (msgpack-able) as the answer."""
        self._answer("reply", value)

    def fail(self, error: BaseException) -> None:
        """Answer with the type of an error and its message, up to 10 000 characters."""
        self._answer("error", {"type": type(error).__name__, "message": str(error)[:10_000]})


class Requests:
    """Reads requests of run ``run_id`` for ``handle``, their payload by ``unpack``; sends the answers by ``send``."""

    def __init__(
        self,
        run_id: str,
        handle: Callable[[Request], None],
        send: Callable[[bytes, bytes, bytes], None],
        *,
        unpack: Callable[[list[Any]], Any] = unpack_payload,
    ) -> None:
        self._run_id, self._handle, self._send, self._unpack = run_id, handle, send, unpack

    def take(self, identity: bytes, header: dict[str, Any], payload: list[Any]) -> None:
        """Hand on a request; what ``handle`` raises goes to the client. Raises ProtocolError for what is none."""
        number = envelope.field(header, "id", int)

        def answer(kind: str, value: Any) -> None:
            try:
                packed = pack_payload(value)
            except ProtocolError as error:
                kind, packed = "error", pack_payload({"type": "ProtocolError", "message": str(error)})
            self._send(identity, pack_header(kind, self._run_id, b"", id=number), packed)

        if header.get("run") != self._run_id:
            text = f"this is run {self._run_id!r}, the request is of run {header.get('run')!r}"
            answer("error", {"type": "ProtocolError", "message": text})
            return
        request = Request(answer, header, self._unpack(payload))
        try:
            self._handle(request)
        except Exception as error:
            request.fail(error)


class ServiceServer(Listener):
    """Listens in ``network``; ``handle(request)`` runs on the server's thread and must not wait. ``failure`` holds why
    the thread ended, if it did."""

    def __init__(
        self, name: str, run_id: str, handle: Callable[[Request], None], *, network: Network = LOOPBACK
    ) -> None:
        requests = Requests(run_id, handle, self.send)
        super().__init__(name, network.context(), network.listen, requests.take)
        self.start()


class LoopServiceServer(LoopListener):
    """Belongs to the running loop: ``handle(request)`` is called on it, and every answer must be given on it."""

    def __init__(
        self, name: str, run_id: str, handle: Callable[[Request], None], *, network: Network = LOOPBACK
    ) -> None:
        requests = Requests(run_id, handle, self.send)
        super().__init__(name, network.context(), network.listen, requests.take)


_GRACE_S = 5.0
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
    A ``lasting`` client connects again, and sends what is not answered again: a server may get a request twice.
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
        self.endpoint, self._peer, self._client, self._run_id = endpoint, peer, client, run_id
        self._waiting: dict[int, tuple[asyncio.Future[Any], tuple[Frame, ...]]] = {}
        self._numbers = itertools.count(1)
        self.lost = False
        self._why = ""
        self._lasting = lasting
        self._dealer = LoopDealer(
            endpoint, network, self._answer, self._lose, connected=self._send_again if lasting else None
        )

    def begin(self, method: str, *frames: Frame, **fields: Any) -> asyncio.Future[Any]:
        """Send a request whose payload are these frames, which must not change before its answer; ``fields`` stand in
        its header. The future has the answer, or fails with ServiceError or PeerLost. Raises PeerLost."""
        if self.lost or self._dealer.closed:
            raise PeerLost(f"{self._peer} at {self.endpoint} {self._why or 'is gone'}")
        number = next(self._numbers)
        header = pack_header("request", self._run_id, b"", id=number, method=method, client=self._client, **fields)
        self._send(header, *frames)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda _: self._waiting.pop(number))
        self._waiting[number] = future, (header, *frames)
        return future

    def _send(self, *frames: Frame) -> None:
        try:
            self._dealer.send(*frames, copy=not self._lasting)
        except zmq.Again:
            if not self._lasting:  # else the next connection takes it
                raise PeerLost(f"{self._peer} at {self.endpoint} takes no more requests") from None

    def _send_again(self) -> None:
        for future, frames in self._waiting.values():
            if not future.done():
                self._send(*frames)

    async def request(self, method: str, payload: Any, *, timeout_s: float) -> Any:
        """Send a request and return the answer. Raises ServiceError with the server's own text, PeerLost or
        RpcTimeout."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self.begin(method, pack_payload(payload))
        except TimeoutError:
            raise RpcTimeout(f"{self._peer} did not answer {method} within {timeout_s:g} s") from None

    async def ask(self, call: Call[Q, A], request: Q, *, timeout_s: float) -> A:
        """``request`` with a typed message and answer; raises MessageError for an answer of another form."""
        payload = call.pack(request)
        return call.unpack_answer(await self.request(call.name, payload, timeout_s=timeout_s), self._peer)

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
            told = value if isinstance(value, dict) else {}
            future.set_exception(ServiceError(str(told.get("type")), str(told.get("message"))))

    def _lose(self, reason: str) -> None:
        self.lost, self._why = True, self._why or reason
        self._fail_all(reason)

    def _fail_all(self, reason: str) -> None:
        for future, _ in self._waiting.values():
            if not future.done():
                future.set_exception(PeerLost(f"{self._peer} at {self.endpoint} {reason}"))


class BlockingServiceClient:
    """Is a ``ServiceClient`` with an event loop of its own, for code that blocks: the same arguments, the same errors;
    any thread may use it."""

    def __init__(self, endpoint: str, peer: str, client: str, run_id: str, network: Network = LOOPBACK) -> None:
        self._peer = peer
        self._lock = threading.Lock()
        self._closed = False
        self._loop = event_loops.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"client of {peer}", daemon=True)
        self._thread.start()
        self._client = self._on_loop(self._make(endpoint, peer, client, run_id, network), _GRACE_S)

    def request(self, method: str, payload: Any, *, timeout_s: float) -> Any:
        """See ``ServiceClient.request``."""
        return self._on_loop(self._client.request(method, payload, timeout_s=timeout_s), timeout_s + _GRACE_S)

    def ask(self, call: Call[Q, A], request: Q, *, timeout_s: float) -> A:
        """See ``ServiceClient.ask``."""
        return self._on_loop(self._client.ask(call, request, timeout_s=timeout_s), timeout_s + _GRACE_S)

    def close(self) -> None:
        """Close the client; requests in flight fail with PeerLost."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            ended = asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        with contextlib.suppress(FutureTimeout):
            ended.result(_GRACE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_GRACE_S)
        if not self._thread.is_alive():
            self._loop.close()

    async def _end(self) -> None:
        """End the requests, and let their callers learn of it, before the loop stops."""
        self._client.close()
        requests = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*requests, return_exceptions=True)

    @staticmethod
    async def _make(endpoint: str, peer: str, client: str, run_id: str, network: Network) -> ServiceClient:
        return ServiceClient(endpoint, peer, client, run_id, network)

    def _on_loop(self, coroutine: Any, timeout_s: float) -> Any:
        with self._lock:
            if self._closed:
                coroutine.close()
                raise PeerLost(f"the client of {self._peer} is closed")
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return event_loops.result(future, timeout_s)
        except RpcTimeout:
            raise
        except FutureTimeout:
            raise RpcTimeout(f"{self._peer} did not answer within {timeout_s:g} s") from None
