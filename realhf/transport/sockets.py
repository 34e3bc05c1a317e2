"""Carries the messages of all protocols of a run over ROUTER and DEALER, watches how connections come up, and makes
the event loop.

A message is a header (``envelope``) and further frames. A listener belongs to an event loop (``LoopListener``) or has a
thread of its own (``Listener``); who connects either lives on an event loop (``LoopDealer``) or takes a ``dealer`` and
waits. What arrives is bounded before it is read, and what is no message is dropped, counted and logged.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

import realhf
from realhf.base import process_clock
from realhf.transport.envelope import HIGH_WATER_MARK, MAX_PAYLOAD_BYTES, PROTOCOL, unpack_header
from realhf.transport.errors import NetworkError, OtherProtocol, ProtocolError, RpcTimeout
from realhf.transport.network import Network

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
    connection that is refused means a dead one as well. ``greeted`` counts the handshakes that succeeded."""

    def __init__(self, socket: zmq.Socket[Any], *, ends: bool = False) -> None:
        self._socket = socket
        self._hung_up = 0
        self.monitor = socket.get_monitor_socket(_EVENTS | (_ENDS if ends else 0))
        self.reached = self.ended = False
        self.greeted = 0
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
                self.greeted, self.why, self._hung_up = self.greeted + 1, "", 0
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


_log = logging.getLogger(__name__)
AT_ONCE = 256
"""Number of messages that a thread takes before it does something else: peers may send faster than it reads."""
CLOSE_S = 10.0
LINGER_MS = 500
"""How long messages that were sent before an end may take to leave."""
Frame = bytes | memoryview
Take = Callable[[bytes, dict[str, Any], list[Any]], None]
"""Gets a message: who sent it, its header, and the frames after the header. Raises ProtocolError for a bad one."""
Listen = Callable[[zmq.Socket[Any]], str]
"""Binds a socket and returns its endpoint."""


class Waker:
    """Wakes a poller through a pipe: ``wake``, called from any thread or signal handler, makes ``fileno()`` readable
    until ``clear``."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)

    def fileno(self) -> int:
        """Return the descriptor to poll for reading."""
        return self._read

    def wake(self) -> None:
        """Make the descriptor readable. Does nothing after ``close``."""
        with contextlib.suppress(OSError):
            os.write(self._write, b"\0")

    def clear(self) -> None:
        """Make the descriptor unreadable again."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._read, 4096)

    def close(self) -> None:
        """Close the pipe; later calls of ``wake`` have no effect."""
        read, write, self._read, self._write = self._read, self._write, -1, -1
        for descriptor in (read, write):
            if descriptor >= 0:
                os.close(descriptor)


def dealer(
    context: zmq.Context[Any], *, linger_ms: int = 0, most_bytes: int = MAX_PAYLOAD_BYTES, ahead: int = HIGH_WATER_MARK
) -> zmq.Socket[bytes]:
    """Make a socket that connects. Frames of more than ``most_bytes`` end the connection; ``ahead`` messages wait for
    a peer that does not read (0: any number)."""
    return _bounded(context.socket(zmq.DEALER), linger_ms, most_bytes, ahead)


def _bounded(socket: zmq.Socket[bytes], linger_ms: int, most_bytes: int, ahead: int) -> zmq.Socket[bytes]:
    socket.setsockopt(zmq.LINGER, linger_ms)
    socket.setsockopt(zmq.MAXMSGSIZE, most_bytes)
    socket.setsockopt(zmq.SNDHWM, ahead)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    return socket


_NOW, _NOW_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
_EVENTS_OPTION, _IN = int(zmq.EVENTS), int(zmq.POLLIN)
"""Numbers: ZeroMQ's enumerations are slow, and these are used for each message."""


def _send(socket: zmq.Socket[Any], frames: Sequence[Frame], *, copy: bool) -> None:
    """Send a message without waiting."""
    for frame in frames[:-1]:
        socket.send(frame, _NOW_MORE, copy)
    socket.send(frames[-1], _NOW, copy)


def _waits(socket: zmq.Socket[bytes]) -> bool:
    """Return whether a message can be received. Sending may consume the event by which a socket's descriptor, which
    tells of changes only, announces it: a loop has to ask after each time it has sent."""
    return bool(socket.getsockopt(_EVENTS_OPTION) & _IN)  # pyright: ignore[reportOperatorIssue]


