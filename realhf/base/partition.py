"""Deterministic partitioning of weighted items into balanced parts.

Ties are resolved in favour of the lower index. Each part lists its indices in ascending order.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

HOME_LIMITS = (1.0, 0.95, 0.9, 0.8, 0.7)
"""Limits for the total cost of the items that stay in their home part, as fractions of the largest
part's cost. They are tried in turn; lower limits leave more items for balancing the parts."""


def balanced_parts(costs: Sequence[int], n_parts: int) -> list[list[int]]:
    """Partition ``range(len(costs))`` into ``n_parts`` non-empty parts of similar total cost.
    Indices with the largest costs are placed first.

    Parts are ordered by their first index. Raises ValueError unless 1 <= n_parts <= len(costs).
    """
    if not 1 <= n_parts <= len(costs):
        raise ValueError(f"cannot split {len(costs)} samples into {n_parts} non-empty parts")
    return sorted(
        sorted(part) for part in _add_to_lightest(costs, _heaviest_first(costs), [[]] * n_parts)
    )


def balanced_parts_near_homes(
    costs: Sequence[int], homes: Sequence[int | None], n_parts: int
) -> list[list[int]]:
    """Partition ``range(len(costs))`` into ``n_parts`` parts of similar total cost, with each index
    in the part ``homes[index]`` where possible.

    The largest part costs at most as much as the largest part of ``balanced_parts``. No part is
    empty unless there are fewer items than parts.
    """
    order = _heaviest_first(costs)
    usual = _add_to_lightest(costs, order, [[] for _ in range(n_parts)])
    bound = max(_cost(costs, part) for part in usual)
    for share in HOME_LIMITS:
        near = _place_at_home(costs, homes, order, n_parts, share * bound)
        if max(_cost(costs, part) for part in near) <= bound and (
            len(costs) < n_parts or all(near)
        ):
            return [sorted(part) for part in near]
    return [sorted(part) for part in _match_homes(costs, homes, usual)]


def _place_at_home(
    costs: Sequence[int],
    homes: Sequence[int | None],
    order: Sequence[int],
    n_parts: int,
    limit: float,
) -> list[list[int]]:
    """Return parts with items in their home parts up to the cost ``limit``, and each remaining item
    in the part that is the lightest at that time."""
    parts: list[list[int]] = [[] for _ in range(n_parts)]
    loads = [0] * n_parts
    away = list[int]()
    for index in order:
        home = homes[index]
        if home is None or loads[home] + int(costs[index]) > limit:
            away.append(index)
        else:
            parts[home].append(index)
            loads[home] += int(costs[index])
    return _add_to_lightest(costs, away, parts)


def _add_to_lightest(
    costs: Sequence[int], order: Sequence[int], parts: Sequence[Sequence[int]]
) -> list[list[int]]:
    """Return the parts with each index of ``order`` added to the part that is the lightest at that
    time."""
    placed = [list(part) for part in parts]
    heap = [(_cost(costs, indices), len(indices), part) for part, indices in enumerate(placed)]
    heapq.heapify(heap)
    for index in order:
        load, count, part = heapq.heappop(heap)
        placed[part].append(index)
        heapq.heappush(heap, (load + int(costs[index]), count + 1, part))
    return placed


def _match_homes(
    costs: Sequence[int], homes: Sequence[int | None], parts: Sequence[list[int]]
) -> list[list[int]]:
    """Return the parts in another order, chosen greedily so that large costs are in their home
    part."""
    at_home = [
        (sum(int(costs[i]) for i in part if homes[i] == home), number, home)
        for number, part in enumerate(parts)
        for home in range(len(parts))
    ]
    place_of: dict[int, int] = {}
    for _, number, home in sorted(at_home, key=lambda entry: (-entry[0], entry[1], entry[2])):
        if number not in place_of and home not in place_of.values():
            place_of[number] = home
    return [parts[number] for number in sorted(place_of, key=place_of.__getitem__)]


def _cost(costs: Sequence[int], part: Sequence[int]) -> int:
    """Return the total cost of a part."""
    return sum(int(costs[i]) for i in part)


def _heaviest_first(costs: Sequence[int]) -> list[int]:
    """Return all indices by descending cost."""
    return sorted(range(len(costs)), key=lambda i: (-int(costs[i]), i))
