"""Serves and fetches large values in pieces, over several connections of their own.

What is said there are requests of fixed size, and answers that begin with theirs.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import socket
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from realhf.base import process_clock
from realhf.transport.codec import MAX_FRAME_BYTES, MAX_FRAMES, MAX_MESSAGE_BYTES
from realhf.transport.errors import DataError, FetchTimeout, PeerLost, ProtocolError
from realhf.transport.network import Network
from realhf.transport.tls import RunTls

PIECE_BYTES = 64 << 20
"""Size of the largest piece."""
NUMBER_BYTES = 16
"""Size of the number of a transfer, which nobody can guess."""
MOST_TRANSFERS = 64
"""Answers that are being fetched at once; the one that was used longest ago makes room for another."""
IDLE_S = 120.0
"""How long a consumer may be silent before its answer is forgotten, in seconds."""


@dataclass
class _Transfer:
    frames: Sequence[memoryview]
    ids: frozenset[str]
    used: float = field(default_factory=process_clock.now)


class Outgoing:
    """Keeps the answers that consumers fetch. They are views of the store's tensors, not copies. Not thread-safe."""

    def __init__(self) -> None:
        self._transfers: dict[bytes, _Transfer] = {}

    def __len__(self) -> int:
        """Count the answers that are being fetched."""
        return len(self._transfers)

    def open(self, frames: Sequence[bytes | memoryview], ids: Sequence[str]) -> bytes:
        """Keep an answer about these samples; return its number."""
        now = process_clock.now()
        for number in [number for number, held in self._transfers.items() if now - held.used > IDLE_S]:
            del self._transfers[number]
        while len(self._transfers) >= MOST_TRANSFERS:
            del self._transfers[min(self._transfers, key=lambda number: self._transfers[number].used)]
        views = [memoryview(frame).cast("B") for frame in frames]
        number = os.urandom(NUMBER_BYTES)
        self._transfers[number] = _Transfer(views, frozenset(ids))
        return number

    def piece(self, number: bytes, frame: int, start: int, length: int) -> memoryview | None:
        """Return a piece of an answer; None when the answer is no longer there. Raises ProtocolError for one that it
        does not have."""
        held = self._transfers.get(number)
        if held is None:
            return None
        held.used = process_clock.now()
        if not 0 <= frame < len(held.frames) or start < 0 or not 0 < length <= PIECE_BYTES:
            raise ProtocolError(f"piece {frame}:{start}:{length} of {len(held.frames)} frames")
        view = held.frames[frame]
        if start + length > view.nbytes:
            raise ProtocolError(f"piece {frame}:{start}:{length} of a frame of {view.nbytes} bytes")
        return view[start : start + length]

    def close(self, number: bytes) -> None:
        """Forget an answer that was fetched."""
        self._transfers.pop(number, None)

    def forget(self, ids: frozenset[str]) -> None:
        """Forget answers about samples that were cleared."""
        for number in [number for number, held in self._transfers.items() if held.ids & ids]:
            del self._transfers[number]


LANES = 4
"""Connections over which pieces come, each with one piece on its way: what a consumer has asked for is never more."""
RETRIES = 3
"""How often in a row connections may break without one piece arriving between."""
ALIGNMENT = 64


class Piece(NamedTuple):
    """Bytes ``start`` to ``start + length`` of a frame."""

    frame: int
    start: int
    length: int


Ask = Callable[[int, Piece, memoryview], None]
"""(lane, piece, into) fills ``into`` with the piece. Raises PeerLost, which is tried again, and DataError."""
Take = Callable[[int], np.ndarray[Any, np.dtype[np.uint8]]]
"""Bytes -> memory of this size, aligned, of any content."""


