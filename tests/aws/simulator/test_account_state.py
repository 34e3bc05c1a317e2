"""What is marked as drawn in the texts of an account; no simulator is needed."""

from __future__ import annotations

from realhf.aws.simulator.account_state import DRAWN, END_DRAWN, Draws


def test_what_was_drawn_is_marked_also_when_the_text_was_told_before() -> None:
    draws = Draws()
    draws.add("0af31c9e77", "0AF31C9E77")
    draws.look()
    assert draws.marked("vpc-0af31c9e77") == f"vpc-{DRAWN}0af31c9e77{END_DRAWN}"
    assert draws.marked("subnet-55aa55aa/CidrBlock") == "subnet-55aa55aa/CidrBlock"
    for letter in "55aa55aa":
        draws.add_letter(letter)
    draws.look()
    assert draws.marked("subnet-55aa55aa/CidrBlock") == f"subnet-{DRAWN}55aa55aa{END_DRAWN}/CidrBlock"
    draws.clear()
    assert draws.marked("vpc-0af31c9e77") == "vpc-0af31c9e77"


def test_a_word_with_a_drawn_end_alone_is_not_marked() -> None:
    draws = Draws()
    draws.add("0af31c9e77", "0AF31C9E77")
    draws.look()
    assert draws.marked("somethingquite31c9e77") == "somethingquite31c9e77"


def test_the_first_text_after_a_reset_is_taken_in_also_when_it_is_the_only_one() -> None:
    draws = Draws()
    draws.add("only31c9e77")
    draws.look()
    assert draws.marked("i-only31c9e77") == f"i-{DRAWN}only31c9e77{END_DRAWN}"
