"""Sends weights between hosts: by a torch.distributed broadcast from the publisher to the receivers of a version.

Receivers need not come together, and may fail. Those that come within ``GATHER_S`` of each other share a broadcast; one
that comes late, e.g. a restarted worker, gets a broadcast of its own. A receiver that dies breaks the broadcast that it
takes part in; the others join the next one, and the log names the receiver that was lost.

Neither the control links nor gloo have passwords or encryption: whoever reaches the address can read the weights. What
a receiver accepts is fixed by the checksum in its manifest.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

from realhf.transport.errors import ProtocolError
from realhf.transport.weights.control_link import ControlLink
from realhf.transport.weights.deadline import transfer_s
from realhf.transport.weights.flat_buffer import Buffer, checksum
from realhf.transport.weights.gloo_group import JOIN_S, GlooGroup

GATHER_S = 0.5
"""How long the first receiver that waits is kept for others to join its broadcast."""
SEND_S = 2.0
"""How long a receiver may take to read a control message."""
HELLO_S = 5.0
"""How long a new connection may take for its first message."""
IDLE_S = 3600.0
"""Longest time in seconds that a receiver waits for its turn, whatever its own deadline."""

log = logging.getLogger(__name__)


class _Guest:
    """Holds a receiver as the publisher sees it. Guarded by the lock of its broadcast."""

    def __init__(self, link: ControlLink, name: str) -> None:
        self.link = link
        self.name = name
        self.address: bytes | None = None
        self.seated = False
        self.group: GlooGroup | None = None


class Broadcast:
    """Serves one version's buffer on threads of its own. Raises OSError when the address cannot be listened on."""

    def __init__(self, version: int, buffer: Buffer, host: str, receivers: int) -> None:
        self.checksum = checksum(buffer)
        self._version = version
        self._buffer = buffer
        self._host = host
        self._receivers = receivers
        self._served: set[str] = set()
        self._lost: set[str] = set()
        self._guests: list[_Guest] = []
        self._closed = False
        self._changed = threading.Condition()
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        self._listener = socket.create_server(address[:2], family=family, backlog=128)
        self.location = f"{host}:{self._listener.getsockname()[1]}"
        self._threads: list[threading.Thread] = []
        self._start(self._accept, "accept")
        self._start(self._serve, "serve")

    @property
    def unconfirmed(self) -> list[str]:
        """Receivers that asked for this version and have not confirmed that they received it."""
        with self._changed:
            return sorted((self._lost | {guest.name for guest in self._guests}) - self._served)

    def close(self) -> None:
        """Stop serving. A broadcast under way ends on the threads, which hold the buffer until then; see ``join``."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        # From now on connections are refused; the thread that accepts wakes and closes the socket.
        self._listener.shutdown(socket.SHUT_RDWR)

    def join(self, timeout_s: float) -> bool:
        """Wait until all threads of a closed broadcast have ended; return whether they have."""
        deadline = time.monotonic() + timeout_s
        while alive := self._alive():
            if time.monotonic() >= deadline:
                return False
            alive[0].join(max(deadline - time.monotonic(), 0.0))
        return True

    def _alive(self) -> list[threading.Thread]:
        with self._changed:
            return [thread for thread in self._threads if thread.is_alive()]

    def _start(self, target: Any, role: str, *arguments: Any) -> None:
        name = f"weights-v{self._version}-{role}"
        thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
        with self._changed:
            self._threads = [*self._alive(), thread]
            thread.start()

    # Receivers come and go.

    def _accept(self) -> None:
        with self._listener:
            while True:
                try:
                    connection, _ = self._listener.accept()
                except OSError:
                    return
                self._start(self._attend, "guest", ControlLink(connection))

    def _attend(self, link: ControlLink) -> None:
        """Follow one receiver until it has the weights or is gone."""
        guest: _Guest | None = None
        try:
            hello = link.receive(HELLO_S)
            name = f"{hello.get('name')!s:.200}"
            if hello.get("checksum") != self.checksum or not self._admit(guest := _Guest(link, name)):
                link.send(SEND_S, gone=True)
                return
            while not self._hear(guest, link.receive(IDLE_S)):
                pass
        except (OSError, ProtocolError) as error:
            if guest is None:
                log.warning("weights version %d: a connection that is no receiver: %s", self._version, error)
            else:
                with self._changed:
                    self._lost.add(guest.name)
                log.warning("weights version %d: lost %s before it had them: %s", self._version, guest.name, error)
        finally:
            link.close()
            with self._changed:
                if guest in self._guests:
                    self._guests.remove(guest)
                self._changed.notify_all()

    def _admit(self, guest: _Guest) -> bool:
        with self._changed:
            if not self._closed:
                self._guests.append(guest)
                self._changed.notify_all()
            return not self._closed

    def _hear(self, guest: _Guest, message: dict[str, Any]) -> bool:
        """Take note of a receiver's message; return whether it has the weights."""
        with self._changed:
            self._changed.notify_all()
            if isinstance(message.get("address"), bytes):
                guest.address = message["address"]
            elif message.get("end") == "broke":
                if self._closed:
                    raise ConnectionAbortedError("the version was retired meanwhile")
                guest.seated, guest.group = False, None
            elif message.get("end") == "got":
                self._served.add(guest.name)
                return True
            else:
                raise ProtocolError(f"unexpected message with {sorted(message)!r:.80}")
            return False

    # Broadcasts, one after another.

    def _serve(self) -> None:
        while True:
            with self._changed:
                members = self._gather()
                for guest in members:
                    guest.seated, guest.address = True, None
            if not members:
                return
            try:
                self._send(members)
            except (RuntimeError, OSError) as error:
                names = ", ".join(guest.name for guest in members)
                log.warning("weights version %d: a broadcast to %s broke: %.200s", self._version, names, error)

    def _gather(self) -> list[_Guest]:
        """Return the receivers that wait, once they are as many as expected or the first has waited for a while; an
        empty list when closed."""

        def waiting() -> list[_Guest]:
            return [guest for guest in self._guests if not guest.seated]

        while not self._changed.wait_for(lambda: self._closed or waiting(), IDLE_S):
            pass
        if not self._closed:
            self._changed.wait_for(lambda: len(waiting()) >= self._receivers - len(self._served), GATHER_S)
        return waiting()

    def _send(self, members: list[_Guest]) -> None:
        """Run one broadcast. Raises RuntimeError when it breaks: the members that still live then wait for the next."""
        size = len(members) + 1
        for rank, guest in enumerate(members, start=1):
            self._tell(guest, seat=[rank, size])

        def exchange(own: bytes) -> Sequence[bytes]:
            addresses = self._addresses(own, members)
            for guest in members:
                self._tell(guest, **({"addresses": addresses} if addresses else {"again": True}))
            if addresses is None:
                raise RuntimeError("a receiver was lost, or did not answer in time")
            return addresses

        group = GlooGroup(0, size, self._host, exchange)
        with self._changed:
            # Receivers pass data on to one another, so the group must live as long as one of them is in it.
            for guest in members:
                guest.group = group
        group.broadcast(self._buffer, transfer_s(len(self._buffer)))

    def _addresses(self, own: bytes, members: list[_Guest]) -> list[bytes] | None:
        with self._changed:
            self._changed.wait_for(lambda: all(guest.address or guest not in self._guests for guest in members), JOIN_S)
            known = [guest.address for guest in members if guest.address and guest in self._guests]
        return [own, *known] if len(known) == len(members) else None

    def _tell(self, guest: _Guest, **message: Any) -> None:
        """Send a message. A receiver that does not read is dropped; its thread notices that."""
        try:
            guest.link.send(SEND_S, **message)
        except OSError:
            guest.link.hang_up()
