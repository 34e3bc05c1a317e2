"""Parsing of plain words without ``argparse``: exact names of options, each followed by its values."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple


class _Option(NamedTuple):
    """An option of a parser that the short cut can read."""

    action: argparse.Action
    """The parser's own description."""
    convert: Callable[[str], Any] | None
    """Function that converts a word; None for a flag."""


class WordParser:
    """What a parser of an operation's options does with plain words: exact names of options, each
    followed by its words, none of which begins with a dash."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._options: dict[str, _Option] = {}
        self._defaults: dict[str, Any] = {}
        self._required: set[int] = set()
        actions = parser._actions
        self._is_plain = not parser._mutually_exclusive_groups and all(map(_is_plain, actions))
        for action in actions if self._is_plain else ():
            self._defaults.setdefault(action.dest, action.default)
            if action.required:
                self._required.add(id(action))
            is_flag = isinstance(action, argparse._StoreConstAction)
            convert = None if is_flag else parser._registry_get("type", action.type, action.type)
            self._options |= {name: _Option(action, convert) for name in action.option_strings}

    @classmethod
    def of(cls, parser: Any) -> WordParser:
        """Return the one for a parser, which is built once."""
        known = parser.__dict__.get("_words")
        if known is None:
            known = parser._words = cls(parser)
        return known

    def read(self, words: Sequence[str]) -> dict[str, Any] | None:
        """Return the parsed values by their names, or None if the words are not plain."""
        if not self._is_plain:
            return None
        values: dict[str, Any] = {}
        seen: set[int] = set()
        position = 0
        end = len(words)
        while position < end:
            option = self._options.get(words[position])
            if option is None:
                return None
            action, convert = option
            seen.add(id(action))
            position += 1
            if convert is None:
                values[action.dest] = action.const
                continue
            first = position
            while position < end and not words[position].startswith("-"):
                position += 1
            is_list = action.nargs == "*"
            if not is_list and position != first + 1:
                return None
            try:
                converted = [convert(word) for word in words[first:position]]
            except Exception:  # whatever it is, the parser raises it in its own way
                return None
            values[action.dest] = converted if is_list else converted[0]
        if not self._required <= seen:
            return None
        return self._defaults | values


def _is_plain(action: argparse.Action) -> bool:
    """Return whether a parser's argument is an option, or the optional word after them, of a kind
    that the short cut can read."""
    if action.choices is not None or isinstance(action.default, str):
        return False  # a default in words would be converted
    if not action.option_strings:
        return type(action) is argparse._StoreAction and action.nargs == "?"
    flags = (argparse._StoreTrueAction, argparse._StoreFalseAction, argparse._StoreConstAction)
    return type(action) in flags or (
        type(action) is argparse._StoreAction and action.nargs in (None, "*")
    )


def is_left_over(word: str, options: Iterable[str]) -> bool:
    """Return whether a parser with these options leaves a word over, or takes it as a word without
    a dash."""
    if not word.startswith("-"):
        return True
    if not word.startswith("--") or word == "--":
        return False
    name = word.partition("=")[0]
    return not any(option.startswith(name) for option in options)
