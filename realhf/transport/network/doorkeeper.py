"""Decides for the listeners of a context which keys they take (ZeroMQ's authentication protocol, ZAP 1.0)."""

from __future__ import annotations

import hmac
import logging
import threading
from typing import Any

import zmq
from zmq.utils import z85

_log = logging.getLogger(__name__)
ENDPOINT = "inproc://zeromq.zap.01"
"""Where ZeroMQ asks, in each context of its own."""
_VERSION = b"1.0"
_FIELDS = 7


class Doorkeeper:
    """Lets in whoever connects with the key ``client_public``. It ends with its context.

    It has to be there before a socket of the context listens: until then, the context refuses everybody.
    """

    def __init__(self, context: zmq.Context[Any], client_public: str) -> None:
        self._key = z85.decode(client_public)
        self.refused = 0
        # A shadow's sockets are not closed by the context's ``destroy``, which may run on another thread than this one.
        self._socket = zmq.Context.shadow(context.underlying).socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(ENDPOINT)
        threading.Thread(target=self._run, name="doorkeeper", daemon=True).start()

    def _run(self) -> None:
        try:
            while True:
                self._socket.send_multipart(self._answer(self._socket.recv_multipart()))
        except zmq.ZMQError:
            # The context is being terminated, which waits until this socket is closed.
            self._socket.close(0)

    def _answer(self, request: list[bytes]) -> list[bytes]:
        number = request[1] if len(request) > 1 else b""
        asked = len(request) == _FIELDS and request[0] == _VERSION and request[5] == b"CURVE"
        if asked and hmac.compare_digest(request[6], self._key):
            return [_VERSION, number, b"200", b"OK", b"run", b""]
        self.refused += 1
        if self.refused & (self.refused - 1) == 0:
            address = request[3].decode("ascii", "replace") if len(request) > 3 else "an unknown address"
            _log.warning("connection %d refused: %s has not the key of this run", self.refused, address)
        return [_VERSION, number, b"400", b"the key is not of this run", b"", b""]
