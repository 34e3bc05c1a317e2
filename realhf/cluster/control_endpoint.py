"""Control endpoint of a launcher for host agents and operators: a ROUTER socket with its own
thread.

Hosts are identified by their keys. The endpoint's thread answers heartbeats itself, so that a busy
launcher does not look dead, and passes everything else to the thread that runs the scheduler. A
host counts as lost after ``dead_after_s`` seconds of silence.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zmq

from realhf.base import process_clock
from realhf.cluster.cluster_keys import KnownHosts
from realhf.cluster.messages import (
    CONTROL,
    OF_AGENT,
    HelloRefusal,
    HostHello,
    Message,
    OperatorReport,
    Welcome,
    pack_message,
    unpack_message,
)
from realhf.cluster.placement import LAUNCHER
from realhf.transport import envelope
from realhf.transport.errors import ProtocolError
from realhf.transport.network import Authenticator, listen_encrypted
from realhf.transport.sockets import Listener, Waker, describe_version_differences

_log = logging.getLogger(__name__)
PING_S = 1.0
"""Interval of a host's heartbeats in seconds."""
SILENT_PINGS = 3
"""Number of missed heartbeats after which a new agent with the same host name may replace an
agent."""
CHECK_S = 0.25
"""Interval of the check for silent hosts in seconds."""
FAREWELL_TIMEOUT_S = 5.0
"""Seconds that ``close`` waits for hosts to confirm the end of the run. Hosts that have not
received the announcement notice the end by the launcher's silence."""
SILENT_FACTOR = 1.25
"""An agent considers the launcher dead after this factor times ``dead_after_s`` of silence. It is
more than 1, so that the launcher is the first to give up."""
OPERATOR = ("status", "add", "remove")
"""Kinds of messages that only operators may send."""


@dataclass(frozen=True)
class HostJoined:
    """Event: a host has registered."""

    hello: HostHello
    session: bytes
    """Random id of the agent's registration. Another agent with the same host name has another
    id."""


@dataclass(frozen=True)
class _HostEvent:
    name: str
    """Name of the host."""
    reason: str


class HostRefused(_HostEvent):
    """Event: the registration of a host was refused."""


class HostLost(_HostEvent):
    """Event: a host has left or was lost."""


@dataclass(frozen=True)
class HostMessage:
    """Event: a registered host has sent a message."""

    name: str
    """Name of the host."""
    message: Message


class InvalidMessage(_HostEvent):
    """Event: a host has sent a message that this version cannot decode."""


@dataclass(frozen=True)
class OperatorRequest:
    """Event: an operator has sent a request."""

    kind: str
    """Kind of request: status, add or remove."""
    message: Message
    sender: tuple[bytes, bytes]
    """Where to send the answer; an argument of ``ControlEndpoint.answer``."""


EndpointEvent = HostJoined | HostRefused | HostLost | HostMessage | InvalidMessage | OperatorRequest


@dataclass
class _Agent:
    """Connection of a registered host."""

    identity: bytes
    """ZeroMQ identity of the connection."""
    session: bytes
    last_message_at: float
    """Time of the last message (process_clock.now)."""


