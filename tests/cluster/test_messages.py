"""What a control endpoint takes from the network: messages of the right form and size, and nothing else."""

from __future__ import annotations

import re
from typing import Any

import msgpack
import pytest

from realhf.cluster.messages import OF_AGENT, OF_LAUNCHER, TAIL_BYTES, Exited, HostHello, packed, unpacked
from realhf.transport.envelope import unpack_header
from realhf.transport.errors import ProtocolError

HELLO = {
    "name": "b",
    "cores": 2,
    "memory_gib": 1.0,
    "gpus": [],
    "address": "10.0.0.2",
    "machine": "m",
    "clock": 0.0,
    "folder": "/x",
    "wants": {"rollout_worker": 2},
    "made_of": {"source": "0123"},
}
EXITED = {"name": "generation/0", "exit_code": -9, "log": "/l", "log_from": 0, "tail": b"x"}


def take(kind: str, value: Any) -> Any:
    return unpacked(kind, [msgpack.packb(value)], OF_AGENT)


def test_messages_arrive_as_they_were_sent():
    hello = HostHello(**HELLO)
    header, payload = packed("hello", b"s" * 16, hello, node="n")
    assert unpack_header(header)["node"] == "n"
    assert unpacked("hello", [payload], OF_AGENT) == hello == take("hello", HELLO)
    assert take("exited", EXITED) == Exited("generation/0", -9, "/l", 0, b"x")


@pytest.mark.parametrize(
    ("kind", "changed", "says"),
    [
        ("hello", {"name": "../etc"}, "name"),
        ("hello", {"name": "a" * 64}, "name"),
        ("hello", {"name": "a\n"}, "name"),
        ("hello", {"address": "\x1b[2J"}, "address"),
        ("hello", {"cores": 0}, "cores"),
        ("hello", {"cores": True}, "cores"),
        ("hello", {"memory_gib": float("nan")}, "memory_gib"),
        ("hello", {"gpus": ["g"] * 65}, "gpus"),
        ("hello", {"folder": "relative"}, "folder"),
        ("hello", {"wants": {"rollout_worker": 10**9}}, "wants"),
        ("hello", {"wants": {"rollout_worker": -1}}, "wants"),
        ("hello", {"more": 1}, "more"),
        ("exited", {"name": "a/b/c"}, "name"),
        ("exited", {"exit_code": 10**6}, "exit_code"),
        ("exited", {"tail": b"x" * (TAIL_BYTES + 1)}, "tail"),
        ("exited", {"log_from": -1}, "log_from"),
    ],
)
def test_what_has_not_its_form_is_refused_by_its_field(kind: str, changed: dict[str, Any], says: str):
    with pytest.raises(ProtocolError, match=re.escape(says)):
        take(kind, {**(HELLO if kind == "hello" else EXITED), **changed})


def test_neither_end_takes_what_the_other_should_send():
    for kind, known in (("start", OF_AGENT), ("hello", OF_LAUNCHER), ("nonsense", OF_AGENT)):
        with pytest.raises(ProtocolError, match="unknown message kind"):
            unpacked(kind, [msgpack.packb({})], known)
    with pytest.raises(ProtocolError):
        unpacked("ping", [b"\xc1"], OF_AGENT)
    with pytest.raises(ProtocolError):
        unpacked("ping", [b"\x80", b"\x80"], OF_AGENT)
