"""Receives a broadcast of weights."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from realhf.api.generation import WeightsManifest
from realhf.transport.errors import ProtocolError
from realhf.transport.weights.control_link import ControlLink
from realhf.transport.weights.deadline import staging_s, transfer_s
from realhf.transport.weights.errors import WeightsError, WeightsGone, WeightsTimeout
from realhf.transport.weights.flat_buffer import Buffer
from realhf.transport.weights.gloo_group import GlooGroup

ATTEMPTS = 5
"""How many broadcasts may break before a receiver gives up."""


def read_broadcast(manifest: WeightsManifest, timeout_s: float, name: str) -> Buffer:
    """Return the buffer of a manifest from its publisher. Raises WeightsGone, WeightsTimeout, WeightsError."""
    whole_s = timeout_s + staging_s(manifest.nbytes)
    deadline = time.monotonic() + whole_s
    host, _, port = manifest.location.rpartition(":")
    try:
        link = ControlLink(socket.create_connection((host, int(port)), timeout=timeout_s))
    except TimeoutError:
        raise WeightsTimeout(manifest, f"{manifest.location} was not reached within {timeout_s:g} s") from None
    except ConnectionError:
        raise WeightsGone(manifest, f"nobody serves it at {manifest.location}") from None
    except (OSError, ValueError, OverflowError) as error:
        raise WeightsError(manifest, f"location {manifest.location!r:.80}: {error}") from None
    try:
        link.send(timeout_s, checksum=manifest.checksum, name=name or f"process {os.getpid()}")
        return _Visit(manifest, link, deadline).read()
    except TimeoutError:
        reason = f"the publisher at {manifest.location} did not finish within {whole_s:g} s"
        raise WeightsTimeout(manifest, reason) from None
    except OSError as error:
        raise WeightsGone(manifest, f"its publisher at {manifest.location} is gone: {error}") from None
    except ProtocolError as error:
        raise WeightsError(manifest, f"{manifest.location} is not its publisher: {error}") from None
    finally:
        link.close()


class _Visit:
    """Runs one receiver at a publisher, for as many broadcasts as it takes."""

    def __init__(self, manifest: WeightsManifest, link: ControlLink, deadline: float) -> None:
        self._manifest = manifest
        self._link = link
        self._deadline = deadline
        self._buffer: Buffer = np.zeros(manifest.nbytes, dtype=np.uint8)

    def read(self) -> Buffer:
        """Receive the buffer. Raises OSError when the publisher is gone, TimeoutError, ProtocolError, WeightsError."""
        broken = ""
        for _ in range(ATTEMPTS):
            rank, size = self._seat()
            try:
                self._take_part(rank, size)
            except RuntimeError as error:
                broken = str(error)
                self._link.send(self._left(), end="broke")
            else:
                self._link.send(self._left(), end="got")
                return self._buffer
        raise WeightsError(self._manifest, f"broke {ATTEMPTS} times, last: {broken:.200}")

    def _seat(self) -> tuple[int, int]:
        while True:
            message = self._link.receive(self._left())
            if "gone" in message:
                raise WeightsGone(self._manifest, f"{self._manifest.location} serves it no more")
            if "seat" in message:
                try:
                    rank, size = (int(number) for number in message["seat"])
                except (TypeError, ValueError):
                    raise ProtocolError(f"a seat {message['seat']!r:.60}") from None
                return rank, size

    def _take_part(self, rank: int, size: int) -> None:
        """Take part in one broadcast. Raises RuntimeError when it breaks."""
        group = GlooGroup(rank, size, self._link.own_address, lambda own: self._exchange(own, size))
        group.broadcast(self._buffer, min(transfer_s(len(self._buffer)), self._left()))

    def _exchange(self, own: bytes, size: int) -> Sequence[bytes]:
        try:
            self._link.send(self._left(), address=own)
            message: dict[str, Any] = self._link.receive(self._left())
        except (OSError, ProtocolError) as error:
            raise RuntimeError(f"no word from the publisher: {error}") from None
        addresses = message.get("addresses")
        if not isinstance(addresses, list) or [type(address) for address in addresses] != [bytes] * size:
            raise RuntimeError("another receiver was lost")
        return addresses

    def _left(self) -> float:
        return max(self._deadline - time.monotonic(), 0.001)
