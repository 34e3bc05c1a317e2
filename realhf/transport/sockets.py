"""ZeroMQ sockets of all protocols of a run: ROUTER listeners, DEALER clients, and the monitoring of
handshakes.

A message is a header (``envelope``) and further frames. A listener belongs to an event loop
(``LoopListener``) or has its own thread (``Listener``). A client belongs to an event loop
(``LoopDealer``), or is the plain socket of ``open_dealer`` for blocking code. Messages are limited
in size before they are read, and malformed ones are dropped, counted and logged.
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
"""Seconds within which a listener must accept a connection. It already listens when its endpoint is
announced."""
FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_EVENTS = FAILED | zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
_ENDS = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
_MECHANISM_MISMATCH = zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
MAX_SILENT_REFUSALS = 3
"""Number of handshakes that a listener may end without a reason before it counts as refusing."""


def describe_refusal(event: int, value: int) -> str:
    """Return a description of a failed handshake from the client's view; "" for any other event."""
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return "refused the key of this process"
    if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == _MECHANISM_MISMATCH:
        return "wants other keys than this process has: one of the two has none (--key-file)"
    if event in (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL):
        return (
            "broke off the handshake: its key is not the one that this process was given "
            "(--key-file)"
        )
    return ""


class HandshakeWatch:
    """Monitor of a socket's connection attempts.

    Create it before the socket connects, use it on the thread of the socket, and close it before
    the socket.

    ends: Whether to observe the end of a connection as well; a refused TCP connection counts as
    one, because a listener listens before its endpoint is announced. ``handshakes`` counts the
    successful handshakes.
    """

    def __init__(self, socket: zmq.Socket[Any], *, ends: bool = False) -> None:
        self._socket = socket
        self._silent_refusals = 0
        self.monitor = socket.get_monitor_socket(_EVENTS | (_ENDS if ends else 0))
        self.reached = self.ended = False
        self.handshakes = 0
        self.reason = ""

    @property
    def refusal(self) -> str:
        """Reason why the listener refuses this process; "" as long as it may still accept."""
        return (
            self.reason
            if self._silent_refusals == 0 or self._silent_refusals >= MAX_SILENT_REFUSALS
            else ""
        )

    def process_events(self) -> None:
        """Process the socket events since the last call."""
        while self.monitor.poll(0):
            message = recv_monitor_message(self.monitor)
            event = int(message["event"])
            value = int(message["value"])
            self.reached = True
            self.ended = self.ended or bool(event & _ENDS)
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.handshakes += 1
                self.reason = ""
                self._silent_refusals = 0
            elif reason := describe_refusal(event, value):
                self.reason = reason
                self._silent_refusals += event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL

    def close(self) -> None:
        """Stop observing the socket, which stays open."""
        self._socket.disable_monitor()
        self.monitor.close(0)


def describe_unreached() -> str:
    """Return the error text for a listener that was not reached within ``REACHED_WITHIN_S``."""
    return (
        f"was not reached within {REACHED_WITHIN_S:g} s: nothing answers there, or a firewall lies "
        f"between "
        "(network.bind, network.advertise)"
    )