def _fresh(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.empty(nbytes, dtype=np.uint8)


def fetch_pieces(sizes: Sequence[Any], ask: Ask, take: Take = _fresh) -> list[memoryview]:
    """Return frames of these sizes, writable and aligned, in memory that ``take`` gives. Raises what ``ask`` raises,
    PeerLost after ``RETRIES`` broken connections in a row, and ProtocolError for sizes that no sample has, before
    memory is allocated."""
    return _Fetch(_checked(sizes), ask, take).run()


def fetch_whole(nbytes: int, ask: Ask) -> memoryview:
    """Return one frame of any size; otherwise as ``fetch_pieces``."""
    return _Fetch([nbytes], ask, _fresh).run()[0]


def _checked(sizes: Sequence[Any]) -> list[int]:
    if not all(type(size) is int and 0 <= size <= MAX_FRAME_BYTES for size in sizes) or len(sizes) > MAX_FRAMES:
        raise ProtocolError("bad frame sizes in an answer")
    if sum(sizes) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"an answer of {sum(sizes)} bytes")
    return list(sizes)


class _Fetch:
    """Is one fetch. Lanes are threads, the calling one among them; they take pieces until none is left or one of them
    fails."""

    def __init__(self, sizes: list[int], ask: Ask, take: Take) -> None:
        starts = np.cumsum([0, *(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]).tolist()
        whole = memoryview(take(starts[-1]))  # pyright: ignore[reportArgumentType]
        self._frames = [whole[start : start + size] for start, size in zip(starts, sizes, strict=False)]
        self._ask = ask
        self._lock = threading.Lock()
        self._todo = deque(
            Piece(frame, start, min(PIECE_BYTES, size - start))
            for frame, size in enumerate(sizes)
            for start in range(0, size, PIECE_BYTES)
        )
        self._broken = 0
        self._failure: BaseException | None = None

    def run(self) -> list[memoryview]:
        """Fetch everything."""
        count = min(LANES, len(self._todo))
        others = [threading.Thread(target=self._work, args=(lane,), daemon=True) for lane in range(1, count)]
        for thread in others:
            thread.start()
        self._work(0)
        for thread in others:
            thread.join()
        if self._failure is not None:
            raise self._failure
        return self._frames

    def _work(self, lane: int) -> None:
        while (piece := self._next()) is not None:
            try:
                self._ask(lane, piece, self._frames[piece.frame][piece.start : piece.start + piece.length])
                with self._lock:
                    self._broken = 0
            except PeerLost as error:
                self._again(piece, error)
            except BaseException as error:
                self._fail(error)

    def _next(self) -> Piece | None:
        with self._lock:
            return self._todo.popleft() if self._todo and self._failure is None else None

    def _again(self, piece: Piece, error: PeerLost) -> None:
        """Leave a piece to any lane that works; all lanes break at once where the peer does, which counts once."""
        with self._lock:
            self._broken += 1
            if self._broken > RETRIES * LANES:
                self._failure = self._failure or error
            self._todo.appendleft(piece)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._failure = self._failure or error


REQUEST = struct.Struct("!16sIQI")
"""Number of the transfer, frame, start, length."""
ANSWER = struct.Struct("!BI")
"""What follows, and its bytes."""
PIECE, REFUSED = 0, 1
MOST_MESSAGE_BYTES = 4000
HANDSHAKE_S = 8.0
"""How long each step of a handshake may take, and the connection before it."""
STALL_S = 20.0
"""After this long without a byte the other end counts as lost."""
CALL_BYTES = 1 << 20
"""Bytes that one call of the system sends or receives at most; both fit into a core's cache on the way."""


def send(connection: socket.socket, view: memoryview) -> None:
    """Send all of a view. Raises OSError, TimeoutError among them."""
    for start in range(0, view.nbytes, CALL_BYTES):
        connection.sendall(view[start : start + CALL_BYTES])


def receive(connection: socket.socket, view: memoryview, deadline: float = math.inf) -> None:
    """Fill a view. Raises OSError, TimeoutError among them when something came and ``deadline`` (process_clock.now) is
    over, and ConnectionError when the other end has closed."""
    start, size = 0, view.nbytes
    while start < size:
        count = connection.recv_into(view[start : start + CALL_BYTES])
        if count == 0:
            raise ConnectionError("closed the connection")
        start += count
        if start < size and process_clock.now() >= deadline:
            raise TimeoutError


def received(connection: socket.socket, size: int) -> bytes:
    """Receive exactly ``size`` bytes, else as ``receive``."""
    found = bytearray(size)
    receive(connection, memoryview(found))
    return bytes(found)


_log = logging.getLogger(__name__)
MOST_CONNECTIONS = 256
"""Connections at once; one more is closed."""
MOST_STRANGERS = 32
"""Connections that have not yet shown the run's certificate; one more closes the oldest of them."""
_NO_DESCRIPTOR_PAUSE_S = 0.5
GetPiece = Callable[[bytes, int, int, int], memoryview | None]
"""(transfer, frame, start, length) -> the piece; None when it is no longer held. Raises ProtocolError."""


class BulkServer:
    """Listens on a port of its own, and gives each connection a thread. A connection asks for one piece after another;
    what it does not read stays where it is, so a slow consumer costs no memory. Without ``tls``, for which there have
    to be keys, connections are plain, and on the loopback. ``most`` connections are taken, ``strangers`` of them before
    they have shown the certificate; 0: as many as the constants say."""

    def __init__(
        self, name: str, network: Network, tls: RunTls | None, piece: GetPiece, *, most: int = 0, strangers: int = 0
    ) -> None:
        self._most, self._most_strangers = most or MOST_CONNECTIONS, strangers or MOST_STRANGERS
        self._name, self._network, self._tls, self._piece = name, network, tls, piece
        self._lock = threading.Lock()
        # Second handles of the same connections: TLS takes the first one away, and any of them can end it.
        self._strangers: dict[int, socket.socket] = {}
        self._guests: dict[int, socket.socket] = {}
        self._stopping = False
        self.refused = 0
        self.port = 0

    def start(self) -> None:
        """Listen and serve. Raises DataError when nothing can listen there."""
        try:
            self._socket = socket.create_server((self._network.host, 0), backlog=128)
        except OSError as error:
            raise DataError(f"{self._name} cannot serve pieces on {self._network.host}: {error.strerror}") from None
        self.port = int(self._socket.getsockname()[1])
        threading.Thread(target=self._accept, name="bulk-server", daemon=True).start()

    def close(self) -> None:
        """Stop listening, and break off all connections."""
        self._stopping = True
        if self.port:
            _cut(self._socket)
            self._socket.close()
        with self._lock:
            for handle in (*self._strangers.values(), *self._guests.values()):
                _cut(handle)

    def _accept(self) -> None:
        for number in itertools.count():
            try:
                connection, (host, _) = self._socket.accept()
            except OSError as error:
                if self._stopping:
                    return
                _log.warning("%s cannot take a connection: %s", self._name, error)
                time.sleep(_NO_DESCRIPTOR_PAUSE_S)
                continue
            try:
                self._begin(number, connection, host)
            except (OSError, RuntimeError) as error:
                _log.warning("%s has no room for a connection: %s", self._name, error)
                self._leave(number)
                connection.close()

    def _begin(self, number: int, connection: socket.socket, host: str) -> None:
        """Give a connection its thread. Raises OSError or RuntimeError where there is no descriptor or thread left."""
        with self._lock:
            if self._stopping or len(self._strangers) + len(self._guests) >= self._most:
                raise OSError(f"there are {self._most} of them")
            for handle in list(self._strangers.values())[: max(0, len(self._strangers) + 1 - self._most_strangers)]:
                _cut(handle)
            self._strangers[number] = connection.dup()
        threading.Thread(target=self._serve, args=(number, connection, host), name="bulk", daemon=True).start()

    def _serve(self, number: int, plain: socket.socket, host: str) -> None:
        plain.settimeout(HANDSHAKE_S)
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with contextlib.closing(self._tls.accept(plain) if self._tls else plain) as connection:
                with self._lock:
                    self._guests[number] = self._strangers.pop(number)
                connection.settimeout(STALL_S)
                self._answer_all(connection)
        except OSError as error:
            self._note(number, host, error)
        finally:
            self._leave(number)

    def _leave(self, number: int) -> None:
        with self._lock:
            for handles in (self._strangers, self._guests):
                if (handle := handles.pop(number, None)) is not None:
                    handle.close()

    def _note(self, number: int, host: str, error: OSError) -> None:
        """Log the 1st, 2nd, 4th, ... stranger; what ends a known connection is the business of its other end."""
        with self._lock:
            if number in self._guests or self._stopping:
                return
            self.refused += 1
            count = self.refused
        if count & (count - 1) == 0:
            _log.warning("%s refused bulk connection %d, of %s: %s", self._name, count, host, error)

    def _answer_all(self, connection: socket.socket) -> None:
        while True:
            asked = REQUEST.unpack(received(connection, REQUEST.size))
            try:
                piece = self._piece(*asked)
            except ProtocolError as error:
                _refuse(connection, str(error))
                continue
            if piece is None:
                _refuse(connection, "it no longer holds it: its samples were cleared, or it is too old")
                continue
            connection.sendall(ANSWER.pack(PIECE, piece.nbytes))
            send(connection, piece)


def _refuse(connection: socket.socket, message: str) -> None:
    text = message.encode()[:MOST_MESSAGE_BYTES]
    connection.sendall(ANSWER.pack(REFUSED, len(text)) + text)


def _cut(connection: socket.socket) -> None:
    """End a connection whose thread is at work: that finds it closed, and gives it up."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class BulkConnection:
    """Is one connection to the ``BulkServer`` at ``host`` and ``port``, made at the first request; plain without
    ``tls``. One thread uses it. An error breaks it off; the next request makes another one."""

    def __init__(self, tls: RunTls | None, host: str, port: int) -> None:
        self._tls, self._address = tls, (host, port)
        self._name = f"{host}:{port}"
        self._connection: socket.socket | None = None

    def fetch(self, transfer: bytes, piece: Piece, into: memoryview, deadline: float) -> None:
        """Fill ``into`` with a piece. Raises PeerLost for a connection that broke or could not be made, FetchTimeout
        after ``deadline`` (process_clock.now), DataError for what the peer says instead."""
        message = ""
        try:
            connection = self._connected(deadline)
            connection.sendall(REQUEST.pack(transfer, *piece))
            kind, size = ANSWER.unpack(received(connection, ANSWER.size))
            if kind == REFUSED and size <= MOST_MESSAGE_BYTES:
                message = received(connection, size).decode("utf-8", "replace")
            elif kind != PIECE or size != into.nbytes:
                message = f"another piece than {tuple(piece)} was sent"
            else:
                self._fill(connection, into, deadline)
                return
        except OSError as error:
            self.close()
            if process_clock.now() >= deadline:
                raise FetchTimeout(f"{self._name} did not send all of a transfer before the deadline") from None
            raise PeerLost(f"{self._name} {_reason(error)}") from None
        self.close()
        raise DataError(f"{self._name} broke off a transfer: {message}")

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.close()
            self._connection = None

    def _connected(self, deadline: float) -> socket.socket:
        if self._connection is None:
            limit_s = _time_left(deadline, HANDSHAKE_S)
            plain = socket.create_connection(self._address, timeout=limit_s)
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connection = self._tls.connect(plain) if self._tls is not None else plain
        self._connection.settimeout(_time_left(deadline, STALL_S))
        return self._connection

    def _fill(self, connection: socket.socket, into: memoryview, deadline: float) -> None:
        """Receive in parts, so that a peer that sends one byte now and then does not outlive the deadline."""
        for start in range(0, into.nbytes, CALL_BYTES):
            connection.settimeout(_time_left(deadline, STALL_S))
            receive(connection, into[start : start + CALL_BYTES], deadline)


def _time_left(deadline: float, at_most: float) -> float:
    left = deadline - process_clock.now()
    if left <= 0:
        raise TimeoutError
    return min(left, at_most)


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
        return f"refused the certificate of this run, or has another one: {error.reason or error}"
    if isinstance(error, TimeoutError):
        limits = f"{STALL_S:g} s for the next bytes, {HANDSHAKE_S:g} s for a connection, or less before a deadline"
        return f"sent nothing in time ({limits})"
    return str(error.strerror or error) or "closed the connection"
