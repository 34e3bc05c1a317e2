"""Bulk transfer of large values in pieces, over separate connections.

The consumer sends requests of fixed size (``REQUEST``). Each answer is an ``ANSWER`` header,
followed by the bytes of a piece or by the text of an error.
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
"""Maximum size of a piece in bytes."""
NUMBER_BYTES = 16
"""Size in bytes of a transfer number, which is random so that it cannot be guessed."""
MAX_TRANSFERS = 64
"""Maximum number of transfers in progress; starting another one drops the least recently used."""
IDLE_S = 120.0
"""Seconds without a request after which a transfer is dropped."""


@dataclass
class _Transfer:
    """A value that a consumer fetches in pieces."""

    frames: Sequence[memoryview]
    ids: frozenset[str]
    """Samples to which the value belongs."""
    used: float = field(default_factory=process_clock.now)
    """Time of the last request (``process_clock.now``)."""


class Outgoing:
    """Registry of the transfers that consumers are fetching, with views of the store's tensors. Not
    thread-safe."""

    def __init__(self) -> None:
        self._transfers: dict[bytes, _Transfer] = {}

    def __len__(self) -> int:
        """Return the number of transfers in progress."""
        return len(self._transfers)

    def open(self, frames: Sequence[bytes | memoryview], ids: Sequence[str]) -> bytes:
        """Register the frames of a value that belongs to these samples, so that it can be fetched;
        return the number of the transfer."""
        now = process_clock.now()
        idle = [
            number for number, transfer in self._transfers.items() if now - transfer.used > IDLE_S
        ]
        for number in idle:
            del self._transfers[number]
        while len(self._transfers) >= MAX_TRANSFERS:
            del self._transfers[
                min(self._transfers, key=lambda number: self._transfers[number].used)
            ]
        views = [memoryview(frame).cast("B") for frame in frames]
        number = os.urandom(NUMBER_BYTES)
        self._transfers[number] = _Transfer(views, frozenset(ids))
        return number

    def piece(self, number: bytes, frame: int, start: int, length: int) -> memoryview | None:
        """Return ``length`` bytes from ``start`` of a frame of a transfer; None if the transfer was
        dropped.

        Raises ProtocolError for a piece outside the frames.
        """
        transfer = self._transfers.get(number)
        if transfer is None:
            return None
        transfer.used = process_clock.now()
        if not 0 <= frame < len(transfer.frames) or start < 0 or not 0 < length <= PIECE_BYTES:
            raise ProtocolError(f"piece {frame}:{start}:{length} of {len(transfer.frames)} frames")
        view = transfer.frames[frame]
        if start + length > view.nbytes:
            raise ProtocolError(f"piece {frame}:{start}:{length} of a frame of {view.nbytes} bytes")
        return view[start : start + length]

    def close(self, number: bytes) -> None:
        """Drop a completed transfer."""
        self._transfers.pop(number, None)

    def forget(self, ids: frozenset[str]) -> None:
        """Drop the transfers of samples that were cleared."""
        cleared = [number for number, transfer in self._transfers.items() if transfer.ids & ids]
        for number in cleared:
            del self._transfers[number]


LANES = 4
"""Number of connections of one fetch. Each has at most one piece in flight, which bounds unread
bytes."""
RETRIES = 3
"""Number of consecutive times that every connection may break without a piece arriving in
between."""
ALIGNMENT = 64
"""Frames are received at addresses that are multiples of this many bytes, so that tensors can be
built over them without a copy."""


class Piece(NamedTuple):
    """Bytes ``start`` to ``start + length`` of a frame."""

    frame: int
    """Index of the frame in its transfer."""
    start: int
    length: int


FetchPiece = Callable[[int, Piece, memoryview], None]
"""Function (lane, piece, into) -> None that fills ``into`` with the piece. Raises PeerLost, which
is retried, and DataError."""
Allocate = Callable[[int], np.ndarray[Any, np.dtype[np.uint8]]]
"""Function from a size in bytes to aligned, uninitialised memory."""


def _allocate(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.empty(nbytes, dtype=np.uint8)


def fetch_pieces(
    sizes: Sequence[Any], ask: FetchPiece, take: Allocate = _allocate
) -> list[memoryview]:
    """Fetch frames of these sizes into memory from ``take``; return writable, aligned views of
    them.

    Raises the errors of ``ask``, PeerLost after ``RETRIES`` failures in a row, and ProtocolError
    for sizes beyond the limits of a sample, before memory is allocated.
    """
    return _Fetch(_check_sizes(sizes), ask, take).run()


def fetch_whole(nbytes: int, ask: FetchPiece) -> memoryview:
    """Fetch one frame of any size; otherwise like ``fetch_pieces``."""
    return _Fetch([nbytes], ask, _allocate).run()[0]


def _check_sizes(sizes: Sequence[Any]) -> list[int]:
    if (
        not all(type(size) is int and 0 <= size <= MAX_FRAME_BYTES for size in sizes)
        or len(sizes) > MAX_FRAMES
    ):
        raise ProtocolError("bad frame sizes in an answer")
    if sum(sizes) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"an answer of {sum(sizes)} bytes")
    return list(sizes)


class _Fetch:
    """One fetch of several frames.

    Each lane is a thread, the first one being the calling thread. Lanes take pieces from a shared
    queue until it is empty or one of them fails.
    """

    def __init__(self, sizes: list[int], ask: FetchPiece, take: Allocate) -> None:
        starts = np.cumsum([0, *(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]).tolist()
        whole = memoryview(take(starts[-1]))  # pyright: ignore[reportArgumentType]
        self._frames = [
            whole[start : start + size] for start, size in zip(starts, sizes, strict=False)
        ]
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
        """Fetch all pieces; return the frames."""
        count = min(LANES, len(self._todo))
        others = [
            threading.Thread(target=self._run_lane, args=(lane,), daemon=True)
            for lane in range(1, count)
        ]
        for thread in others:
            thread.start()
        self._run_lane(0)
        for thread in others:
            thread.join()
        if self._failure is not None:
            raise self._failure
        return self._frames

    def _run_lane(self, lane: int) -> None:
        while (piece := self._next()) is not None:
            try:
                self._ask(
                    lane, piece, self._frames[piece.frame][piece.start : piece.start + piece.length]
                )
                with self._lock:
                    self._broken = 0
            except PeerLost as error:
                self._retry(piece, error)
            except BaseException as error:
                self._record_failure(error)

    def _next(self) -> Piece | None:
        with self._lock:
            return self._todo.popleft() if self._todo and self._failure is None else None

    def _retry(self, piece: Piece, error: PeerLost) -> None:
        """Put a piece back for any lane that still works."""
        with self._lock:
            self._broken += 1
            # A peer that restarts breaks all lanes at once, which counts as one failure.
            if self._broken > RETRIES * LANES:
                self._failure = self._failure or error
            self._todo.appendleft(piece)

    def _record_failure(self, error: BaseException) -> None:
        with self._lock:
            self._failure = self._failure or error


REQUEST = struct.Struct("!16sIQI")
"""Fields: number of the transfer, frame, start, length."""
ANSWER = struct.Struct("!BI")
"""Fields: kind of the content that follows (PIECE or REFUSED), and its size in bytes."""
PIECE = 0
REFUSED = 1
MAX_MESSAGE_TEXT_BYTES = 4000
HANDSHAKE_S = 8.0
"""Timeout in seconds for connecting, and for each step of a handshake."""
STALL_S = 20.0
"""Seconds without receiving a byte after which the other end counts as lost."""
CALL_BYTES = 1 << 20
"""Maximum bytes per system call, small enough that source and target stay in the core's cache."""


