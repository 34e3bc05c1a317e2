"""JSON groups: what is accepted, what is refused, and that nothing changes on the way; rows of
numbers told from their bytes, never with another verdict than the decoder's.

Source: docs/reference/trajectory.md 2.1, 2.6, 3.8.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from realhf.trajectory.records import FIELDS, FLOATS, N_STOCK_FIELDS, Incoming, Int64
from realhf.trajectory.wire import encode, json_groups, lax_groups
from realhf.trajectory.wire.intake import INLINE_NESTS, Offload, parse_groups
from realhf.trajectory.wire.json_groups import float_rows, integer_rows
from realhf.web.refusal import Refusal
from tests.trajectory.groups import EVERYTHING, encoded, group


def parse(
    body: bytes, content_type: str | None = None, listed: bool = False, int64: bool = True
) -> list[Incoming]:
    return asyncio.run(
        parse_groups(body, content_type, listed=listed, int64=int64, offload=Offload())
    )


def delivered(incoming: Incoming) -> dict[str, Any]:
    return json.loads(encode.json_group((incoming.present, incoming.data)))


def refused(body: bytes, **options: Any) -> list[dict[str, Any]]:
    with pytest.raises(Refusal) as refusal:
        parse(body, **options)
    assert refusal.value.status == 422
    json.dumps(refusal.value.detail, allow_nan=False)
    return refusal.value.detail


def with_value(path: list[Any], literal: str) -> bytes:
    """EVERYTHING with a raw JSON literal put at a path."""
    value = json.loads(json.dumps(EVERYTHING))
    place = value
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = "@@"
    return json.dumps(value).replace('"@@"', literal).encode()


def test_every_field_comes_back_as_it_was():
    [incoming] = parse(encoded(EVERYTHING))
    assert delivered(incoming) == EVERYTHING
    assert (incoming.size, incoming.env_id, incoming.policy_version) == (3, 3, None)
    floats = encoded(delivered(incoming))
    assert parse(floats)[0].data == floats, "the fast path keeps the bytes"


WHOLE = {
    "tokens": [[1, 2]],
    "masks": [[1, 0]],
    "scores": [1, 0, -3],
    "advantages": [[1, 0.5], [], [0]],
    "ref_logprobs": [[-1, 1e-05]],
    "inference_logprobs": [[1, 1]],
    "distill_token_ids": [[[7, 8]]],
    "distill_logprobs": [[[0, -2]]],
    "messages": [[{"role": "user", "content": "[1, 2]", "n": 3}]],
    "group_overrides": {"n": [4]},
}


def leaves(value):
    return [each for item in value for each in leaves(item)] if isinstance(value, list) else [value]


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("unknown", [{}, {"another": 1}])
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), (" ,\n", " : ")])
def test_floats_that_were_pushed_as_integers_are_floats(listed, unknown, separators):
    """A trainer's ``torch.tensor(scores).mean()`` raised: the original answers floats."""
    pushed = json.dumps(
        [WHOLE | unknown] if listed else WHOLE | unknown, separators=separators
    ).encode()
    [incoming] = parse(pushed, listed=listed)
    seen = delivered(incoming)
    assert {name: seen[name] for name in WHOLE} == WHOLE
    for name in FIELDS:
        found = leaves(seen[name]) if name in FLOATS and seen[name] is not None else []
        assert all(type(each) is float for each in found), name
    for name in ("tokens", "masks", "distill_token_ids"):
        assert all(type(each) is int for each in leaves(seen[name])), name
    assert type(seen["messages"][0][0]["n"]) is int
    assert incoming.crc == zlib.crc32(incoming.data)


def test_what_is_said_in_floats_is_kept_as_it_came():
    for said in (b"[[1.0,-2.5],[0.0]]", b"[1.5e-05]", b"[]", b"[[]]"):
        assert json_groups.convert_integers(said) == said
    assert (
        json_groups.convert_integers(b"[[1,-2.5],[],[1e-05, 0]]") == b"[[1.0,-2.5],[],[1e-05, 0.0]]"
    )


def test_a_minimal_group_gets_all_fourteen_keys():
    [incoming] = parse(b' {"tokens": [], "masks": [[1, 2]], "scores": [1]}\n')
    item = delivered(incoming)
    assert list(item)[:3] == ["tokens", "masks", "scores"]
    assert set(item) == set(FIELDS[:N_STOCK_FIELDS])
    assert [item[name] for name in ("advantages", "env_id", "images")] == [None, None, None]
    assert incoming.size == 0


