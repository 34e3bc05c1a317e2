"""Messages between the processes of a run: every one comes back from the wire as it was, and
nothing else is taken."""

from __future__ import annotations

import json
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import pytest

from realhf.api import calls
from realhf.api.calls import (
    CALL,
    GENERATE,
    STATUS,
    Arrival,
    CallAnswer,
    EvaluateAnswer,
    GenerateRequest,
    RolloutLease,
)
from realhf.api.config import ConfigError, GenConfig, ModelConfig, ParallelConfig
from realhf.api.evaluation import mean_interval, wilson_interval
from realhf.api.experiment import HeldOutOptions, RolloutOptions
from realhf.api.generation import TensorSlot, WeightsManifest
from realhf.api.parallel import Parallel, resolve_parallel
from realhf.base.messages import Call, MessageError, from_payload, to_payload
from realhf.rollout.interface import EnvRolloutInterface
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
    """msgspec resolves the annotations of a form on first use; one that it cannot read is found
    here."""
    assert len({call.name for call in ALL}) == len(ALL) > 20
    for call in ALL:
        for kind in (call.request, call.answer):
            assert msgspec.json.schema(kind)


def test_messages_come_back_from_the_wire_as_they_were():
    slot = TensorSlot("w", "f32", (4, 6), 0, 96)
    for message in (
        CALL.unpack(REQUEST),
        CallAnswer(
            [b"\x00\xff", b""], {"loss": 0.5, "episodes": ["text"], "nothing": None}, 1.0, 0.0
        ),
        WeightsManifest(7, "shm", "segment", 96, "ab", (slot,)),
        RolloutLease("t0", 1, 2, 3, 4.0, {"task": "{}", "seed": 5}, {"numbers": [1, 2]}),
        Arrival("t0", 1, "w", [1, 2, 3], [b"meta"]),
        GenerateRequest(1, [5, 6], 0, None, -1),
    ):
        assert through_the_wire(message) == message


def test_numbers_of_numpy_and_read_only_maps_are_sent_as_plain_ones():
    stats = {"sampled": MappingProxyType({"success": np.float64(0.25), "episodes": np.int64(4)})}
    assert through_the_wire(EvaluateAnswer(stats)) == EvaluateAnswer(
        {"sampled": {"success": 0.25, "episodes": 4}}
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"idz": []}, "field idz: Object contains unknown field"),
        ({"ids": ["t0", 1]}, r"field ids\[1\]: Expected `str`, got `int`"),
        ({"step": 1.5}, "field step: Expected `int`, got `float`"),
        (
            {"fetches": [{"endpoint": "x", "ids": []}]},
            r"field fetches\[0\]: .*missing required field `keys`",
        ),
        ({"metadata": None}, "field metadata: Expected `object`, got `null`"),
    ],
)
def test_a_wrong_payload_names_the_message_and_the_field(change, words):
    with pytest.raises(MessageError, match=rf"message call \(CallRequest\), {words}"):
        CALL.unpack({**REQUEST, **change})


def test_a_wrong_answer_names_who_gave_it():
    with pytest.raises(
        MessageError,
        match=r"message status of generation/0 \(StatusAnswer\), field at_s: .*missing",
    ):
        STATUS.unpack_answer({}, "generation/0")
    with pytest.raises(
        MessageError,
        match=r"message generate \(GenerateRequest\), field \[1\]\[0\]: Expected `int` >= 0",
    ):
        GENERATE.unpack([0, [-1], 0, None, -1])


def test_what_cannot_be_sent_is_refused_where_it_is_made():
    with pytest.raises(MessageError, match=r"message call \(CallAnswer\): a object cannot be sent"):
        CALL.pack_answer(CallAnswer(None, {"odd": object()}, 0.0, 0.0))


def of(workers, backend, **parallel):
    return resolve_parallel(
        "critic",
        ModelConfig(
            workers=[*range(workers)], backend=backend, parallel=ParallelConfig(**parallel)
        ),
    )


