"""Is where host agents and operators reach a launcher: one ROUTER socket, which knows each host by its key, on a thread
of its own.

The thread answers signs of life, so that a busy launcher is not a dead one, and hands everything else to the thread
that owns the scheduler. A host is lost when it has said nothing for ``dead_after_s``.
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
from realhf.cluster.messages import CONTROL, OF_AGENT, HostHello, Message, Refused, Report, Welcome, packed, unpacked
from realhf.cluster.placement import LAUNCHER
from realhf.transport import envelope
from realhf.transport.errors import ProtocolError
from realhf.transport.network import Authenticator, listen_encrypted
from realhf.transport.sockets import Listener, Waker, describe_version_differences

_log = logging.getLogger(__name__)
PING_S = 1.0
SILENT_PINGS = 3
"""An agent that missed so many signs of life may have been replaced by another one of its name."""
LOOK_S = 0.25
PART_S = 5.0
"""So long the endpoint waits for hosts to say that they have heard of the end: one that has not learns of it by
silence."""
SILENT_FACTOR = 1.25
"""An agent takes the launcher for dead after this many times ``dead_after_s``: the launcher decides first."""
OPERATOR = ("status", "add", "remove")


@dataclass(frozen=True)
class HostJoined:
    """A host has registered; ``session`` is its agent's, of which another one of its name has another."""

    hello: HostHello
    session: bytes


@dataclass(frozen=True)
class _AboutHost:
    name: str
    reason: str


class HostRefused(_AboutHost):
    """A host would have taken part, and may not."""


class HostLost(_AboutHost):
    """A host takes part no longer."""


@dataclass(frozen=True)
class FromHost:
    """A host says something."""

    name: str
    message: Message


class InvalidMessage(_AboutHost):
    """A host says what no agent of this version says."""


@dataclass(frozen=True)
class FromOperator:
    """An operator asks for something; ``sender`` is for ``ControlEndpoint.answer``."""

    kind: str
    message: Message
    sender: tuple[bytes, bytes]


EndpointEvent = HostJoined | HostRefused | HostLost | FromHost | InvalidMessage | FromOperator


@dataclass
class _Host:
    identity: bytes
    session: bytes
    heard: float


