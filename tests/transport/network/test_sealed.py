"""Connections in large records: what was sent arrives, and what was changed, left out, repeated or sent back on the way
does not; an end without the package goes on in TLS."""

from __future__ import annotations

import contextlib
import random
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from realhf.transport import tls
from realhf.transport.network import RunKeys
from realhf.transport.tls import RECORD_BYTES, SECRET_BYTES, RunTls, SealedSocket, new_secret

pytestmark = pytest.mark.skipif(tls.cipher() is None, reason="needs the package cryptography (extra network)")

LIMIT_S = 30.0
SECRET = bytes(range(SECRET_BYTES))
MESSAGES = [b"first", b"second", b"third"]
RECORD = struct.calcsize("!I") + 16


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a connection."""
    near, far = socket.socketpair()
    with near, far:
        for end in (near, far):
            end.settimeout(LIMIT_S)
        yield near, far


def sent(messages: list[bytes], secret: bytes = SECRET, *, drawn_here: bool = True) -> list[bytes]:
    """The records of short messages as they are on the way."""
    near, far = socket.socketpair()
    with near, far:
        sender = SealedSocket(near, secret, drawn_here=drawn_here)
        found = []
        for message in messages:
            sender.sendall(message)
            found.append(far.recv(1 << 16))
        return found


def received(sealed_socket: SealedSocket, size: int, at_once: int) -> bytes:
    """So many bytes, asked for in small parts."""
    found = bytearray()
    while len(found) < size:
        part = memoryview(bytearray(min(at_once, size - len(found))))
        count = sealed_socket.recv_into(part)
        assert count
        found += part[:count]
    return bytes(found)


@pytest.mark.parametrize("size", [1, RECORD_BYTES - 1, RECORD_BYTES, RECORD_BYTES + 1, 3 * RECORD_BYTES + 7])
@pytest.mark.parametrize("at_once", [999_983, 70_001])
def test_both_directions_bring_what_was_sent_however_it_is_read(ends, size, at_once):
    near, far = (SealedSocket(end, SECRET, drawn_here=here) for end, here in zip(ends, (True, False), strict=True))
    data = random.Random(size).randbytes(size)
    for source, sink in ((near, far), (far, near)):
        thread = threading.Thread(target=source.sendall, args=(memoryview(data),), daemon=True)
        thread.start()
        assert received(sink, size, at_once) == data
        thread.join(LIMIT_S)


def flipped(record: bytes, at: int) -> bytes:
    """A record with one bit changed."""
    return record[:at] + bytes([record[at] ^ 1]) + record[at + 1 :]


@pytest.mark.parametrize(
    "attack",
    [
        pytest.param(lambda r: [flipped(r[0], 10)], id="text changed"),
        pytest.param(lambda r: [flipped(r[0], len(r[0]) - 1)], id="tag changed"),
        pytest.param(lambda r: [struct.pack("!I", 4) + r[0][4:]], id="length changed"),
        pytest.param(lambda r: [r[0], r[0]], id="repeated"),
        pytest.param(lambda r: [r[0], r[2]], id="left out"),
        pytest.param(lambda r: [r[1], r[0]], id="in another order"),
        pytest.param(lambda r: sent(MESSAGES, drawn_here=False), id="sent back to its sender"),
        pytest.param(lambda r: sent(MESSAGES, new_secret()), id="of another connection"),
        pytest.param(lambda r: [r[0], r[1][:-1]], id="cut off in a record"),
        pytest.param(lambda r: [r[0], b"\0\0"], id="cut off in a length"),
        pytest.param(lambda r: [struct.pack("!I", 0) + bytes(16)], id="nothing in it"),
        pytest.param(lambda r: [struct.pack("!I", RECORD_BYTES + 1)], id="too long"),
        pytest.param(lambda r: [b"GET / HTTP/1.1\r\n\r\n"], id="no record"),
    ],
)
def test_what_was_done_to_records_on_the_way_ends_the_connection(ends, attack):
    """Nothing that the sender did not send, in its order, is ever returned."""
    near, far = ends
    reader = SealedSocket(near, SECRET, drawn_here=False)
    far.sendall(b"".join(attack(sent(MESSAGES))))
    far.shutdown(socket.SHUT_WR)
    found = bytearray()
    part = memoryview(bytearray(100))
    with pytest.raises(ConnectionError):
        while True:
            count = reader.recv_into(part)
            assert count, "the end came before the error"
            found += part[:count]
    assert b"firstsecondthird".startswith(found)


def test_the_end_of_a_connection_between_records_is_seen(ends):
    near, far = ends
    far.sendall(sent(MESSAGES)[0])
    far.close()
    reader = SealedSocket(near, SECRET, drawn_here=False)
    assert received(reader, 5, 5) == b"first"
    assert reader.recv_into(memoryview(bytearray(5))) == 0


def test_a_record_that_comes_byte_by_byte_is_not_waited_for_without_end(ends):
    near, far = ends
    reader = SealedSocket(near, SECRET, drawn_here=False)
    reader.settimeout(0.2)

    def dribble() -> None:
        with contextlib.suppress(OSError):
            for byte in sent([b"x" * 10_000])[0]:
                far.sendall(bytes([byte]))
                time.sleep(0.02)

    thread = threading.Thread(target=dribble, daemon=True)
    thread.start()
    with pytest.raises(TimeoutError):
        reader.recv_into(memoryview(bytearray(5)))
    near.close()
    thread.join(LIMIT_S)


def test_equal_messages_never_look_equal_on_the_way():
    """No number of a record is used twice, no key for both directions or for two connections."""
    records = sent([b"same"] * 3) + sent([b"same"], drawn_here=False) + sent([b"same"], new_secret())
    assert len({record[4:] for record in records}) == 5
    assert all(len(record) == RECORD + 4 for record in records)


@pytest.mark.parametrize("without", ["nobody", "who listens", "who connects"])
def test_ends_agree_on_records_when_both_can_and_on_tls_otherwise(ends, without):
    keys = RunKeys.make()
    listener, caller = RunTls(keys), RunTls(keys)
    listener._can_seal, caller._can_seal = without != "who listens", without != "who connects"
    accepted = []
    thread = threading.Thread(target=lambda: accepted.append(listener.accept(ends[0])), daemon=True)
    thread.start()
    with contextlib.closing(caller.connect(ends[1])) as connection:
        thread.join(LIMIT_S)
        kind = SealedSocket if without == "nobody" else ssl.SSLSocket
        assert isinstance(connection, kind) and isinstance(accepted[0], kind)
        for source, sink in ((connection, accepted[0]), (accepted[0], connection)):
            source.sendall(b"hello")
            into = memoryview(bytearray(5))
            assert sink.recv_into(into) == 5 and bytes(into) == b"hello"
    accepted[0].close()
