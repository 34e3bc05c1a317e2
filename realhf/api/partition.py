"""Deterministic partitions of weighted items: balanced parts and bins under a cap.

Ties go to the lower original index; every part lists its indices in ascending order.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def balanced_parts(costs: Sequence[int], n_parts: int) -> list[list[int]]:
    """Longest-processing-time-first partition of ``range(len(costs))`` into ``n_parts`` non-empty parts.

    Parts are ordered by their first index. Raises ValueError unless 1 <= n_parts <= len(costs)."""
    if not 1 <= n_parts <= len(costs):
        raise ValueError(f"cannot split {len(costs)} samples into {n_parts} non-empty parts")
    heap = [(0, 0, part) for part in range(n_parts)]
    parts: list[list[int]] = [[] for _ in range(n_parts)]
    for index in _heaviest_first(costs):
        load, count, part = heapq.heappop(heap)
        parts[part].append(index)
        heapq.heappush(heap, (load + int(costs[index]), count + 1, part))
    return sorted(sorted(part) for part in parts)


def capped_bins(costs: Sequence[int], cap: int | None, minimum: int) -> list[list[int]]:
    """First-fit-decreasing bins of at most ``cap`` total cost, at least ``minimum`` bins (as far as there
    are items). An item above the cap has a bin of its own: nothing is dropped."""
    minimum = min(minimum, len(costs))
    if cap is None:
        return balanced_parts(costs, minimum)
    bins: list[list[int]] = []
    loads: list[int] = []
    for index in _heaviest_first(costs):
        cost = int(costs[index])
        target = next((b for b, load in enumerate(loads) if load + cost <= cap), None)
        if target is None:
            bins.append([index])
            loads.append(cost)
        else:
            bins[target].append(index)
            loads[target] += cost
    while len(bins) < minimum:
        _halve_heaviest(bins, costs)
    return sorted(sorted(members) for members in bins)


def _heaviest_first(costs: Sequence[int]) -> list[int]:
    return sorted(range(len(costs)), key=lambda i: (-int(costs[i]), i))


def _halve_heaviest(bins: list[list[int]], costs: Sequence[int]) -> None:
    divisible = [b for b, members in enumerate(bins) if len(members) > 1]
    heaviest = max(divisible, key=lambda b: (sum(int(costs[i]) for i in bins[b]), -b))
    members = bins.pop(heaviest)
    halves = balanced_parts([costs[i] for i in members], 2)
    bins.extend([members[i] for i in half] for half in halves)
