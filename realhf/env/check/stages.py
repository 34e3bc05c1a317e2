"""Puts the checks that play in order, and hands what one finds to the next."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from realhf.api.environment import TRAIN, Demonstration
from realhf.env.check.crowd import check_crowd
from realhf.env.check.episodes import Arena, Case
from realhf.env.check.finding import counted
from realhf.env.check.order import Order
from realhf.env.check.play_stages import (
    check_demonstrations,
    check_determinism,
    check_end,
    check_openings,
    check_twins,
    check_wrong_messages,
)
from realhf.env.check.resources import ResourceBook
from realhf.env.check.task_sets import Sampled
from realhf.env.doors.threads import MOST_THREADS

OPENINGS, DETERMINISM, INSTANCES, WRONG, END, DEMONSTRATIONS = PLAYED = (
    "openings",
    "determinism",
    "instances",
    "wrong messages",
    "end",
    "demonstrations",
)
EVENT_LOOP = "event loop"
_STAGE_S = 20.0
"""Time of one check, in seconds: of an environment that is slow, less is played."""
_SCRIPTED_CASES = 4


class NotRun(Exception):
    """A check makes no sense now; the text says why."""


class Stages:
    """Holds what the checks that play share. ``found`` counts the faults so far, of the checks that it is given."""

    def __init__(
        self,
        arena: Arena,
        tasks: Sequence[Sampled],
        twins: Sequence[tuple[Sampled, Sampled]],
        scripts: Sequence[Demonstration],
        order: Order,
        found: Callable[..., int],
    ) -> None:
        self._arena = arena
        self._tasks = tasks
        self._twins = twins
        self._scripts = scripts
        self._order = order
        self._found = found
        self._book = ResourceBook(arena.code)
        self._busy_s = 0.0
        self.playable: list[Sampled] = []
        self.transcripts: Mapping[str, Sequence[Any]] = {}

    def all(self) -> dict[str, Callable[[], Awaitable[str]]]:
        """Return the checks by name, in order. Each returns a remark, and raises Broken when nothing more can be
        played."""
        checks = (self._openings, self._determinism, self._instances, self._wrong, self._end, self._demonstrations)
        return {name: partial(self._timed, check) for name, check in zip(PLAYED, checks, strict=True)}

    async def _timed(self, check: Callable[[], Awaitable[str]]) -> str:
        self._arena.begin(_STAGE_S)
        remark = await check()
        return f"{remark}, cut short after {_STAGE_S:g} s".lstrip(", ") if self._arena.was_cut else remark

    async def play_again(self) -> Mapping[str, Sequence[Any]]:
        """Play what the determinism check of another process has played, as far as it is there. Returns the
        transcripts."""
        self._arena.begin(_STAGE_S)
        await self._openings()
        wanted = {*self._order.again}
        return {case.key: await self._arena.play(case) for case in self._cases() if case.key in wanted}

    def _cases(self) -> list[Case]:
        scripted = self._scripts[:: max(1, len(self._scripts) // _SCRIPTED_CASES)][:_SCRIPTED_CASES]
        played = [Case(Sampled(TRAIN, "", script.task), script.turns) for script in scripted]
        return [*map(Case, self.playable), *played]

    async def _openings(self) -> str:
        self.playable = await check_openings(self._arena, self._tasks)
        if self.playable:
            await check_twins(self._arena, self._twins)
        tools = len(self._arena.tools)
        return f"{counted(len(self.playable), 'task')}, {counted(tools, 'tool') if tools else 'plain text'}"

    async def _determinism(self) -> str:
        turns, busy_s = self._arena.turns, time.process_time()
        self.transcripts = await check_determinism(self._arena, self._cases())
        self._busy_s = (time.process_time() - busy_s) / max(1, self._arena.turns - turns)
        if not self._arena.spec.deterministic:
            return "declared not to be deterministic"
        return f"{counted(len(self.transcripts), 'episode')}, played three times"

    async def _instances(self) -> str:
        if self._found(EVENT_LOOP):
            raise NotRun("calls block the event loop, so many instances at once would only wait for each other")
        count = min(self._order.instances, self._arena.spec.concurrency or self._order.instances, self._bearable())
        alone = self.transcripts if self._arena.spec.deterministic and not self._found(DETERMINISM) else {}
        turns = await check_crowd(self._arena, self._cases(), alone, count, self._book)
        return f"{count} at once, {turns:,.0f} turns per second"

    def _bearable(self) -> int:
        """How many instances at once get their answers in time: turns that compute come one after another, and a door
        makes a limited number of blocking calls at once."""
        half_s = self._order.timeout_s / 2
        waiting = MOST_THREADS * half_s / max(self._arena.slowest_s, 1e-6)
        return max(2, int(min(half_s / max(self._busy_s, 1e-6), waiting)))

    async def _wrong(self) -> str:
        sent = await check_wrong_messages(self._arena, self.playable, self._scripts)
        return counted(sent, "message")

    async def _end(self) -> str:
        turns = await check_end(self._arena, self.playable[0], self._order.most_turns, bool(self._scripts))
        return f"after {counted(turns, 'turn')}" if turns else ""

    async def _demonstrations(self) -> str:
        if not self._scripts:
            return "no scripted solver"
        await check_demonstrations(self._arena, self._scripts)
        return counted(len(self._scripts), "script")