def test_a_policy_version_is_echoed_only_when_it_was_sent():
    [incoming] = parse(encoded(group(policy_version=7)))
    assert incoming.policy_version == 7
    assert delivered(incoming)["policy_version"] == 7
    assert "policy_version" not in delivered(parse(encoded(group()))[0])


def test_shapes_are_not_compared():
    value = {
        "tokens": [[1], [2, 3]],
        "masks": [[1, 2, 3]],
        "scores": [],
        "advantages": [[], [], [], [1]],
    }
    assert delivered(parse(encoded(value))[0])["masks"] == [[1, 2, 3]]


@pytest.mark.parametrize(
    ("literal", "number"), [('"8"', 8), ("8.0", 8), ("true", 1), ("-0", 0), ('" 8 "', 8)]
)
def test_lax_integers(literal, number):
    value = delivered(parse(with_value(["tokens", 0, 0], literal))[0])
    assert value["tokens"][0] == [number, 2, 3]
    assert value["generation_params"] == EVERYTHING["generation_params"]


@pytest.mark.parametrize("literal", ["8.5", '"x"', "null", "[]", "{}", '""'])
def test_what_is_no_integer_is_located(literal):
    [problem] = refused(with_value(["tokens", 0, 0], literal))
    assert problem["loc"] == ["body", "tokens", 0, 0]
    assert set(problem) == {"type", "loc", "msg", "input"}


def test_unknown_and_repeated_keys():
    body = b'{"x": "tokens", "tokens": [[1]], "masks": [[1]], "scores": [1], "tokens": [[2], [3]]}'
    [incoming] = parse(body)
    assert delivered(incoming)["tokens"] == [[2], [3]], (
        "as in every JSON reader, the last one counts"
    )
    assert "x" not in delivered(incoming)
    assert incoming.data.count(b"tokens") == 1
    assert incoming.size == 2


PLACES = [["tokens", 0, 0], ["masks", 0, 1], ["scores", 1], ["advantages", 0, 0], ["ref_logprobs", 0, 0],
          ["inference_logprobs", 1, 0], ["distill_token_ids", 0, 0, 0], ["distill_logprobs", 0, 0, 1],
          ["messages", 0, 0, "content"], ["messages", 0, 0, "extra", "tokens", 0],
          ["generation_params", "n", "deep", 0],
          ["overrides", 0, "a"], ["group_overrides", "big"], ["images", 2, "url"], ["env_id"]]  # fmt: skip


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
@pytest.mark.parametrize("path", PLACES, ids=lambda path: ".".join(map(str, path)))
def test_numbers_that_are_not_finite_are_refused_where_they_stand(path, literal):
    problems = refused(with_value(path, literal))
    assert problems[0]["loc"] == ["body", *path]


@pytest.mark.parametrize("number", [2**63, -(2**63) - 1, 10**30, 10**399])
def test_tokens_fit_64_bits_unless_strict(number):
    body = with_value(["tokens", 0, 0], str(number))
    assert refused(body)[0]["loc"] == ["body", "tokens", 0, 0]
    assert delivered(parse(body, int64=False)[0])["tokens"][0][0] == number
    assert (
        delivered(parse(with_value(["masks", 0, 0], str(2**63 - 1)))[0])["masks"][0][0] == 2**63 - 1
    )


@pytest.mark.nightly
@pytest.mark.parametrize("body", [
    b"", b"{", b"nonsense", b"[1]", b"null", b"{} "
                                             b"{}", b'{"tokens": '
                                                    b'[[1]]', b"\xff\xfe", b'{"tokens":"\xff"}',
    b"[" * 100_000, b'{"tokens":' * 50_000, b'{"tokens": '
                                            b'[[' + b"9" * 5000 + b']], "masks": [], "scores": []}',
    b'{"tokens": [[1]], "masks": [[1]], "scores": [1], "images": ' + b"[" * 20_000 + b"]" * 20_000 + b"}",
    b'{"tokens": [[1]], "masks": [[1]], "scores": [1' + b"0" * 400 + b"]}",
])  # fmt: skip
def test_nonsense_is_a_clear_422(body):
    assert refused(body)[0]["loc"][0] == "body"
    assert refused(body, listed=True)[0]["loc"][0] == "body"


@pytest.mark.parametrize("messages", [
    '[[{"role": '
    '"a"}]]', '[[{"content": '
              '"a"}]]', "[[null]]", "[[1]]", '[["x"]]', "[[[]]]", "[null]", '"x"', "{}",
    "[[{}]]",
])  # fmt: skip
def test_messages_need_role_and_content(messages):
    assert refused(with_value(["messages"], messages))[0]["loc"][:2] == ["body", "messages"]


