"""Change the order of actions: one left out, done twice, done too early, undone, and others put in between.

An action is anything: a command, a call, a text. What a change is worth is found out by whoever plays it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")

LEFT_OUT, DOUBLED, REORDERED, FIRST = ("left out", "doubled", "reordered", "beside")


class Change(NamedTuple, Generic[T]):
    """Something changed: ``kind`` groups changes alike, ``what`` says it to people, ``value`` is the result."""

    kind: str
    what: str
    value: T


def reordered(actions: Sequence[T]) -> Iterator[Change[tuple[T, ...]]]:
    """Yield the actions with one or all but one left out, one or all done twice, two swapped, all reversed."""
    all_of, count = tuple(actions), len(actions)
    for at in range(count):
        yield Change(LEFT_OUT, f"action {at + 1} left out", all_of[:at] + all_of[at + 1 :])
        yield Change(DOUBLED, f"action {at + 1} done twice", all_of[: at + 1] + all_of[at:])
        if count > 2:
            yield Change(LEFT_OUT, f"action {at + 1} alone", all_of[at : at + 1])
    for at in range(count - 1):
        swapped = (*all_of[:at], all_of[at + 1], all_of[at], *all_of[at + 2 :])
        yield Change(REORDERED, f"actions {at + 1} and {at + 2} swapped", swapped)
    if count > 1:
        yield Change(DOUBLED, "everything done twice", all_of * 2)
        yield Change(REORDERED, "the last action first", (all_of[-1], *all_of[:-1]))
    if count > 2:
        yield Change(REORDERED, "everything in reverse", all_of[::-1])


def with_variants(
    actions: Sequence[T], variants: Callable[[T], Iterable[Change[T]]]
) -> Iterator[Change[tuple[T, ...]]]:
    """Yield the actions with each one in turn replaced by a variant, and with the variant before or behind it. The kind
    of a replacement is that of the variant, ``before`` and ``after`` are kinds of their own."""
    all_of = tuple(actions)
    for at, action in enumerate(all_of):
        head, tail, number = all_of[:at], all_of[at + 1 :], at + 1
        for kind, what, variant in variants(action):
            yield Change(kind, f"action {number}: {what}", (*head, variant, *tail))
            yield Change(f"{kind}, before", f"before action {number} the same, {what}", (*head, variant, action, *tail))
            yield Change(f"{kind}, after", f"after action {number} the same, {what}", (*head, action, variant, *tail))


def with_others(actions: Sequence[T], others: Iterable[Change[T]]) -> Iterator[Change[tuple[T, ...]]]:
    """Yield the actions with another one before all of them, and one before the last."""
    all_of = tuple(actions)
    for kind, what, other in others:
        yield Change(kind, f"{what}, first", (other, *all_of))
        if len(all_of) > 1:
            yield Change(kind, f"{what}, before the last action", (*all_of[:-1], other, all_of[-1]))


def drawn(changes: Iterable[Change[T]], most: int, rng: random.Random) -> list[Change[T]]:
    """Return at most ``most`` changes, as many of each kind as of any other, as far as there are."""
    by_kind: dict[str, list[Change[T]]] = {}
    for change in changes:
        by_kind.setdefault(change.kind, []).append(change)
    for found in by_kind.values():
        rng.shuffle(found)
    ranks: Iterator[tuple[Any, ...]] = zip_longest(*by_kind.values())
    return [change for rank in ranks for change in rank if change is not None][:most]