class _Router:
    """Holds a ROUTER socket, and hands each message to ``take``. One of another protocol version goes to ``other``
    first, where there is that. The context ends with it if it is ``owned``."""

    def __init__(
        self,
        name: str,
        context: zmq.Context[Any],
        listen: Listen,
        take: Take,
        other: Callable[[bytes, dict[str, Any]], None] | None,
        *,
        most_bytes: int = MAX_PAYLOAD_BYTES,
        ahead: int = HIGH_WATER_MARK,
        mandatory: bool = False,
        linger_ms: int = LINGER_MS,
        owned: bool = True,
    ) -> None:
        self._name, self._context, self._take, self._other, self._owned = name, context, take, other, owned
        self._socket = _bounded(context.socket(zmq.ROUTER), linger_ms, most_bytes, ahead)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, int(mandatory))
        self.dropped_messages = 0
        try:
            self.endpoint = listen(self._socket)
        except BaseException:
            self._socket.close(0)
            if owned:
                context.destroy(0)
            raise

    def drop(self, why: str) -> None:
        """Count a message that was none, and log the 1st, 2nd, 4th, ... of them."""
        self.dropped_messages += 1
        if self.dropped_messages & (self.dropped_messages - 1) == 0:
            _log.warning("%s dropped message %d: %s", self._name, self.dropped_messages, why)

    def _read(self, identity: bytes, header: Any, payload: list[Any]) -> None:
        try:
            self._take(identity, unpack_header(header), payload)
        except ProtocolError as error:
            self.drop(str(error))
            if self._other is not None and isinstance(error, OtherProtocol):
                with contextlib.suppress(ProtocolError):  # what it repeats of the message may be too large
                    self._other(identity, error.header)


class LoopListener(_Router):
    """Listens on the running event loop, to which all of it belongs. The context ends with it."""

    def __init__(
        self,
        name: str,
        context: zmq.Context[Any],
        listen: Listen,
        take: Take,
        other: Callable[[bytes, dict[str, Any]], None] | None = None,
        *,
        mandatory: bool = False,
    ) -> None:
        super().__init__(name, context, listen, take, other, mandatory=mandatory)
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.FD, self.drain)
        self._loop.call_soon(self.drain)

    def send(self, identity: bytes, *frames: bytes) -> None:
        """Send now, without waiting; nothing after ``close``. Where it is ``mandatory`` that somebody is there and
        reads, this raises ZMQError otherwise."""
        if self._closed:
            return
        _send(self._socket, [identity, *frames], copy=True)
        if _waits(self._socket):
            self._loop.call_soon(self.drain)

    def drain(self) -> None:
        """Take all that has arrived."""
        while not self._closed:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) < 2:
                self.drop("it has no header")
                continue
            try:
                self._read(frames[0], frames[1], frames[2:])
            except BaseException:
                self._loop.call_soon(self.drain)  # what waits behind it is not announced again
                raise

    async def close(self) -> None:
        """Stop listening; what was sent before still leaves."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._socket.FD)
            self._socket.close(LINGER_MS)
            await asyncio.to_thread(self._context.term)


class Listener(_Router):
    """Listens on a thread of its own. ``start`` begins that.

    ``after()`` is called on the thread once what has arrived is taken, at least every ``every_s`` seconds where that is
    given, when a descriptor of ``also`` (set before ``start``) is readable, and at the end. What it or ``take`` raises
    ends the listener and stays in ``failure``. ``drained``: nothing that arrived before ``after`` waits to be taken.
    Frames are buffers, not copied, unless ``copy``. Where they are ``keyed``, which needs ``copy=False``,
    ``sender_key`` is the key (Z85) of who sent the message that is being taken.
    """

    def __init__(
        self,
        name: str,
        context: zmq.Context[Any],
        listen: Listen,
        take: Take,
        other: Callable[[bytes, dict[str, Any]], None] | None = None,
        *,
        after: Callable[[], None] = lambda: None,
        every_s: float | None = None,
        copy: bool = True,
        keyed: bool = False,
        **limits: Any,
    ) -> None:
        self._copy, self._keyed = copy, keyed
        super().__init__(name, context, listen, take, other, **limits)
        self._after, self._every_ms = after, None if every_s is None else int(every_s * 1000)
        self.also: Sequence[int] = ()
        self._outgoing: deque[tuple[bytes, Sequence[Frame]]] = deque()
        self._waker = Waker()
        self._unsent = 0
        self.sender_key = ""
        self.drained = True
        self.closing = False
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin to take messages."""
        self._thread.start()

    def send(self, identity: bytes, *frames: Frame) -> None:
        """Send a message, once what has arrived is taken: together they wake a peer once. May be called from any
        thread; what cannot be sent is logged."""
        self._outgoing.append((identity, frames))
        if threading.get_ident() != self._thread.ident:
            self._waker.wake()

    def flush(self) -> None:
        """Send now what waits to be sent. For the listener's own thread."""
        while self._outgoing:
            self._post(*self._outgoing.popleft())

    def wake(self) -> None:
        """Have ``after`` called soon. May be called from any thread."""
        self._waker.wake()

    def close(self) -> None:
        """Stop listening; what was sent before still leaves."""
        if self.closing:
            return
        self.closing = True
        if self._thread.ident is None:
            self._end()
            return
        self._waker.wake()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            _log.warning("%s at %s is still at work; it ends with that", self._name, self.endpoint)

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            self.failure = error
            _log.exception("%s at %s failed", self._name, self.endpoint)
        finally:
            self.closing = True
            self._end()

    def _end(self) -> None:
        self._socket.close()
        if self._owned:
            self._context.destroy(LINGER_MS)
        self._waker.close()

    def _serve(self) -> None:
        poller = zmq.Poller()
        for source in (self._socket, self._waker.fileno(), *self.also):
            poller.register(source, zmq.POLLIN)
        while not self.closing:
            ready = dict(poller.poll(self._every_ms))
            if self._waker.fileno() in ready:
                self._waker.clear()
            self.drained = self._socket not in ready or self._receive()
            self._after()
            self.flush()
        self._after()
        self.flush()

    def _receive(self) -> bool:
        """Take what has arrived, and return whether that was all."""
        for _ in range(AT_ONCE):
            try:
                frames: list[Any] = self._socket.recv_multipart(zmq.NOBLOCK, copy=self._copy)
            except zmq.Again:
                return True
            if len(frames) < 2:
                self.drop("it has no header")
            elif self._copy:
                self._read(frames[0], frames[1], frames[2:])
            else:
                if self._keyed:
                    self.sender_key = str(frames[0].get("User-Id"))
                self._read(frames[0].bytes, frames[1].buffer, [frame.buffer for frame in frames[2:]])
        return False

    def _post(self, identity: bytes, frames: Sequence[Frame]) -> None:
        try:
            _send(self._socket, [identity, *frames], copy=self._copy)
        except zmq.ZMQError as error:
            self._unsent += 1
            if self._unsent & (self._unsent - 1) == 0:
                _log.warning("%s could not send message %d: %s", self._name, self._unsent, error)


