"""Plays many instances at once: they must not see each other, and what they held must be gone when they are closed."""

from __future__ import annotations

import asyncio
import gc
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from realhf.env.check.episodes import Arena, Broken, Case, first_difference
from realhf.env.check.finding import Finding
from realhf.env.check.resources import THREADS, Held, ResourceBook

_ROUNDS = 3
"""The first fills pools and caches; only what grows after it has leaked."""
_LEAST_EPISODES = 20
_SHARE, _THREAD_SHARE = 10, 4
"""One thing left behind by so many episodes is a leak. Pools of threads fill up slowly, so more of these may be new."""
_ROUND_S = 8.0
"""A round that took longer is followed by smaller ones, in seconds."""
_SETTLED_S = 0.5
"""How long a closed instance may take to let go of what it held, in seconds."""


async def check_crowd(
    arena: Arena, cases: Sequence[Case], alone: Mapping[str, Sequence[Any]], count: int, book: ResourceBook
) -> float:
    """Play ``count`` instances at once, several times, turn by turn. ``alone``: transcripts of the cases played one by
    one; without the one of a case nothing is compared. Returns how many turns were played in a second. Raises Broken
    when an answer did not come."""
    played, seconds = arena.turns, 0.0
    episodes = 0
    held: list[Held] = []
    for number in range(_ROUNDS):
        began = time.monotonic()
        waves = max(1, math.ceil(_LEAST_EPISODES / count)) if not arena.was_cut else 1
        for _ in range(waves):
            await _play_at_once(arena, cases, alone, count)
        seconds += time.monotonic() - began
        held.append(await _settled(book, held[-1] if held else None))
        episodes = waves * count
        if number == 0 and seconds > _ROUND_S:
            # Those that go on must be as many in all further rounds, or nothing could be compared.
            arena.was_cut, count = True, max(2, int(count * _ROUND_S / seconds))
    for kind, more, place in held[-1].grown_since(held[-2]):
        if more >= max(2, episodes // (_THREAD_SHARE if kind == THREADS else _SHARE)):
            what = f"{episodes} closed instances left {more} {kind} behind"
            arena.add(Finding("leaks", what, "Release in close whatever reset and step took", place))
    return (arena.turns - played) / max(seconds, 1e-9)


async def _play_at_once(arena: Arena, cases: Sequence[Case], alone: Mapping[str, Sequence[Any]], count: int) -> None:
    crowd = [asyncio.create_task(_play_among_others(arena, cases[i % len(cases)])) for i in range(count)]
    transcripts = await asyncio.gather(*crowd, return_exceptions=True)
    for index, found in enumerate(transcripts):
        case = cases[index % len(cases)]
        task = case.sampled.task.id
        if isinstance(found, Broken):
            if found.hung:
                raise found
        elif isinstance(found, BaseException):
            raise found
        elif case.key in alone and (differs := first_difference(alone[case.key], found)):
            what = f"among {count} instances a task is answered otherwise than alone: {differs}"
            mend = (
                "Keep what an episode changes in the instance (self), not in the class, the module or a shared object"
            )
            place = arena.place(None, "reset")
            arena.add(Finding("instances", what, mend, place, task, kind="otherwise"))


async def _play_among_others(arena: Arena, case: Case) -> list[Any]:
    """Play a case on an instance that has left another episode; the others go on between its turns."""
    environment = arena.make()
    try:
        await arena.reset(environment, case.sampled)
        return await arena.transcript(environment, case)
    finally:
        await arena.close(environment, case.sampled.task.id)


async def _settled(book: ResourceBook, before: Held | None) -> Held:
    """Look once nothing goes away any more."""
    deadline = time.monotonic() + _SETTLED_S
    while True:
        await asyncio.sleep(0.02)
        gc.collect()
        held = book.look()
        if before is None or time.monotonic() > deadline or not any(held.grown_since(before)):
            return held
