"""Random numbers that depend on a sequence and a position only."""

from __future__ import annotations

import numpy as np

from realhf.backends.embedded.sampling import stream_of, uniform_at


def test_numbers_are_uniform_and_independent_across_neighbouring_seeds_and_positions() -> None:
    streams = np.array([stream_of(seed) for seed in range(200)], dtype=np.uint64)
    table = uniform_at(streams[:, None], np.arange(200)[None])
    assert table.min() >= 0 and table.max() < 1
    counts = np.histogram(table, bins=64, range=(0, 1))[0]
    assert ((counts - 625) ** 2 / 625).sum() < 120  # chi-square, 63 degrees of freedom: p < 1e-5 beyond
    centred = table - 0.5
    for shifted in (centred[1:] * centred[:-1], centred[:, 1:] * centred[:, :-1], centred[1:, 1:] * centred[:-1, :-1]):
        assert abs(shifted.mean()) < 5 / 12 / np.sqrt(shifted.size)


def test_a_number_does_not_depend_on_its_company_and_seeds_may_be_any_integer() -> None:
    seeds = [0, 1, -1, 2**63, 2**64 - 1, 2**80 + 7]
    streams = np.array([stream_of(seed) for seed in seeds], dtype=np.uint64)
    alone = [uniform_at(streams[i : i + 1], np.array([7]))[0] for i in range(6)]
    assert uniform_at(streams, np.full(6, 7)).tolist() == alone
    assert stream_of(-1) == stream_of(2**64 - 1)
    assert len(set(alone)) == 5
