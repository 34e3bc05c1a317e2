"""Lets a person play an environment: what they type is the policy's turn."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from realhf.api.environment import AssistantMessage, Environment, EnvironmentSpec, Opening, Task, Turn
from realhf.base.close_names import close_to
from realhf.base.loop_thread import LoopThread
from realhf.env.check.calls import Caller, CallFailed
from realhf.env.check.scripts import call_text, functions, policy_turn
from realhf.env.check.shapes import ends, opening_problems, tool_problems, turn_problems
from realhf.env.check.user_code import UserCode
from realhf.env.play.board import Board
from realhf.env.play.commands import CALL, HELP, HELP_TEXT, NEXT, QUIT, RESTART, TOOLS, Typed, read_line
from realhf.env.play.lines import Lines

_STOP_S = 1.0
_CLOSE_S = 3.0


def choose_task(spec: EnvironmentSpec, split: str, template: str, seed: int) -> Task:
    """Return the instance that ``seed`` draws of a template, which it draws too when ``template`` is "". Raises
    ValueError for a template that the split does not have."""
    tasks = spec.tasks(split)
    known = [*tasks.group_of]
    if not known:
        raise ValueError(f"{spec.name} has no task in the split {split!r}")
    if template and template not in tasks.group_of:
        raise ValueError(f"the split {split!r} has no task {template!r}{close_to(template, known)}")
    return tasks.instantiate(template or random.Random(seed).choice(known), seed)


class Game:
    """Plays episodes of ``spec`` on an event loop of its own; ``timeout_s`` bounds every call of the environment. Close
    it at the end."""

    def __init__(self, spec: EnvironmentSpec, board: Board, code: UserCode, timeout_s: float) -> None:
        self._spec = spec
        self._board = board
        self._timeout_s = timeout_s
        self._caller = Caller(code, timeout_s, lambda name, task: None)
        self._loop = LoopThread("play", instead="the environment itself")
        self._environment: Environment | None = None
        self._opening: Opening | None = None
        self._return = 0.0
        self._over = True

    def play(self, lines: Lines, split: str, template: str, seed: int) -> int:
        """Play until the lines end. Returns 0, or 1 when the environment failed in the last episode. Raises ValueError
        for a task that does not exist."""
        task = choose_task(self._spec, split, template, seed)
        whole = self._begin(task, split, seed)
        while (line := lines.read()) is not None:
            try:
                typed = read_line(line, self._opening.tools if self._opening else ())
            except ValueError as error:
                self._board.line(f"error: {error}", "red")
                continue
            if typed.kind == QUIT:
                break
            if typed.kind == NEXT:
                seed += 1
                task = choose_task(self._spec, split, "", seed)
            if typed.kind in (NEXT, RESTART):
                whole = self._begin(task, split, seed)
            elif typed.kind == HELP:
                self._board.line(HELP_TEXT)
            elif typed.kind == TOOLS:
                self._board.tools(self._opening.tools if self._opening else ())
            elif self._over:
                self._board.line("the episode is over: /restart begins it again, /next another one, /quit ends", "red")
            else:
                whole = self._say(typed, task)
        return 0 if whole else 1

    def close(self) -> None:
        """Close the environment and end the loop, within a few seconds. Raises CallFailed for an environment that does
        not close."""
        self._timeout_s = min(self._timeout_s, _CLOSE_S)
        try:
            if self._environment is not None and self._is_blocked():
                raise CallFailed("it blocks the event loop and cannot be closed", "", "blocked", hung=True)
            self._release()
        finally:
            self._loop.stop(_STOP_S)

    def _begin(self, task: Task, split: str, seed: int) -> bool:
        self._board.title(self._spec, task, split, seed)
        self._return, self._over, self._opening = 0.0, True, None
        try:
            if self._environment is None:
                self._environment = self._made()
            environment = self._environment
            opening = self._call("reset", task.id, lambda: environment.reset(task.payload, seed=task.seed))
        except CallFailed as error:
            return self._failed(error)
        problems = [*opening_problems(opening, self._spec.system_prompt)]
        problems = problems or [*tool_problems(opening.tools)]
        if problems:
            return self._refused(problems)
        self._opening, self._over = opening, False
        self._board.opening(self._spec.system_prompt, opening)
        return True

    def _say(self, typed: Typed, task: Task) -> bool:
        environment, opening = self._environment, self._opening
        assert environment is not None and opening is not None
        message = self._message(typed, opening.tools)
        try:
            turn = self._call("step", task.id, lambda: environment.step(message))
        except CallFailed as error:
            return self._failed(error)
        if problems := [*turn_problems(turn)]:
            return self._refused(problems)
        self._show(turn)
        return True

    def _message(self, typed: Typed, tools: Sequence[Mapping[str, Any]]) -> AssistantMessage:
        if typed.kind != CALL:
            return policy_turn(typed.text, tools)
        if typed.name not in dict(functions(tools)):
            self._board.line(f"there is no tool {typed.name!r}; it is called all the same", "dim")
        return policy_turn(call_text(typed.name, typed.arguments), tools)

    def _show(self, turn: Turn) -> None:
        self._return = (turn.reward or 0.0) + (0.0 if turn.final else self._return)
        self._board.turn(turn, self._return)
        if ends(turn):
            self._over = True
            self._board.line(f"the episode is over, its return is {self._return:g}", "bold")

    def _failed(self, error: CallFailed) -> bool:
        """Say that the environment failed, and let go of the instance: nobody knows what state it is in."""
        self._over = True
        self._board.line(f"the environment failed: {error.what}{f', at {error.where}' if error.where else ''}", "red")
        try:
            self._release()
        except CallFailed as again:
            self._board.line(f"and then {again.what}", "red")
        return False

    def _refused(self, problems: Sequence[str]) -> bool:
        self._over = True
        self._board.line(f"the environment breaks its contract: {problems[0]} (see `check`)", "red")
        return False

    def _release(self) -> None:
        environment, self._environment = self._environment, None
        if environment is not None:
            self._call("close", "", environment.close)

    def _made(self) -> Environment:
        async def make() -> Environment:
            return self._caller.make(self._spec.make, "")

        return self._bounded(make())

    def _call(self, name: str, task: str, method: Any) -> Any:
        return self._bounded(self._caller.call(name, task, method))

    def _bounded(self, work: Any) -> Any:
        """Run on the loop. Raises CallFailed, also when the loop itself is blocked."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop.loop)
        try:
            return future.result(self._timeout_s + 2 * _STOP_S)
        except TimeoutError:
            raise CallFailed("it blocks the event loop and gives no answer", "", "blocked", hung=True) from None
        finally:
            future.cancel()

    def _is_blocked(self) -> bool:
        """Return whether the loop runs nothing at all any more."""
        alive = threading.Event()
        self._loop.loop.call_soon_threadsafe(alive.set)
        return not alive.wait(_STOP_S)
