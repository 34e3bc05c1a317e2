"""The door for a class with tools, the one that TRL's ``environment_factory`` takes: ``reset(**row)``, public methods
that are the tools, and ``get_reward()``. Such a class imports nothing of this project.

Source: TRL 1.16, GRPOTrainer, ``environment_factory``. What an author may add here: a dataclass ``Options``, ``done``,
``metrics``, ``view``, ``close()``, ``user_reply(text)``, ``tasks(split)``, ``system_prompt``, ``deterministic``,
``concurrency``, ``demonstrate``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from realhf.api.environment import (
    AssistantMessage,
    EnvironmentDefinition,
    EnvironmentFailure,
    EnvironmentSpec,
    Opening,
    Turn,
)
from realhf.env.doors.author import class_parts, place_of, takes
from realhf.env.doors.checks import BrokenContract
from realhf.env.doors.tasks import Row
from realhf.env.doors.threads import MOST_THREADS, Threads
from realhf.env.doors.tool_play import ToolClass, ToolPlay, messages_of
from realhf.env.doors.tools import USER_REPLY, tools_of


def tool_class(kind: type[Any]) -> EnvironmentDefinition:
    """The definition of a class. Raises ValueError that names the line for a class without tools, a tool without type
    hints or docstring, and a get_reward that needs arguments."""
    about = read_class(kind)
    parts = class_parts(kind, seeded="seed" in inspect.signature(kind.reset).parameters, check=_check_prompt)

    def build(options: Any) -> EnvironmentSpec:
        """Return the environment for these options."""
        threads = Threads(kind.__name__, max(MOST_THREADS, parts.traits.concurrency or 0))
        return EnvironmentSpec(
            kind.__name__,
            lambda _: ToolClassEnvironment(about, lambda: parts.instance(options), threads),
            parts.tasks(options),
            **parts.traits._asdict(),
        )

    return EnvironmentDefinition(parts.options, build)


def read_class(kind: type[Any]) -> ToolClass:
    """Look at the methods of a class. Raises ValueError as ``tool_class`` does, and for a ``user_reply`` of another
    form."""
    tools = tools_of(kind)
    try:
        inspect.signature(kind.get_reward).bind(None)
    except TypeError as error:
        place = place_of(kind.get_reward)
        raise ValueError(f"{kind.__name__}.get_reward must take no arguments: {error} ({place})") from None
    if reply := getattr(kind, USER_REPLY, None):
        try:
            inspect.signature(reply).bind(None, text="")
        except TypeError as error:
            raise ValueError(
                f"{kind.__name__}.{USER_REPLY} must be {USER_REPLY}(self, text): {error} ({place_of(reply)})"
            ) from None
    methods = [tool.function for tool in tools.values()]
    others = ("reset", "get_reward", "close", "metrics", USER_REPLY)
    methods += [getattr(kind, name, None) for name in others if name not in tools]
    blocking = not any(inspect.iscoroutinefunction(inspect.unwrap(each)) for each in methods if callable(each))
    schemas = tuple(tool.schema for tool in tools.values())
    return ToolClass(kind, tools, schemas, blocking, takes(kind.reset, "seed"), set())


class ToolClassEnvironment:
    """Plays the author's class.

    What a tool raises, and a call that cannot be made, is answered by a ``tool`` message, as in TRL. What reset,
    get_reward and the like raise or return against the contract is EnvironmentFailure("internal") that names the class,
    the task and the line. Each turn has the reward of the state after it, so the last one is right whenever the episode
    ends.
    """

    def __init__(self, about: ToolClass, make: Callable[[], Any], threads: Threads) -> None:
        self._make_play = lambda: ToolPlay(about, make, threads)
        self._play = self._make_play()

    async def reset(self, task: Mapping[str, Any], *, seed: int) -> Opening:
        """Begin an episode; an instance whose last call was cancelled is left to its thread, and a new one is made."""
        if self._play.lost:
            self._play = self._make_play()
        return await self._play.open(task, seed)

    async def step(self, message: AssistantMessage) -> Turn:
        """Answer the tool calls of a turn. A turn without any is answered by the class's user, or ends the episode."""
        if self._play.lost:
            raise EnvironmentFailure(
                "lost", "the call before was cancelled and may still be running; reset begins anew"
            )
        return await self._play.turn(message)

    async def reward_again(self) -> float:
        """Ask the class once more what the state is worth; it must say the same."""
        return await self._play.reward_again()

    async def close(self) -> None:
        """Close the instance if there is one that can be closed."""
        await self._play.close()


def _check_prompt(row: Row) -> None:
    try:
        messages_of(row.values.get("prompt", ""), "the column 'prompt'")
    except BrokenContract as error:
        raise ValueError(f"{row.where}: {error}") from None
