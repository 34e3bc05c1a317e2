"""Watches how a connection comes up, so that a refused key, a closed way or another version has a name."""

from __future__ import annotations

import os
import sys
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

import realhf
from realhf.transport.envelope import PROTOCOL

REACHED_WITHIN_S = 8.0
"""How long the way to a listener may take: it listens before anybody learns its endpoint."""
FAILED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_EVENTS = FAILED | zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
_ENDS = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
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
    """Follows a socket that is about to connect. Use it on the thread of the socket, and close it before that.
    ``ends``: take note of the end of a connection, too. A listener listens before anyone learns its endpoint, so a
    connection that is refused means a dead one as well."""

    def __init__(self, socket: zmq.Socket[Any], *, ends: bool = False) -> None:
        self._socket = socket
        self._hung_up = 0
        self.monitor = socket.get_monitor_socket(_EVENTS | (_ENDS if ends else 0))
        self.reached = self.ended = False
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
            self.ended = self.ended or bool(event & _ENDS)
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


def own_versions() -> dict[str, str]:
    """Return the versions that must be the same in all processes of a run: package, Python (without its last number)
    and protocol."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return {"realhf": realhf.__version__, "Python": python, "protocol": str(PROTOCOL)}


def differences(theirs: Any, host: str) -> str:
    """Say how the versions of a process on ``host`` differ from those here, with both; empty if they do not."""
    own, here = own_versions(), os.uname().nodename
    other = theirs if isinstance(theirs, dict) else {}
    found = [
        f"{name} {other.get(name, 'of an unknown version')!s:.40} on {host:.80}, {version} on {here}"
        for name, version in own.items()
        if other.get(name) != version
    ]
    return "; ".join(found)