class ControlEndpoint:
    """Listens at ``bind`` (tcp://HOST:PORT; port 0: any) for the ``known`` hosts and operators. Raises AddressTaken or
    NetworkError. ``fileno`` becomes readable when ``events`` has something. ``refusal`` says of a host why it may not
    take part, "" if it may; it is called on the endpoint's own thread."""

    def __init__(
        self, known: KnownHosts, bind: str, dead_after_s: float, refusal: Callable[[HostHello], str] = lambda hello: ""
    ) -> None:
        self._known, self._dead_after_s, self._refusal = known, dead_after_s, refusal
        self._refused: set[bytes] = set()
        self._sender = ""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        Authenticator(context, known.knows)
        self._listener = Listener(
            "the endpoint",
            context,
            lambda socket: listen_encrypted(socket, bind, known.keys.server),
            self._take,
            self._of_other_protocol,
            after=self._look,
            every_s=LOOK_S,
            mandatory=True,
            copy=False,
            keyed=True,
        )
        self.endpoint = self._listener.endpoint
        self._hosts: dict[str, _Host] = {}
        self._doubles: dict[bytes, float] = {}
        self._events: queue.SimpleQueue[EndpointEvent] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._arrived = Waker()
        self._closing = False
        self._parting: set[bytes] = set()
        self._parted = threading.Event()
        self._listener.start()

    # ---- for the owner's thread

    def fileno(self) -> int:
        """Return the descriptor that is readable while ``events`` may have something."""
        return self._arrived.fileno()

    def events(self) -> list[EndpointEvent]:
        """Return what has happened since the last call, in order."""
        self._arrived.clear()
        found: list[EndpointEvent] = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._events.get_nowait())
        return found

    def send(self, host: str, kind: str, message: Message | None = None, *, session: bytes = b"") -> bool:
        """Send to a host; False when it is not there, or not the agent with this ``session`` any more."""
        with self._lock:
            peer = self._hosts.get(host)
            if peer is None or (session and peer.session != session):
                return False
            self._listener.send(peer.identity, *packed(kind, peer.session, message))
        return True

    def answer(self, sender: tuple[bytes, bytes], message: Message) -> None:
        """Answer an operator."""
        self._listener.send(sender[0], *packed("report", sender[1], message))

    def send_away(self, host: str) -> None:
        """Let a host leave for good: its agent ends, and its key is taken away."""
        self.send(host, "leave")
        self._known.take_away(host)
        with self._lock:
            self._hosts.pop(host, None)

    def close(self) -> None:
        """Tell all hosts that the run is over, wait until they have heard of it, and release the port. Where something
        of theirs was left unread, the kernel would break off the connection, and they would never read what was sent to
        them before."""
        with self._lock:
            self._parting = {peer.session for peer in self._hosts.values()}
            for peer in self._hosts.values():
                self._listener.send(peer.identity, *packed("over", peer.session))
            self._hosts.clear()
            self._closing = True
            waits = bool(self._parting)
        if waits:
            self._parted.wait(PART_S)
        self._listener.close()
        self._arrived.close()

    # ---- the endpoint's own thread

    def _look(self) -> None:
        if not self._closing and self._listener.drained:
            self._look_for_silence()

    def _post(self, identity: bytes, frames: list[bytes]) -> None:
        self._listener.send(identity, *frames)

    def _refuse(self, identity: bytes, session: bytes, reason: str) -> None:
        self._post(identity, packed("refused", session, Refused(reason[:4000])))

    def _happened(self, event: EndpointEvent) -> None:
        self._events.put(event)
        self._arrived.wake()

    def _of_other_protocol(self, identity: bytes, header: dict[str, Any]) -> None:
        session = header.get("session")
        if header.get("kind") == "hello" and isinstance(session, bytes):
            different = describe_version_differences(header.get("versions"), str(header.get("node", "its host")))
            self._refuse(identity, session[:16], f"versions differ: {different}")

    def _take(self, identity: bytes, header: dict[str, Any], payload: list[Any]) -> None:
        kind, session = envelope.field(header, "kind", str), envelope.field(header, "session", bytes)[:16]
        if self._closing:
            if kind == "leave":
                with self._lock:
                    self._parting.discard(session)
                    if not self._parting:
                        self._parted.set()
            return
        # Who says this: a host, an operator (``LAUNCHER``), or one whose key was taken away ("").
        key = self._listener.sender_key
        self._sender = self._known.name_of(key)
        if header.get("run") != CONTROL:
            raise ProtocolError("a message that is not for the control endpoint of a launcher")
        if not self._sender or (kind == "hello" and not self._known.knows(key)):
            self._post(identity, packed("leave", session))
            return
        try:
            message = unpacked(kind, payload, OF_AGENT)
        except ProtocolError as error:
            self._not_understood(identity, session, kind, str(error))
            raise
        if isinstance(message, HostHello):
            if different := describe_version_differences(header.get("versions"), str(header.get("node", message.name))):
                self._refuse(identity, session, f"versions differ: {different}")
                return
            self._hello(identity, session, message)
        elif kind in OPERATOR and self._sender != LAUNCHER:
            text = f"the key of host {self._sender} is none of an operator: take the launcher's own file of keys"
            self._post(identity, packed("report", session, Report([text], failed=True)))
        elif kind in OPERATOR:
            self._happened(FromOperator(kind, message, (identity, session)))
        else:
            self._from_host(identity, session, kind, message)

    def _not_understood(self, identity: bytes, session: bytes, kind: str, reason: str) -> None:
        """Tell whoever waits for an answer, and the launcher of which host this comes."""
        if kind in OPERATOR:
            self._post(identity, packed("report", session, Report([reason[:4000]], failed=True)))
        elif kind == "hello":
            self._refuse(identity, session, reason)
        with self._lock:
            name = self._name_of(session)
        if name is not None:
            self._happened(InvalidMessage(name, reason))

    def _name_of(self, session: bytes) -> str | None:
        """Return the host whose agent has this session; the lock is held."""
        return next((name for name, host in self._hosts.items() if host.session == session), None)

    def _hello(self, identity: bytes, session: bytes, hello: HostHello) -> None:
        now = process_clock.now()
        if hello.name == LAUNCHER:
            text = f"{LAUNCHER!r} is the launcher's own machine; name this host otherwise with --name"
            self._refuse(identity, session, text)
            return
        if hello.name != self._sender:
            text = f"its key is that of {self._sender}, and not of a host {hello.name!r} (--name, --key-file)"
            self._refuse(identity, session, text)
            return
        if reason := self._refusal(hello):
            self._refuse(identity, session, reason)
            if session not in self._refused:
                self._refused.add(session)
                self._happened(HostRefused(hello.name, reason))
            return
        with self._lock:
            if self._closing:
                return  # it would not be told that the run is over; there may be another endpoint soon
            known = self._hosts.get(hello.name)
            if known is not None and known.session == session:
                return  # the welcome is on its way
            if known is not None and now - known.heard < SILENT_PINGS * PING_S:
                if now - self._doubles.setdefault(session, now) > (SILENT_PINGS + 1) * PING_S:
                    text = f"a host named {hello.name!r} takes part already; name this one with --name"
                    self._refuse(identity, session, text)
                return  # perhaps its agent was killed, and this one is the next
            if known is not None:
                self._happened(HostLost(hello.name, "its agent was started anew"))
            self._hosts[hello.name] = _Host(identity, session, now)
            self._doubles.clear()
        self._post(identity, packed("welcome", session, Welcome(PING_S, SILENT_FACTOR * self._dead_after_s)))
        self._happened(HostJoined(hello, session))

    def _from_host(self, identity: bytes, session: bytes, kind: str, message: Message) -> None:
        with self._lock:
            name = self._name_of(session)
            if name is None or name != self._sender:
                self._post(identity, packed("again", session))
                return
            # ZeroMQ connects anew by itself. What was under way is lost then, and the way back is another one.
            broken = self._hosts[name].identity != identity
            self._hosts[name].heard = process_clock.now()
            if kind == "leave" or broken:
                del self._hosts[name]
        if broken:
            self._post(identity, packed("again", session))
            self._happened(HostLost(name, "its connection broke"))
        elif kind == "ping":
            self._post(identity, packed("pong", session))
        elif kind == "leave":
            self._happened(HostLost(name, "its agent was stopped"))
        else:
            self._happened(FromHost(name, message))

    def _look_for_silence(self) -> None:
        now = process_clock.now()
        with self._lock:
            silent = {
                name: now - host.heard for name, host in self._hosts.items() if now - host.heard > self._dead_after_s
            }
            for name in silent:
                del self._hosts[name]
        for name, seconds in silent.items():
            self._happened(HostLost(name, f"nothing was heard of it for {seconds:.1f} s"))