_LASTING = (
    (zmq.RECONNECT_IVL, 20),
    (zmq.RECONNECT_IVL_MAX, 500),
    # What waited for a connection would come twice, since whoever sent it is told of the connection.
    (zmq.IMMEDIATE, 1),
    # What is not sent although there is a connection would never be.
    (zmq.SNDHWM, 0),
    # The end of a connection on which nothing is said shows, too, and of one whose bytes nobody confirms (30 s).
    (zmq.TCP_MAXRT, 30_000),
    (zmq.TCP_KEEPALIVE, 1),
    (zmq.TCP_KEEPALIVE_IDLE, 10),
    (zmq.TCP_KEEPALIVE_INTVL, 5),
    (zmq.TCP_KEEPALIVE_CNT, 4),
)
"""How the socket of a connection is set that is made anew when it ends."""


class LoopDealer:
    """Connects to one listener of the run; belongs to the running event loop.

    ``take(header, frames)`` gets what arrives, ``lost(reason)`` is called when the listener refuses the keys of
    ``network`` or, on another host, is not reached within ``REACHED_WITHIN_S``; without ``connected`` also when the
    connection ends, and it is over then. With it, a connection that ends is made anew, ``connected()`` is called for
    each, and what was sent before may be lost. Raises NetworkError for an endpoint to which nothing may connect.
    """

    def __init__(
        self,
        endpoint: str,
        network: Network,
        take: Callable[[dict[str, Any], list[bytes]], None],
        lost: Callable[[str], None],
        *,
        connected: Callable[[], None] | None = None,
    ) -> None:
        self._take, self._lost, self._connected = take, lost, connected
        self._loop = asyncio.get_running_loop()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._socket = dealer(self._context)
        for option, value in _LASTING if connected else ():
            self._socket.setsockopt(option, value)
        self._watch = HandshakeWatch(self._socket, ends=connected is None)
        self.closed = False
        self.dropped_messages = 0
        try:
            network.connect(self._socket, endpoint)
        except NetworkError:
            self._watch.close()
            self._context.destroy(0)
            raise
        self._deadline = self._loop.call_later(REACHED_WITHIN_S, self._too_late) if network.protected else None
        self._loop.add_reader(self._socket.FD, self.drain)
        self._loop.add_reader(self._watch.monitor.FD, self._look)
        self._loop.call_soon(self._look)
        self._loop.call_soon(self.drain)

    def send(self, *frames: Frame, copy: bool = True) -> None:
        """Send now, without waiting. Raises zmq.Again where too much waits already, and with ``connected`` where there
        is no connection at the moment. Without ``copy`` buffers must not change until they have left."""
        _send(self._socket, frames, copy=copy)
        if _waits(self._socket):
            self._loop.call_soon(self.drain)

    def drain(self) -> None:
        """Take all that has arrived."""
        while not self.closed:
            try:
                header, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._take(unpack_header(header), frames)
            except ProtocolError as error:
                self.dropped_messages += 1
                if self.dropped_messages & (self.dropped_messages - 1) == 0:
                    _log.warning("message %d of a listener dropped: %s", self.dropped_messages, error)
            except BaseException:
                self._loop.call_soon(self.drain)  # what waits behind it is not announced again
                raise

    def close(self) -> None:
        """Close the connection and forget what has not left."""
        if self.closed:
            return
        self.closed = True
        if self._deadline is not None:
            self._deadline.cancel()
        self._loop.remove_reader(self._socket.FD)
        self._loop.remove_reader(self._watch.monitor.FD)
        self._watch.close()
        self._socket.close(0)
        self._context.term()

    def _look(self) -> None:
        if self.closed:
            return
        greeted = self._watch.greeted
        self._watch.look()
        if self._connected is not None and self._watch.greeted > greeted:
            _waits(self._socket)  # the socket takes note of the connection, which sending alone does now and then only
            self._connected()
        if self._watch.refused or self._watch.ended:
            self.drain()  # an answer that came before the end counts
            self._lost(self._watch.why or "closed the connection")

    def _too_late(self) -> None:
        self._look()
        if not self.closed and not self._watch.reached:
            self._lost(unreached())


