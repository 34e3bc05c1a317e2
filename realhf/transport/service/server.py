"""Answers requests of many clients to one process, in any order: admission at the master, tokens at a generation
worker.

``realhf.transport.rpc.master`` goes the other way, it calls; see docs/reference/dataflow.md 6 and 9. A message is a
header (``kind`` request, ``id`` of the client's choice, ``method``) and one msgpack payload.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from realhf.transport import envelope
from realhf.transport.envelope import pack_header, pack_payload, unpack_payload
from realhf.transport.errors import ProtocolError
from realhf.transport.network.network import LOOPBACK, Network
from realhf.transport.network.sockets import Listener, LoopListener


class Request:
    """Is one request. Answer it once, with ``reply`` or ``fail``, from any thread unless the server's docstring says
    otherwise. Answering a client that has gone is not an error."""

    def __init__(self, answer: Callable[[str, Any], None], client: str, method: str, payload: Any) -> None:
        self.client, self.method, self.payload = client, method, payload
        self._answer = answer

    def reply(self, value: Any) -> None:
        """Send ``value`` (msgpack-able) as the answer."""
        self._answer("reply", value)

    def fail(self, error: BaseException) -> None:
        """Answer with the type of an error and its message, up to 10 000 characters."""
        self._answer("error", {"type": type(error).__name__, "message": str(error)[:10_000]})


class _Requests:
    """Reads requests of run ``run_id`` for ``handle``, and sends the answers by ``send``."""

    def __init__(
        self, run_id: str, handle: Callable[[Request], None], send: Callable[[bytes, bytes, bytes], None]
    ) -> None:
        self._run_id, self._handle, self._send = run_id, handle, send

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
        client, method = envelope.field(header, "client", str), envelope.field(header, "method", str)
        request = Request(answer, client, method, unpack_payload(payload))
        try:
            self._handle(request)
        except Exception as error:
            request.fail(error)


class ServiceServer(Listener):
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
        requests = _Requests(run_id, handle, self.send)
        super().__init__(name, network.context(), lambda socket: network.listen(socket, bind), requests.take)
        self.start()


class LoopServiceServer(LoopListener):
    """Belongs to the running loop: ``handle(request)`` is called on it, and every answer must be given on it."""

    def __init__(
        self,
        name: str,
        run_id: str,
        handle: Callable[[Request], None],
        *,
        bind: str = "",
        network: Network = LOOPBACK,
    ) -> None:
        requests = _Requests(run_id, handle, self.send)
        super().__init__(name, network.context(), lambda socket: network.listen(socket, bind), requests.take)