def collect_versions() -> dict[str, str]:
    """Return the versions that must be equal in all processes of a run: package, Python
    (major.minor) and protocol."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return {"realhf": realhf.__version__, "Python": python, "protocol": str(PROTOCOL)}


def describe_version_differences(theirs: Any, host: str) -> str:
    """Return how the versions of a process on ``host`` differ from those of this one; "" if they do
    not."""
    own = collect_versions()
    own_host = os.uname().nodename
    their_versions = theirs if isinstance(theirs, dict) else {}
    different = [
        f"{name} {their_versions.get(name, 'of an unknown version')!s:.40} on {host:.80}, "
        f"{version} on "
        f"{own_host}"
        for name, version in own.items()
        if their_versions.get(name) != version
    ]
    return "; ".join(different)


_log = logging.getLogger(__name__)
MAX_MESSAGES_AT_ONCE = 256
"""Number of messages after which a thread attends to its other work, because peers may send faster
than it reads."""
CLOSE_S = 10.0
"""Seconds that ``Listener.close`` waits for the thread to end."""
LINGER_MS = 500
"""Milliseconds for which a closed socket still tries to send queued messages."""
Frame = bytes | memoryview
TakeMessage = Callable[[bytes, dict[str, Any], list[Any]], None]
"""Function (identity of the sender, header, frames after the header) -> None. Raises ProtocolError
for a bad message."""
Listen = Callable[[zmq.Socket[Any]], str]
"""Function that binds a socket and returns its endpoint."""


class Waker:
    """Pipe that wakes a poller.

    ``wake``, called from any thread or signal handler, makes ``fileno()`` readable until ``clear``
    is called.
    """

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
        descriptors = (self._read, self._write)
        self._read = -1
        self._write = -1
        for descriptor in descriptors:
            if descriptor >= 0:
                os.close(descriptor)


def open_dealer(
    context: zmq.Context[Any],
    *,
    linger_ms: int = 0,
    max_bytes: int = MAX_PAYLOAD_BYTES,
    ahead: int = HIGH_WATER_MARK,
) -> zmq.Socket[bytes]:
    """Open a client socket.

    max_bytes: Maximum frame size; a larger frame ends the connection. ahead: Maximum number of
    messages queued for a peer that does not read (0: unlimited).
    """
    return _set_limits(context.socket(zmq.DEALER), linger_ms, max_bytes, ahead)


def _set_limits(
    socket: zmq.Socket[bytes], linger_ms: int, max_bytes: int, ahead: int
) -> zmq.Socket[bytes]:
    socket.setsockopt(zmq.LINGER, linger_ms)
    socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
    socket.setsockopt(zmq.SNDHWM, ahead)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    return socket


# As plain numbers: operations on ZeroMQ's enumerations are slow, and these are used for each
# message.
_NOW = int(zmq.NOBLOCK)
_NOW_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_EVENTS_OPTION = int(zmq.EVENTS)
_IN = int(zmq.POLLIN)


def _send(socket: zmq.Socket[Any], frames: Sequence[Frame], *, copy: bool) -> None:
    """Send a message without blocking."""
    for frame in frames[:-1]:
        socket.send(frame, _NOW_MORE, copy)
    socket.send(frames[-1], _NOW, copy)


def _has_message(socket: zmq.Socket[bytes]) -> bool:
    """Return whether a message can be received.

    The descriptor of a ZeroMQ socket is edge-triggered, and sending may consume the edge of an
    arrival, so an event loop must call this after each send.
    """
    return bool(socket.getsockopt(_EVENTS_OPTION) & _IN)  # pyright: ignore[reportOperatorIssue]


class _Router:
    """ROUTER socket that passes each message to ``take``.

    other: Receives messages of another protocol version, which are then dropped. owned: Whether to
    close the context with the listener.
    """

    def __init__(
        self,
        name: str,
        context: zmq.Context[Any],
        listen: Listen,
        take: TakeMessage,
        other: Callable[[bytes, dict[str, Any]], None] | None,
        *,
        max_bytes: int = MAX_PAYLOAD_BYTES,
        ahead: int = HIGH_WATER_MARK,
        mandatory: bool = False,
        linger_ms: int = LINGER_MS,
        owned: bool = True,
    ) -> None:
        self._name = name
        self._context = context
        self._take = take
        self._other = other
        self._owned = owned
        self._socket = _set_limits(context.socket(zmq.ROUTER), linger_ms, max_bytes, ahead)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, int(mandatory))
        self.dropped_messages = 0
        try:
            self.endpoint = listen(self._socket)
        except BaseException:
            self._socket.close(0)
            if owned:
                context.destroy(0)
            raise

    def drop(self, reason: str) -> None:
        """Count a malformed message; log the 1st, 2nd, 4th, ... of them."""
        self.dropped_messages += 1
        if self.dropped_messages & (self.dropped_messages - 1) == 0:
            _log.warning("%s dropped message %d: %s", self._name, self.dropped_messages, reason)

    def _read(self, identity: bytes, header: Any, payload: list[Any]) -> None:
        try:
            self._take(identity, unpack_header(header), payload)
        except ProtocolError as error:
            self.drop(str(error))
            if self._other is not None and isinstance(error, OtherProtocol):
                # the answer may be too large with the parts of the message
                with contextlib.suppress(ProtocolError):
                    self._other(identity, error.header)


class LoopListener(_Router):
    """Listener on the running event loop, on which all methods must be called. It closes its
    context at the end."""

    def __init__(
        self,
        name: str,
        context: zmq.Context[Any],
        listen: Listen,
        take: TakeMessage,
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
        """Send without blocking; do nothing after ``close``.

        A ``mandatory`` listener raises ZMQError if the peer is disconnected or its queue is full.
        """
        if self._closed:
            return
        _send(self._socket, [identity, *frames], copy=True)
        if _has_message(self._socket):
            self._loop.call_soon(self.drain)

    def drain(self) -> None:
        """Take all messages that have arrived."""
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
        """Stop listening, after sending queued messages for up to LINGER_MS."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._socket.FD)
            self._socket.close(LINGER_MS)
            await asyncio.to_thread(self._context.term)