def greeted(
    network: Network, socket: zmq.Socket[bytes], endpoint: str, hello: bytes, name: str, timeout_s: float
) -> list[bytes]:
    """Connect ``socket`` to the master, send ``hello`` for the worker ``name`` and return the frames of the answer.
    Raises RpcTimeout when there is none within ``timeout_s``, and in a network with keys NetworkError as soon as the
    master refuses them, or when it was not reached within ``REACHED_WITHIN_S``."""
    watch = HandshakeWatch(socket) if network.protected else None
    try:
        network.connect(socket, endpoint)
        socket.send(hello)
        if not _arrives(socket, watch, endpoint, name, timeout_s):
            why = f": {watch.why}" if watch is not None and watch.why else ""
            raise RpcTimeout(f"the master at {endpoint} did not answer worker {name!r} within {timeout_s:g} s{why}")
        return socket.recv_multipart()
    except (RpcTimeout, NetworkError):
        socket.setsockopt(zmq.LINGER, 0)
        raise
    finally:
        if watch is not None:
            watch.close()


def _arrives(
    socket: zmq.Socket[bytes], watch: HandshakeWatch | None, endpoint: str, name: str, timeout_s: float
) -> bool:
    """Wait for the answer; return whether it is there."""
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    if watch is None:
        return bool(process_clock.wait(lambda left_s: poller.poll(int(left_s * 1000)), timeout_s))
    poller.register(watch.monitor, zmq.POLLIN)
    began = process_clock.now()
    while (waited := process_clock.now() - began) < timeout_s:
        limit_s = timeout_s if watch.reached else min(timeout_s, REACHED_WITHIN_S)
        if socket in dict(poller.poll(max(1, int(1000 * (limit_s - waited))))):
            return True
        watch.look()
        if watch.refused:
            raise NetworkError(f"worker {name!r}: the master at {endpoint} {watch.refused}")
        if not watch.reached and process_clock.now() - began >= REACHED_WITHIN_S:
            raise NetworkError(f"worker {name!r}: the master at {endpoint} {unreached()}")
    return False


def allow_many_connections() -> int:
    """Raise the limit of open descriptors to what the host allows this process (``ulimit -Hn``); return it. The usual
    limit of 1,024 is that of a program that waits with select(2), and few hundred workers exhaust it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
