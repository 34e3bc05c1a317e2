"""Reads the quotes of a command line as a shell does."""

from __future__ import annotations

from collections.abc import Iterator


def quote_states(text: str) -> Iterator[tuple[str, str, bool]]:
    """Yield every character with the state after it: the quote character that is open ("" outside of quotes), and
    whether the character is a backslash that escapes the next one."""
    quote, escaped = "", False
    for char in text:
        if escaped:
            escaped = False
        elif char == "\\" and quote != "'":
            escaped = True
        elif quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        yield char, quote, escaped
