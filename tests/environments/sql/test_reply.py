"""What the policy says is read leniently, and what it reads is short."""

from __future__ import annotations

import pytest

from realhf.environments.sql.database import Result
from realhf.environments.sql.environment import is_right, read_answer, read_statement, result_text


@pytest.mark.parametrize(
    "content, statement",
    [
        ("SELECT 1", "SELECT 1"),
        ("  SELECT 1 ;\n", "SELECT 1"),
        ("SELECT 1;;", "SELECT 1"),
        ("```sql\nSELECT 1;\n```", "SELECT 1"),
        ("I look first.\n```SQL\nSELECT 1\n```\nand then\n```sql\nSELECT 2\n```", "SELECT 1"),
        ("```\nSELECT 1\n```", "SELECT 1"),
        ("```sqlite\nSELECT 1", "SELECT 1"),
        ("```sql```", ""),
        ("", ""),
        ("SELECT\n1", "SELECT\n1"),
    ],
)
def test_a_statement_may_stand_in_a_fence(content: str, statement: str):
    assert read_statement(content) == statement


@pytest.mark.parametrize(
    "content, answer",
    [
        ("answer: 7", "7"),
        ("Answer : brave-otter \n", "brave-otter"),
        ("It is clear now.\n\nANSWER: oslo", "oslo"),
        ("answer:", ""),
        ("answer: 7\nSELECT 1", None),
        ("the answer: 7", None),
        ("SELECT 'answer: 7'", None),
        ("", None),
        ("\n", None),
    ],
)
def test_an_answer_is_the_last_line(content: str, answer: str | None):
    assert read_answer(content) == answer


@pytest.mark.parametrize(
    "given, expected, right",
    [
        ("7", 7, True),
        ("7.0", 7, True),
        (" '7'. ", 7, True),
        ("+7", 7, True),
        ("07", 7, True),
        ("7 ", 7, True),
        ("8", 7, False),
        ("7.4", 7, False),
        ("", 7, False),
        ("nan", 7, False),
        ("inf", 7, False),
        ("NULL", 7, False),
        ("None", 7, False),
        ("7e0", 7, False),
        ("7" * 5000, 7, False),
        ("7 8", 7, False),
        ("٧", 7, False),
        ("brave-otter", "brave-otter", True),
        ('"Brave-Otter"', "brave-otter", True),
        ("brave", "brave-otter", False),
        ("", "brave-otter", False),
        ("brave-otter brave-lynx", "brave-otter", False),
    ],
)
def test_an_answer_is_compared_by_what_it_means(given: str, expected: int | str, right: bool):
    assert is_right(given, expected) is right


@pytest.mark.parametrize(
    "result, text",
    [
        (Result(), "no rows"),
        (Result(((7,),)), "7"),
        (Result(((1, "a"), (2, None)), more=True), "1|a\n2|NULL\nmore rows"),
        (Result(changed=0), "ok, 0 rows changed"),
        (Result(changed=1), "ok, 1 row changed"),
        (Result(changed=3), "ok, 3 rows changed"),
        (Result(((5,),), changed=1), "5"),
        (Result(error="no such table: x"), "error: no such table: x"),
        (Result(error="no such column: \x1b[2J\u202e"), "error: no such column:  [2J "),
        (Result(((1.5, 2.0, 1 / 3, float("inf"), float("-inf")),)), "1.5|2|0.3333333333|Inf|-Inf"),
        (Result(((b"\x00\xff", "a\nb\x1b"),)), "x'00ff'|a b "),
    ],
)
def test_a_result_is_compact(result: Result, text: str):
    assert result_text(result, 200) == text


@pytest.mark.parametrize("result", [Result((("x" * 500,),)), Result(error="x" * 500)])
def test_a_long_result_is_cut(result: Result):
    text = result_text(result, 50)
    assert len(text) == 50 and text.endswith("...")