def send(connection: socket.socket, view: memoryview) -> None:
    """Send all of a view. Raises OSError, of which TimeoutError is a subclass."""
    for start in range(0, view.nbytes, CALL_BYTES):
        connection.sendall(view[start : start + CALL_BYTES])


def receive(connection: socket.socket, view: memoryview, deadline: float = math.inf) -> None:
    """Fill a view with received bytes.

    Raises TimeoutError after ``deadline`` (``process_clock.now``), which is checked whenever bytes
    have arrived, ConnectionError if the other end has closed the connection, and other OSErrors.
    """
    start = 0
    size = view.nbytes
    while start < size:
        count = connection.recv_into(view[start : start + CALL_BYTES])
        if count == 0:
            raise ConnectionError("closed the connection")
        start += count
        if start < size and process_clock.now() >= deadline:
            raise TimeoutError


def receive_bytes(connection: socket.socket, size: int) -> bytes:
    """Receive exactly ``size`` bytes. Raises the errors of ``receive``."""
    data = bytearray(size)
    receive(connection, memoryview(data))
    return bytes(data)


_log = logging.getLogger(__name__)
MAX_CONNECTIONS = 256
"""Maximum number of open connections; one more is closed at once."""
MAX_UNAUTHENTICATED = 32
"""Maximum number of connections that have not yet shown the run's certificate; one more closes the
oldest of them."""
_NO_DESCRIPTOR_PAUSE_S = 0.5
"""Pause before accepting again when the process has no file descriptor left."""
GetPiece = Callable[[bytes, int, int, int], memoryview | None]
"""Function (transfer, frame, start, length) that returns the piece, or None if the transfer was
dropped. Raises ProtocolError."""


