"""Many connections in one process that stand for many workers, without a thread or an event loop
per connection."""

from __future__ import annotations

import select
from collections.abc import Callable, Sequence
from typing import Any

import zmq

Receive = Callable[[int, list[bytes]], None]
"""Function that receives the number of a line and the frames of a message from it."""


class Wires:
    """Event loop for all connections of the process, based on epoll."""

    def __init__(self, max_sockets: int) -> None:
        self.context = zmq.Context(io_threads=1)
        self.context.set(zmq.MAX_SOCKETS, max_sockets)
        self._epoll = select.epoll()
        self._drains: dict[int, Callable[[], None]] = {}
        self.due: set[int] = set()
        """Descriptors for which a message may already have been announced."""

    def watch(self, descriptor: int, drain: Callable[[], None]) -> None:
        """Call ``drain`` whenever the descriptor becomes readable."""
        self._drains[descriptor] = drain
        self._epoll.register(descriptor, select.EPOLLIN)

    def forget(self, descriptor: int) -> None:
        """Stop watching a descriptor."""
        if self._drains.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)

    def turn(self, timeout_s: float) -> None:
        """Handle the messages that have arrived; if there are none, wait up to ``timeout_s``
        seconds for some."""
        due = self.due
        self.due = set()
        ready = [descriptor for descriptor, _ in self._epoll.poll(0 if due else timeout_s, 512)]
        for descriptor in {*due, *ready}:
            drain = self._drains.get(descriptor)
            if drain is not None:
                drain()

    def close(self) -> None:
        """Close every connection."""
        self.context.destroy(0)
        self._epoll.close()


class Lines:
    """``count`` DEALER connections to one endpoint. User number n sends over line n modulo
    ``count``."""

    def __init__(self, wires: Wires, endpoint: str, count: int, receive: Receive) -> None:
        self._wires = wires
        self._receive = receive
        self._sockets: list[zmq.Socket[bytes] | None] = []
        for number in range(count):
            socket = wires.context.socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.connect(endpoint)
            wires.watch(socket.FD, lambda number=number: self._drain(number))
            self._sockets.append(socket)

    def __len__(self) -> int:
        return len(self._sockets)

    def send(self, user: int, frames: Sequence[Any]) -> None:
        """Send a message over a user's line. Does nothing if the line was cut."""
        number = user % len(self._sockets)
        socket = self._sockets[number]
        if socket is not None:
            socket.send_multipart(frames, zmq.NOBLOCK)
            # Sending may consume the event by which the descriptor announces an incoming message.
            if socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:  # pyright: ignore[reportOperatorIssue]
                self._wires.due.add(socket.FD)

    def cut(self, user: int) -> None:
        """Close a user's line, unless other users share it."""
        if user < len(self._sockets) and (socket := self._sockets[user]) is not None:
            self._sockets[user] = None
            self._wires.forget(socket.FD)
            socket.close(0)

    def _drain(self, number: int) -> None:
        while (socket := self._sockets[number]) is not None:
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._receive(number, frames)
