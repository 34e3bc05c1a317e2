"""Splits weighted items into balanced parts, deterministically.

Ties go to the lower original index; every part lists its indices in ascending order.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def balanced_parts(costs: Sequence[int], n_parts: int) -> list[list[int]]:
    """Partition ``range(len(costs))`` into ``n_parts`` non-empty parts, placing the largest costs first.

    Parts are ordered by their first index. Raises ValueError unless 1 <= n_parts <= len(costs).
    """
    if not 1 <= n_parts <= len(costs):
        raise ValueError(f"cannot split {len(costs)} samples into {n_parts} non-empty parts")
    heap = [(0, 0, part) for part in range(n_parts)]
    parts: list[list[int]] = [[] for _ in range(n_parts)]
    for index in _heaviest_first(costs):
        load, count, part = heapq.heappop(heap)
        parts[part].append(index)
        heapq.heappush(heap, (load + int(costs[index]), count + 1, part))
    return sorted(sorted(part) for part in parts)


def _heaviest_first(costs: Sequence[int]) -> list[int]:
    return sorted(range(len(costs)), key=lambda i: (-int(costs[i]), i))
