"""Lines that a person types: messages, calls by hand, commands, and one sentence for what is none of these."""

from __future__ import annotations

import pytest

from realhf.env.play import CALL, HELP, NEXT, QUIT, RESTART, SAY, TOOLS, Typed, read_line

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}, "lines": {"type": "integer"}}}
KNOWN = [{"type": "function", "function": {"name": "read", "description": "Read.", "parameters": SCHEMA}}]


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("hello there", Typed(SAY, "hello there")),
        ("", Typed(SAY, "")),
        ("//etc", Typed(SAY, "/etc")),
        ("/help", Typed(HELP)),
        ("/tools", Typed(TOOLS)),
        ("/restart", Typed(RESTART)),
        ("/next ", Typed(NEXT)),
        ("/quit", Typed(QUIT)),
        ("/tool read", Typed(CALL, name="read")),
        ("/tool read path=7 lines=7", Typed(CALL, name="read", arguments={"path": "7", "lines": 7})),
        ("/tool read path='a b' other=x", Typed(CALL, name="read", arguments={"path": "a b", "other": "x"})),
        ('/tool read {"lines": "seven"}', Typed(CALL, name="read", arguments={"lines": "seven"})),
        ("/tool other list=[1,2]", Typed(CALL, name="other", arguments={"list": [1, 2]})),
    ],
)
def test_what_a_line_means(line: str, meant: Typed) -> None:
    assert read_line(line, KNOWN) == meant


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("/fly", "'/fly' is no command"),
        ("/quit now", "'/quit now' is no command"),
        ("/tool", "say which tool"),
        ("/tool read path", "'path' is no argument: write key=value"),
        ("/tool read lines=many", "lines is of the type integer, and 'many' is none"),
        ("/tool read path='a", "the arguments cannot be read: no closing quotation"),
        ('/tool read {"path": ', "the arguments are no JSON"),
    ],
)
def test_a_line_that_means_nothing_is_a_sentence(line: str, says: str) -> None:
    with pytest.raises(ValueError) as raised:
        read_line(line, KNOWN)
    assert str(raised.value).startswith(says)
