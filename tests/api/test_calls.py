"""Messages between the processes of a run: every one comes back from the wire as it was, and nothing else is taken."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import pytest

from realhf.api import calls
from realhf.api.calls import CALL, GENERATE, STATUS, Arrival, CallAnswer, EvaluateAnswer, GenerateRequest, RolloutLease
from realhf.api.generation import TensorSlot, WeightsManifest
from realhf.base.messages import Call, MessageError, from_payload, to_payload
from realhf.transport.envelope import pack_payload, unpack_payload

ALL: list[Call[Any, Any]] = [value for value in vars(calls).values() if isinstance(value, Call)]
REQUEST = {
    "mfc": "actor_train",
    "role": "actor",
    "ids": ["t0"],
    "keys": ["rewards"],
    "metadata": {"tier": ["warmup"]},
    "fetches": [{"endpoint": "tcp://x", "ids": ["t0"], "keys": ["rewards"]}],
    "step": 3,
    "seed": 2**62,
    "endpoints": {"env": ["http://x"]},
}


def through_the_wire(message):
    return from_payload(type(message), unpack_payload([pack_payload(to_payload(message))]))


def test_names_are_unique_and_every_form_can_be_read():
    """msgspec resolves the annotations of a form on first use; one that it cannot read is found here."""
    assert len({call.name for call in ALL}) == len(ALL) > 20
    for call in ALL:
        for kind in (call.request, call.answer):
            assert msgspec.json.schema(kind)


def test_messages_come_back_from_the_wire_as_they_were():
    slot = TensorSlot("w", "f32", (4, 6), 0, 96)
    for message in (
        CALL.unpack(REQUEST),
        CallAnswer([b"\x00\xff", b""], {"loss": 0.5, "episodes": ["text"], "nothing": None}, 1.0, 0.0),
        WeightsManifest(7, "shm", "segment", 96, "ab", (slot,)),
        RolloutLease("t0", 1, 2, 3, 4.0, {"task": "{}", "seed": 5}, {"numbers": [1, 2]}),
        Arrival("t0", 1, "w", [1, 2, 3], [b"meta"]),
        GenerateRequest(1, [5, 6], 0, None, -1),
    ):
        assert through_the_wire(message) == message


def test_numbers_of_numpy_and_read_only_maps_are_sent_as_plain_ones():
    stats = {"sampled": MappingProxyType({"success": np.float64(0.25), "episodes": np.int64(4)})}
    assert through_the_wire(EvaluateAnswer(stats)) == EvaluateAnswer({"sampled": {"success": 0.25, "episodes": 4}})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"idz": []}, "field idz: Object contains unknown field"),
        ({"ids": ["t0", 1]}, r"field ids\[1\]: Expected `str`, got `int`"),
        ({"step": 1.5}, "field step: Expected `int`, got `float`"),
        ({"fetches": [{"endpoint": "x", "ids": []}]}, r"field fetches\[0\]: .*missing required field `keys`"),
        ({"metadata": None}, "field metadata: Expected `object`, got `null`"),
    ],
)
def test_a_wrong_payload_names_the_message_and_the_field(change, words):
    with pytest.raises(MessageError, match=rf"message call \(CallRequest\), {words}"):
        CALL.unpack({**REQUEST, **change})


def test_a_wrong_answer_names_who_gave_it():
    with pytest.raises(MessageError, match=r"message status of generation/0 \(StatusAnswer\), field at_s: .*missing"):
        STATUS.unpack_answer({}, "generation/0")
    with pytest.raises(
        MessageError, match=r"message generate \(GenerateRequest\), field \[1\]\[0\]: Expected `int` >= 0"
    ):
        GENERATE.unpack([0, [-1], 0, None, -1])


def test_what_cannot_be_sent_is_refused_where_it_is_made():
    with pytest.raises(MessageError, match=r"message call \(CallAnswer\): a object cannot be sent"):
        CALL.pack_answer(CallAnswer(None, {"odd": object()}, 0.0, 0.0))
