import pytest

from realhf.api.keys import STANDARD_KEYS, KeySpec, KeyTable


def test_length_rules():
    table = KeyTable()
    tokens = [[3, 1], [5]]
    assert table["packed_input_ids"].lengths(tokens) == tokens
    assert table["packed_logprobs"].lengths(tokens) == [[2, 0], [4]]
    assert table["rewards"].lengths(tokens) == [[1, 1], [1]]
    with pytest.raises(ValueError, match="free lengths"):
        table["packed_prompts"].lengths(tokens)
    with pytest.raises(ValueError, match="at least one token"):
        table["packed_logprobs"].lengths([[0]])


def test_register():
    table = KeyTable()
    table.register(KeySpec("step_marks", "f32", "free"))
    assert table["step_marks"].dtype == "f32"
    table.register(KeySpec("step_marks", "f32", "free"))
    with pytest.raises(ValueError, match="already registered"):
        table.register(KeySpec("step_marks", "f64", "free"))
    assert "step_marks" not in KeyTable()
    with pytest.raises(KeyError, match="not registered"):
        table["step_mark"]


@pytest.mark.parametrize(("dtype", "rule"), [("c64", "L"), ("f32", "L+1")])
def test_bad_specification(dtype, rule):
    with pytest.raises(ValueError, match="unknown"):
        KeySpec("k", dtype, rule)


def test_standard_names_are_distinct():
    assert len({spec.name for spec in STANDARD_KEYS}) == len(STANDARD_KEYS)