class ControlEndpoint:
    """Control endpoint that listens at ``bind`` (tcp://HOST:PORT; port 0: any free port) and
    accepts the ``known`` hosts and operators.

    dead_after_s: seconds of silence after which a host counts as lost. refusal: returns why a host
    must not join, or "" if it may; it is called on the endpoint's thread. ``fileno`` becomes
    readable when ``events`` has something to return. Raises AddressTaken or NetworkError.
    """

    def __init__(
        self,
        known: KnownHosts,
        bind: str,
        dead_after_s: float,
        refusal: Callable[[HostHello], str] = lambda hello: "",
    ) -> None:
        self._known = known
        self._dead_after_s = dead_after_s
        self._refusal = refusal
        self._refused_sessions: set[bytes] = set()
        self._sender = ""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        Authenticator(context, known.accepts)
        self._listener = Listener(
            "the endpoint",
            context,
            lambda socket: listen_encrypted(socket, bind, known.keys.server),
            self._on_message,
            self._refuse_other_protocol,
            after=self._check_hosts,
            every_s=CHECK_S,
            mandatory=True,
            copy=False,
            keyed=True,
        )
        self.endpoint = self._listener.endpoint
        self._hosts: dict[str, _Agent] = {}
        self._duplicates: dict[bytes, float] = {}
        self._events: queue.SimpleQueue[EndpointEvent] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._arrived = Waker()
        self._closing = False
        self._waiting_for_leave: set[bytes] = set()
        self._all_left = threading.Event()
        self._listener.start()

    # ---- for the owner's thread

    def fileno(self) -> int:
        """Return a file descriptor that is readable while ``events`` may have something to
        return."""
        return self._arrived.fileno()

    def events(self) -> list[EndpointEvent]:
        """Return the events since the last call, in order."""
        self._arrived.clear()
        events: list[EndpointEvent] = []
        with contextlib.suppress(queue.Empty):
            while True:
                events.append(self._events.get_nowait())
        return events

    def send(
        self, host: str, kind: str, message: Message | None = None, *, session: bytes = b""
    ) -> bool:
        """Send a message to a host; return False if the host is not connected, or if ``session`` is
        given and is not that of its current agent."""
        with self._lock:
            peer = self._hosts.get(host)
            if peer is None or (session and peer.session != session):
                return False
            self._listener.send(peer.identity, *pack_message(kind, peer.session, message))
        return True

    def answer(self, sender: tuple[bytes, bytes], message: Message) -> None:
        """Send the answer to an operator's request."""
        self._listener.send(sender[0], *pack_message("report", sender[1], message))

    def dismiss(self, host: str) -> None:
        """Remove a host permanently: end its agent and revoke its key."""
        self.send(host, "leave")
        self._known.revoke(host)
        with self._lock:
            self._hosts.pop(host, None)

    def close(self) -> None:
        """Announce the end of the run to all hosts, wait for their confirmations, and release the
        port."""
        # Closing a connection with unread data resets it, and the peer may lose messages that were
        # sent before. So keep reading messages until each host has confirmed.
        with self._lock:
            self._waiting_for_leave = {peer.session for peer in self._hosts.values()}
            for peer in self._hosts.values():
                self._listener.send(peer.identity, *pack_message("over", peer.session))
            self._hosts.clear()
            self._closing = True
            waits = bool(self._waiting_for_leave)
        if waits:
            self._all_left.wait(FAREWELL_TIMEOUT_S)
        self._listener.close()
        self._arrived.close()

    # ---- the endpoint's own thread

    def _check_hosts(self) -> None:
        if not self._closing and self._listener.drained:
            self._drop_silent_hosts()

    def _post(self, identity: bytes, frames: list[bytes]) -> None:
        self._listener.send(identity, *frames)

    def _refuse(self, identity: bytes, session: bytes, reason: str) -> None:
        self._post(identity, pack_message("refused", session, HelloRefusal(reason[:4000])))

    def _emit(self, event: EndpointEvent) -> None:
        self._events.put(event)
        self._arrived.wake()

    def _refuse_other_protocol(self, identity: bytes, header: dict[str, Any]) -> None:
        session = header.get("session")
        if header.get("kind") == "hello" and isinstance(session, bytes):
            different = describe_version_differences(
                header.get("versions"), str(header.get("node", "its host"))
            )
            self._refuse(identity, session[:16], f"versions differ: {different}")

    def _on_message(self, identity: bytes, header: dict[str, Any], payload: list[Any]) -> None:
        kind = envelope.field(header, "kind", str)
        session = envelope.field(header, "session", bytes)[:16]
        if self._closing:
            if kind == "leave":
                with self._lock:
                    self._waiting_for_leave.discard(session)
                    if not self._waiting_for_leave:
                        self._all_left.set()
            return
        # Name of the sender: a host, an operator (``LAUNCHER``), or "" if its key is unknown or
        # revoked.
        key = self._listener.sender_key
        self._sender = self._known.name_of(key)
        if header.get("run") != CONTROL:
            raise ProtocolError("a message that is not for the control endpoint of a launcher")
        if not self._sender or (kind == "hello" and not self._known.accepts(key)):
            self._post(identity, pack_message("leave", session))
            return
        try:
            message = unpack_message(kind, payload, OF_AGENT)
        except ProtocolError as error:
            self._on_invalid_message(identity, session, kind, str(error))
            raise
        if isinstance(message, HostHello):
            if different := describe_version_differences(
                header.get("versions"), str(header.get("node", message.name))
            ):
                self._refuse(identity, session, f"versions differ: {different}")
                return
            self._on_hello(identity, session, message)
        elif kind in OPERATOR and self._sender != LAUNCHER:
            text = (
                f"the key of host {self._sender} is not an operator's: take the launcher's own "
                f"file of keys"
            )
            self._post(
                identity, pack_message("report", session, OperatorReport([text], failed=True))
            )
        elif kind in OPERATOR:
            self._emit(OperatorRequest(kind, message, (identity, session)))
        else:
            self._on_host_message(identity, session, kind, message)

    def _on_invalid_message(self, identity: bytes, session: bytes, kind: str, reason: str) -> None:
        """Refuse an invalid request or hello, whose sender waits for an answer, and emit an event
        if the sender is a registered host."""
        if kind in OPERATOR:
            self._post(
                identity,
                pack_message("report", session, OperatorReport([reason[:4000]], failed=True)),
            )
        elif kind == "hello":
            self._refuse(identity, session, reason)
        with self._lock:
            name = self._find_host(session)
        if name is not None:
            self._emit(InvalidMessage(name, reason))

    def _find_host(self, session: bytes) -> str | None:
        """Return the name of the host whose agent has this session, or None. The caller must hold
        the lock."""
        return next((name for name, host in self._hosts.items() if host.session == session), None)

    def _on_hello(self, identity: bytes, session: bytes, hello: HostHello) -> None:
        now = process_clock.now()
        if hello.name == LAUNCHER:
            text = (
                f"{LAUNCHER!r} is the launcher's own machine; name this host otherwise with --name"
            )
            self._refuse(identity, session, text)
            return
        if hello.name != self._sender:
            text = (
                f"its key is that of {self._sender}, and not of a host {hello.name!r} (--name, "
                f"--key-file)"
            )
            self._refuse(identity, session, text)
            return
        if reason := self._refusal(hello):
            self._refuse(identity, session, reason)
            if session not in self._refused_sessions:
                self._refused_sessions.add(session)
                self._emit(HostRefused(hello.name, reason))
            return
        with self._lock:
            if self._closing:
                return  # hosts were already told that the run is over; this one retries
            known = self._hosts.get(hello.name)
            if known is not None and known.session == session:
                return  # a repeated hello; the welcome was sent
            if known is not None and now - known.last_message_at < SILENT_PINGS * PING_S:
                if now - self._duplicates.setdefault(session, now) > (SILENT_PINGS + 1) * PING_S:
                    text = (
                        f"a host named {hello.name!r} takes part already; name this one with --name"
                    )
                    self._refuse(identity, session, text)
                return  # the earlier agent may be dead: wait until it has missed enough heartbeats
            if known is not None:
                self._emit(HostLost(hello.name, "its agent was restarted"))
            self._hosts[hello.name] = _Agent(identity, session, now)
            self._duplicates.clear()
        self._post(
            identity,
            pack_message("welcome", session, Welcome(PING_S, SILENT_FACTOR * self._dead_after_s)),
        )
        self._emit(HostJoined(hello, session))

    def _on_host_message(
        self, identity: bytes, session: bytes, kind: str, message: Message
    ) -> None:
        with self._lock:
            name = self._find_host(session)
            if name is None or name != self._sender:
                self._post(identity, pack_message("again", session))
                return
            # ZeroMQ reconnects automatically under a new identity, and messages in flight are lost.
            broken = self._hosts[name].identity != identity
            self._hosts[name].last_message_at = process_clock.now()
            if kind == "leave" or broken:
                del self._hosts[name]
        if broken:
            self._post(identity, pack_message("again", session))
            self._emit(HostLost(name, "its connection broke"))
        elif kind == "ping":
            self._post(identity, pack_message("pong", session))
        elif kind == "leave":
            self._emit(HostLost(name, "its agent was stopped"))
        else:
            self._emit(HostMessage(name, message))

    def _drop_silent_hosts(self) -> None:
        now = process_clock.now()
        with self._lock:
            silent = {
                name: now - host.last_message_at
                for name, host in self._hosts.items()
                if now - host.last_message_at > self._dead_after_s
            }
            for name in silent:
                del self._hosts[name]
        for name, seconds in silent.items():
            self._emit(HostLost(name, f"nothing was heard of it for {seconds:.1f} s"))
