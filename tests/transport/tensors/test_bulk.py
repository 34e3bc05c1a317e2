"""Bulk connections: pieces arrive whole, encrypted or as on a trusted network; strangers, replays,
cut connections and wrong requests bring nothing and harm nobody."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from realhf.base import process_clock
from realhf.transport import bulk
from realhf.transport import network as run_keys
from realhf.transport.bulk import BulkConnection, BulkServer, Outgoing, Piece, fetch_pieces
from realhf.transport.errors import DataError, FetchTimeout, NetworkError, PeerLost
from realhf.transport.network import Network, RunKeys
from realhf.transport.tls import RunTls

KEYS = RunKeys.make()
HOST = "127.0.0.1"
FRAME = bytes(range(256)) * 4000
WHOLE = Piece(0, 0, len(FRAME))
LIMIT_S = 60.0
ENDED_IN_TIME = "before the deadline|sent nothing in time"


class Owner:
    """Serves ``FRAME`` as transfer ``number``."""

    def __init__(self, *, trusted: bool = False) -> None:
        self.tls = RunTls(KEYS, trusted=trusted)
        outgoing = Outgoing()
        self.number = outgoing.open([FRAME], ["a"])
        self.server = BulkServer(
            "owner", Network(keys=KEYS, trusted=trusted), self.tls, outgoing.piece
        )
        self.server.start()

    def lane(self, port: int = 0, tls: RunTls | None = None) -> BulkConnection:
        """A connection to the server, or to another port."""
        return BulkConnection(tls or self.tls, HOST, port or self.server.port)


@pytest.fixture
def owner() -> Iterator[Owner]:
    made = Owner()
    yield made
    made.server.close()


def got(
    lane: BulkConnection, number: bytes, piece: Piece = WHOLE, limit_s: float = LIMIT_S
) -> bytes:
    """What a lane brings; the lane stays open."""
    into = bytearray(piece.length)
    lane.fetch(number, piece, memoryview(into), process_clock.now() + limit_s)
    return bytes(into)


def until(condition: Callable[[], object]) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Tap:
    """Relays connections to a port, keeps what either end sends, and cuts the first ``cuts``
    connections after 100 KB of answers."""

    def __init__(self, port: int, cuts: int = 0) -> None:
        self._target = port
        self._cuts = cuts
        self._socket = socket.create_server((HOST, 0))
        self.port = self._socket.getsockname()[1]
        self.asked = bytearray()
        self.answered = bytearray()
        self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._socket.accept()
                self.connections += 1
                far = socket.create_connection((HOST, self._target))
                limit = 100_000 if self.connections <= self._cuts else 1 << 40
                for source, sink, kept, most in (
                    (near, far, self.asked, 1 << 40),
                    (far, near, self.answered, limit),
                ):
                    threading.Thread(
                        target=self._relay, args=(source, sink, kept, most), daemon=True
                    ).start()

    @staticmethod
    def _relay(source: socket.socket, sink: socket.socket, kept: bytearray, most: int) -> None:
        count = 0
        with contextlib.suppress(OSError):
            while count < most and (data := source.recv(65536)):
                kept += data
                count += len(data)
                sink.sendall(data)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Stop taking connections."""
        self._socket.close()


@pytest.mark.parametrize("trusted", [False, True])
def test_a_piece_is_readable_on_the_way_on_a_trusted_network_only(trusted):
    owner = Owner(trusted=trusted)
    tap = Tap(owner.server.port)
    lane = owner.lane(tap.port)
    try:
        assert got(lane, owner.number) == FRAME
        assert got(lane, owner.number, Piece(0, 300, 5)) == FRAME[300:305]
        assert tap.connections == 1, "a connection serves for several pieces"
        assert (bytes(range(256)) in tap.answered) is trusted
        assert (owner.number in tap.asked) is trusted
        assert owner.server.n_refused == 0
    finally:
        lane.close()
        tap.close()
        owner.server.close()


def test_what_was_heard_on_the_way_opens_nothing_when_it_is_sent_again(owner):
    tap = Tap(owner.server.port)
    lane = owner.lane(tap.port)
    assert got(lane, owner.number) == FRAME
    lane.close()
    tap.close()
    with socket.create_connection((HOST, owner.server.port), timeout=LIMIT_S) as replay:
        replay.sendall(tap.asked)
        heard = bytearray()
        with contextlib.suppress(ConnectionError):
            while data := replay.recv(65536):
                heard += data
    assert len(heard) < 10_000
    until(lambda: owner.server.n_refused == 1)


