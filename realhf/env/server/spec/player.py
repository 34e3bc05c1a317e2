"""Plays the episodes of a session on its place: the blocking side of a session of any environment."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from realhf.api.environment import Environment, EnvironmentFailure, Turn
from realhf.base.text import shorten
from realhf.env.server import wire
from realhf.env.server.served import Reply
from realhf.env.server.spec.observations import of_opening, of_turn
from realhf.env.server.spec.place import Place
from realhf.env.server.spec.places import Places
from realhf.env.server.spec.requests import message_of
from realhf.env.server.spec.task_choice import ChosenTask, TaskChoice
from realhf.env.server.wire import WireError

_LONGEST_MESSAGE = 1000


class SpecPlayer:
    """Implements ``realhf.env.server.served.Player`` on a ``place`` of ``places``. Use it from one thread at a time,
    except ``kill``. ``info``: whether observations carry it."""

    def __init__(self, place: Place, places: Places, choice: TaskChoice, system_prompt: str, *, info: bool) -> None:
        self._place, self._places, self._choice, self._system_prompt = place, places, choice, system_prompt
        self._info = info
        self._episode_id: str | None = None
        self._chosen: ChosenTask | None = None
        self._steps = 0
        self._playing = False
        self._tools: Sequence[Mapping[str, Any]] = ()

    def reset(self, data: dict[str, Any]) -> Reply:
        """Start an episode of the task that ``data`` mean; one that is open is given up. Raises WireError."""
        self._choice.check(data)
        self._playing, self._steps, self._chosen, self._tools = False, 0, None, ()
        self._episode_id = data.get("episode_id") or uuid.uuid4().hex

        async def opened(env: Environment) -> dict[str, Any]:
            self._chosen = self._choice.choose(data)
            task = self._chosen.task
            return of_opening(await env.reset(task.payload, seed=task.seed), self._system_prompt)

        seen = self._run("reset", opened)
        self._playing, self._tools = True, seen["tools"]
        return self._shown(seen), None, False

    def step(self, action: dict[str, Any]) -> Reply:
        """Take a turn of the policy, as a checked action says it. Raises WireError."""
        self._check_playing()
        message = message_of(action)

        async def taken(env: Environment) -> Reply:
            turn: Turn = await env.step(message)
            return of_turn(turn)

        seen, reward, done = self._run("step", taken)
        self._steps += 1
        self._playing = not done
        return self._shown(seen), reward, done

    def state(self) -> dict[str, Any]:
        """Return what ``SpecState`` describes; never the task itself, which may hold its solution."""
        found = {"episode_id": self._episode_id, "step_count": self._steps, "playing": self._playing}
        if self._chosen is not None:
            task = self._chosen.task
            found |= {"task_id": task.id, "template": self._chosen.template, "group": task.group}
            found |= {"split": self._chosen.split, "seed": task.seed}
        return found

    def tools(self) -> Sequence[Mapping[str, Any]]:
        """Return the tools of the episode. Raises WireError when none is open."""
        self._check_playing()
        return self._tools

    def kill(self) -> None:
        """Break off the call in flight."""
        self._place.kill()

    def _shown(self, seen: dict[str, Any]) -> dict[str, Any]:
        if not self._info:
            seen.pop("info", None)
        return seen

    def _check_playing(self) -> None:
        if not self._playing:
            raise WireError(wire.VALIDATION_ERROR, "no episode is open; send a reset", field="type")

    def _run(self, what: str, call: Any) -> Any:
        try:
            return self._place.run(what, call)
        except EnvironmentFailure as failure:
            if failure.kind != "unavailable":
                self._playing = False
            told = EnvironmentFailure(failure.kind, f"{shorten(str(failure), _LONGEST_MESSAGE)}{self._of_task()}")
            self._places.count(told)
            again = failure.kind == "unavailable"
            code = wire.UNAVAILABLE if again else wire.EXECUTION_ERROR
            raise WireError(code, str(told), kind=failure.kind, retryable=again) from None

    def _of_task(self) -> str:
        """Which episode it was, for a message; never its payload, which may hold the answer."""
        if self._chosen is None:
            return ""
        task = self._chosen.task
        name = task.id or (f"of template {self._chosen.template}" if self._chosen.template else "without an id")
        return f" (task {name}, seed {task.seed})"