@pytest.mark.parametrize(
    ("workers", "backend", "asked", "said"),
    [
        (
            3,
            "ddp",
            {"dp": 2},
            r"dp=2 times fsdp=1 needs 2 workers, critic.workers=\[0, 1, 2\] names 3",
        ),
        (1, "ddp", {"dp": 2}, r"dp=2 times fsdp=1 needs 2 workers, critic.workers=\[0\] names 1"),
        (4, "fsdp2", {"dp": 2, "fsdp": 3}, r"dp=2 times fsdp=3 needs 6 workers, .* names 4"),
        (3, "fsdp2", {"dp": 2}, r"dp=2 times fsdp=1 needs 2 workers, .* names 3"),
        (2, "fsdp2", {"fsdp": 4}, r"dp=1 times fsdp=4 needs 4 workers, .* names 2"),
        (
            2,
            "ddp",
            {"fsdp": 2},
            r"^critic.parallel.fsdp=2: backend ddp keeps whole copies; set critic.backend=fsdp2",
        ),
        (
            1,
            "torch",
            {"dp": 2},
            r"^critic.parallel.dp=2: backend torch trains on one worker; set critic.backend=ddp",
        ),
        (
            1,
            "torch",
            {"fsdp": 2},
            r"^critic.parallel.fsdp=2: backend torch .*; set critic.backend=fsdp2",
        ),
        (2, "torch", {}, r"^critic.workers=\[0, 1\]: backend torch trains on one worker"),
        (2, "ddp", {"tp": 2}, r"^critic.parallel.tp=2: no backend cuts layers"),
    ],
)
def test_a_mesh_that_the_workers_cannot_hold_is_refused(workers, backend, asked, said):
    with pytest.raises(ConfigError, match=said):
        of(workers, backend, **asked)


def test_what_is_not_asked_for_follows_from_the_workers():
    assert of(1, "torch") == of(1, "ddp") == of(1, "fsdp2") == Parallel()
    assert of(3, "ddp") == of(3, "ddp", dp=3) == Parallel(dp=3)
    assert of(4, "fsdp2") == of(4, "fsdp2", dp=1) == Parallel(fsdp=4)
    assert of(4, "fsdp2", dp=2) == of(4, "fsdp2", fsdp=2) == Parallel(dp=2, fsdp=2)


def test_options_survive_json():
    options = RolloutOptions(
        "sql", 8, 16, {"rows": 3}, gen=GenConfig(max_new_tokens=9), retries=0, seed=3
    )
    assert RolloutOptions.from_args(json.loads(json.dumps(options.to_args()))) == options
    held_out = HeldOutOptions("heldout", 2, 0, 40)
    assert HeldOutOptions.from_args(json.loads(json.dumps(held_out.to_args()))) == held_out


def test_an_unknown_or_a_missing_option_is_named():
    args = RolloutOptions("sql", group_size=8, sessions=16).to_args()
    with pytest.raises(
        TypeError, match="RolloutOptions has no field 'max_turn'; did you mean 'max_turns'"
    ):
        EnvRolloutInterface(**args, max_turn=3)
    with pytest.raises(TypeError, match="GenConfig has no field 'temp'"):
        EnvRolloutInterface(**{**args, "gen": {"temp": 1.0}})
    with pytest.raises(TypeError, match="sessions"):
        EnvRolloutInterface(environment="sql", group_size=8)


def test_wilson_interval_against_published_values():
    # Newcombe 1998, table I: 81 of 263 and 15 of 148.
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert wilson_interval(15, 148) == pytest.approx((0.0624, 0.1605), abs=1e-4)
    assert wilson_interval(0, 0) == (0.0, 1.0)


def test_mean_interval_is_the_mean_and_its_standard_error():
    # standard error of 1, 2, 3, 4: sqrt(5 / 3) / 2
    assert mean_interval([1.0, 2.0, 3.0, 4.0]) == pytest.approx(
        (2.5, 2.5 - 1.959964 * 0.645497, 3.765152), abs=1e-5
    )
    assert mean_interval([7.0]) == (7.0, 7.0, 7.0)
    assert mean_interval([]) is None
