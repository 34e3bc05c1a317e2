"""Runs a ``ServiceServer`` without a thread of its own, for a process whose event loop answers all requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import zmq

from realhf.transport.network.network import LOOPBACK, Network
from realhf.transport.service.server import LINGER_MS, Request, ServiceListener


class LoopServiceServer(ServiceListener):
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
        super().__init__(name, run_id, handle, bind, network)
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.FD, self._drain)
        self._loop.call_soon(self._drain)

    def send(self, identity: bytes, kind: str, number: int, value: Any) -> None:
        """Send an answer; does nothing after ``close``."""
        if self._closed:
            return
        self._socket.send_multipart(self._answer(identity, kind, number, value), zmq.NOBLOCK)
        # Sending may consume the event by which the descriptor announces an incoming message.
        if self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:  # pyright: ignore[reportOperatorIssue]
            self._loop.call_soon(self._drain)

    async def close(self) -> None:
        """Stop listening; answers given before are still sent."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._socket.FD)
            self._socket.close(LINGER_MS)
            await asyncio.to_thread(self._context.term)

    def _drain(self) -> None:
        if not self._closed:
            self._receive_all()
