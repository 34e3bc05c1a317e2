"""Rows of numbers told from their bytes: never another verdict than the decoder's.

Source: docs/reference/trajectory.md 2.6, 3.8.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from realhf.trajectory.records import Int64
from realhf.trajectory.wire.json_groups import float_rows, integer_rows

DECODERS: dict[Any, Any] = {
    integer_rows: msgspec.json.Decoder(list[list[Int64]]),
    float_rows: msgspec.json.Decoder(list[list[float]]),
}
EITHER = pytest.mark.parametrize("tell", [integer_rows, float_rows])
NUMBERS = ("0", "-7", "150000", "1.5", "-0.25", "1e-05", "2.5E-7", "1e5", "1E+5", "1e999", "9" * 19, "9" * 400, "-0")
OTHERS = ("null", "true", '"1"', '""', "{}", "[]", "[1]", "[[1]]", "NaN")


@EITHER
@pytest.mark.parametrize("separators", [None, (",", ":")])
def test_plain_rows_are_told(tell: Any, separators: Any):
    for rows in ([], [[]], [[], []], [[1]], [[1, -2, 3], [], [150_000, 0]], [[100_000] * 50] * 8):
        assert tell(json.dumps(rows, separators=separators).encode()) == len(rows)


def test_small_logprobs_are_told():
    rows = [[1.0, -3.2e-07, -0.12345678901234567], [-1e-300, 2]]
    assert float_rows(json.dumps(rows).encode()) == 2
    assert integer_rows(json.dumps(rows).encode()) is None


@EITHER
@pytest.mark.parametrize(
    "text",
    [
        "[1]",
        "[1, 2]",
        "[[1], 2]",
        "[1, [2]]",
        "[[1], 2, [3]]",
        "[[1, [2]]]",
        "[[[1]]]",
        "1",
        "[[1],[2],3]",
        "null",
        "[[1e400]]",
        "[[1e+5]]",
        "{}",
        "[[" + "9" * 310 + "]]",
        '[["1"]]',
        "[[1],null]",
        "[[1] , 2, [3]]",
    ],
)
def test_what_may_be_wrong_is_left_to_the_decoder(tell: Any, text: str):
    assert tell(text.encode()) is None


@pytest.mark.nightly
@pytest.mark.parametrize("position", range(40))
@pytest.mark.parametrize("digits", [15, 18, 19, 20, 30])
def test_no_long_integer_slips_between_blocks(position: int, digits: int):
    numbers = ["1"] * 60
    for place in (position, -1 - position):
        raw = ("[[" + ",".join([*numbers[:place], "9" * digits, *numbers[place:]]) + "]]").encode()
        if integer_rows(raw) is not None:
            assert digits <= 18


@pytest.mark.parametrize("length", [308, 309, 400])
def test_no_overflowing_float_slips_between_blocks(length: int):
    for before in range(0, 140, 3):
        for after in ("", ",1" * before):
            assert float_rows(b"[[" + b"1," * before + b"9" * length + after.encode() + b"]]") is None


item = st.sampled_from(NUMBERS + OTHERS)
row = st.lists(item, max_size=4).map(lambda items: "[" + ",".join(items) + "]")
text = st.lists(st.one_of(row, row, row, item), max_size=4)


@pytest.mark.nightly
@pytest.mark.slow
@EITHER
@settings(max_examples=400, deadline=None)
@example(pieces=["[1]", "2", "[3]"], joint=",")
@given(pieces=text, joint=st.sampled_from([",", ", ", " ,", ",\n"]))
def test_a_told_number_of_rows_is_the_decoders(tell: Any, pieces: list[str], joint: str):
    raw = ("[" + joint.join(pieces) + "]").encode()
    told = tell(raw)
    if told is not None:
        assert len(DECODERS[tell].decode(raw)) == told
