"""Quotes of a command line, character by character, beside what a shell's own reader makes of the same text."""

import shlex

from hypothesis import given
from hypothesis import strategies as st

from realhf.base.text import quote_states


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
