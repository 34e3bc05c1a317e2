"""String helpers: shortening, escaping for terminals, parsing of shell quotes, and suggestions for
misspelled names."""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Iterator, Sequence

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
"""Terminal escape sequences that set colours."""


def escape_controls(text: str, *, colours: bool = True) -> str:
    """Return ``text`` with its control characters replaced by visible ones, so that its author
    cannot control the terminal.

    colours: whether to make colour escape sequences visible like other control characters. If
    False, they are removed.
    """
    return "".join(map(_escape_control, text if colours else _COLOURS.sub("", text)))


def _escape_control(char: str) -> str:
    if char.isprintable() or char in "\n\t" or unicodedata.category(char) == "Zs":
        return char
    return chr(0x2400 + ord(char)) if ord(char) < 32 else "\N{REPLACEMENT CHARACTER}"


def shorten(text: str, max_chars: int) -> str:
    """Return ``text`` shortened to at most ``max_chars`` characters by omitting its middle. Two
    thirds of what remains are from its start."""
    if len(text) <= max_chars:
        return text
    mark = "..."
    if max_chars <= len(mark):
        return text[:max_chars]
    keep = max_chars - len(mark)
    tail = keep // 3
    return text[: keep - tail] + mark + (text[-tail:] if tail else "")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the error's type if the message is empty,
    truncated to 200 characters."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


_MAX_KNOWN_NAMES = 20
"""Maximum number of known names in a message."""


def suggest_names(name: str, known: Sequence[str]) -> str:
    """Return a suffix for an error message about the unknown ``name``: the most similar known name
    and the first 20 known names."""
    close = difflib.get_close_matches(name[:100], known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    more = f", and {len(known) - _MAX_KNOWN_NAMES} more" if len(known) > _MAX_KNOWN_NAMES else ""
    return f"{hint} (known: {', '.join(known[:_MAX_KNOWN_NAMES]) or 'none'}{more})"


def quote_states(text: str) -> Iterator[tuple[str, str, bool]]:
    """Yield (character, open quote, escapes) for each character of a string with shell quoting.

    The open quote is the quote character that is in effect after this character, or "" outside of
    quotes. ``escapes`` is True for a backslash that escapes the next character.
    """
    quote = ""
    escaped = False
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
