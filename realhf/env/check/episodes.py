"""Player of episodes for checks; it validates everything that an environment returns."""

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
    TaskRemark,
    Turn,
)
from realhf.env.check.calls import Caller, CallFailed, UserCode
from realhf.env.check.contract import (
    ends_episode,
    is_solved,
    opening_problems,
    to_plain_json,
    tool_problems,
    turn_problems,
)
from realhf.env.check.report import Finding, format_difference
from realhf.env.check.scripts import policy_turn, random_turns
from realhf.env.loader.tool_env import TOOL_ERRORS, ToolClassEnvironment

_RANDOM_TURNS = 6
"""Number of turns of a case without a demonstration."""
_MAX_FAILED = 3
"""Number of failed episodes after which a check stops, because further ones would fail in the same
way."""
_MAX_SEARCHED = 200
"""Maximum number of objects searched for the definition of a method."""
_REPLACED_METHODS = {"step": ("get_reward", "step")}
"""Methods that an env format replaces: for each, the author's methods to look for instead (a class
with tools has no ``step``)."""
_ADVICE_ON_HANGS = "Give everything that waits a deadline of its own"
_ADVICE = {
    "make": "Making an instance must work, and take no time; open what an episode needs in reset",
    "reset": "Let reset begin an episode of every task; for a service that is down raise "
    "EnvironmentFailure('unavailable', why)",
    "step": "Answer a message that is wrong by a turn whose message says what is wrong; an "
    "exception loses the episode",
    "get_reward": "Let get_reward return the value of the state whenever it is called",
    "close": "Let close return at any time after the instance was made, also without or within an "
    "episode",
}
_ADVICE_ON_TOOLS = (
    "Give every tool a name, a description and a JSON schema with a type for each parameter"
)
_ADVICE_ON_REWARDS = (
    "It says what the state is worth so far, and changes nothing; what turns earn is added up in "
    "the instance"
)


class Case(NamedTuple):
    """An episode to play."""

    task: Task
    """Task to play."""
    texts: Sequence[str] | None = None
    """Turns of the policy; None to try calls with random arguments, or random words if there are no
    tools."""
    kind: str = ""
    """Kind of the demonstration from which ``texts`` were taken; "" if they are not from one."""

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
        return (
            random_turns(tools, self.task.seed, _RANDOM_TURNS) if self.texts is None else self.texts
        )


class CheckedEpisode:
    """Record of an episode so far.

    Attributes:
        tools: Tools of the opening.
        transcript: Opening and turns as plain JSON values.
        texts: Texts that the policy read.
        policy_texts: Turns of the policy.
        ended, solved: Whether the episode has ended, and whether the task was solved.
        episode_return: Sum of the rewards so far, or the last one if it is final.
        views: Descriptions of its states in order; empty if the environment has none.
        answer: Text of the last turn of the environment.
    """

    def __init__(self, opening: Opening) -> None:
        self.tools = opening.tools
        self.transcript, self.texts = [to_plain_json(opening)], _message_texts(opening)
        self.policy_texts: list[str] = []
        self.ended = self.solved = False
        self.episode_return = 0.0
        self.views: list[Any] = []
        self.answer = ""

    @property
    def view(self) -> Any:
        """Description of the last state; None if the environment has none."""
        return self.views[-1] if self.views else None

    def record_turn(self, text: str, turn: Turn) -> None:
        """Record a turn of the policy and the environment's answer."""
        self.policy_texts.append(text)
        self.transcript.append(to_plain_json(turn))
        self.episode_return = (turn.reward or 0.0) + (0.0 if turn.final else self.episode_return)
        self.ended, self.solved = ends_episode(turn), self.solved or is_solved(turn)
        if (view := turn.info.get("view", self.view)) is not None:
            self.views.append(view)
        self.texts += _message_texts(turn)
        self.answer = " ".join(_message_texts(turn))


class _FailedInstance:
    """Placeholder for an instance whose creation failed. The failure has been reported; ``reset``
    raises the same error."""

    def __init__(self, error: CallFailed) -> None:
        self.error = error


