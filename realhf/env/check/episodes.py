"""Player of episodes for checks, which validates everything that an environment returns."""

from __future__ import annotations

import json
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from types import FunctionType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from realhf.api.environment import (
    AssistantMessage,
    Environment,
    EnvironmentSpec,
    Opening,
    Task,
    Turn,
)
from realhf.env.check.calls import Caller, CallFailed, UserCode
from realhf.env.check.contract import (
    ends,
    opening_problems,
    plain,
    solved,
    tool_problems,
    turn_problems,
)
from realhf.env.check.report import Finding, difference
from realhf.env.check.scripts import policy_turn, trying
from realhf.env.loader.tool_env import TOOL_ERRORS, ToolClassEnvironment

_TRIED_TURNS = 6
"""Number of turns of a case without a demonstration."""
_MOST_FAILED = 3
"""Number of failed episodes after which a check stops, because further ones would show the same."""
_MOST_SEEN = 200
"""Maximum number of objects searched for the definition of a method."""
_INSTEAD = {"step": ("get_reward", "step")}
"""Methods that an author writes instead of another one: a class with tools has no ``step``."""
_MEND_HANG = "Give everything that waits a deadline of its own"
_MEND = {
    "make": "Making an instance must work, and take no time; open what an episode needs in reset",
    "reset": "Let reset begin an episode of every task; for a service that is down raise "
    "EnvironmentFailure('unavailable', why)",
    "step": "Answer a message that is wrong by a turn whose message says what is wrong; an "
    "exception loses the episode",
    "get_reward": "Let get_reward say what the state is worth, whenever it is asked",
    "close": "Let close return at any time after the instance was made, also without or within an "
    "episode",
}
_MEND_TOOLS = (
    "Give every tool a name, a description and a JSON schema with a type for each parameter"
)
_MEND_WORTH = (
    "It says what the state is worth so far, and changes nothing; what turns earn is added up in "
    "the instance"
)


class Case(NamedTuple):
    """An episode to play."""

    task: Task
    """Task to play."""
    texts: Sequence[str] | None = None
    """Turns of the policy; None tries calls with random arguments, or random words."""
    kind: str = ""
    """Kind of the demonstration that ``texts`` come from; "" without one."""

    @property
    def key(self) -> str:
        """Name of the case, unique within a check."""
        return (
            self.task.id
            if self.texts is None
            else f"{self.task.id} ({self.kind or 'demonstration'})"
        )

    def script(self, tools: Sequence[Mapping[str, Any]]) -> Sequence[str]:
        """Return the policy's turns for an opening with ``tools``."""
        return trying(tools, self.task.seed, _TRIED_TURNS) if self.texts is None else self.texts


class Episode:
    """Record of an episode so far.

    Attributes:
        tools: Tools of the opening.
        transcript: Opening and turns as plain JSON values.
        texts: Texts that the policy read.
        said: Turns of the policy.
        ended, solved: Whether the episode has ended, and whether the task was solved.
        paid: Return of the episode.
        views: Descriptions of its states in order; empty if the environment has none.
        answer: Text of the last turn of the environment.
    """

    def __init__(self, opening: Opening) -> None:
        self.tools = opening.tools
        self.transcript, self.texts = [plain(opening)], _contents(opening)
        self.said: list[str] = []
        self.ended = self.solved = False
        self.paid = 0.0
        self.views: list[Any] = []
        self.answer = ""

    @property
    def view(self) -> Any:
        """Description of the last state; None if the environment has none."""
        return self.views[-1] if self.views else None

    def take(self, text: str, turn: Turn) -> None:
        """Record a turn of the policy and the environment's answer."""
        self.said.append(text)
        self.transcript.append(plain(turn))
        self.paid = (turn.reward or 0.0) + (0.0 if turn.final else self.paid)
        self.ended, self.solved = ends(turn), self.solved or solved(turn)
        if (view := turn.info.get("view", self.view)) is not None:
            self.views.append(view)
        self.texts += _contents(turn)
        self.answer = " ".join(_contents(turn))


class _NotMade:
    """Placeholder for an instance whose creation failed, which is already reported; ``reset``
    raises the same error."""

    def __init__(self, error: CallFailed) -> None:
        self.error = error