@pytest.mark.parametrize("messages", [
    "null", "[]", "[[], []]", '[[{"role": null, "content": [1]}]]',
    '[[{"content": {}, "role": "x", "reward": -1, "tool_calls": [{}]}]]',
])  # fmt: skip
def test_messages_of_any_values_are_kept(messages):
    assert delivered(parse(with_value(["messages"], messages))[0])["messages"] == json.loads(
        messages
    )


def test_a_list_is_checked_whole_and_errors_say_which_item():
    good = encoded(group())
    assert len(parse(b"[" + good + b" ,\n" + good + b"]", listed=True)) == 2
    assert parse(b" [ ] ", listed=True) == []
    problems = refused(
        b"[" + good + b',{"tokens": [["x"]], "masks": [], "scores": []}]', listed=True
    )
    assert problems[0]["loc"] == ["body", 1, "tokens", 0, 0]
    assert refused(good, listed=True)[0]["type"] == "list_type"


@pytest.mark.parametrize(
    "kind", [None, "", "application/json", "application/json; charset=utf-8", "application/x+json"]
)
def test_json_types(kind):
    assert parse(encoded(group()), kind)


@pytest.mark.parametrize("kind", ["text/plain", "application/octet-stream", " ", "json"])
def test_other_types_are_refused(kind):
    assert refused(encoded(group()), content_type=kind)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_large_body_is_validated_elsewhere_with_the_same_result():
    big = encoded(group(8, 60_000))
    assert len(big) > 4 << 20
    assert parse(big)[0] == json_groups.read_group(big)
    assert parse(b"[" + big + b"]", listed=True)[0].size == 8
    assert refused(big[:-1] + b',"masks":[["x"]]}')[0]["loc"] == ["body", "masks", 0, 0]


@pytest.mark.slow
def test_what_the_process_beside_returns_is_what_was_sent():
    """Spans of the body for groups kept as they came, bytes for those that were encoded again."""
    group_8k = group(8, 1024)
    texts = encoded(group_8k | {"masks": [["1"] * 9_000]})
    body = (
        b" ["
        + b" ,\n".join([encoded(group_8k), texts, encoded(group_8k)[:-1] + b',"unknown":1}'])
        + b"]"
    )
    first, second, third = parse(body, listed=True)
    assert first.data == third.data == encoded(group_8k)
    assert json.loads(second.data)["masks"] == [[1] * 9_000]
    assert [zlib.crc32(item.data) for item in (first, second, third)] == [
        first.crc,
        second.crc,
        third.crc,
    ]
    nests = (
        b'{"tokens":[[1]],"masks":[[1]],"scores":[1.0],"images":[' + b"{}," * INLINE_NESTS + b"1]}"
    )
    assert parse(nests)[0].data == nests


@pytest.mark.parametrize(
    "free", ['"\\ud800"', '{"\\udfff": 1}', '{"\\ud800": NaN}', '["ok", {"a": "\\udc00x"}]']
)
def test_half_a_surrogate_pair_is_refused(free):
    for path in (["images"], ["group_overrides", "x"]):
        problems = refused(with_value(path, free))
        json.dumps(problems, ensure_ascii=False).encode()


@pytest.mark.slow
def test_a_million_bad_numbers_are_one_error():
    bad = ",".join(['"x"'] * 8_000)
    body = f'{{"tokens":[[{bad}]],"masks":[[1],[{bad}]],"scores":[1,{bad}]}}'.encode()
    assert [problem["loc"][1:] for problem in refused(body)] == [
        ["tokens", 0, 0],
        ["masks", 1, 0],
        ["scores", 1],
    ]