@pytest.mark.parametrize("end", ["who connects", "who listens"])
@pytest.mark.parametrize("trusted", [False, True])
def test_the_certificate_of_another_run_is_refused_at_both_ends(end, trusted):
    """Both ends prove themselves: a stranger gets nothing, and nothing of a stranger is taken."""
    owner = Owner(trusted=trusted)
    others = RunTls(RunKeys.make(), trusted=trusted)
    if end == "who listens":
        owner.server._tls = others
    try:
        with pytest.raises(PeerLost, match=f"{HOST}:{owner.server.port} .*certificate of this run"):
            got(owner.lane(tls=others if end == "who connects" else None), owner.number)
        until(lambda: owner.server.n_refused == 1)
    finally:
        owner.server.close()


@pytest.mark.parametrize(
    "greeting", [b"", b"\xff\0\0\0\0\0\0\0\1\x7f\3", b"GET / HTTP/1.1\r\n\r\n", bytes(100_000)]
)
def test_a_stranger_without_tls_is_sent_away(owner, greeting):
    with (
        socket.create_connection((HOST, owner.server.port), timeout=LIMIT_S) as stranger,
        contextlib.suppress(OSError),
    ):
        stranger.sendall(greeting)
        stranger.shutdown(socket.SHUT_WR)
        while stranger.recv(4096):
            pass
    until(lambda: owner.server.n_refused == 1)
    assert got(owner.lane(), owner.number) == FRAME


def test_silent_strangers_do_not_keep_the_run_out(owner, monkeypatch):
    """The one that has been silent for longest makes room, long before its handshake has to be
    over."""
    monkeypatch.setattr(owner.server, "_max_unauthenticated", 2)
    silent = [
        socket.create_connection((HOST, owner.server.port), timeout=LIMIT_S) for _ in range(3)
    ]
    try:
        assert silent[0].recv(1) == b""
        assert got(owner.lane(), owner.number) == FRAME
    finally:
        for each in silent:
            each.close()


def test_connections_have_a_limit(owner, monkeypatch):
    monkeypatch.setattr(owner.server, "_max_connections", 1)
    first = owner.lane()
    got(first, owner.number)
    with pytest.raises(PeerLost):
        got(owner.lane(), owner.number)
    assert got(first, owner.number) == FRAME
    first.close()
    until(lambda: not owner.server._authenticated)
    assert got(owner.lane(), owner.number) == FRAME


@pytest.mark.parametrize(
    "piece", [Piece(1, 0, 1), Piece(0, len(FRAME), 1), Piece(0, 0, 0), Piece(0, 0, (1 << 26) + 1)]
)
def test_a_piece_that_there_is_not_is_refused_with_a_reason(owner, piece):
    with pytest.raises(DataError, match="broke off a transfer: piece"):
        got(owner.lane(), owner.number, piece)


def test_a_transfer_that_was_given_up_is_named(owner):
    with pytest.raises(DataError, match="no longer holds it"):
        got(owner.lane(), bytes(16))


@pytest.mark.parametrize(
    "answer",
    [
        bulk.ANSWER.pack(bulk.PIECE, 9),
        bulk.ANSWER.pack(7, 10),
        bulk.ANSWER.pack(bulk.REFUSED, 1 << 31),
    ],
)
def test_an_answer_of_another_size_is_refused_before_anything_is_read(answer):
    with answering(answer) as port, pytest.raises(DataError, match="another piece"):
        got(BulkConnection(RunTls(KEYS), HOST, port), bytes(16), Piece(0, 0, 10))


@pytest.mark.parametrize("answer", [b"", b"\0\0", bulk.ANSWER.pack(bulk.PIECE, 10) + b"half"])
def test_a_truncated_answer_is_a_lost_peer(answer):
    with answering(answer) as port, pytest.raises(PeerLost):
        got(BulkConnection(RunTls(KEYS), HOST, port), bytes(16), Piece(0, 0, 10))


@pytest.mark.slow
def test_a_peer_that_stops_in_the_middle_ends_at_the_deadline():
    started = bulk.ANSWER.pack(bulk.PIECE, 10) + b"half"
    # On a machine so busy that this process could not run for a second, the socket's limit ends
    # before the deadline, which leaves such seconds out: the peer counts as lost, and the caller
    # asks again.
    with (
        answering(started, then_close=False) as port,
        pytest.raises((FetchTimeout, PeerLost), match=ENDED_IN_TIME),
    ):
        got(BulkConnection(RunTls(KEYS), HOST, port), bytes(16), Piece(0, 0, 10), limit_s=2.0)


