"""Large answers in pieces: all bytes in their places, over connections that break, and nothing that
nobody has asked for."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from realhf.transport import bulk
from realhf.transport.bulk import LANES, Outgoing, Piece, fetch_pieces
from realhf.transport.errors import DataError, PeerLost, ProtocolError

FRAMES = [bytes(range(256)) * 5, b"", b"x", bytes(1000), bytes(reversed(range(200))) * 3]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "PIECE_BYTES", 100)


class Peer:
    """Answers from ``FRAMES``, and breaks off the answers with the given numbers."""

    def __init__(self, *broken: int) -> None:
        self._outgoing = Outgoing()
        self._broken = set(broken)
        self.number = self._outgoing.open(FRAMES, ["a"])
        self.asked: Counter[Piece] = Counter()
        self.at_once = self.most_at_once = 0
        self._lock = threading.Lock()

    def ask(self, lane: int, piece: Piece, into: memoryview) -> None:
        with self._lock:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            self.asked[piece] += 1
            breaks = self.asked.total() in self._broken
        try:
            assert 0 <= lane < LANES
            if breaks:
                raise PeerLost("it closed the connection")
            found = self._outgoing.piece(self.number, *piece)
            if found is None:
                raise DataError("it is gone")
            into[:] = found
        finally:
            with self._lock:
                self.at_once -= 1

    def cleared(self) -> None:
        """The samples were cleared."""
        self._outgoing.forget(frozenset({"a"}))


def test_every_piece_is_fetched_once_and_lies_where_it_belongs():
    peer = Peer()
    found = fetch_pieces([len(frame) for frame in FRAMES], peer.ask)
    assert [bytes(frame) for frame in found] == FRAMES
    assert set(peer.asked.values()) == {1} and peer.most_at_once <= LANES
    assert all(not frame.readonly for frame in found)
    assert max(piece.length for piece in peer.asked) == 100


def test_only_what_a_broken_connection_did_not_bring_is_asked_for_again():
    peer = Peer(2, 3, 9, 20)
    found = fetch_pieces([len(frame) for frame in FRAMES], peer.ask)
    assert [bytes(frame) for frame in found] == FRAMES
    assert sum(count - 1 for count in peer.asked.values()) == 4


def test_a_peer_that_stays_away_ends_the_fetch():
    with pytest.raises(PeerLost, match="closed the connection"):
        fetch_pieces([len(frame) for frame in FRAMES], Peer(*range(3, 1000)).ask)


def test_an_answer_that_was_given_up_ends_the_fetch():
    peer = Peer()
    peer.cleared()
    with pytest.raises(DataError, match="gone"):
        fetch_pieces([len(frame) for frame in FRAMES], peer.ask)


@pytest.mark.parametrize("sizes", [[-1], [1 << 40], ["1"], [True], [1 << 30] * 5, [1] * 5000])
def test_sizes_that_no_sample_has_are_refused_before_memory_is_taken(sizes):
    with pytest.raises(ProtocolError):
        fetch_pieces(sizes, lambda *asked: pytest.fail("nothing is asked for"))


@pytest.mark.parametrize(
    "piece", [(0, 0, 101), (0, 1200, 100), (9, 0, 1), (-1, 0, 1), (0, -1, 5), (0, 0, 0)]
)
def test_a_piece_that_there_is_not_is_refused(piece):
    outgoing = Outgoing()
    number = outgoing.open(FRAMES, ["a"])
    with pytest.raises(ProtocolError, match="piece"):
        outgoing.piece(number, *piece)


def test_what_is_kept_for_consumers_has_an_end(monkeypatch):
    outgoing = Outgoing()
    numbers = [outgoing.open(FRAMES, [str(count)]) for count in range(70)]
    assert len(outgoing) == 64
    assert outgoing.piece(numbers[0], 0, 0, 1) is None
    outgoing.close(numbers[-1])
    assert len(outgoing) == 63
    outgoing.forget(frozenset({"60", "unknown"}))
    assert len(outgoing) == 62
    monkeypatch.setattr("realhf.transport.bulk.IDLE_S", -1.0)
    outgoing.open(FRAMES, ["new"])
    assert len(outgoing) == 1