numbers = st.floats(allow_nan=False, allow_infinity=False, width=64) | st.integers(-(2**40), 2**40)
free = st.recursive(
    st.none() | st.booleans() | numbers | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=8,
)
drawn_integers = st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4), max_size=3)
drawn_floats = st.lists(st.lists(numbers, max_size=4), max_size=3)
message = st.fixed_dictionaries(
    {"role": free, "content": free}, optional={"extra": free, '"': free}
)
groups = st.fixed_dictionaries(
    {"tokens": drawn_integers, "masks": drawn_integers, "scores": st.lists(numbers, max_size=4)},
    optional={
        "advantages": st.none() | drawn_floats, "inference_logprobs": drawn_floats, "images": free,
        "messages": st.none() | st.lists(st.lists(message, max_size=2), max_size=2),
        "generation_params": st.none() | st.dictionaries(st.text(max_size=6), free, max_size=3),
        "overrides": st.lists(st.dictionaries(st.text(max_size=6), free, max_size=2), max_size=2),
        "env_id": st.none() | st.integers(-5, 5), "policy_version": st.none() | st.integers(0, 9),
        "distill_token_ids": st.lists(drawn_integers, max_size=2), "unknown": free,
    },
)  # fmt: skip


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(value=groups, indent=st.sampled_from([None, 1]), ascii_only=st.booleans())
def test_both_paths_agree_on_valid_groups(value, indent, ascii_only):
    body = json.dumps(value, indent=indent, ensure_ascii=ascii_only).encode(
        "utf-8", "surrogatepass"
    )
    known = {name: item for name, item in value.items() if name in FIELDS}
    slow = lax_groups.from_object(lax_groups.parse(body, ["body"]), ["body"], int64=True)
    fast = json_groups.read_group(body)
    assert (fast is None) == ("unknown" in value)
    for incoming in (slow, fast or lax_groups.read_lax(body, ["body"], int64=True)):
        item = delivered(incoming)
        assert {name: item[name] for name in known} == known
        assert all(item[name] is None for name in FIELDS[:N_STOCK_FIELDS] if name not in known)
        assert incoming.size == len(value["tokens"])
        assert incoming.env_id == value.get("env_id")


DECODERS: dict[Any, Any] = {
    integer_rows: msgspec.json.Decoder(list[list[Int64]]),
    float_rows: msgspec.json.Decoder(list[list[float]]),
}
EITHER = pytest.mark.parametrize("tell", [integer_rows, float_rows])
NUMBERS = (
    "0",
    "-7",
    "150000",
    "1.5",
    "-0.25",
    "1e-05",
    "2.5E-7",
    "1e5",
    "1E+5",
    "1e999",
    "9" * 19,
    "9" * 400,
    "-0",
)
OTHERS = ("null", "true", '"1"', '""', "{}", "[]", "[1]", "[[1]]", "NaN")


@EITHER
@pytest.mark.parametrize("separators", [None, (",", ":")])
def test_plain_rows_are_told(tell, separators):
    for rows in ([], [[]], [[], []], [[1]], [[1, -2, 3], [], [150_000, 0]], [[100_000] * 50] * 8):
        assert tell(json.dumps(rows, separators=separators).encode()) == len(rows)


def test_small_logprobs_are_told():
    rows = [[1.0, -3.2e-07, -0.12345678901234567], [-1e-300, 2]]
    assert float_rows(json.dumps(rows).encode()) == 2
    assert integer_rows(json.dumps(rows).encode()) is None


@EITHER
@pytest.mark.parametrize("text", [
    "[1]", "[1, "
           "2]", "[[1], "
                 "2]", "[1, "
                       "[2]]", "[[1], 2, [3]]", "[[1, [2]]]", "[[[1]]]", "1", "[[1],[2],3]", "null",
    "[[1e400]]", "[[1e+5]]", "{}", "[[" + "9" * 310 + "]]", '[["1"]]', "[[1],null]", "[[1] , 2, [3]]",
])  # fmt: skip
def test_what_may_be_wrong_is_left_to_the_decoder(tell, text):
    assert tell(text.encode()) is None


@pytest.mark.nightly
@pytest.mark.parametrize("position", range(40))
@pytest.mark.parametrize("digits", [15, 18, 19, 20, 30])
def test_no_long_integer_slips_between_blocks(position, digits):
    numbers = ["1"] * 60
    for place in (position, -1 - position):
        raw = ("[[" + ",".join([*numbers[:place], "9" * digits, *numbers[place:]]) + "]]").encode()
        if integer_rows(raw) is not None:
            assert digits <= 18


@pytest.mark.parametrize("length", [308, 309, 400])
def test_no_overflowing_float_slips_between_blocks(length):
    for before in range(0, 140, 3):
        for after in ("", ",1" * before):
            assert (
                float_rows(b"[[" + b"1," * before + b"9" * length + after.encode() + b"]]") is None
            )


item = st.sampled_from(NUMBERS + OTHERS)
row = st.lists(item, max_size=4).map(lambda items: "[" + ",".join(items) + "]")
text = st.lists(st.one_of(row, row, row, item), max_size=4)


@pytest.mark.nightly
@pytest.mark.slow
@EITHER
@settings(max_examples=400, deadline=None)
@example(pieces=["[1]", "2", "[3]"], joint=",")
@given(pieces=text, joint=st.sampled_from([",", ", ", " ,", ",\n"]))
def test_a_told_number_of_rows_is_the_decoders(tell, pieces, joint):
    raw = ("[" + joint.join(pieces) + "]").encode()
    told = tell(raw)
    if told is not None:
        assert len(DECODERS[tell].decode(raw)) == told
