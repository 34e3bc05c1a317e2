"""Draws the words of an instance: names of tables and rows, columns, and values of text columns.

A table is called ``adjective_things``, a row ``adjective-animal-place``. Held-out names begin with *pairs* of words
that no training name combines, decided by a stable hash; every word occurs in training names, so a policy must copy,
not recall. Every instance has a table with a drawn name, so the splits share no instance.
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


TABLE_ADJECTIVES = words(
    """amber annual coastal daily distant golden grand hidden local lunar modern national northern old open
    private public royal rural silver spare upper urban winter"""
)
THINGS = words("boats books clients flights goods items jobs orders parcels parts rooms ships songs teams tools trips")
ROW_ADJECTIVES = words(
    """agile bold brave bright calm clever cozy curly eager fancy fierce gentle grand happy jolly keen kind lively lucky
    merry mild noble polite proud quiet rapid shy silent sturdy swift tidy witty"""
)
ANIMALS = words(
    """badger bear beaver bison camel crane dolphin eagle falcon finch fox gecko hawk heron jaguar koala lemur lynx
    moose osprey otter owl panda puffin rabbit raven robin salmon seal tiger walrus wolf"""
)
PLACES = words("bay bell cove den dock farm gate hall hill inn lane loft mill nest park peak pier pond tower yard")
TEXT_COLUMNS = MappingProxyType(
    {
        "city": words("cairo lima oslo paris rome tokyo"),
        "color": words("black blue green red white yellow"),
        "metal": words("copper iron lead nickel steel zinc"),
    }
)
"""A text column, and what its values are drawn from."""
NUMBER_COLUMNS = words("cost price score stock volume weight")
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


def draw_table_name(rng: random.Random, split: str) -> str:
    """Draw a name such as ``amber_orders``. Raises ValueError for an unknown split."""
    return "_".join(_pair(rng, split, TABLE_ADJECTIVES, THINGS))


def draw_row_names(rng: random.Random, split: str, count: int) -> list[str]:
    """Draw ``count`` different names such as ``brave-otter-mill``; the first two differ in the last word alone. Raises
    ValueError for an unknown split."""
    names: list[str] = []
    pair = _pair(rng, split, ROW_ADJECTIVES, ANIMALS)
    while len(names) < count:
        name = "-".join((*pair, rng.choice(PLACES)))
        if name not in names:
            names.append(name)
            pair = pair if len(names) == 1 else _pair(rng, split, ROW_ADJECTIVES, ANIMALS)
    return names


def _pair(rng: random.Random, split: str, first: tuple[str, ...], second: tuple[str, ...]) -> tuple[str, str]:
    if split not in SPLITS:
        raise ValueError(f"{split!r} is no split (known: {', '.join(SPLITS)})")
    while True:
        pair = rng.choice(first), rng.choice(second)
        if is_heldout_pair(*pair) is (split == HELD_OUT):
            return pair
