"""Many connections of one process that stand for many workers, without a thread or an event loop
for each."""

from __future__ import annotations

import select
from collections.abc import Callable, Sequence
from typing import Any

import zmq

Receive = Callable[[int, list[bytes]], None]
"""Gets the number of the line and the frames that came over it."""


class Wires:
    """Waits for all connections of the process at once. ``timeout_s`` bounds how long ``turn``
    waits."""

    def __init__(self, most_sockets: int) -> None:
        self.context = zmq.Context(io_threads=1)
        self.context.set(zmq.MAX_SOCKETS, most_sockets)
        self._epoll = select.epoll()
        self._drains: dict[int, Callable[[], None]] = {}
        self.due: set[int] = set()
        """Descriptors that may have announced a message already."""

    def watch(self, descriptor: int, drain: Callable[[], None]) -> None:
        """Call ``drain`` when the descriptor is readable."""
        self._drains[descriptor] = drain
        self._epoll.register(descriptor, select.EPOLLIN)

    def forget(self, descriptor: int) -> None:
        """Watch it no longer."""
        if self._drains.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)

    def turn(self, timeout_s: float) -> None:
        """Handle what has come, or wait for it."""
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
    """``count`` DEALER connections to one endpoint; whoever has number n uses line n modulo
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
        """Send over the line of a user. Does nothing once it is cut."""
        number = user % len(self._sockets)
        socket = self._sockets[number]
        if socket is not None:
            socket.send_multipart(frames, zmq.NOBLOCK)
            # Sending may consume the event by which the descriptor announces an incoming message.
            if socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:  # pyright: ignore[reportOperatorIssue]
                self._wires.due.add(socket.FD)

    def cut(self, user: int) -> None:
        """Close the line of a user, if no other shares it."""
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