class CheckHarness:
    """Creator of instances of ``spec`` and player of episodes on them.

    ``add`` is called with each finding. A failure of an episode is reported to ``add`` before it is
    raised as CallFailed.
    """

    def __init__(
        self,
        spec: EnvironmentSpec,
        caller: Caller,
        add: Callable[[Finding], None],
        address: str = "",
    ) -> None:
        self.spec = spec
        self.code = caller.code
        self.add = add
        self.tools: dict[str, Mapping[str, Any]] = {}
        self.turns = 0
        self.slowest_s = 0.0
        """Longest duration of a turn so far in seconds."""
        self.was_cut = False
        """Whether the running check left something out because its time was up."""
        self._late_at = math.inf
        self._failed = 0
        self._places: dict[str, str] = {}
        self._worth: WeakKeyDictionary[Environment, float] = WeakKeyDictionary()
        self._address = address
        self._caller = caller

    def begin(self, seconds: float) -> None:
        """Start the time limit of the next check, which may exceed it by one episode."""
        self._late_at = time.monotonic() + seconds
        self.was_cut = False
        self._failed = 0

    def is_over(self, played: bool = True) -> bool:
        """Return whether a check should stop: several episodes have failed, or its time is up and
        it has ``played`` something."""
        return self._failed >= _MOST_FAILED or (played and self.is_late())

    def is_late(self) -> bool:
        """Return whether the time of the check is up; it then leaves out the rest."""
        late = time.monotonic() > self._late_at
        self.was_cut = self.was_cut or late
        return late

    def make(self) -> Environment:
        """Create an instance. Raises CallFailed."""
        try:
            return self._caller.make(self.spec.make, self._address)
        except CallFailed as error:
            self._refuse("make", [error])
            raise

    @asynccontextmanager
    async def instance(self, task: str) -> AsyncIterator[Environment]:
        """Create an instance, and close it on exit.

        A failure of the creation or of a call ends the ``with`` block without an error, except that
        a call that hung raises CallFailed.
        """
        try:
            environment: Any = self.make()
        except CallFailed as error:
            environment = _NotMade(error)
        try:
            yield environment
        except CallFailed as error:
            self.forgive(error)
        finally:
            if not isinstance(environment, _NotMade):
                await self.close(environment, task)

    def forgive(self, error: CallFailed) -> None:
        """Count a failed episode; raise the error again if the call hung."""
        if error.hung:
            raise error
        self._failed += 1

    async def reset(self, environment: Environment, task: Task) -> Opening:
        """Start an episode of a task and check its opening. Raises CallFailed."""
        if isinstance(environment, _NotMade):
            raise environment.error
        opening = await self._call(
            "reset", environment, task.id, lambda: environment.reset(task.payload, seed=task.seed)
        )
        self._worth.pop(environment, None)
        wrong = (
            f"the opening is wrong: {each}"
            for each in opening_problems(opening, self.spec.system_prompt)
        )
        tools = (
            f"the schema of a tool is wrong: {each}"
            for each in tool_problems(getattr(opening, "tools", ()))
        )
        failures = [CallFailed(each, shape=True) for each in wrong]
        failures += [CallFailed(each, mend=_MEND_TOOLS) for each in tools]
        self._refuse("reset", failures, environment, task.id)
        for tool in opening.tools:
            self.tools.setdefault(tool["function"]["name"], tool)
        return opening

    async def step(
        self, environment: Environment, task: Task, message: AssistantMessage, said: str = ""
    ) -> Turn:
        """Send a message and check the answer; ``said`` describes a message that is wrong on
        purpose. Raises CallFailed."""
        self.turns += 1
        began = time.monotonic()
        turn = await self._call(
            "step", environment, task.id, lambda: environment.step(message), said
        )
        self.slowest_s = max(self.slowest_s, time.monotonic() - began)
        wrong = [
            CallFailed(f"the turn is wrong: {each}", shape=True) for each in turn_problems(turn)
        ]
        self._refuse("step", wrong, environment, task.id, said)
        if isinstance(environment, ToolClassEnvironment):
            await self._judge_reward(environment, task.id, turn)
        return turn

    async def _judge_reward(self, environment: ToolClassEnvironment, task: str, turn: Turn) -> None:
        """Check the reward of a class with tools, and note the errors of its tools. Raises
        CallFailed.

        ``get_reward`` must return the same value when it is called again. It is noted if it falls
        to zero or below after a positive value, which indicates that the author returns the reward
        of each turn.
        """
        again = await self._call("get_reward", environment, task, environment.reward_again)
        place = self.place(environment, "get_reward")
        before = self._worth.get(environment, 0.0)
        now = self._worth[environment] = turn.reward or 0.0
        if again != now:
            what = f"get_reward says {now:g} and, asked again, {again:g}"
            self.add(Finding("rewards", what, _MEND_WORTH, place, task, kind="asked again"))
        elif now <= 0 < before:
            what = f"get_reward falls from {before:g} to {now:g}, and its last answer alone counts"
            self.add(
                Finding("rewards", what, _MEND_WORTH, place, task, is_fault=False, kind="falls")
            )
        for told in turn.info.get(TOOL_ERRORS, ()):
            what = (
                f"a tool that was called rightly fails, {told}, and the policy reads it as its own "
                f"mistake"
            )
            mend = "Mend it, or raise ValueError with a text for the policy"
            self.add(Finding("tools", what, mend, task=task, is_fault=False, kind=told))

    async def close(self, environment: Environment, task: str = "") -> None:
        """Close an instance. A failure is reported; CallFailed is raised only if the call hung."""
        try:
            await self._call("close", environment, task, environment.close)
        except CallFailed as error:
            if error.hung:
                raise

    async def play(self, case: Case, left: Case | None = None, turns: int = 0) -> Episode:
        """Play a case on a new instance, after the first ``turns`` turns of the case ``left``, if
        given. Raises CallFailed."""
        environment = self.make()
        try:
            if left is not None:
                await self._played(environment, left, turns)
            return await self._played(environment, case)
        finally:
            await self.close(environment, case.task.id)

    async def follow(self, case: Case) -> Episode | None:
        """Play a case on a new instance; return None if it failed. Raises CallFailed if a call
        hung."""
        async with self.instance(case.task.id) as environment:
            return await self._played(environment, case)
        return None

    async def _played(
        self, environment: Environment, case: Case, turns: int | None = None
    ) -> Episode:
        opening = await self.reset(environment, case.task)
        episode = Episode(opening)
        for text in case.script(opening.tools)[:turns]:
            message = policy_turn(text, opening.tools)
            episode.take(text, await self.step(environment, case.task, message))
            if episode.ended:
                break
        return episode

    async def _call(
        self,
        method: str,
        environment: Environment,
        task: str,
        call: Callable[[], Any],
        said: str = "",
    ) -> Any:
        try:
            return await self._caller.call(method, task, call, self.place(environment, method))
        except CallFailed as error:
            self._refuse(method, [error], environment, task, said)

    def _refuse(
        self,
        method: str,
        failures: Sequence[CallFailed],
        environment: Environment | None = None,
        task: str = "",
        said: str = "",
    ) -> None:
        """Report failures of a call, and raise the first one, if any."""
        for error in failures:
            mend = (
                _MEND_HANG
                if error.hung
                else _mend_shape(error.what)
                if error.shape
                else error.mend or _MEND[method]
            )
            what = f"{error.what} (the answer to {said})" if said else error.what
            where = error.where or self.place(environment, method)
            self.add(Finding(method, what, mend, where, task, kind=error.kind))
        for error in failures:
            raise error

    def place(self, environment: Environment | None, method: str) -> str:
        """Return where the environment's code defines ``method``, or the method that replaces it in
        its env format.

        Without an instance, the location that was found earlier is returned, or "".
        """
        if environment is not None and not self._places.get(method):
            self._places[method] = defined_at(environment, method, self.code)
        return self._places.get(method, "")


