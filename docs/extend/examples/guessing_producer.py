"""An environment that plays with a policy of its own and pushes groups to a trajectory server.

    python docs/extend/examples/guessing_producer.py http://127.0.0.1:8000

Tokens 0 to 99 are guesses, and three more are the answers and the beginning of an episode.
"""

from __future__ import annotations

import math
import random
import sys
from typing import Any, NamedTuple

from realhf.trajectory.client import TrajectoryClient

HIGHER, LOWER, START = 100, 101, 102
GROUP, GUESSES = 4, 8
NOT_TRAINED, NO_LOGPROB = -100, 1.0


class Episode(NamedTuple):
    """Rows of equal length: tokens; the same, or -100 where nothing is learned; log-probabilities of the guesses."""

    tokens: list[int]
    masks: list[int]
    logprobs: list[float]
    score: float


def play(secret: int, rng: random.Random) -> Episode:
    """Guess at random among what is left. The sooner the number is found, the better the score."""
    tokens, masks, logprobs, score = [START], [NOT_TRAINED], [NO_LOGPROB], 0.0
    low, high = 0, 99
    for turn in range(1, GUESSES + 1):
        guess = rng.randint(low, high)
        tokens, masks = [*tokens, guess], [*masks, guess]
        logprobs = [*logprobs, -math.log(high - low + 1)]
        if guess == secret:
            score = 1 / turn
            break
        low, high = (guess + 1, high) if guess < secret else (low, guess - 1)
        tokens, masks = [*tokens, HIGHER if guess < secret else LOWER], [*masks, NOT_TRAINED]
        logprobs = [*logprobs, NO_LOGPROB]
    return Episode(tokens, masks, logprobs, score)


def group(rng: random.Random) -> dict[str, Any]:
    """Several episodes with the same number: what the trainer compares with each other."""
    secret = rng.randint(0, 99)
    tokens, masks, logprobs, scores = zip(*(play(secret, rng) for _ in range(GROUP)), strict=True)
    rows = {"tokens": tokens, "masks": masks, "inference_logprobs": logprobs, "scores": scores}
    return {name: list(row) for name, row in rows.items()}


def produce(url: str, seed: int = 1) -> int:
    """Push groups as fast as the server wants them, until the run has enough. Returns how many were pushed."""
    rng, pushed = random.Random(seed), 0
    with TrajectoryClient(url) as client:
        client.register_env("guessing", group_size=GROUP, max_token_length=2 * GUESSES + 1)
        while not (pace := client.wait_for_room(timeout_s=60)).done:
            if not pace.pause:
                client.push(group(rng))
                pushed += 1
        client.disconnect()
    return pushed


if __name__ == "__main__":
    print(f"pushed {produce(sys.argv[1])} groups")
