"""The verifier of countdown: which part of a completion it judges, and what that earns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realhf.environments.countdown import PARTIAL_CREDIT, answer_in, judge, reward

ROW = {"numbers": [3, 4, 5], "target": 17, "prompt": "not read", "level": "not read"}


@pytest.mark.parametrize(
    ("completion", "earned"),
    [
        ("3*4=12, 12+5=17", 1.0),
        ("(3*4)+5", 1.0),
        ("thinking: 3+4=9?\n3*4+5\n\n", 1.0),
        ("<answer>3*4=12\n12+5=17</answer> done", 1.0),
        ("<answer>3+4</answer> no, <answer> 3*4+5 </answer>", 1.0),
        ("3+4+5=12", PARTIAL_CREDIT),
        ("3*4+5\n3+4", PARTIAL_CREDIT),
        ("<answer>3*4+5</answer><answer>3+4</answer>", PARTIAL_CREDIT),
        ("3*4+5=17 done", 0.0),
        ("12+5=17", 0.0),
        ("3+4=17", 0.0),
        ("17", 0.0),
        ("3", 0.0),
        ("3+3+3+4+4", 0.0),
        ("", 0.0),
        ("<answer></answer>", 0.0),
        ("</answer>3*4+5<answer>", 0.0),
    ],
)
def test_what_a_completion_earns(completion: str, earned: float):
    assert reward(completion, **ROW) == earned
    assert judge(completion, ROW["numbers"], ROW["target"]).solved == (earned == 1)


def test_the_partial_credit_can_be_chosen():
    assert reward("3+4", **ROW, partial_credit=0) == 0
    assert reward("3*4+5", **ROW, partial_credit=0) == 1


def test_the_target_among_the_numbers_is_no_answer_by_itself():
    """Naming a number is no arithmetic, even where it is the target."""
    assert reward("5", numbers=[5, 3], target=5) == 0


@given(st.text(max_size=200))
def test_any_text_is_judged(completion: str):
    """No completion raises, and a completion that does not succeed says why."""
    verdict = judge(completion, [3, 4, 5], 17)
    assert verdict.solved == (not verdict.problem)
    assert len(answer_in(completion)) <= len(completion)


def test_a_huge_completion_is_judged_by_its_last_line():
    assert reward("(" * 3_000_000 + "\n3*4+5", **ROW) == 1
    assert reward("<answer>" * 300_000 + "3*4+5" + "</answer>" * 300_000, **ROW) == 0
