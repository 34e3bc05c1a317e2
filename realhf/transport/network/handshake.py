"""Watches how a connection comes up, so that a refused key or a closed way has a name."""

from __future__ import annotations

from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

REACHED_WITHIN_S = 8.0
"""How long the way to a listener may take: it listens before anybody learns its endpoint."""
FAILED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_EVENTS = FAILED | zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
_MECHANISM_MISMATCH = zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
HUNG_UP = 3
"""After as many handshakes that the listener broke off without a word it will break off the next one, too."""


def refusal(event: int, value: int) -> str:
    """Say what a failed handshake means for the one who connects; empty for any other event."""
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return "refused the key of this process"
    if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == _MECHANISM_MISMATCH:
        return "wants other keys than this process has: one of the two has none (--key-file)"
    if event in (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL):
        return "broke off the handshake: its key is not the one that this process was given (--key-file)"
    return ""


class HandshakeWatch:
    """Follows a socket that is about to connect. Use it on the thread of the socket, and close it before that."""

    def __init__(self, socket: zmq.Socket[Any]) -> None:
        self._socket = socket
        self._hung_up = 0
        self.monitor = socket.get_monitor_socket(_EVENTS)
        self.reached = False
        self.greeted = False
        self.why = ""

    @property
    def refused(self) -> str:
        """Why the listener will not take this process; empty as long as it may."""
        return self.why if self._hung_up == 0 or self._hung_up >= HUNG_UP else ""

    def look(self) -> None:
        """Take note of what has happened."""
        while self.monitor.poll(0):
            found = recv_monitor_message(self.monitor)
            event, value = int(found["event"]), int(found["value"])
            self.reached = True
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.greeted, self.why, self._hung_up = True, "", 0
            elif why := refusal(event, value):
                self.why = why
                self._hung_up += event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL

    def close(self) -> None:
        """Stop watching; the socket stays as it is."""
        self._socket.disable_monitor()
        self.monitor.close(0)


def unreached() -> str:
    """Say that there was no connection within ``REACHED_WITHIN_S``."""
    return (
        f"was not reached within {REACHED_WITHIN_S:g} s: nothing answers there, or a firewall lies between "
        "(network.bind, network.advertise)"
    )
