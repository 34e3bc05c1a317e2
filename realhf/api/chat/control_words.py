"""Keeps the words that steer a chat template, such as ``<|im_end|>``, out of what is said in messages.

A tokenizer reads them as control ids wherever they stand in a text. A file, a web page or a row of a database that
holds them could end the environment's turn and go on as the policy, the user or the system. Here such a word is broken
by a space after its first letter, so that it is encoded as ordinary text. Other texts are left alone, to the letter.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from typing import Any

_TAG = re.compile(r"</?\w+>")
"""``<think>``, ``<tool_call>``: tags within a turn, which an environment may speak of."""
_HEAD = 3
_log = logging.getLogger(__name__)


def control_words(tokenizer: Any, framing: str) -> set[str]:
    """Return the words that a tokenizer reads as control ids: its special tokens, and of its other added ones those
    that the template writes around messages (``framing``), except tags within a turn."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    framed = {each.content for each in added if each.content in framing and not _TAG.fullmatch(each.content)}
    return {*tokenizer.all_special_tokens, *framed, *(each.content for each in added if each.special)}


class ControlWords:
    """Breaks ``words`` wherever they stand in a message; the first time, it is logged."""

    def __init__(self, words: Iterable[str]) -> None:
        whole = {word for word in words if word.strip()}
        self._words = _any_of(whole)
        # A template may put the keys of a schema into angle brackets.
        self._keys = _any_of(whole | {word[1:-1] for word in whole if word[0] == "<" and not _TAG.fullmatch(word)})
        self._logged = False

    def broken(self, value: Any) -> Any:
        """Return a text, or maps and lists of them, without any whole control word. Raises RecursionError for what is
        nested too deeply."""
        if isinstance(value, str):
            return self._broken(self._words, value)
        if isinstance(value, dict):
            return {
                self._broken(self._keys, key) if isinstance(key, str) else key: self.broken(item)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return self._joined([self.broken(item) for item in value])
        return value

    def _joined(self, parts: list[Any]) -> list[Any]:
        """A template may join the parts of a content: none of them may end what another begins."""
        texts = [part.get("text") for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
        if len(texts) > 1 and self._words is not None and self._words.search("".join(map(str, texts))):
            return [
                {**part, "text": f" {part['text']}"} if isinstance(part, dict) and "text" in part else part
                for part in parts
            ]
        return parts

    def _broken(self, words: re.Pattern[str] | None, text: str) -> str:
        while words is not None and (found := words.search(text)):
            if not self._logged:
                self._logged = True
                _log.warning(
                    "a message holds %r, which controls the chat; the policy reads such words as ordinary text, broken "
                    "by a space (said once)",
                    found[0],
                )
            text = words.sub(lambda match: f"{match[0][0]} {match[0][1:]}" if len(match[0]) > 1 else "", text)
        return text


def _any_of(words: Iterable[str]) -> re.Pattern[str] | None:
    """Words with the same beginning stand together: some tokenizers have hundreds, and a page thousands of brackets."""
    tails: dict[str, list[str]] = {}
    for word in sorted(words, key=lambda word: (-len(word), word)):
        tails.setdefault(word[:_HEAD], []).append(re.escape(word[_HEAD:]))
    branches = [f"{re.escape(head)}(?:{'|'.join(rest)})" for head, rest in tails.items()]
    return re.compile("|".join(branches)) if branches else None