@pytest.mark.slow
def test_a_peer_that_sends_a_byte_now_and_then_ends_at_the_deadline():
    """It used to go on for as long as something came."""
    begun = bulk.ANSWER.pack(bulk.PIECE, 5000)
    with (
        answering(begun, b"x" * 5000) as port,
        pytest.raises(FetchTimeout, match="before the deadline"),
    ):
        got(BulkConnection(RunTls(KEYS), HOST, port), bytes(16), Piece(0, 0, 5000), limit_s=0.5)


@contextlib.contextmanager
def answering(answer: bytes, slowly: bytes = b"", *, then_close: bool = True) -> Iterator[int]:
    """A listener with the run's certificate that answers the first request with ``answer``, and
    then with a byte of ``slowly`` now and then; its port."""
    done = threading.Event()

    def serve() -> None:
        plain, _ = listener.accept()
        with contextlib.closing(RunTls(KEYS).accept(plain)) as connection:
            bulk.receive_bytes(connection, bulk.REQUEST.size)
            connection.sendall(answer)
            with contextlib.suppress(OSError):
                for byte in slowly:
                    connection.sendall(bytes([byte]))
                    time.sleep(0.02)
            if not then_close:
                done.wait(LIMIT_S)

    with socket.create_server((HOST, 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            done.set()
            thread.join(LIMIT_S)


def test_a_fetch_goes_on_after_its_connections_were_cut(owner, monkeypatch):
    """Each of the first three connections breaks in the middle of a piece; what had arrived is not
    fetched again."""
    monkeypatch.setattr("realhf.transport.bulk.PIECE_BYTES", 64_000)
    tap = Tap(owner.server.port, cuts=3)
    lanes = [owner.lane(tap.port) for _ in range(4)]
    deadline = time.monotonic() + LIMIT_S

    def ask(lane: int, piece: Piece, into: memoryview) -> None:
        lanes[lane].fetch(owner.number, piece, into, deadline)

    try:
        (frame,) = fetch_pieces([len(FRAME)], ask)
        assert bytes(frame) == FRAME
        assert tap.connections > 4
    finally:
        for lane in lanes:
            lane.close()
        tap.close()


def test_the_end_of_a_door_ends_its_connections(owner):
    lane = owner.lane()
    got(lane, owner.number)
    owner.server.close()
    with pytest.raises(PeerLost):
        got(lane, owner.number)
    until(lambda: not owner.server._authenticated)


CA = """
[ca]
default_ca = d
[d]
database = {0}/index
serial = {0}/serial
new_certs_dir = {0}
default_md = sha256
policy = p
[p]
commonName = supplied
"""


def test_hosts_whose_clocks_are_apart_talk_to_each_other(tmp_path):
    """This certificate was over in 1970; what counts is that it is the one of the run."""
    (tmp_path / "ca").write_text(CA.format(tmp_path))
    (tmp_path / "index").touch()
    (tmp_path / "serial").write_text("01")
    key, request, made = (str(tmp_path / name) for name in ("key", "request", "made"))
    asked = [word for word in run_keys._COMMAND if word != "-x509"]
    asked[asked.index("-keyout") + 1], asked[asked.index("-out") + 1] = key, request
    signed = [
        "openssl",
        "ca",
        "-batch",
        "-selfsign",
        "-notext",
        "-config",
        str(tmp_path / "ca"),
        "-keyfile",
        key,
    ]
    dates = [
        "-startdate",
        "700101000000Z",
        "-enddate",
        "700102000000Z",
        "-in",
        request,
        "-out",
        made,
    ]
    for command in (asked, signed + dates):
        subprocess.run(command, check=True, capture_output=True, timeout=LIMIT_S)
    keys = replace(KEYS, certificate=Path(made).read_text(), certificate_key=Path(key).read_text())
    tls, (near, far) = RunTls(keys), socket.socketpair()
    thread = threading.Thread(target=lambda: tls.accept(near).close(), daemon=True)
    thread.start()
    tls.connect(far).close()
    thread.join(LIMIT_S)


def test_without_openssl_the_option_is_named(monkeypatch):
    monkeypatch.setattr(run_keys, "_COMMAND", ("no-such-openssl",))
    with pytest.raises(NetworkError, match=r"network\.bind: the command openssl is missing"):
        RunKeys.make()
    monkeypatch.setattr(run_keys, "_COMMAND", ("openssl", "req", "-nonsense"))
    with pytest.raises(NetworkError, match=r"network\.bind: openssl could not make"):
        RunKeys.make()
