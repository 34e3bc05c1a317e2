"""Shortens texts."""

from __future__ import annotations


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