class Listener(_Router):
    """Listener with its own thread, which ``start`` starts.

    Args:
        after: Called on the thread when messages have been taken, at least every ``every_s``
            seconds if given, when a descriptor of ``also`` (set before ``start``) is readable, and
            at the end. An exception in it or in ``take`` ends the listener and is kept in
            ``failure``.
        copy: Whether to pass frames as bytes instead of buffers.
        keyed: Whether to set ``sender_key`` to the sender's key (Z85) while a message is taken;
            needs ``copy=False``.

    ``drained`` tells ``after`` whether all messages that had arrived before this call of it have
    been taken.
    """

    def __init__(
        self,
        name: str,
        context: zmq.Context[Any],
        listen: Listen,
        take: TakeMessage,
        other: Callable[[bytes, dict[str, Any]], None] | None = None,
        *,
        after: Callable[[], None] = lambda: None,
        every_s: float | None = None,
        copy: bool = True,
        keyed: bool = False,
        **limits: Any,
    ) -> None:
        self._copy = copy
        self._keyed = keyed
        super().__init__(name, context, listen, take, other, **limits)
        self._after = after
        self._every_ms = None if every_s is None else int(every_s * 1000)
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
        """Start the thread."""
        self._thread.start()

    def send(self, identity: bytes, *frames: Frame) -> None:
        """Queue a message. It is sent once the messages that have arrived are taken, so that
        several messages wake a peer only once. Thread-safe. Failures are logged."""
        self._outgoing.append((identity, frames))
        if threading.get_ident() != self._thread.ident:
            self._waker.wake()

    def flush(self) -> None:
        """Send the queued messages now. Only for the listener's own thread."""
        while self._outgoing:
            self._post(*self._outgoing.popleft())

    def wake(self) -> None:
        """Schedule a call of ``after``. Thread-safe."""
        self._waker.wake()

    def close(self) -> None:
        """Stop listening, after sending queued messages for up to LINGER_MS."""
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
        """Take messages that have arrived; return whether none is left."""
        for _ in range(MAX_MESSAGES_AT_ONCE):
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
                self._read(
                    frames[0].bytes, frames[1].buffer, [frame.buffer for frame in frames[2:]]
                )
        return False

    def _post(self, identity: bytes, frames: Sequence[Frame]) -> None:
        try:
            _send(self._socket, [identity, *frames], copy=self._copy)
        except zmq.ZMQError as error:
            self._unsent += 1
            if self._unsent & (self._unsent - 1) == 0:
                _log.warning("%s could not send message %d: %s", self._name, self._unsent, error)


_RECONNECT_OPTIONS = (
    (zmq.RECONNECT_IVL, 20),
    (zmq.RECONNECT_IVL_MAX, 500),
    # Queue no messages without a connection: the client repeats them on ``connected``, so they
    # would arrive twice.
    (zmq.IMMEDIATE, 1),
    # No limit: a message that was refused despite a connection would never be sent.
    (zmq.SNDHWM, 0),
    # Detect the end of an idle connection, and of one whose bytes are not acknowledged for 30 s.
    (zmq.TCP_MAXRT, 30_000),
    (zmq.TCP_KEEPALIVE, 1),
    (zmq.TCP_KEEPALIVE_IDLE, 10),
    (zmq.TCP_KEEPALIVE_INTVL, 5),
    (zmq.TCP_KEEPALIVE_CNT, 4),
)
"""Socket options of a client that reconnects."""


