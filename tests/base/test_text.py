"""Texts of others on a terminal."""

import shlex

from hypothesis import given
from hypothesis import strategies as st

from realhf.base.text import close_to, printable, quote_states


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


def test_a_close_spelling_is_offered_and_the_names_are_listed():
    assert close_to("gree", ["green", "blue"]) == "; did you mean 'green'? (known: green, blue)"
    assert close_to("zzz", []) == " (known: none)"


def test_a_long_list_is_cut_and_counted():
    said = close_to("zzz", [f"name{i}" for i in range(25)])
    assert "name19, and 5 more)" in said and "name20" not in said


def test_the_state_after_every_character():
    text = "a 'b\\' \"c\\\"'d\" e\\"
    states = [*quote_states(text)]
    assert "".join(char for char, _, _ in states) == text
    assert "".join(quote or "." for _, quote, _ in states) == "..'''.." + '"' * 6 + "...."
    assert states[-1] == ("\\", "", True)


@given(st.text(alphabet="ab '\"\\", max_size=20))
def test_open_quotes_and_escapes_are_those_that_a_shell_refuses(text):
    quote, escaped = "", False
    for _, quote, escaped in quote_states(text):  # noqa: B007
        pass
    try:
        shlex.split(text)
        whole = True
    except ValueError:
        whole = False
    assert whole == (not quote and not escaped)
