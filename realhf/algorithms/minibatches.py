"""Cuts the rollouts of one train step into parts of about equal numbers of tokens, one for each update."""

from __future__ import annotations

import numpy as np

from realhf.algorithms.sequences import rollouts
from realhf.api.sample import SequenceSample
from realhf.api.sequence_choice import choose_sequences


def minibatches(sample: SequenceSample, n: int, seed: tuple[int, ...]) -> list[SequenceSample]:
    """Cut ``sample`` into ``n`` parts, or into as many as there are rollouts; deterministic in ``seed``.

    Groups are cut too, so whatever a loss needs of a group must be in the keys already; the sequences of a rollout stay
    together. In shuffled order each rollout joins the part with the fewest tokens so far: parts differ by at most the
    longest rollout.
    """
    rollout = rollouts(sample).numpy()
    lengths = np.bincount(rollout, weights=sample.lengths("packed_input_ids").values).astype(np.int64)
    owner, load = np.zeros(len(lengths), dtype=np.int64), np.zeros(n, dtype=np.int64)
    for i in np.random.default_rng(seed).permutation(len(lengths)):
        owner[i] = load.argmin()
        load[owner[i]] += lengths[i]
    parts = [choose_sequences(sample, owner[rollout] == number) for number in range(n)]
    return [part for part in parts if part is not None]
