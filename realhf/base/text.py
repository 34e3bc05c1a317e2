"""Shortens texts, and makes texts of others fit for a terminal."""

from __future__ import annotations

import re
import unicodedata

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def printable(text: str, *, colours: bool = True) -> str:
    """Return a text whose control characters are shown and not obeyed: a terminal would be driven by whoever wrote it.
    Without ``colours`` the sequences that only set them are left out."""
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
