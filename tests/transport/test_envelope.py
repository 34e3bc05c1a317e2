"""What the control messages of a run may hold."""

from __future__ import annotations

import pytest

from realhf.transport import envelope
from realhf.transport.envelope import COUNTED_FROM_BYTES, pack_payload, unpack_payload
from realhf.transport.errors import ProtocolError


def test_a_payload_of_empty_lists_is_refused_before_it_fills_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte each on the wire, 64 in memory: the limit of 64 MiB let one message take four gigabytes."""
    monkeypatch.setattr(envelope, "MAX_PAYLOAD_CONTAINERS", 1000)
    filling = "x" * COUNTED_FROM_BYTES
    with pytest.raises(ProtocolError, match="lists and maps"):
        unpack_payload([pack_payload([filling, *([] for _ in range(1000))])])
    with pytest.raises(ProtocolError):
        unpack_payload([b"\x91" * COUNTED_FROM_BYTES + b"\x90"])
    whole = [filling, *([] for _ in range(999))]
    assert unpack_payload([pack_payload(whole)]) == whole
    small = [[] for _ in range(2000)]
    assert unpack_payload([pack_payload(small)]) == small, "what is small on the wire is small in memory"
