"""Finds among groups of the wrong size a set that adds up to the right one. Pure functions, usable without HTTP.

Source: docs/reference/trajectory.md 2.7.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MOST_BITS = 1 << 25
"""Largest product of groups and target for an exact search, which takes a few milliseconds. Of a larger buffer it
searches the oldest part."""


def find_set(sizes: Sequence[int], target: int) -> list[int]:
    """Return ascending indices of sizes that sum to ``target``; an empty list if there are none.

    It first adds sizes in order of arrival, skipping what does not fit. Then it searches an exact subset, rebuilt from
    the newest index downwards: it leaves an index out wherever the rest can be reached without it being larger. Sizes
    and target are in sequences, sizes at least 1.
    """
    if target < 1 or sum(sizes) < target:
        return []
    return _in_order(sizes, target) or _exactly(sizes, target)


def find_groups_summing_to_target(buffer: Sequence[Mapping[str, Any]], target_size: int) -> list[int]:
    """Apply ``find_set`` to groups given as plain mappings with a list of ``tokens``."""
    return find_set([len(group["tokens"]) for group in buffer], target_size)


def _in_order(sizes: Sequence[int], target: int) -> list[int]:
    chosen, total = [], 0
    for index, size in enumerate(sizes):
        if total + size <= target:
            chosen.append(index)
            total += size
            if total == target:
                return chosen
    return []


def _exactly(sizes: Sequence[int], target: int) -> list[int]:
    """Solve the subset sum over bit sets: bit j of ``reachable[i]`` says that the first i sizes can sum to j."""
    sizes = sizes[: max(1, MOST_BITS // (target + 1))]
    mask = (1 << (target + 1)) - 1
    reachable = [1]
    for size in sizes:
        last = reachable[-1]
        reachable.append((last | last << size) & mask if size <= target else last)
    if not reachable[-1] >> target & 1:
        return []
    chosen, rest = [], target
    for index in range(len(sizes) - 1, -1, -1):
        if sizes[index] <= rest and reachable[index] >> (rest - sizes[index]) & 1:
            chosen.append(index)
            rest -= sizes[index]
    return chosen[::-1]
