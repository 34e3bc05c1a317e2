"""Texts of others on a terminal."""

from realhf.base.text import printable


def test_control_characters_are_shown_and_not_obeyed():
    """A title, a cleared screen, text from right to left, and what an encoding did not know."""
    said = "a\tb\n\x1b]0;title\x07\x1b[2J \u202eod\r\x7f \ud800 é 漢"
    assert printable(said) == "a\tb\n␛]0;title␇␛[2J \ufffdod␍\ufffd \ufffd é 漢"


def test_spaces_of_other_scripts_are_spaces():
    said = "東京\u3000大阪 10\u00a0000"
    assert printable(said) == said
    assert printable("a\u2028b\u2029") == "a\ufffdb\ufffd"  # they end a line


def test_colours_may_be_left_out():
    said = "\x1b[1;31mred\x1b[0m \x1b[2J"
    assert printable(said, colours=False) == "red ␛[2J"
    assert printable(said) == "␛[1;31mred␛[0m ␛[2J"
