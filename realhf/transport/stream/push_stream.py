"""Defines the wire of the push stream: samples from many producers to one receiver.

A producer pushes *sample* messages, numbered from 1 per session (one start of a producer), to the receiver, which sends
*acks* back on the connection on which a session was heard of last. An ack says which messages are done (``up_to``: all
up to this number), which have arrived (``received``), and how many may be on their way at once (``credits``). A *probe*
asks for an ack and says how much has been sent, so a loss on the way shows without sending anything twice; ``base``
(the lowest number not acked) lets a new receiver take up the count. *bye* ends a session. All headers are those of
``realhf.transport.envelope``.

Source: docs/reference/dataflow.md 9, StreamDataset.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from realhf.api.sample import MAX_ID_BYTES
from realhf.transport.codec import MAX_FRAME_BYTES, MAX_FRAMES, MAX_MESSAGE_BYTES
from realhf.transport.envelope import field, pack_header
from realhf.transport.errors import ProtocolError, TransportError

MAX_NUMBER = 1 << 53
"""Largest number of a message."""
WINDOW = 1 << 16
"""Number of messages of one session that may wait for their ack, whatever the credits were when they were sent."""


class StreamFailed(TransportError):
    """Is raised when this end of a stream no longer works, or is closed."""


@dataclass(frozen=True, slots=True)
class StreamMessage:
    """Holds one sample as it arrived. ``frames`` are buffers that stay valid while they are referred to."""

    producer: str
    session: bytes
    seq: int
    id: str
    attempt: int
    frames: list[Any]


@dataclass(frozen=True, slots=True)
class Ack:
    """Reports arrivals to a producer. ``to``: session of the producer; ``sent``: echo of a probe, 0 when this answers
    none."""

    to: bytes
    receiver: bytes
    up_to: int
    received: int
    sent: int
    credits: int


def pack_sample(run: str, session: bytes, name: str, *, base: int, seq: int, sample: tuple[str, int]) -> bytes:
    """Encode the header of a sample message; ``sample`` is its (id, attempt)."""
    return pack_header("sample", run, session, name=name, base=base, seq=seq, id=sample[0], attempt=sample[1])


def pack_probe(run: str, session: bytes, name: str, *, base: int, sent: int) -> bytes:
    """Encode a probe, which asks for an ack of the messages up to ``sent``."""
    return pack_header("probe", run, session, name=name, base=base, sent=sent)


def pack_ack(run: str, ack: Ack) -> bytes:
    """Encode an ack."""
    return pack_header(
        "ack", run, ack.receiver, to=ack.to, up_to=ack.up_to, received=ack.received, sent=ack.sent, credits=ack.credits
    )


def check_from_producer(header: dict[str, Any], payload: Sequence[Any], run: str) -> None:
    """Raise ProtocolError for what is no sample, probe or bye message of this run."""
    _check_run(header, run)
    kind = header.get("kind")
    name = field(header, "name", str)
    if not name or len(name.encode(errors="replace")) > MAX_ID_BYTES:
        raise ProtocolError(f"bad producer name {name!r:.60}")
    if kind == "bye":
        return
    base = _number(header, "base", 1)
    if kind == "probe":
        _number(header, "sent", base - 1)
    elif kind == "sample":
        if _number(header, "seq", base) - base >= WINDOW:
            raise ProtocolError(f"message {header['seq']} is too far ahead of {base}")
        if len(field(header, "id", str).encode(errors="replace")) > MAX_ID_BYTES:
            raise ProtocolError(f"id {header['id']!r:.60} is longer than {MAX_ID_BYTES} bytes")
        _number(header, "attempt", 0)
        check_frames(payload)
    else:
        raise ProtocolError(f"kind {kind!r:.60} is none of a producer")


def read_ack(header: dict[str, Any], payload: Sequence[Any], run: str) -> Ack:
    """Return the checked ack in a message of this run. Raises ProtocolError."""
    _check_run(header, run)
    if header.get("kind") != "ack" or payload:
        raise ProtocolError(f"kind {header.get('kind')!r:.60} with {len(payload)} frames, expected a bare ack")
    up_to = _number(header, "up_to", 0)
    return Ack(
        field(header, "to", bytes),
        header["session"],
        up_to,
        _number(header, "received", up_to),
        _number(header, "sent", 0),
        _number(header, "credits", 0),
    )


def check_frames(frames: Sequence[Any]) -> int:
    """Count the bytes of a sample's frames. Raises ProtocolError when they are too many or too large."""
    if not 1 <= len(frames) <= MAX_FRAMES:
        raise ProtocolError(f"{len(frames)} frames, allowed 1 to {MAX_FRAMES}")
    sizes = [memoryview(frame).nbytes for frame in frames]
    if max(sizes) > MAX_FRAME_BYTES or sum(sizes) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"frames of up to {max(sizes)} bytes, {sum(sizes)} in all, exceed the limits")
    return sum(sizes)


def _check_run(header: dict[str, Any], run: str) -> None:
    if header.get("run") != run:
        raise ProtocolError(f"message of run {header.get('run')!r:.60}, this is {run!r}")
    if len(field(header, "session", bytes)) != 16:
        raise ProtocolError("a session is 16 bytes")


def _number(header: dict[str, Any], name: str, lowest: int) -> int:
    value = field(header, name, int)
    if not lowest <= value <= MAX_NUMBER:
        raise ProtocolError(f"{name} is {value}, expected {lowest} to {MAX_NUMBER}")
    return value
