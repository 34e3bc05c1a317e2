"""Derives the stream of random numbers of one rollout's tokens."""

from __future__ import annotations

import hashlib


def sampling_seed(run_seed: int, sample_id: str, member: int) -> int:
    """Return 63 bits that depend on these three alone: a rollout draws the same numbers wherever, whenever and beside
    whatever it is played, so that a synchronous and an asynchronous run sample alike."""
    text = f"{run_seed}/{sample_id}/{member}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
