"""Draws names of files, names of folders and words to put into files, each of three words: ``amber-anchor-memo``.

The three kinds share no word, as in a real folder, where a date does not look like a person. So a small policy tells
what a name is from the name.

Names are held out, decided by a stable hash of the whole name. Their words, and the pairs of neighbours, occur in
training names, so a policy must copy, not recall.
"""

from __future__ import annotations

import random
import re
import zlib

from realhf.api.environment import HELD_OUT, TRAIN

Words = tuple[str, ...]
Kind = tuple[Words, Words, Words]

HELD_OUT_SHARE = 5
"""One name in this many is held out."""


def _words(text: str) -> Words:
    return tuple(text.split())


ADJECTIVES = _words(
    """amber bitter blank bronze damp dusty faint frosty golden grey hollow icy late long misty narrow open pale
    plain quiet round silver small tall"""
)
NOUNS = _words(
    """anchor arrow basket bell bottle bridge brush button candle carpet chair clock coat compass drum fence flute
    garden hammer kettle key ladder lamp mirror needle oven piano pillow rope spoon table wagon"""
)
SUFFIXES = _words(
    """agenda budget diary draft essay guide index list memo menu notes plan poem quiz recipe report review sketch
    story"""
)
PLACES = _words("abbey attic barn cabin cellar chapel depot farm forge harbor hotel lodge mill museum station tower")
SIDES = _words("east inner left lower north outer south upper west")
PARTS = _words("annex bay court deck dock hall porch roof stage wing yard")
ANIMALS = _words(
    """badger bear crab crow deer dove eagle finch fox goat goose hawk heron lion lynx mole otter owl panda raven
    seal swan tiger wolf"""
)
MATERIALS = _words("brass brick chalk clay copper cork flint glass iron leather linen marble oak sand slate wool")
NUMBERS = _words("one two three four five six seven eight nine ten eleven twelve")
FILE = (ADJECTIVES, NOUNS, SUFFIXES)
FOLDER = (PLACES, SIDES, PARTS)
TEXT = (ANIMALS, MATERIALS, NUMBERS)
KINDS = (FILE, FOLDER, TEXT)
NAME = re.compile(r"\b([a-z]+)-([a-z]+)-([a-z]+)\b")
"""Finds names in any text of this environment, which holds no other words with hyphens."""


def split_of(name: str) -> str:
    """Return the only split in which this name occurs."""
    return TRAIN if zlib.crc32(name.encode()) % HELD_OUT_SHARE else HELD_OUT


def draw_name(rng: random.Random, split: str, kind: Kind = FILE) -> str:
    """Draw a name of a kind (one of KINDS) and a split."""
    while True:
        name = "-".join(rng.choice(words) for words in kind)
        if split_of(name) == split:
            return name
