"""Draws the words of an instance: names of tables and rows, columns, and values of text columns.

A row is called ``adjective-animal``, a table by one word, because a small policy copies what is short. Held out are
*pairs* of words that training never combines, decided by a stable hash: a table with its column of numbers, and both
words of a row. Every word occurs in training, so a policy must copy, not recall. Every instance has a table with such
a column and rows, so the splits share no instance.
"""

from __future__ import annotations

import random
import zlib
from types import MappingProxyType

from realhf.api.environment import HELD_OUT, SPLITS

HELDOUT_SHARE = 5
"""One pair in this many is held out."""


def words(text: str) -> tuple[str, ...]:
    """Return the words of a text."""
    return tuple(text.split())


TABLES = words(
    """boats books cabins clients engines flights guides hotels items jobs lamps maps orchids parcels parts pets
    rooms ships songs teams tools trains trips visits"""
)
ROW_ADJECTIVES = words(
    """agile bold brave bright calm clever cozy curly eager fancy fierce gentle grand happy jolly keen kind lively lucky
    merry mild noble polite proud quiet rapid shy silent sturdy swift tidy witty"""
)
ANIMALS = words(
    """badger bear beaver bison camel crane dolphin eagle falcon finch fox gecko hawk heron jaguar koala lemur lynx
    moose osprey otter owl panda puffin rabbit raven robin salmon seal tiger walrus wolf"""
)
TEXT_COLUMNS = MappingProxyType(
    {
        "city": words("cairo lima oslo paris rome tokyo"),
        "color": words("black blue green red white yellow"),
        "metal": words("copper iron lead nickel steel zinc"),
    }
)
"""A text column, and what its values are drawn from."""
NUMBER_COLUMNS = words("age cost price score size stock volume weight")
LINKED_COLUMNS = MappingProxyType(
    {
        "owner": words("anna boris clara david"),
        "region": words("east north south west"),
    }
)
"""A column that a second table gives to each value of a text column, and its values."""


def is_heldout_pair(first: str, second: str) -> bool:
    """Return whether names with this pair of words are kept for evaluation."""
    return zlib.crc32(f"{first} {second}".encode()) % HELDOUT_SHARE == 0


def draw_table(rng: random.Random, split: str, numbers: tuple[str, ...] = NUMBER_COLUMNS) -> tuple[str, str]:
    """Draw a table's name and its column of ``numbers``. Raises ValueError for an unknown split."""
    return _pair(rng, split, TABLES, numbers)


def draw_row_names(rng: random.Random, split: str, count: int) -> list[str]:
    """Draw ``count`` different names such as ``brave-otter``; the first two differ in the last word alone. Raises
    ValueError for an unknown split."""
    pairs: list[tuple[str, str]] = []
    while len(pairs) < count:
        first = (pairs[0][0],) if len(pairs) == 1 else ROW_ADJECTIVES
        pair = _pair(rng, split, first, ANIMALS)
        if pair not in pairs:
            pairs.append(pair)
    return ["-".join(pair) for pair in pairs]


def _pair(rng: random.Random, split: str, first: tuple[str, ...], second: tuple[str, ...]) -> tuple[str, str]:
    if split not in SPLITS:
        raise ValueError(f"{split!r} is no split (known: {', '.join(SPLITS)})")
    while True:
        pair = rng.choice(first), rng.choice(second)
        if is_heldout_pair(*pair) is (split == HELD_OUT):
            return pair
