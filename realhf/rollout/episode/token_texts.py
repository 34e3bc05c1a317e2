"""Says what each token of a sequence looks like, for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class TokenTexts:
    """Decodes tokens one by one with ``tokenizer``, each once. A token that holds a part of a character is shown as a
    replacement character."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def __call__(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token."""
        known = self._known
        for token in set(ids) - known.keys():
            known[token] = str(self._tokenizer.decode([token]))
        return [known[token] for token in ids]
