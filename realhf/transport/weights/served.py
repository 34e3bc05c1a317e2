"""Serves weights to generation workers that share neither memory nor a folder with the trainer: over the connections
that carry large tensors, encrypted wherever the run is. The receiver asks for pieces, a few at a time, so a slow one
fills no memory here, and one whose connection broke asks for what is missing.

A version stays until it is retired.
"""

from __future__ import annotations

import random
import secrets
import time
from typing import Any, cast

import numpy as np

from realhf.api.generation import WeightsManifest
from realhf.base.loopback import is_loopback_host
from realhf.transport.errors import DataError, FetchTimeout, NetworkError, PeerLost, ProtocolError
from realhf.transport.network.network import Network
from realhf.transport.network.tls import RunTls
from realhf.transport.tensors.bulk import BulkConnection, BulkServer
from realhf.transport.tensors.pieces import LANES, Piece, fetch_whole
from realhf.transport.weights.flat_buffer import Buffer, WeightsError, WeightsGone, WeightsTimeout, checksum

BASE_S = 10.0
"""Seconds that any transfer may take, whatever its size."""
SLOWEST_BYTES_PER_S = 20e6
"""Slowest rate at which a transfer does not count as stuck."""


def transfer_s(nbytes: int) -> float:
    """Return the seconds after which a transfer of this size counts as stuck."""
    return BASE_S + nbytes / SLOWEST_BYTES_PER_S


def staging_s(nbytes: int) -> float:
    """Return the seconds that the bytes of a version add to a receiver's deadline: for one transfer to others that is
    under way, and for its own."""
    return 2 * nbytes / SLOWEST_BYTES_PER_S


GONE = "no longer holds it"
"""What a server says of a version that was retired."""
TICKET_BYTES = 16
MOST_CONNECTIONS = 1024
"""Four for each engine, and all of them come when a version is there."""
TRIES, PAUSE_S = 20, (0.05, 0.3)
"""How often a connection is made for a piece, and how long it waits before that."""


def _tls(network: Network) -> RunTls | None:
    return RunTls(network.keys, trusted=network.trusted) if network.keys is not None else None


class WeightServer:
    """Listens, with the keys of the run where there are any, and answers with pieces of the versions that are there.
    Raises DataError when nothing can listen."""

    def __init__(self, network: Network) -> None:
        self._buffers: dict[bytes, Buffer] = {}
        most, strangers = MOST_CONNECTIONS, MOST_CONNECTIONS // 4
        self._bulk = BulkServer("weights", network, _tls(network), self._piece, most=most, strangers=strangers)
        self._bulk.start()
        self.endpoint = f"{network.advertised}:{self._bulk.port}"

    def offer(self, buffer: Buffer) -> str:
        """Serve a buffer, which nobody may write to from now on; return the ticket for it."""
        ticket = secrets.token_bytes(TICKET_BYTES)
        self._buffers[ticket] = buffer
        return ticket.hex()

    def withdraw(self, ticket: str) -> None:
        """Serve a buffer no longer. Pieces that are on their way arrive."""
        self._buffers.pop(bytes.fromhex(ticket), None)

    def close(self) -> None:
        """Serve nothing more and release the port."""
        self._bulk.close()
        self._buffers.clear()

    def _piece(self, ticket: bytes, frame: int, start: int, length: int) -> memoryview | None:
        buffer = self._buffers.get(ticket)
        if buffer is None:
            return None
        if frame or not 0 < length <= len(buffer) - start:
            raise ProtocolError(f"bytes {start} to {start + length} of {len(buffer)}")
        return memoryview(cast(Any, buffer))[start : start + length]


class ServedVersion:
    """Owns one version's buffer at a server."""

    def __init__(self, server: WeightServer, buffer: Buffer) -> None:
        self.checksum = checksum(buffer)
        self._server, self._ticket = server, server.offer(buffer)
        self.location = f"{server.endpoint}#{self._ticket}"

    def close(self) -> None:
        """Free the buffer once nobody reads it."""
        self._server.withdraw(self._ticket)


def read_served(manifest: WeightsManifest, timeout_s: float, network: Network) -> Buffer:
    """Fetch the buffer of a manifest. Raises WeightsGone when its publisher has retired it or is not there,
    WeightsTimeout when connections bring nothing for ``timeout_s`` or all of it takes too long, and WeightsError for an
    answer that is none."""
    endpoint, _, ticket = manifest.location.partition("#")
    host, _, port = endpoint.rpartition(":")
    try:
        number, at = bytes.fromhex(ticket), int(port)
        if len(number) != TICKET_BYTES or not host or (network.keys is None and not is_loopback_host(host)):
            raise ValueError("nobody of this run listens there")
        tls = _tls(network)
    except (ValueError, NetworkError) as error:
        raise WeightsError(manifest, f"location {manifest.location!r:.80}: {error}") from None
    whole_s = timeout_s + max(staging_s(manifest.nbytes), transfer_s(manifest.nbytes))
    lanes = [BulkConnection(tls, host, at) for _ in range(LANES)]
    came = time.monotonic()
    deadline = came + whole_s

    def ask(lane: int, piece: Piece, into: memoryview) -> None:
        nonlocal came
        for left in reversed(range(TRIES)):
            try:
                lanes[lane].fetch(number, piece, into, deadline)
                came = time.monotonic()
                return
            except PeerLost as error:
                if time.monotonic() - came > timeout_s:
                    raise FetchTimeout(str(error)) from None
                if not left or "refused" in str(error):  # nobody listens there, or it is of another run
                    raise
                time.sleep(random.uniform(*PAUSE_S))  # all engines come at once, and the server may be full

    try:
        return np.frombuffer(fetch_whole(manifest.nbytes, ask), dtype=np.uint8)
    except FetchTimeout as error:
        text = f"{endpoint} sent nothing for {timeout_s:g} s, or not everything within {whole_s:g} s ({error})"
        raise WeightsTimeout(manifest, text) from None
    except PeerLost as error:
        raise WeightsGone(manifest, f"nobody serves it at {endpoint}, or the connection broke: {error}") from None
    except DataError as error:
        if GONE in str(error):
            raise WeightsGone(manifest, "its publisher serves it no more") from None
        raise WeightsError(manifest, f"{endpoint} is not its publisher: {error}") from None
    finally:
        for lane in lanes:
            lane.close()
