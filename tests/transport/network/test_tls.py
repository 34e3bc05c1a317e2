"""TLS between processes of a run: both directions deliver what was sent, and records that were
changed, dropped, repeated or reordered on the way end the connection."""

from __future__ import annotations

import contextlib
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from realhf.transport.network import RunKeys
from realhf.transport.tls import RunTls

LIMIT_S = 30.0
KEYS = RunKeys.make()
MESSAGES = [b"first", b"second", b"third"]
HEADER_BYTES = 5
"""Type, version and length of a TLS record."""


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def connected(
    *, trusted: bool = False
) -> tuple[socket.socket, socket.socket, socket.socket, socket.socket]:
    """The caller, two raw ends of a person in the middle (towards the caller, towards the
    listener), the listener.

    The handshake went through the middle unchanged; from then on nothing is passed on.
    """
    caller_end, towards_caller = socket.socketpair()
    towards_listener, listener_end = socket.socketpair()
    for end in (caller_end, towards_caller, towards_listener, listener_end):
        end.settimeout(LIMIT_S)
    accepted: list[socket.socket] = []
    tls = RunTls(KEYS, trusted=trusted)
    listening = in_thread(lambda: accepted.append(tls.accept(listener_end)))
    stop = threading.Event()

    def pass_on(source: socket.socket, sink: socket.socket) -> None:
        source.settimeout(0.05)
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                sink.sendall(source.recv(1 << 16))
        source.settimeout(LIMIT_S)

    ways = [
        in_thread(lambda: pass_on(towards_caller, towards_listener)),
        in_thread(lambda: pass_on(towards_listener, towards_caller)),
    ]
    caller = tls.connect(caller_end)
    listening.join(LIMIT_S)
    stop.set()
    for way in ways:
        way.join(LIMIT_S)
    return caller, towards_caller, towards_listener, accepted[0]


@pytest.fixture
def relayed() -> Iterator[tuple[socket.socket, socket.socket, socket.socket, socket.socket]]:
    ends = connected()
    yield ends
    for end in ends:
        end.close()


@pytest.fixture
def direct() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of an encrypted connection."""
    near, far = socket.socketpair()
    for end in (near, far):
        end.settimeout(LIMIT_S)
    accepted: list[socket.socket] = []
    listening = in_thread(lambda: accepted.append(RunTls(KEYS).accept(near)))
    with RunTls(KEYS).connect(far) as caller:
        listening.join(LIMIT_S)
        with accepted[0]:
            yield caller, accepted[0]


def received(connection: socket.socket, size: int, at_once: int) -> bytes:
    """``size`` bytes, read in parts of at most ``at_once``."""
    data = bytearray()
    while len(data) < size:
        part = memoryview(bytearray(min(at_once, size - len(data))))
        count = connection.recv_into(part)
        assert count
        data += part[:count]
    return bytes(data)


@pytest.mark.parametrize("size", [1, 16_383, 16_384, 16_385, 3 << 18])
@pytest.mark.parametrize("at_once", [999_983, 7_001])
def test_both_directions_bring_what_was_sent_however_it_is_read(direct, size, at_once):
    data = random.Random(size).randbytes(size)
    for source, sink in (direct, direct[::-1]):
        sending = in_thread(lambda source=source: source.sendall(memoryview(data)))
        assert received(sink, size, at_once) == data
        sending.join(LIMIT_S)


def test_a_connection_is_tls_1_3(direct):
    for end in direct:
        assert isinstance(end, ssl.SSLSocket) and end.version() == "TLSv1.3"


def test_a_trusted_connection_sends_plain_bytes_after_the_handshake():
    caller, towards_caller, towards_listener, listener = connected(trusted=True)
    with caller, towards_caller, towards_listener, listener:
        caller.sendall(b"to the listener")
        assert towards_caller.recv(100) == b"to the listener"
        listener.sendall(b"to the caller")
        assert towards_listener.recv(100) == b"to the caller"


def records(connection: socket.socket, raw: socket.socket, messages: list[bytes]) -> list[bytes]:
    """What ``connection`` puts on the wire for each message."""
    found = []
    for message in messages:
        connection.sendall(message)
        record = raw.recv(1 << 16)
        assert len(record) == HEADER_BYTES + int.from_bytes(record[3:HEADER_BYTES], "big")
        found.append(record)
    return found


def flipped(record: bytes, at: int) -> bytes:
    """A record with one bit changed."""
    return record[:at] + bytes([record[at] ^ 1]) + record[at + 1 :]


@pytest.mark.parametrize(
    "attack",
    [
        pytest.param(lambda r: [flipped(r[0], HEADER_BYTES)], id="text changed"),
        pytest.param(lambda r: [flipped(r[0], len(r[0]) - 1)], id="tag changed"),
        pytest.param(lambda r: [r[0], r[0]], id="repeated"),
        pytest.param(lambda r: [r[0], r[2]], id="dropped"),
        pytest.param(lambda r: [r[1], r[0]], id="reordered"),
        pytest.param(lambda r: [r[0], r[1][:-1]], id="cut off in a record"),
        pytest.param(lambda r: [r[0]], id="cut off between records"),
        pytest.param(lambda r: [b"GET / HTTP/1.1\r\n\r\n"], id="no record"),
    ],
)
def test_what_was_done_to_records_on_the_way_ends_the_connection(relayed, attack):
    """Only what the sender sent, in its order, is ever returned; then an error, never a regular
    end."""
    caller, towards_caller, towards_listener, listener = relayed
    towards_listener.sendall(b"".join(attack(records(caller, towards_caller, MESSAGES))))
    towards_listener.shutdown(socket.SHUT_WR)
    data = bytearray()
    part = memoryview(bytearray(100))
    with pytest.raises(OSError):
        while True:
            count = listener.recv_into(part)
            assert count, "the end came before the error"
            data += part[:count]
    assert b"firstsecondthird".startswith(data)


@pytest.mark.parametrize("replay", ["sent back to its sender", "of another connection"])
def test_a_record_of_another_direction_or_connection_is_refused(relayed, replay):
    caller, towards_caller, _, _ = relayed
    record = records(caller, towards_caller, MESSAGES[:1])[0]
    if replay == "of another connection":
        others = connected()
        reader = others[3]
        raw = others[2]
    else:
        others = ()
        reader = caller
        raw = towards_caller
    raw.sendall(record)
    with pytest.raises(ssl.SSLError):
        reader.recv_into(memoryview(bytearray(100)))
    for end in others:
        end.close()


def test_equal_messages_look_different_on_the_way(relayed):
    caller, towards_caller, _, _ = relayed
    assert len(set(records(caller, towards_caller, [b"same"] * 3))) == 3


@pytest.mark.slow
def test_a_record_that_comes_byte_by_byte_does_not_outlast_the_timeout(relayed):
    caller, towards_caller, towards_listener, listener = relayed
    record = records(caller, towards_caller, [b"x" * 10_000])[0]
    listener.settimeout(0.2)

    def dribble() -> None:
        with contextlib.suppress(OSError):
            for byte in record:
                towards_listener.sendall(bytes([byte]))
                time.sleep(0.02)

    dribbling = in_thread(dribble)
    with pytest.raises(TimeoutError):
        listener.recv_into(memoryview(bytearray(5)))
    listener.close()
    dribbling.join(LIMIT_S)