class BulkServer:
    """Server of pieces on a separate port, with a thread for each connection.

    A connection requests one piece after another, and unread bytes stay in the store, so a slow
    consumer costs no memory. Without ``tls``, which needs keys, connections are unencrypted and on
    the loopback interface only.

    max_connections, max_unauthenticated: override the constants of the same names; 0 uses the
    constants.
    """

    def __init__(
        self,
        name: str,
        network: Network,
        tls: RunTls | None,
        piece: GetPiece,
        *,
        max_connections: int = 0,
        max_unauthenticated: int = 0,
    ) -> None:
        self._max_connections = max_connections or MAX_CONNECTIONS
        self._max_unauthenticated = max_unauthenticated or MAX_UNAUTHENTICATED
        self._name = name
        self._network = network
        self._tls = tls
        self._piece = piece
        self._lock = threading.Lock()
        # Duplicated handles, by the number of the connection: TLS detaches the first handle, and
        # shutting down any of them ends the connection.
        self._unauthenticated: dict[int, socket.socket] = {}
        self._authenticated: dict[int, socket.socket] = {}
        self._stopping = False
        self.n_refused = 0
        self.port = 0

    def start(self) -> None:
        """Listen and serve. Raises DataError if the server cannot listen on the address."""
        try:
            self._socket = socket.create_server((self._network.host, 0), backlog=128)
        except OSError as error:
            raise DataError(
                f"{self._name} cannot serve pieces on {self._network.host}: {error.strerror}"
            ) from None
        self.port = int(self._socket.getsockname()[1])
        threading.Thread(target=self._accept, name="bulk-server", daemon=True).start()

    def close(self) -> None:
        """Stop listening, and end all connections."""
        self._stopping = True
        if self.port:
            _shut_down_connection(self._socket)
            self._socket.close()
        with self._lock:
            for handle in (*self._unauthenticated.values(), *self._authenticated.values()):
                _shut_down_connection(handle)

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
                self._start_thread(number, connection, host)
            except (OSError, RuntimeError) as error:
                _log.warning("%s has no room for a connection: %s", self._name, error)
                self._release(number)
                connection.close()

    def _start_thread(self, number: int, connection: socket.socket, host: str) -> None:
        """Start the thread of a connection. Raises OSError or RuntimeError if no descriptor or
        thread is left."""
        with self._lock:
            if (
                self._stopping
                or len(self._unauthenticated) + len(self._authenticated) >= self._max_connections
            ):
                raise OSError(f"there are {self._max_connections} of them")
            for handle in list(self._unauthenticated.values())[
                : max(0, len(self._unauthenticated) + 1 - self._max_unauthenticated)
            ]:
                _shut_down_connection(handle)
            self._unauthenticated[number] = connection.dup()
        threading.Thread(
            target=self._serve, args=(number, connection, host), name="bulk", daemon=True
        ).start()

    def _serve(self, number: int, plain: socket.socket, host: str) -> None:
        plain.settimeout(HANDSHAKE_S)
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with contextlib.closing(self._tls.accept(plain) if self._tls else plain) as connection:
                with self._lock:
                    self._authenticated[number] = self._unauthenticated.pop(number)
                connection.settimeout(STALL_S)
                self._answer_all(connection)
        except OSError as error:
            self._log_refusal(number, host, error)
        finally:
            self._release(number)

    def _release(self, number: int) -> None:
        with self._lock:
            for handles in (self._unauthenticated, self._authenticated):
                if (handle := handles.pop(number, None)) is not None:
                    handle.close()

    def _log_refusal(self, number: int, host: str, error: OSError) -> None:
        """Count a refused connection; log the 1st, 2nd, 4th, ... of them.

        Errors of authenticated connections are left to the consumer, which sees and retries them.
        """
        with self._lock:
            if number in self._authenticated or self._stopping:
                return
            self.n_refused += 1
            count = self.n_refused
        if count & (count - 1) == 0:
            _log.warning("%s refused bulk connection %d, of %s: %s", self._name, count, host, error)

    def _answer_all(self, connection: socket.socket) -> None:
        while True:
            fields = REQUEST.unpack(receive_bytes(connection, REQUEST.size))
            try:
                piece = self._piece(*fields)
            except ProtocolError as error:
                _refuse(connection, str(error))
                continue
            if piece is None:
                _refuse(
                    connection, "it no longer holds it: its samples were cleared, or it is too old"
                )
                continue
            connection.sendall(ANSWER.pack(PIECE, piece.nbytes))
            send(connection, piece)