def _contents(found: Opening | Turn) -> list[str]:
    return [str(message.get("content") or "") for message in found.messages]


def defined_at(environment: Any, method: str, code: UserCode) -> str:
    """Return where a method is defined; "" if the definition is not found.

    The class of the instance is searched, and the objects that the adapter of an env format holds:
    an instance of the author's class, the class, or a function.
    """
    waiting = [environment]
    seen = 0
    while waiting and seen < _MOST_SEEN:
        each = waiting.pop(0)
        seen = seen + 1
        for name in _INSTEAD.get(method, (method,)):
            function = getattr(each if isinstance(each, type) else type(each), name, None)
            if place := code.of_code(getattr(function, "__code__", None)):
                return place
        if isinstance(each, FunctionType):
            if place := code.of_code(each.__code__):
                return place
            waiting += [cell.cell_contents for cell in each.__closure__ or ()]
        elif isinstance(each, tuple):
            waiting += each
        elif type(each).__module__.startswith("realhf."):
            waiting += getattr(each, "__dict__", {}).values()
    return ""


def _mend_shape(what: str) -> str:
    if "reward" in what or "metric" in what:
        return "Rewards and metrics are finite numbers; success and progress lie between 0 and 1"
    return "A message is {'role': ..., 'content': text}, and everything in a turn is JSON"


def first_difference(before: Sequence[Any], after: Sequence[Any]) -> str:
    """Describe the first difference between two transcripts; "" if there is none."""
    for number, (one, other) in enumerate(zip(before, after, strict=False)):
        if one != other:
            place, texts = _differing(one, other)
            name = "the opening" if number == 0 else f"turn {number}"
            return f"{name} differs: {place.lstrip('.')} is {texts}"
    if len(before) != len(after):
        return f"the episode is over after {len(before) - 1} turns, and then after {len(after) - 1}"
    return ""


def _differing(one: Any, other: Any, place: str = "") -> tuple[str, str]:
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        key = next(key for key in one if one[key] != other[key])
        return _differing(one[key], other[key], f"{place}.{key}")
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        index = next(index for index in range(len(one)) if one[index] != other[index])
        return _differing(one[index], other[index], f"{place}[{index}]")
    return place, difference(
        json.dumps(one, ensure_ascii=False), json.dumps(other, ensure_ascii=False)
    )
