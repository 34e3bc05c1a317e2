"""Makes the sequences by which a model is tried out: does it follow the masks and positions of shared rows, or some
order of columns of its own?"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from realhf.backends.training.sequence_inputs import SequenceInputs

_LONGEST = 512
"""Widest window of a model's own making, in columns, that is tried out; a row to try it is a bit longer."""
_OURS = "sliding_window"


def own_windows(config: Any) -> list[int]:
    """Return the options of a model that may be windows or chunks in tokens, but for the one that our masks have."""
    options = config.get_text_config().to_dict()
    named = {name: value for name, value in options.items() if "window" in name or "chunk" in name}
    named = {name: value for name, value in named.items() if name != _OURS and "layers" not in name}
    return sorted(value for value in named.values() if type(value) is int and value > 0)


def probe(config: Any) -> SequenceInputs | None:
    """Make sequences that part twice, all of whose positions are scored. In a row of all of them columns part by more
    than every window of the model's own, tokens do not. None if that takes too long a row."""
    widest = max(own_windows(config), default=0)
    if widest > _LONGEST:
        return None
    vocabulary, draw = int(config.get_text_config().vocab_size), np.random.default_rng(0)
    stem, twig = draw.integers(0, vocabulary, 9), draw.integers(0, vocabulary, 5)
    tails = [draw.integers(0, vocabulary, n) for n in (4, 7, 3, 6)]
    tokens = [np.concatenate([stem, twig, tails[0]]), np.concatenate([stem, twig, tails[1]]), stem]
    tokens += [np.concatenate([stem, tail]) for tail in tails[2:]]
    for _ in range(0, widest, 16):
        tokens.append(np.concatenate([stem, draw.integers(0, vocabulary, 18)]))
    asked = [np.arange(len(sequence)) for sequence in tokens]
    ends = np.cumsum([len(sequence) for sequence in tokens])
    place = [end - len(own) + own for end, own in zip(ends, asked, strict=True)]
    return SequenceInputs(tokens, asked, tokens, place, int(ends[-1]))


def strayed(found: Tensor, expected: Tensor) -> float:
    """Return how far hidden states (n, width) are from expected ones at the worst position, of the length there."""
    far = (found - expected).float().norm(dim=-1) / expected.float().norm(dim=-1).clamp(min=1e-6)
    return float(far.max())


def tolerance(dtype: torch.dtype, own: float) -> float:
    """Return how far shared rows may be off. ``own``: how far a model of ``dtype`` is off from itself when only the
    composition of a batch changes."""
    return min(0.1, max(1e-3, 2 * torch.finfo(dtype).eps, 4 * own))
