"""Draws names of resources, ``adjective-noun-suffix``, from three word lists.

Held-out names are unseen *pairs*: an adjective and a noun that no training name combines, decided by a stable hash of
the pair. Every word occurs in training names, so a policy must copy, not recall.
"""

from __future__ import annotations

import random
import zlib

HELDOUT_SHARE = 5
"""One pair in this many is held out."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ADJECTIVES = _words(
    """agile bold brave brief bright brisk calm clean clear clever cold cool cozy crisp curly daring deep eager
    early fair fancy fast fierce fine firm fresh gentle giant glad grand happy humble jolly keen kind light
    little lively loud loyal lucky merry mild modest neat noble polite proud quick quiet rapid sharp shy
    silent sleepy smooth sober sturdy swift tidy"""
)
NOUNS = _words(
    """acorn badger bear beaver bison camel canyon cedar cliff comet crane dolphin dune eagle falcon fern finch
    forest fox gecko glacier harbor hawk heron island jaguar koala lagoon lake lemur lynx maple meadow mesa
    moose oak ocean orchid osprey otter owl panda pebble pine planet puffin rabbit raven reef river robin
    salmon seal spruce thistle tiger tulip valley walrus willow"""
)
SUFFIXES = _words(
    """app lab hub core main prod test stage demo pilot shop pay chat feed sync grid vault pulse dash depot"""
)


def is_heldout_pair(adjective: str, noun: str) -> bool:
    """Return whether names with this pair are kept for evaluation."""
    return zlib.crc32(f"{adjective} {noun}".encode()) % HELDOUT_SHARE == 0


def draw_name(rng: random.Random, split: str) -> str:
    """Draw a name of the split, ``"train"`` or ``"heldout"``; the suffix is drawn freely in both."""
    wanted = split == "heldout"
    while True:
        adjective, noun = rng.choice(ADJECTIVES), rng.choice(NOUNS)
        if is_heldout_pair(adjective, noun) is wanted:
            return f"{adjective}-{noun}-{rng.choice(SUFFIXES)}"


def is_name(text: object) -> bool:
    """Return whether a parameter's value is a drawn name."""
    parts = str(text).split("-")
    return len(parts) == 3 and parts[0] in ADJECTIVES and parts[1] in NOUNS and parts[2] in SUFFIXES


def words() -> tuple[str, ...]:
    """Return every word a name can hold: what a tokenizer should keep whole."""
    return ADJECTIVES + NOUNS + SUFFIXES
