"""The updates of one train step: its sequences in parts of about equal numbers of tokens."""

from __future__ import annotations

import numpy as np

from realhf.api.sample import SequenceSample
from realhf.api.sequence_choice import choose_sequences


def minibatches(sample: SequenceSample, n: int, seed: tuple[int, ...]) -> list[SequenceSample]:
    """``n`` parts, or as many as there are sequences; deterministic in ``seed``. Groups are cut, so what a loss needs
    of a group is in the keys already. In shuffled order each sequence joins the part with the fewest tokens so far:
    parts differ by the longest sequence at most."""
    lengths = np.asarray(sample.lengths("packed_input_ids").values)
    owner, load = np.zeros(len(lengths), dtype=np.int64), np.zeros(n, dtype=np.int64)
    for i in np.random.default_rng(seed).permutation(len(lengths)):
        owner[i] = load.argmin()
        load[owner[i]] += lengths[i]
    parts = [choose_sequences(sample, owner == number) for number in range(n)]
    return [part for part in parts if part is not None]
