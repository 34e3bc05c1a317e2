"""Draws names of files and folders, and words to put into files: ``adjective-noun-suffix``.

Held-out names are unseen *pairs*: an adjective and a noun that no training name combines, decided by a stable hash of
the pair. Every word occurs in training names, so a policy must copy, not recall.
"""

from __future__ import annotations

import random
import re
import zlib

from realhf.api.environment import HELD_OUT, TRAIN

HELD_OUT_SHARE = 5
"""One pair in this many is held out."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ADJECTIVES = _words(
    """amber azure bitter blank blue bronze coral crimson damp dark dusty empty faint flat frosty golden green grey
    hollow icy ivory jade late lemon light long misty narrow olive open pale pink plain red round rusty scarlet short
    silver slow small soft solid stony sunny tall teal velvet violet warm wet white wide wild wooden yellow"""
)
NOUNS = _words(
    """anchor anvil apple arrow barrel basket bell blanket bottle bridge brush bucket button candle carpet castle chair
    clock cloud coat compass cup door drum engine fence flag flute fork garden gate glove hammer harp helmet kettle
    key kite ladder lamp letter map mirror needle oven paper pencil piano pillow plate rope saddle shovel spoon stove
    table tower trumpet wagon wheel window"""
)
SUFFIXES = _words(
    """agenda budget diary draft essay guide index list memo menu notes plan poem quiz recipe report review sketch story
    summary"""
)
NAME = re.compile(r"\b([a-z]+)-([a-z]+)-([a-z]+)\b")
"""Finds names in any text of this environment, which holds no other words with hyphens."""


def split_of(adjective: str, noun: str) -> str:
    """Return the only split in which this pair occurs."""
    return TRAIN if zlib.crc32(f"{adjective} {noun}".encode()) % HELD_OUT_SHARE else HELD_OUT


def draw_name(rng: random.Random, split: str) -> str:
    """Draw a name of the split; the suffix is drawn freely in both."""
    while True:
        adjective, noun = rng.choice(ADJECTIVES), rng.choice(NOUNS)
        if split_of(adjective, noun) == split:
            return f"{adjective}-{noun}-{rng.choice(SUFFIXES)}"
