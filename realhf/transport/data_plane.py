"""Moves tensors from worker to worker (docs/reference/dataflow.md 7).

Every worker serves its TensorStore from a thread of its own, so two busy workers can never wait for each other. A fetch
on one host is answered with a reference to shared memory. Any other fetch, and any whose memory cannot be mapped, is
answered with the bytes themselves; in a network with keys, where the other end may be on another host, an answer from
BULK_FROM_BYTES is kept until the consumer has fetched it in pieces, over connections made for that (``bulk``).
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
from realhf.transport.bulk import LANES, NUMBER_BYTES, BulkConnection, BulkServer, Outgoing, Piece, fetch_pieces
from realhf.transport.codec import MAX_FRAME_BYTES, decode_sample, encode_sample
from realhf.transport.envelope import field, pack_header, pack_payload, unpack_header, unpack_payload
from realhf.transport.errors import (
    DataError,
    DataMissing,
    FetchTimeout,
    NetworkError,
    PeerLost,
    ProtocolError,
    TransportError,
)
from realhf.transport.network import LOOPBACK, Network, host_of
from realhf.transport.shared_memory import MappingCache, SegmentPool, SegmentRef, TargetMemory
from realhf.transport.sockets import HandshakeWatch, Listener, dealer
from realhf.transport.tensor_store import TensorStore
from realhf.transport.tls import RunTls

CONNECT_TIMEOUT_S = 8.0
"""How long a peer may take to accept a connection."""


class PeerConnection:
    """Sends requests to one endpoint, one at a time. The socket's own event stream reports when the peer is gone, so a
    dead peer ends a request at once instead of at its deadline. After an error the connection is ``broken``."""

    def __init__(self, context: zmq.Context[Any], endpoint: str, network: Network = LOOPBACK) -> None:
        self._endpoint = endpoint
        self._lock = threading.Lock()
        self._socket = dealer(context, most_bytes=MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.RCVHWM, 4)
        self._watch = HandshakeWatch(self._socket, ends=True)
        try:
            network.connect(self._socket, endpoint)
        except NetworkError:
            self._end()
            raise
        self.broken = False

    def exchange(self, request_id: bytes, message: list[bytes], deadline: float) -> list[Any]:
        """Send a message and wait for the answer: header frame and payload frames, as buffers. Raises PeerLost or
        FetchTimeout."""
        if not process_clock.wait(lambda left_s: self._lock.acquire(timeout=left_s), deadline - process_clock.now()):
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
            limit = deadline if self._watch.greeted else connect_by
            ready = dict(poller.poll(int(max(0.0, limit - process_clock.now()) * 1000)))
            if self._socket in ready:
                frames = [frame.buffer for frame in self._socket.recv_multipart(copy=False)]
                if field(unpack_header(frames[0]), "id", bytes) == request_id:
                    return frames
            elif self._watch.monitor in ready:
                self._watch.look()
                if self._watch.ended or self._watch.why:
                    raise PeerLost(f"{self._endpoint} {self._watch.why or 'refused or closed the connection'}")
            elif process_clock.now() < limit:
                continue  # the poll had counted a pause of this process
            elif not self._watch.greeted and process_clock.now() < deadline:
                raise PeerLost(f"{self._endpoint} did not accept a connection within {CONNECT_TIMEOUT_S:g} s")
            else:
                waited = process_clock.now() - started
                raise FetchTimeout(f"{self._endpoint} did not answer a fetch within {waited:.1f} s")

    def close(self) -> None:
        """Close the connection after waiting for a request in flight."""
        with self._lock:
            self.broken = True
            self._end()

    def _end(self) -> None:
        self._watch.close()
        self._socket.close(0)


_log = logging.getLogger(__name__)

SHM_FROM_BYTES = 64 << 10
"""Size from which values are served through shared memory."""
SPARE_BYTES = 256 << 20
"""Bytes of cleared segments, and of idle mappings, that are kept for use again."""
SPARE_TARGET_BYTES = 1 << 30
"""Bytes of memory that was fetched into and is kept for use again; the kernel may take them."""
BULK_FROM_BYTES = 1 << 20
"""Size from which an answer to another host goes in pieces: ZeroMQ would encrypt for longer than connecting takes."""
SENDERS_AHEAD = 64
"""Number of messages that wait for a consumer that does not read."""


class DataPlane:
    """Serves one store and fetches from others. ``fetch`` may be called from any thread.

    ``shm=False`` neither offers nor asks for shared memory.
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
        self._name, self._run_id, self._store = name, run_id, store
        self._network = network
        self._host = host_token() if shm else ""
        self._pool = SegmentPool(SPARE_BYTES)
        self._mappings = MappingCache(SPARE_BYTES)
        self._targets = TargetMemory(SPARE_TARGET_BYTES)
        self._pool_lock = threading.Lock()
        self._segments_of: dict[str, set[Any]] = {}
        self._outgoing = Outgoing()
        self._tls = RunTls(network.keys, trusted=network.trusted) if network.keys is not None else None
        self._bulk = BulkServer(name, network, self._tls, self._piece) if self._tls is not None else None
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
        self._store.on_clear(self._forget)
        self._listener.start()

    def fetch(self, endpoint: str, ids: Sequence[str], keys: Sequence[str], timeout_s: float) -> SequenceSample:
        """Fetch values from a peer's store, with the ids in the given order.

        Raises DataMissing (with the list), PeerLost, FetchTimeout, or DataError for what the peer reports. The tensors
        belong to the caller: writing to them changes nothing elsewhere.
        """
        if endpoint == self.endpoint:
            return self._store.get(ids, keys)
        deadline = process_clock.now() + timeout_s
        frames = self._request(endpoint, ids, keys, self._host, deadline)
        if frames is None:
            frames = self._request(endpoint, ids, keys, "", deadline)
        if frames is None:
            raise DataError(f"{endpoint} answered with shared memory that was not asked for")
        return decode_sample(frames)

    def close(self) -> None:
        """Stop serving and give up all shared memory and connections. The store is left as it is."""
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
        """Request the frames of the encoded sample; None when shared memory could not be mapped."""
        request_id = os.urandom(16)
        header = pack_header("fetch", self._run_id, b"", id=request_id)
        wish = {"ids": list(ids), "keys": list(keys), "host": host}
        if self._network.protected:
            wish["pieces"] = True
        peer = self._peer(endpoint)
        answer, *frames = peer.exchange(request_id, [header, pack_payload(wish)], deadline)
        fields = unpack_header(answer)
        if fields["kind"] == "missing":
            raise DataMissing(endpoint, [(str(i), str(k)) for i, k in unpack_payload(frames)])
        if fields["kind"] == "pieces":
            return self._in_pieces(endpoint, fields, deadline)
        if fields["kind"] == "shared":
            return self._mappings.open(SegmentRef.from_map(unpack_payload(frames))) if host else None
        if fields["kind"] == "frames":
            return frames
        raise DataError(f"{endpoint} could not serve {list(keys)}: {fields.get('message')}")

    def _in_pieces(self, endpoint: str, fields: dict[str, Any], deadline: float) -> list[Any]:
        """Fetch the frames of an answer that the peer keeps. A connection that breaks is made anew."""
        number, port = envelope.field(fields, "transfer", bytes), envelope.field(fields, "port", int)
        if self._tls is None or len(number) != NUMBER_BYTES or not 0 < port < 1 << 16:
            raise ProtocolError(f"{endpoint} answered with pieces that cannot be fetched")
        tls, host = self._tls, host_of(endpoint)
        lanes = [BulkConnection(tls, host, port) for _ in range(LANES)]

        def ask(lane: int, piece: Piece, into: memoryview) -> None:
            if self._stopping:
                raise DataError(f"the data plane of {self._name} is closed")
            lanes[lane].fetch(number, piece, into, deadline)

        try:
            frames: list[Any] = list(fetch_pieces(envelope.field(fields, "sizes", list), ask, self._targets.take))
        finally:
            for lane in lanes:
                lane.close()
        request_id = os.urandom(16)
        with contextlib.suppress(DataError):
            header = pack_header("done", self._run_id, b"", id=request_id, transfer=number)
            self._peer(endpoint).exchange(request_id, [header], deadline)
        return frames

    def _peer(self, endpoint: str) -> PeerConnection:
        with self._peers_lock:
            if self._stopping:
                raise DataError(f"the data plane of {self._name} is closed")
            peer = self._peers.get(endpoint)
            if peer is None or peer.broken:
                if peer is not None:
                    peer.close()
                peer = self._peers[endpoint] = PeerConnection(self._context, endpoint, self._network)
            return peer

    # ---- serving

    def _serve(self, identity: bytes, header: dict[str, Any], payload: list[Any]) -> None:
        if header.get("run") != self._run_id or header.get("kind") not in ("fetch", "done"):
            raise ProtocolError(f"{header.get('kind')!r:.60} of run {header.get('run')!r:.60}")
        request_id = envelope.field(header, "id", bytes)
        assert self._listener is not None
        self._listener.send(identity, *self._answer(request_id, header, payload))
        self._listener.flush()

    def _answer(self, request_id: bytes, asked: dict[str, Any], payload: list[Any]) -> list[Any]:
        def header(kind: str, **fields: Any) -> bytes:
            return pack_header(kind, self._run_id, b"", id=request_id, **fields)

        try:
            if asked["kind"] == "done":
                with self._pool_lock:
                    self._outgoing.close(envelope.field(asked, "transfer", bytes))
                return [header("done")]
            wish = unpack_payload(payload)
            ids, keys = envelope.field(wish, "ids", list), envelope.field(wish, "keys", list)
            ref = self._shared(ids, keys) if wish.get("host") and wish["host"] == self._host else None
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

    def _piece(self, number: bytes, frame: int, start: int, length: int) -> memoryview | None:
        with self._pool_lock:
            return self._outgoing.piece(number, frame, start, length)

    def _shared(self, ids: Sequence[str], keys: Sequence[str]) -> SegmentRef | None:
        """Put these values into a segment; None when they are small or there is no memory for it."""
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

    def _forget(self, ids: frozenset[str]) -> None:
        """Release the segments of samples that were cleared, so that others can use them."""
        with self._pool_lock:
            self._outgoing.forget(ids)
            names = {name for i in ids for name in self._segments_of.pop(i, ())}
            for name in names:
                self._pool.release(name)
                for sample_id in name[0]:
                    self._segments_of.get(sample_id, set()).discard(name)