def _refuse(connection: socket.socket, message: str) -> None:
    text = message.encode()[:MAX_MESSAGE_TEXT_BYTES]
    connection.sendall(ANSWER.pack(REFUSED, len(text)) + text)


def _shut_down_connection(connection: socket.socket) -> None:
    """Shut down a connection; its thread sees the end and stops."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class BulkConnection:
    """Connection to the ``BulkServer`` at ``host`` and ``port``; unencrypted without ``tls``.

    The first request opens it, as does the first request after an error. Not thread-safe.
    """

    def __init__(self, tls: RunTls | None, host: str, port: int) -> None:
        self._tls = tls
        self._address = (host, port)
        self._name = f"{host}:{port}"
        self._connection: socket.socket | None = None

    def fetch(self, transfer: bytes, piece: Piece, into: memoryview, deadline: float) -> None:
        """Fetch a piece into ``into``.

        Raises PeerLost if the connection breaks or cannot be opened, FetchTimeout after
        ``deadline`` (``process_clock.now``), and DataError if the peer refuses or sends another
        piece.
        """
        message = ""
        try:
            connection = self._connect(deadline)
            connection.sendall(REQUEST.pack(transfer, *piece))
            kind, size = ANSWER.unpack(receive_bytes(connection, ANSWER.size))
            if kind == REFUSED and size <= MAX_MESSAGE_TEXT_BYTES:
                message = receive_bytes(connection, size).decode("utf-8", "replace")
            elif kind != PIECE or size != into.nbytes:
                message = f"another piece than {tuple(piece)} was sent"
            else:
                self._fill(connection, into, deadline)
                return
        except OSError as error:
            self.close()
            if process_clock.now() >= deadline:
                raise FetchTimeout(
                    f"{self._name} did not send all of a transfer before the deadline"
                ) from None
            raise PeerLost(f"{self._name} {_describe(error)}") from None
        self.close()
        raise DataError(f"{self._name} broke off a transfer: {message}")

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.close()
            self._connection = None

    def _connect(self, deadline: float) -> socket.socket:
        if self._connection is None:
            limit_s = _time_left(deadline, HANDSHAKE_S)
            plain = socket.create_connection(self._address, timeout=limit_s)
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connection = self._tls.connect(plain) if self._tls is not None else plain
        self._connection.settimeout(_time_left(deadline, STALL_S))
        return self._connection

    def _fill(self, connection: socket.socket, into: memoryview, deadline: float) -> None:
        """Receive in parts, checking the deadline in between, so that a peer that trickles bytes
        cannot exceed it."""
        for start in range(0, into.nbytes, CALL_BYTES):
            connection.settimeout(_time_left(deadline, STALL_S))
            receive(connection, into[start : start + CALL_BYTES], deadline)


def _time_left(deadline: float, at_most: float) -> float:
    left = deadline - process_clock.now()
    if left <= 0:
        raise TimeoutError
    return min(left, at_most)


def _describe(error: OSError) -> str:
    if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
        return f"refused the certificate of this run, or has another one: {error.reason or error}"
    if isinstance(error, TimeoutError):
        limits = (
            f"{STALL_S:g} s for the next bytes, {HANDSHAKE_S:g} s for a connection, or less before "
            f"a deadline"
        )
        return f"sent nothing in time ({limits})"
    return str(error.strerror or error) or "closed the connection"
