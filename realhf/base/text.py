"""Shortens texts, makes them fit for a terminal, reads shell quotes, and names the known word that
was meant."""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Iterator, Sequence

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def printable(text: str, *, colours: bool = True) -> str:
    """Return a text whose control characters are shown and not obeyed: a terminal would be driven
    by whoever wrote it. Without ``colours`` the sequences that only set them are left out."""
    return "".join(map(_visible, text if colours else _COLOURS.sub("", text)))


def _visible(char: str) -> str:
    if char.isprintable() or char in "\n\t" or unicodedata.category(char) == "Zs":
        return char
    return chr(0x2400 + ord(char)) if ord(char) < 32 else "\N{REPLACEMENT CHARACTER}"


def shorten(text: str, max_chars: int) -> str:
    """Cut the middle out of a text that is too long; two thirds of what stays is its head."""
    if len(text) <= max_chars:
        return text
    mark = "..."
    if max_chars <= len(mark):
        return text[:max_chars]
    keep = max_chars - len(mark)
    tail = keep // 3
    return text[: keep - tail] + mark + (text[-tail:] if tail else "")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its type where it has none; libraries write
    essays below."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


_MOST_NAMES = 20


def close_to(name: str, known: Sequence[str]) -> str:
    """Return the end of a sentence about an unknown name: a close spelling, and the names that are
    known (the first 20 of them)."""
    close = difflib.get_close_matches(name[:100], known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    more = f", and {len(known) - _MOST_NAMES} more" if len(known) > _MOST_NAMES else ""
    return f"{hint} (known: {', '.join(known[:_MOST_NAMES]) or 'none'}{more})"


def quote_states(text: str) -> Iterator[tuple[str, str, bool]]:
    """Yield every character with the state after it: the quote character that is open ("" outside
    of quotes), and whether the character is a backslash that escapes the next one."""
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