class LoopDealer:
    """Client of one listener of the run. Belongs to the running event loop.

    Args:
        take: Function (header, frames) -> None that receives each message.
        lost: Function (reason) -> None that is called when the listener refuses the keys of
            ``network``, when a listener on another host is not reached within ``REACHED_WITHIN_S``,
            and, if ``connected`` is not given, when the connection ends.
        connected: If given, a connection that ends is opened again, and this function is called for
            each connection. Messages sent before may be lost.

    Raises NetworkError for an endpoint that must not be connected to.
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
        self._take = take
        self._lost = lost
        self._connected = connected
        self._loop = asyncio.get_running_loop()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._socket = open_dealer(self._context)
        for option, value in _RECONNECT_OPTIONS if connected else ():
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
        self._deadline = (
            self._loop.call_later(REACHED_WITHIN_S, self._on_connect_timeout)
            if network.protected
            else None
        )
        self._loop.add_reader(self._socket.FD, self.drain)
        self._loop.add_reader(self._watch.monitor.FD, self._check_handshake)
        self._loop.call_soon(self._check_handshake)
        self._loop.call_soon(self.drain)

    def send(self, *frames: Frame, copy: bool = True) -> None:
        """Send without blocking.

        Without ``copy`` the buffers must not change until they are sent. Raises zmq.Again if the
        queue is full and, with ``connected``, if there is no connection.
        """
        _send(self._socket, frames, copy=copy)
        if _has_message(self._socket):
            self._loop.call_soon(self.drain)

    def drain(self) -> None:
        """Take all messages that have arrived."""
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
                    _log.warning(
                        "message %d of a listener dropped: %s", self.dropped_messages, error
                    )
            except BaseException:
                self._loop.call_soon(self.drain)  # what waits behind it is not announced again
                raise

    def close(self) -> None:
        """Close the connection and drop unsent messages."""
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

    def _check_handshake(self) -> None:
        if self.closed:
            return
        handshakes = self._watch.handshakes
        self._watch.process_events()
        if self._connected is not None and self._watch.handshakes > handshakes:
            # Makes ZeroMQ process the new connection, which sending does only now and then.
            _has_message(self._socket)
            self._connected()
        if self._watch.refusal or self._watch.ended:
            self.drain()  # an answer that arrived before the end is valid
            self._lost(self._watch.reason or "closed the connection")

    def _on_connect_timeout(self) -> None:
        self._check_handshake()
        if not self.closed and not self._watch.reached:
            self._lost(describe_unreached())


def say_hello(
    network: Network,
    socket: zmq.Socket[bytes],
    endpoint: str,
    hello: bytes,
    name: str,
    timeout_s: float,
) -> list[bytes]:
    """Connect ``socket`` to the master and send ``hello`` for worker ``name``; return the frames of
    the answer.

    Raises RpcTimeout if there is no answer within ``timeout_s`` seconds. In a network with keys,
    raises NetworkError as soon as the master refuses them, or if it is not reached within
    ``REACHED_WITHIN_S``.
    """
    watch = HandshakeWatch(socket) if network.protected else None
    try:
        network.connect(socket, endpoint)
        socket.send(hello)
        if not _wait_for_answer(socket, watch, endpoint, name, timeout_s):
            reason = f": {watch.reason}" if watch is not None and watch.reason else ""
            raise RpcTimeout(
                f"the master at {endpoint} did not answer worker {name!r} within {timeout_s:g} "
                f"s{reason}"
            )
        return socket.recv_multipart()
    except (RpcTimeout, NetworkError):
        socket.setsockopt(zmq.LINGER, 0)
        raise
    finally:
        if watch is not None:
            watch.close()


def _wait_for_answer(
    socket: zmq.Socket[bytes],
    watch: HandshakeWatch | None,
    endpoint: str,
    name: str,
    timeout_s: float,
) -> bool:
    """Wait for the answer; return whether it has arrived. Raises NetworkError."""
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    if watch is None:
        return bool(process_clock.wait(lambda left_s: poller.poll(int(left_s * 1000)), timeout_s))
    poller.register(watch.monitor, zmq.POLLIN)
    start = process_clock.now()
    while (elapsed_s := process_clock.now() - start) < timeout_s:
        limit_s = timeout_s if watch.reached else min(timeout_s, REACHED_WITHIN_S)
        if socket in dict(poller.poll(max(1, int(1000 * (limit_s - elapsed_s))))):
            return True
        watch.process_events()
        if watch.refusal:
            raise NetworkError(f"worker {name!r}: the master at {endpoint} {watch.refusal}")
        if not watch.reached and process_clock.now() - start >= REACHED_WITHIN_S:
            raise NetworkError(f"worker {name!r}: the master at {endpoint} {describe_unreached()}")
    return False


def raise_descriptor_limit() -> int:
    """Raise the limit on open file descriptors to the hard limit (``ulimit -Hn``); return it.

    The usual soft limit of 1,024 exists for programs that use select(2); a few hundred workers
    exceed it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
