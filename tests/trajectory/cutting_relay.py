"""A TCP relay that breaks connections where a test says so: the network between a client and a real
server."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class CuttingRelay:
    """Forwards new connections to ``port``. The first answers that begin after ``cut_answers`` was
    called end after so many bytes."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._cuts: list[int] = []
        self.cut = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def cut_answers(self, *after_bytes: int) -> None:
        """Break each of the next answers after so many bytes, in turn."""
        self._cuts += after_bytes

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self.port))
                threading.Thread(target=self._copy, args=(near, far), daemon=True).start()
                threading.Thread(target=self._answer, args=(far, near), daemon=True).start()

    @staticmethod
    def _copy(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _answer(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if self._cuts:
                    self.cut += 1
                    sink.sendall(data[: self._cuts.pop(0)])
                    source.settimeout(0.2)
                    # the server gets rid of all of it: it was sent, as far as it knows
                    while source.recv(1 << 16):
                        pass
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@contextmanager
def cutting_relay(url: str) -> Iterator[CuttingRelay]:
    """A relay in front of the server at ``url``."""
    relay = CuttingRelay(int(url.rpartition(":")[2]))
    try:
        yield relay
    finally:
        relay.close()
