"""Runs the checks that play episodes, in order: openings, determinism, instances, wrong messages, an end,
demonstrations."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from realhf.api.environment import TRAIN, Demonstration, Environment
from realhf.env.check.contract import Sampled, ends, plain, solved
from realhf.env.check.episodes import Arena, Broken, Case, first_difference
from realhf.env.check.leaks import ResourceBook, check_crowd
from realhf.env.check.report import Finding, Order, counted, quoted
from realhf.env.check.scripts import Said, policy_turn, talking, trying, wrong_messages
from realhf.env.loader.threads import MOST_THREADS

_MOST_BROKEN = 3
_WRONG_TASKS = 2
_SHOWN = 120
_KEPT_CHARS = 4000


class _Patience:
    """Counts broken episodes; after a few, the next would say the same."""

    def __init__(self) -> None:
        self._broken = 0

    def is_over(self, error: Broken) -> bool:
        """Take a broken episode in. Raises it again when it hung."""
        if error.hung:
            raise error
        self._broken += 1
        return self._broken >= _MOST_BROKEN


async def check_openings(arena: Arena, tasks: Sequence[Sampled]) -> list[Sampled]:
    """Reset every task and return those that can be played; close an instance that never played."""
    await arena.close(arena.make())
    playable, patience = [], _Patience()
    for sampled in tasks:
        if playable and arena.is_late():
            break
        environment = arena.make()
        try:
            await arena.reset(environment, sampled)
            playable.append(sampled)
        except Broken as error:
            if patience.is_over(error):
                break
        finally:
            await arena.close(environment, sampled.task.id)
    return playable


async def check_wrong_messages(arena: Arena, tasks: Sequence[Sampled], scripts: Sequence[Demonstration]) -> int:
    """Send everything that a policy can get wrong. An episode goes on until it is over or broken. ``scripts``: where
    one of them solves a task by saying nothing, that is right there. Returns how many messages were sent."""
    quiet = [script.task for script in scripts if script.succeeds and not "".join(script.turns).strip()]
    patience, before = _Patience(), arena.turns
    for sampled in tasks[:_WRONG_TASKS]:
        meant = any(sampled.task.id == task.id or sampled.task.payload == task.payload for task in quiet)
        environment, opening = None, None
        try:
            for said in wrong_messages([*arena.tools.values()]):
                if arena.is_late():
                    return arena.turns - before
                try:
                    if environment is None:
                        environment = arena.make()
                        opening = await arena.reset(environment, sampled)
                    elif opening is None:
                        opening = await arena.reset(environment, sampled)
                    turn = await arena.step(environment, sampled, said.message, said.name)
                    _judge_payment(arena, environment, sampled, said, turn, meant=meant)
                    if ends(turn):
                        opening = None
                except Broken as error:
                    if environment is not None:
                        await arena.close(environment, sampled.task.id)
                    environment = opening = None
                    if patience.is_over(error):
                        return arena.turns - before
        finally:
            if environment is not None:
                await arena.close(environment, sampled.task.id)
    return arena.turns - before


def _judge_payment(
    arena: Arena, environment: Environment, sampled: Sampled, said: Said, turn: Any, *, meant: bool
) -> None:
    """Nothing that says nothing may be paid, unless that is ``meant``."""
    name, message = said
    if message.tool_calls or (message.content.strip() and message.content.isprintable()):
        return
    place, task = arena.place(environment, "step"), sampled.task.id
    if solved(turn):
        mend = "Look at what the grader takes for a solution; where nothing is to be done, let a demonstration say so"
        what = f"the task is solved by {name}"
        arena.add(Finding("rewards", what, mend, place, task, is_fault=not meant, kind="solved"))
    elif turn.reward is not None and turn.reward > 0:
        mend = "A policy finds such rewards first; pay for what the task asks"
        what = f"{turn.reward:g} is earned by {name}"
        arena.add(Finding("rewards", what, mend, place, task, is_fault=False, kind="earned"))


async def check_end(arena: Arena, sampled: Sampled, most_turns: int, demonstrated: bool) -> int:
    """Let a policy talk, and another one try its tools: one of the two episodes must end. ``demonstrated``: there are
    scripts that end, so it is enough to say that nothing else does. Returns the number of turns of the episode that
    ended, 0 if none did."""
    ways = (talking(most_turns), trying([*arena.tools.values()], 0, most_turns))
    environment = arena.make()
    try:
        for script in ways if arena.tools else ways[:1]:
            await arena.reset(environment, sampled)
            for turns, message in enumerate(script, 1):
                if ends(await arena.step(environment, sampled, message)):
                    return turns
                if arena.is_late():
                    return 0
        what = f"no episode ended within {most_turns} turns"
        mend = "End an episode after a number of turns (done=True), whatever the policy says"
        if demonstrated:
            what, mend = f"{what}, unless it was solved", f"{mend}, or rely on rollout.max_turns"
        place = arena.place(environment, "step")
        arena.add(Finding("end", what, mend, place, sampled.task.id, is_fault=not demonstrated))
    except Broken as error:
        if error.hung:
            raise
    finally:
        await arena.close(environment, sampled.task.id)
    return 0


async def check_determinism(arena: Arena, cases: Sequence[Case]) -> dict[str, list[Any]]:
    """Play every case alone, again on another instance, and again on one that has played before and left off. Returns
    the transcripts by the keys of the cases."""
    found: dict[str, list[Any]] = {}
    patience = _Patience()
    for case, other in zip(cases, [*cases[1:], *cases[:1]], strict=True):
        if found and arena.is_late():
            break
        task = case.sampled.task.id
        try:
            found[case.key] = await arena.play(case)
            if not arena.spec.deterministic:
                continue
            again = await arena.play(case)
            used, place = await _play_used(arena, case, other)
        except Broken as error:
            if patience.is_over(error):
                break
            continue
        if differs := first_difference(found[case.key], again):
            what = f"the same task, seed and messages give other turns: {differs}"
            mend = "Draw from random.Random(seed) alone; or declare deterministic=False"
            arena.add(Finding("determinism", what, mend, place, task, kind=what.partition(":")[0]))
        elif differs := first_difference(found[case.key], used):
            what = f"an instance that has played before answers otherwise: {differs}"
            mend = "Set everything that an episode changes in reset"
            arena.add(Finding("determinism", what, mend, place, task, kind=what.partition(":")[0]))
    return found


async def _play_used(arena: Arena, case: Case, other: Case) -> tuple[list[Any], str]:
    """Play a case on an instance that left another one after its first turn. Returns its transcript, and where the
    environment defines its reset."""
    environment = arena.make()
    try:
        opening = await arena.reset(environment, other.sampled)
        for message in other.script(opening.tools)[:1]:
            await arena.step(environment, other.sampled, message)
        return await arena.transcript(environment, case), arena.place(environment, "reset")
    finally:
        await arena.close(environment, case.sampled.task.id)


async def check_demonstrations(arena: Arena, demonstrations: Sequence[Demonstration]) -> None:
    """Play scripts: each must end with its last turn, in success or without as it is labelled."""
    patience = _Patience()
    for script in demonstrations:
        if arena.is_late():
            return
        environment = arena.make()
        try:
            await _check_script(arena, environment, script)
        except Broken as error:
            if patience.is_over(error):
                return
        finally:
            await arena.close(environment, script.task.id)


async def _check_script(arena: Arena, environment: Environment, script: Demonstration) -> None:
    sampled = Sampled("train", "", script.task)
    opening = await arena.reset(environment, sampled)
    paid, done, success, answer = 0.0, False, False, ""
    for number, text in enumerate(script.turns, 1):
        turn = await arena.step(environment, sampled, policy_turn(text, opening.tools))
        paid = (turn.reward or 0.0) + (0.0 if turn.final else paid)
        done, success = ends(turn), success or solved(turn)
        answer = quoted(" ".join(str(message["content"]) for message in turn.messages), _SHOWN)
        if done and number < len(script.turns):
            _blame_script(arena, script, f"is over after turn {number} of {len(script.turns)}", answer)
            return
    if success != script.succeeds:
        fate = "does not succeed" if script.succeeds else "succeeds, though succeeds=False"
        _blame_script(arena, script, fate, answer)
    elif script.succeeds and not done:
        _blame_script(arena, script, "does not end the episode", answer)
    elif success and paid <= 0:
        _blame_script(arena, script, f"succeeds and earns {paid:g}", answer)


def _blame_script(arena: Arena, script: Demonstration, fate: str, answer: str) -> None:
    what = f"a demonstration of the kind {script.kind!r} {fate}: the last answer is {answer!r}"
    mend = "Play what the solver writes with `play`, and mend the solver or the grading"
    function = getattr(arena.spec.demonstrate, "__code__", None)
    arena.add(Finding("demonstrations", what, mend, arena.code.of_code(function), script.task.id, kind=fate))


def fingerprints(transcripts: Mapping[str, Sequence[Any]]) -> dict[str, list[tuple[str, str]]]:
    """Return for every case a digest and the beginning of the text of its opening and of every turn, to compare with
    those of another process."""
    return {key: [_fingerprint(turn) for turn in turns] for key, turns in transcripts.items()}


def _fingerprint(turn: Any) -> tuple[str, str]:
    text = json.dumps(turn, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest(), text[:_KEPT_CHARS]


async def check_twins(arena: Arena, twins: Sequence[tuple[Sampled, Sampled]]) -> None:
    """Open tasks that have one id and two seeds: the seed may not make another episode of them."""
    for pair in twins:
        openings = []
        for sampled in pair:
            environment = arena.make()
            try:
                openings.append(plain(await arena.reset(environment, sampled)))
                place = arena.place(environment, "reset")
            finally:
                await arena.close(environment, sampled.task.id)
        if openings[0] != openings[1]:
            what = f"one id names two episodes: seeds {pair[0].task.seed} and {pair[1].task.seed} open otherwise"
            arena.add(Finding("tasks", what, "Make the seed part of the id", place, pair[0].task.id, kind="one id"))
            return


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
