"""Says which known name a person may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

_MOST_NAMES = 20


def close_to(name: str, known: Sequence[str]) -> str:
    """Return the end of a sentence about an unknown name: a close spelling, and the names that are known (the first
    20 of them)."""
    close = difflib.get_close_matches(name[:100], known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    more = f", and {len(known) - _MOST_NAMES} more" if len(known) > _MOST_NAMES else ""
    return f"{hint} (known: {', '.join(known[:_MOST_NAMES]) or 'none'}{more})"
