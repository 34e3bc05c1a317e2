"""Transfer of tensors between workers (docs/reference/dataflow.md 7).

Every worker serves its TensorStore from a separate thread, so two busy workers can never wait for
each other. A fetch within one host is answered with a reference to shared memory. If the memory
cannot be mapped, or the fetch comes from another host, it is answered with the bytes themselves. In
a network with keys, where the other end may be on another host, an answer of BULK_FROM_BYTES or
more stays with its owner until the consumer has fetched it in pieces, over separate connections
(``bulk``).
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Sequence
from typing import Any

import zmq

from realhf.api.sample import SequenceSample
from realhf.base import process_clock
from realhf.base.process import host_token
from realhf.transport import envelope
from realhf.transport.bulk import (
    LANES,
    NUMBER_BYTES,
    BulkConnection,
    BulkServer,
    Outgoing,
    Piece,
    fetch_pieces,
)
from realhf.transport.codec import MAX_FRAME_BYTES, decode_sample, encode_sample
from realhf.transport.envelope import (
    field,
    pack_header,
    pack_payload,
    unpack_header,
    unpack_payload,
)
from realhf.transport.errors import (
    DataError,
    DataMissing,
    FetchTimeout,
    NetworkError,
    PeerLost,
    ProtocolError,
    TransportError,
)
from realhf.transport.network import LOOPBACK, Network, parse_host
from realhf.transport.shared_memory import MappingCache, SegmentPool, SegmentRef, TargetMemory
from realhf.transport.sockets import HandshakeWatch, Listener, open_dealer
from realhf.transport.tensor_store import TensorStore
from realhf.transport.tls import RunTls

CONNECT_TIMEOUT_S = 8.0
"""Seconds that a peer has to accept a connection."""


class PeerConnection:
    """Connection to one endpoint, for one request at a time.

    The socket's event stream reports when the peer disconnects, so that a request to a dead peer
    fails at once instead of at its deadline. After an error the connection is ``broken``.
    """

    def __init__(
        self, context: zmq.Context[Any], endpoint: str, network: Network = LOOPBACK
    ) -> None:
        self._endpoint = endpoint
        self._lock = threading.Lock()
        self._socket = open_dealer(context, max_bytes=MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.RCVHWM, 4)
        self._watch = HandshakeWatch(self._socket, ends=True)
        try:
            network.connect(self._socket, endpoint)
        except NetworkError:
            self._close_socket()
            raise
        self.broken = False

    def exchange(self, request_id: bytes, message: list[bytes], deadline: float) -> list[Any]:
        """Send a message; return the header frame and payload frames of the answer, as buffers.

        ``deadline`` is a time of ``process_clock.now``. Raises PeerLost or FetchTimeout.
        """
        if not process_clock.wait(
            lambda left_s: self._lock.acquire(timeout=left_s), deadline - process_clock.now()
        ):
            raise FetchTimeout(f"{self._endpoint} was busy with another fetch until the deadline")
        try:
            if self.broken:
                raise PeerLost(f"{self._endpoint} closed the connection")
            self._socket.send_multipart(message)
            return self._receive(request_id, deadline)
        except BaseException:
            self.broken = True
            raise
        finally:
            self._lock.release()

    def _receive(self, request_id: bytes, deadline: float) -> list[Any]:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._watch.monitor, zmq.POLLIN)
        started = process_clock.now()
        connect_by = min(deadline, started + CONNECT_TIMEOUT_S)
        while True:
            limit = deadline if self._watch.handshakes else connect_by
            ready = dict(poller.poll(int(max(0.0, limit - process_clock.now()) * 1000)))
            if self._socket in ready:
                frames = [frame.buffer for frame in self._socket.recv_multipart(copy=False)]
                if field(unpack_header(frames[0]), "id", bytes) == request_id:
                    return frames
            elif self._watch.monitor in ready:
                self._watch.process_events()
                if self._watch.ended or self._watch.reason:
                    raise PeerLost(
                        f"{self._endpoint} "
                        f"{self._watch.reason or 'refused or closed the connection'}"
                    )
            elif process_clock.now() < limit:
                continue  # the poll included time in which this process was suspended
            elif not self._watch.handshakes and process_clock.now() < deadline:
                raise PeerLost(
                    f"{self._endpoint} did not accept a connection within {CONNECT_TIMEOUT_S:g} s"
                )
            else:
                waited = process_clock.now() - started
                raise FetchTimeout(f"{self._endpoint} did not answer a fetch within {waited:.1f} s")

    def close(self) -> None:
        """Close the connection after waiting for a request in flight."""
        with self._lock:
            self.broken = True
            self._close_socket()

    def _close_socket(self) -> None:
        self._watch.close()
        self._socket.close(0)


_log = logging.getLogger(__name__)

SHM_FROM_BYTES = 64 << 10
"""Size in bytes from which values are served through shared memory."""
SPARE_BYTES = 256 << 20
"""Maximum bytes of cleared segments, and of idle mappings, kept for reuse."""
SPARE_TARGET_BYTES = 1 << 30
"""Maximum bytes of receive memory kept for reuse; the kernel may reclaim it."""
BULK_FROM_BYTES = 1 << 20
"""Size in bytes from which an answer to another host is fetched in pieces: encrypting more bytes
with ZeroMQ takes longer than opening connections."""
SENDERS_AHEAD = 64
"""Maximum number of messages queued for a consumer that does not read."""


class DataPlane:
    """Server of a worker's own store, and client of the other workers' stores. ``fetch`` is
    thread-safe.

    shm: Whether to offer and request shared memory.
    """

    def __init__(
        self,
        name: str,
        run_id: str,
        store: TensorStore,
        *,
        shm: bool = True,
        network: Network = LOOPBACK,
    ) -> None:
        self._name = name
        self._run_id = run_id
        self._store = store
        self._network = network
        self._host = host_token() if shm else ""
        self._pool = SegmentPool(SPARE_BYTES)
        self._mappings = MappingCache(SPARE_BYTES)
        self._targets = TargetMemory(SPARE_TARGET_BYTES)
        self._pool_lock = threading.Lock()
        self._segments_of: dict[str, set[Any]] = {}
        self._outgoing = Outgoing()
        self._tls = (
            RunTls(network.keys, trusted=network.trusted) if network.keys is not None else None
        )
        self._bulk = (
            BulkServer(name, network, self._tls, self._read_piece)
            if self._tls is not None
            else None
        )
        self._peers: dict[str, PeerConnection] = {}
        self._peers_lock = threading.Lock()
        self._context = network.context()
        self._listener: Listener | None = None
        self._stopping = False
        self.endpoint = ""

    def start(self) -> None:
        """Bind the socket and serve."""
        self._listener = Listener(
            f"the data plane of {self._name}",
            self._context,
            self._network.listen,
            self._serve,
            ahead=SENDERS_AHEAD,
            mandatory=True,
            linger_ms=0,
            copy=False,
            owned=False,
        )
        self.endpoint = self._listener.endpoint
        if self._bulk is not None:
            self._bulk.start()
        self._store.on_clear(self._release_segments)
        self._listener.start()

    def fetch(
        self, endpoint: str, ids: Sequence[str], keys: Sequence[str], timeout_s: float
    ) -> SequenceSample:
        """Fetch values from a peer's store, in the order of ``ids``.

        The tensors belong to the caller: writing to them changes nothing elsewhere. Raises
        DataMissing (with the list of missing values), PeerLost, FetchTimeout, and DataError for
        errors that the peer reports.
        """
        if endpoint == self.endpoint:
            return self._store.get(ids, keys)
        deadline = process_clock.now() + timeout_s
        frames = self._request(endpoint, ids, keys, self._host, deadline)
        if frames is None:
            frames = self._request(endpoint, ids, keys, "", deadline)
        if frames is None:
            raise DataError(f"{endpoint} answered with shared memory that was not requested")
        return decode_sample(frames)

    def close(self) -> None:
        """Stop serving; release all shared memory and connections. The store is not changed."""
        self._stopping = True
        if self._bulk is not None:
            self._bulk.close()
        if self._listener is not None:
            self._listener.close()
        with self._peers_lock:
            for peer in self._peers.values():
                peer.close()
            self._peers.clear()
        self._mappings.close()
        self._targets.close()
        with self._pool_lock:
            self._pool.close()
            self._segments_of.clear()
        if not self._context.closed:
            self._context.destroy(0)

    # ---- fetching

    def _request(
        self, endpoint: str, ids: Sequence[str], keys: Sequence[str], host: str, deadline: float
    ) -> list[Any] | None:
        """Request the encoded sample and return its frames; None if shared memory could not be
        mapped.

        host: ``host_token`` of this process to request shared memory, "" to request bytes.
        """
        request_id = os.urandom(16)
        header = pack_header("fetch", self._run_id, b"", id=request_id)
        wish = {"ids": list(ids), "keys": list(keys), "host": host}
        if self._network.protected:
            wish["pieces"] = True
        peer = self._connect(endpoint)
        answer, *frames = peer.exchange(request_id, [header, pack_payload(wish)], deadline)
        fields = unpack_header(answer)
        if fields["kind"] == "missing":
            raise DataMissing(endpoint, [(str(i), str(k)) for i, k in unpack_payload(frames)])
        if fields["kind"] == "pieces":
            return self._fetch_pieces(endpoint, fields, deadline)
        if fields["kind"] == "shared":
            return (
                self._mappings.open(SegmentRef.from_map(unpack_payload(frames))) if host else None
            )
        if fields["kind"] == "frames":
            return frames
        raise DataError(f"{endpoint} could not serve {list(keys)}: {fields.get('message')}")

    def _fetch_pieces(self, endpoint: str, fields: dict[str, Any], deadline: float) -> list[Any]:
        """Fetch the frames of an answer that stays with the peer; broken connections are
        reopened."""
        number = envelope.field(fields, "transfer", bytes)
        port = envelope.field(fields, "port", int)
        if self._tls is None or len(number) != NUMBER_BYTES or not 0 < port < 1 << 16:
            raise ProtocolError(f"{endpoint} answered with pieces that cannot be fetched")
        tls = self._tls
        host = parse_host(endpoint)
        lanes = [BulkConnection(tls, host, port) for _ in range(LANES)]

        def ask(lane: int, piece: Piece, into: memoryview) -> None:
            if self._stopping:
                raise DataError(f"the data plane of {self._name} is closed")
            lanes[lane].fetch(number, piece, into, deadline)

        try:
            frames: list[Any] = list(
                fetch_pieces(envelope.field(fields, "sizes", list), ask, self._targets.take)
            )
        finally:
            for lane in lanes:
                lane.close()
        request_id = os.urandom(16)
        with contextlib.suppress(DataError):
            header = pack_header("done", self._run_id, b"", id=request_id, transfer=number)
            self._connect(endpoint).exchange(request_id, [header], deadline)
        return frames

    def _connect(self, endpoint: str) -> PeerConnection:
        with self._peers_lock:
            if self._stopping:
                raise DataError(f"the data plane of {self._name} is closed")
            peer = self._peers.get(endpoint)
            if peer is None or peer.broken:
                if peer is not None:
                    peer.close()
                peer = self._peers[endpoint] = PeerConnection(
                    self._context, endpoint, self._network
                )
            return peer

    # ---- serving

    def _serve(self, identity: bytes, header: dict[str, Any], payload: list[Any]) -> None:
        if header.get("run") != self._run_id or header.get("kind") not in ("fetch", "done"):
            raise ProtocolError(f"{header.get('kind')!r:.60} of run {header.get('run')!r:.60}")
        request_id = envelope.field(header, "id", bytes)
        assert self._listener is not None
        self._listener.send(identity, *self._answer(request_id, header, payload))
        self._listener.flush()

    def _answer(self, request_id: bytes, request: dict[str, Any], payload: list[Any]) -> list[Any]:
        def header(kind: str, **fields: Any) -> bytes:
            return pack_header(kind, self._run_id, b"", id=request_id, **fields)

        try:
            if request["kind"] == "done":
                with self._pool_lock:
                    self._outgoing.close(envelope.field(request, "transfer", bytes))
                return [header("done")]
            wish = unpack_payload(payload)
            ids = envelope.field(wish, "ids", list)
            keys = envelope.field(wish, "keys", list)
            ref = (
                self._share(ids, keys) if wish.get("host") and wish["host"] == self._host else None
            )
            if ref is not None:
                return [header("shared"), pack_payload(ref.to_map())]
            frames = encode_sample(self._store.get(ids, keys))
            sizes = [memoryview(frame).nbytes for frame in frames]
            if self._bulk is not None and wish.get("pieces") and sum(sizes) >= BULK_FROM_BYTES:
                with self._pool_lock:
                    number = self._outgoing.open(frames, ids)
                return [header("pieces", sizes=sizes, transfer=number, port=self._bulk.port)]
            return [header("frames"), *frames]
        except DataMissing as error:
            return [header("missing"), pack_payload(error.missing)]
        except (TransportError, ValueError, TypeError, AttributeError) as error:
            return [header("error", message=f"{type(error).__name__}: {error}"[:4000])]

    def _read_piece(self, number: bytes, frame: int, start: int, length: int) -> memoryview | None:
        with self._pool_lock:
            return self._outgoing.piece(number, frame, start, length)

    def _share(self, ids: Sequence[str], keys: Sequence[str]) -> SegmentRef | None:
        """Copy these values into a segment and return its location; None if they are small or there
        is no memory for it."""
        name = (tuple(ids), tuple(sorted(keys)))
        with self._pool_lock:
            ref = self._pool.find(name)
            if ref is not None:
                return ref
            frames = encode_sample(self._store.get(ids, keys))
            if sum(memoryview(frame).nbytes for frame in frames) < SHM_FROM_BYTES:
                return None
            ref = self._pool.store(name, frames)
            if ref is not None:
                for sample_id in ids:
                    self._segments_of.setdefault(sample_id, set()).add(name)
            return ref

    def _release_segments(self, ids: frozenset[str]) -> None:
        """Release the segments of samples that were cleared, so that they can be refilled."""
        with self._pool_lock:
            self._outgoing.forget(ids)
            names = {name for i in ids for name in self._segments_of.pop(i, ())}
            for name in names:
                self._pool.release(name)
                for sample_id in name[0]:
                    self._segments_of.get(sample_id, set()).discard(name)