class CheckHarness:
    """Creator of instances of ``spec``, and player of episodes on them.

    ``add`` is called with each finding. If an episode fails, the failure is reported to ``add`` and
    then raised as CallFailed.
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
        self.is_cut_short = False
        """Whether the running check left something out because its time limit was reached."""
        self._deadline = math.inf
        self._failed = 0
        self._places: dict[str, str] = {}
        self._last_rewards: WeakKeyDictionary[Environment, float] = WeakKeyDictionary()
        self._address = address
        self._caller = caller

    def start_check(self, seconds: float) -> None:
        """Start the time limit of the next check. The check may exceed it by one episode."""
        self._deadline = time.monotonic() + seconds
        self.is_cut_short = False
        self._failed = 0

    def is_over(self, played: bool = True) -> bool:
        """Return whether a check should stop, because several episodes have failed, or because its
        time is up and it has already ``played`` something."""
        return self._failed >= _MAX_FAILED or (played and self.is_late())

    def is_late(self) -> bool:
        """Return whether the check's time is up and it must leave out the rest; record that if
        so."""
        late = time.monotonic() > self._deadline
        self.is_cut_short = self.is_cut_short or late
        return late

    def make(self) -> Environment:
        """Create an instance. Raises CallFailed."""
        try:
            return self._caller.make(self.spec.make, self._address)
        except CallFailed as error:
            self._report_failures("make", [error])
            raise

    @asynccontextmanager
    async def instance(self, task: str) -> AsyncIterator[Environment]:
        """Context manager that creates an instance, and closes it on exit.

        A failure to create it or of a call ends the ``with`` block without an error, except that a
        call that hung raises CallFailed.
        """
        try:
            environment: Any = self.make()
        except CallFailed as error:
            environment = _FailedInstance(error)
        try:
            yield environment
        except CallFailed as error:
            self.count_failure(error)
        finally:
            if not isinstance(environment, _FailedInstance):
                await self.close(environment, task)

    def count_failure(self, error: CallFailed) -> None:
        """Count a failed episode; raise the error again if the call hung."""
        if error.hung:
            raise error
        self._failed += 1

    async def reset(self, environment: Environment, task: Task) -> Opening:
        """Start an episode of a task and check its opening. Raises CallFailed."""
        if isinstance(environment, _FailedInstance):
            raise environment.error
        opening = await self._call_environment(
            "reset", environment, task.id, lambda: environment.reset(task.payload, seed=task.seed)
        )
        self._last_rewards.pop(environment, None)
        wrong = (
            f"the opening is wrong: {each}"
            for each in opening_problems(opening, self.spec.system_prompt)
        )
        tools = (
            f"the schema of a tool is wrong: {each}"
            for each in tool_problems(getattr(opening, "tools", ()))
        )
        failures = [CallFailed(each, shape=True) for each in wrong]
        failures += [CallFailed(each, mend=_ADVICE_ON_TOOLS) for each in tools]
        self._report_failures("reset", failures, environment, task.id)
        for tool in opening.tools:
            self.tools.setdefault(tool["function"]["name"], tool)
        return opening

    async def step(
        self,
        environment: Environment,
        task: Task,
        message: AssistantMessage,
        wrong_message: str = "",
    ) -> Turn:
        """Send a message and check the answer. ``wrong_message`` describes a message that is wrong
        on purpose. Raises CallFailed."""
        self.turns += 1
        began = time.monotonic()
        turn = await self._call_environment(
            "step", environment, task.id, lambda: environment.step(message), wrong_message
        )
        self.slowest_s = max(self.slowest_s, time.monotonic() - began)
        wrong = [
            CallFailed(f"the turn is wrong: {each}", shape=True) for each in turn_problems(turn)
        ]
        self._report_failures("step", wrong, environment, task.id, wrong_message)
        if isinstance(environment, ToolClassEnvironment):
            await self._check_reward(environment, task.id, turn)
        return turn

    async def _check_reward(self, environment: ToolClassEnvironment, task: str, turn: Turn) -> None:
        """Check the reward of a class with tools, and note errors of its tools. Raises CallFailed.

        ``get_reward`` must return the same value when it is called again. A note is added if the
        reward falls to zero or below after it was positive, which suggests that the author returns
        the reward of each single turn.
        """
        again = await self._call_environment(
            "get_reward", environment, task, environment.reward_again
        )
        place = self.place(environment, "get_reward")
        previous = self._last_rewards.get(environment, 0.0)
        reward = self._last_rewards[environment] = turn.reward or 0.0
        if again != reward:
            what = f"get_reward returns {reward:g}, and {again:g} when it is called again"
            self.add(Finding("rewards", what, _ADVICE_ON_REWARDS, place, task, kind="asked again"))
        elif reward <= 0 < previous:
            what = (
                f"get_reward falls from {previous:g} to {reward:g}, and only its last value counts"
            )
            self.add(
                Finding(
                    "rewards", what, _ADVICE_ON_REWARDS, place, task, is_fault=False, kind="falls"
                )
            )
        for tool_error in turn.info.get(TOOL_ERRORS, ()):
            what = (
                f"a tool fails although its call is valid ({tool_error}), and the policy takes it "
                f"for its own mistake"
            )
            mend = "Fix it, or raise ValueError with a text for the policy"
            self.add(Finding("tools", what, mend, task=task, is_fault=False, kind=tool_error))

    async def examine(self, task: Task) -> Sequence[TaskRemark]:
        """Let the environment examine a task; return its remarks. A failure is reported, and
        CallFailed raised only if the call hung."""
        examine = self.spec.examine
        assert examine is not None
        try:
            return await self._caller.call("examine", task.id, lambda: examine(task))
        except CallFailed as error:
            place = error.where or self.place(None, "examine")
            what = f"{error.what} ({task.id})"
            self.add(Finding("examine", what, where=place, task=task.id))
            self.count_failure(error)
        return ()

    async def close(self, environment: Environment, task: str = "") -> None:
        """Close an instance. A failure is reported; CallFailed is raised only if the call hung."""
        try:
            await self._call_environment("close", environment, task, environment.close)
        except CallFailed as error:
            if error.hung:
                raise

    async def play(
        self, case: Case, unfinished: Case | None = None, turns: int = 0
    ) -> CheckedEpisode:
        """Play a case on a new instance. If ``unfinished`` is given, first play that case's first
        ``turns`` turns on the same instance. Raises CallFailed."""
        environment = self.make()
        try:
            if unfinished is not None:
                await self._play_on(environment, unfinished, turns)
            return await self._play_on(environment, case)
        finally:
            await self.close(environment, case.task.id)

    async def follow(self, case: Case) -> CheckedEpisode | None:
        """Play a case on a new instance; return None if it failed. Raises CallFailed if a call
        hung."""
        async with self.instance(case.task.id) as environment:
            return await self._play_on(environment, case)
        return None

    async def _play_on(
        self, environment: Environment, case: Case, turns: int | None = None
    ) -> CheckedEpisode:
        opening = await self.reset(environment, case.task)
        episode = CheckedEpisode(opening)
        for text in case.script(opening.tools)[:turns]:
            message = policy_turn(text, opening.tools)
            episode.record_turn(text, await self.step(environment, case.task, message))
            if episode.ended:
                break
        return episode

    async def _call_environment(
        self,
        method: str,
        environment: Environment,
        task: str,
        call: Callable[[], Any],
        wrong_message: str = "",
    ) -> Any:
        try:
            return await self._caller.call(method, task, call, self.place(environment, method))
        except CallFailed as error:
            self._report_failures(method, [error], environment, task, wrong_message)

    def _report_failures(
        self,
        method: str,
        failures: Sequence[CallFailed],
        environment: Environment | None = None,
        task: str = "",
        wrong_message: str = "",
    ) -> None:
        """Report failures of a call, and raise the first one, if any."""
        for error in failures:
            mend = (
                _ADVICE_ON_HANGS
                if error.hung
                else _advise_on_shape(error.what)
                if error.shape
                else error.mend or _ADVICE[method]
            )
            what = f"{error.what} (the answer to {wrong_message})" if wrong_message else error.what
            where = error.where or self.place(environment, method)
            self.add(Finding(method, what, mend, where, task, kind=error.kind))
        for error in failures:
            raise error

    def place(self, environment: Environment | None, method: str) -> str:
        """Return where the environment's code defines ``method``, or the author's method that takes
        its place in the env format.

        Without an instance, return the location found earlier, or "".
        """
        if environment is not None and not self._places.get(method):
            self._places[method] = defined_at(environment, method, self.code)
        return self._places.get(method, "")


def _message_texts(step: Opening | Turn) -> list[str]:
    return [str(message.get("content") or "") for message in step.messages]


def defined_at(environment: Any, method: str, code: UserCode) -> str:
    """Return where a method is defined; "" if the definition is not found.

    The class of the instance is searched, and the objects that the adapter of an env format holds:
    an instance of the author's class, the class, or a function.
    """
    pending = [environment]
    searched = 0
    while pending and searched < _MAX_SEARCHED:
        current = pending.pop(0)
        searched = searched + 1
        for name in _REPLACED_METHODS.get(method, (method,)):
            function = getattr(current if isinstance(current, type) else type(current), name, None)
            if place := code.find_definition(getattr(function, "__code__", None)):
                return place
        if isinstance(current, FunctionType):
            if place := code.find_definition(current.__code__):
                return place
            pending += [cell.cell_contents for cell in current.__closure__ or ()]
        elif isinstance(current, tuple):
            pending += current
        elif type(current).__module__.startswith("realhf."):
            pending += getattr(current, "__dict__", {}).values()
    return ""


def _advise_on_shape(description: str) -> str:
    if "reward" in description or "metric" in description:
        return "Rewards and metrics are finite numbers; success and progress lie between 0 and 1"
    return "A message is {'role': ..., 'content': text}, and everything in a turn is JSON"


def first_difference(before: Sequence[Any], after: Sequence[Any]) -> str:
    """Describe the first difference between two transcripts; "" if there is none."""
    for number, (left, right) in enumerate(zip(before, after, strict=False)):
        if left != right:
            place, texts = _locate_difference(left, right)
            name = "the opening" if number == 0 else f"turn {number}"
            return f"{name} differs: {place.lstrip('.')} is {texts}"
    if len(before) != len(after):
        return f"the episode is over after {len(before) - 1} turns, and then after {len(after) - 1}"
    return ""


def _locate_difference(left: Any, right: Any, place: str = "") -> tuple[str, str]:
    if isinstance(left, dict) and isinstance(right, dict) and left.keys() == right.keys():
        key = next(key for key in left if left[key] != right[key])
        return _locate_difference(left[key], right[key], f"{place}.{key}")
    if isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        index = next(index for index in range(len(left)) if left[index] != right[index])
        return _locate_difference(left[index], right[index], f"{place}[{index}]")
    return place, format_difference(
        json.dumps(left, ensure_ascii=False), json.dumps(right, ensure_ascii=False)
    )
