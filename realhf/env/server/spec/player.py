"""Player of one session's episodes on any environment: chooses the task, calls the environment, and
counts its failures."""

from __future__ import annotations

import itertools
import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from realhf.api.environment import (
    SPLITS,
    TRAIN,
    Environment,
    EnvironmentFailure,
    EnvironmentSpec,
    Task,
    TaskSet,
    Turn,
)
from realhf.base.text import shorten
from realhf.env.server import wire
from realhf.env.server.interfaces import Reply
from realhf.env.server.spec.messages import opening_observation, to_message, turn_observation
from realhf.env.server.spec.slots import EnvironmentThread, EnvironmentThreads
from realhf.env.server.wire import VALIDATION_ERROR, WireError


@dataclass(frozen=True)
class ChosenTask:
    """Task that a reset selected."""

    task: Task
    """The task, with its payload and seed."""
    template: str = ""
    """Id of the template that the task was instantiated from; "" if the client sent the whole
    task."""
    split: str = ""
    """Split of the template; "" if the client sent the whole task."""


class TaskChoice:
    """Selection of the task that a reset asks for.

    Seed n in a split selects the template with index n modulo the number of templates, instantiated
    with seed n. A reset that names neither seed nor task plays the next seed of the training split.

    Raises ValueError if the environment has no training tasks. An error in making the held-out
    split is raised only by a reset that asks for that split.
    """

    def __init__(self, spec: EnvironmentSpec) -> None:
        self._sets: dict[str, TaskSet] = {}
        self._templates: dict[str, list[str]] = {}
        self._missing: dict[str, str] = {}
        self._seeds = itertools.count()
        for split in SPLITS:
            try:
                tasks = spec.tasks(split)
                self._sets[split], self._templates[split] = tasks, [*tasks.group_of]
                if not self._templates[split]:
                    raise ValueError(f"there are no tasks in the split {split}")
            except Exception as error:
                if split == TRAIN:
                    raise ValueError(
                        f"no tasks to play: {type(error).__name__}: {error}"
                    ) from error
                self._missing[split] = (
                    f"the split {split} cannot be played ({type(error).__name__}: {error})"
                )

    def counts(self) -> dict[str, int]:
        """Return the number of templates of each split; 0 for a split that cannot be played."""
        return {
            split: 0 if split in self._missing else len(self._templates[split]) for split in SPLITS
        }

    def groups(self) -> list[str]:
        """Return the groups of the training split, easiest first."""
        return [str(group) for group in self._sets[TRAIN].groups]

    def check(self, data: Mapping[str, Any]) -> None:
        """Raise WireError if reset data name a task or a split that does not exist."""
        split = data.get("split", TRAIN)
        if "task" in data:
            return
        if split in self._missing:
            raise WireError(
                VALIDATION_ERROR, shorten(self._missing[split], 300), field="data.split"
            )
        if "task_id" in data and str(data["task_id"]) not in self._sets[split].group_of:
            text = f"no task {str(data['task_id'])[:64]!a} in the split {split}"
            raise WireError(VALIDATION_ERROR, text, field="data.task_id")

    def choose(self, data: Mapping[str, Any]) -> ChosenTask:
        """Return the task that validated reset data selects. It runs the environment's own code, so
        it may raise any exception."""
        if "task" in data:
            return ChosenTask(Task("", payload=data["task"], seed=data.get("seed", 0)))
        split = data.get("split", TRAIN)
        names_nothing = "seed" not in data and "task_id" not in data
        seed = data.get("seed", next(self._seeds) if names_nothing else 0)
        templates = self._templates[split]
        template = str(data["task_id"]) if "task_id" in data else templates[seed % len(templates)]
        return ChosenTask(self._sets[split].instantiate(template, seed), template, split)


_MAX_MESSAGE_CHARS = 1000
"""Maximum number of characters of an environment's failure that are sent to the client."""
_LOG = logging.getLogger(__name__)


class SpecPlayer:
    """Implementation of ``realhf.env.server.interfaces.Player`` on ``env_thread``, one of
    ``env_threads``. Only one thread may use it at a time, except that any thread may call ``kill``.

    info: whether observations contain the environment's ``info``.
    """

    def __init__(
        self,
        env_thread: EnvironmentThread,
        env_threads: EnvironmentThreads,
        choice: TaskChoice,
        system_prompt: str,
        *,
        info: bool,
    ) -> None:
        self._env_thread = env_thread
        self._env_threads = env_threads
        self._choice = choice
        self._system_prompt = system_prompt
        self._info = info
        self._episode_id: str | None = None
        self._chosen: ChosenTask | None = None
        self._steps = 0
        self._playing = False
        self._tools: Sequence[Mapping[str, Any]] = ()

    def reset(self, data: dict[str, Any]) -> Reply:
        """Start an episode of the task that ``data`` selects; an unfinished episode is abandoned.
        Raises WireError."""
        self._choice.check(data)
        self._playing = False
        self._steps = 0
        self._chosen = None
        self._tools = ()
        self._episode_id = data.get("episode_id") or uuid.uuid4().hex

        async def open_episode(env: Environment) -> dict[str, Any]:
            self._chosen = self._choice.choose(data)
            task = self._chosen.task
            return opening_observation(
                await env.reset(task.payload, seed=task.seed), self._system_prompt
            )

        observation = self._run("reset", open_episode)
        self._playing = True
        self._tools = observation["tools"]
        return self._visible_part(observation), None, False

    def step(self, action: dict[str, Any]) -> Reply:
        """Pass a validated action to the environment as the policy's turn. Raises WireError."""
        self._check_playing()
        message = to_message(action)

        async def take_turn(env: Environment) -> Reply:
            turn: Turn = await env.step(message)
            return turn_observation(turn)

        observation, reward, done = self._run("step", take_turn)
        self._steps += 1
        self._playing = not done
        return self._visible_part(observation), reward, done

    def state(self) -> dict[str, Any]:
        """Return the fields of ``SpecState``. The task itself is left out, because it may contain
        its solution."""
        state = {
            "episode_id": self._episode_id,
            "step_count": self._steps,
            "playing": self._playing,
        }
        if self._chosen is not None:
            task = self._chosen.task
            state |= {"task_id": task.id, "template": self._chosen.template, "group": task.group}
            state |= {"split": self._chosen.split, "seed": task.seed}
        return state

    def tools(self) -> Sequence[Mapping[str, Any]]:
        """Return the tools of the episode. Raises WireError if none is open."""
        self._check_playing()
        return self._tools

    def kill(self) -> None:
        """Cancel the running call. May be called from any thread."""
        self._env_thread.kill()

    def _visible_part(self, observation: dict[str, Any]) -> dict[str, Any]:
        """Return the observation, without ``info`` if the server is set to leave it out."""
        if not self._info:
            observation.pop("info", None)
        return observation

    def _check_playing(self) -> None:
        """Raise WireError if no episode is open."""
        if not self._playing:
            raise WireError(wire.VALIDATION_ERROR, "no episode is open; send a reset", field="type")

    def _run(self, call_name: str, call: Any) -> Any:
        """Call the environment and return the result. A failure is counted, logged and raised as
        WireError; it ends the episode unless it is of the kind ``unavailable``."""
        try:
            return self._env_thread.run(call_name, call)
        except EnvironmentFailure as failure:
            if failure.kind != "unavailable":
                self._playing = False
            reported = EnvironmentFailure(
                failure.kind, f"{shorten(str(failure), _MAX_MESSAGE_CHARS)}{self._describe_task()}"
            )
            self._env_threads.count(reported.kind)
            _LOG.warning("%s: %s", reported.kind, reported)
            retryable = failure.kind == "unavailable"
            code = wire.UNAVAILABLE if retryable else wire.EXECUTION_ERROR
            raise WireError(code, str(reported), kind=failure.kind, retryable=retryable) from None

    def _describe_task(self) -> str:
        """Return a description of the task for a message. It omits the payload, which may contain
        the answer."""
        if self._chosen is None:
            return ""
        task = self._chosen.task
        name = task.id or (
            f"of template {self._chosen.template}" if self._chosen.template else "without an id"
        )
        return f" (task {name}, seed {task.seed})"


@dataclass(frozen=True)
class EnvironmentFacts:
    """Description of an environment that the server publishes."""

    name: str
    """Name of the environment."""
    deterministic: bool
    """Whether the same seed and actions give the same answers."""
    concurrency: int | None
    """Maximum number of instances at a time; None for no limit."""
    templates: dict[str, int]
    """Number of templates of each split."""
    groups: list[str]
    """Groups of the training split, easiest first."""


class EnvironmentHost:
    """Environment in this process, with threads and players for at most ``size`` sessions.

    timeout_s: time limit of one call of the environment, in seconds. info: whether observations
    contain the environment's ``info``. Raises ValueError for an environment that has no tasks, or
    that needs a service of its own.
    """

    def __init__(self, spec: EnvironmentSpec, size: int, timeout_s: float, *, info: bool) -> None:
        if spec.launch is not None:
            raise ValueError(
                f"the environment {spec.name} is played on a server of its own: python -m "
                f"{spec.launch.module}"
            )
        self._spec = spec
        self._info = info
        self._choice = TaskChoice(spec)
        self.env_threads = EnvironmentThreads(spec.name, lambda: spec.make(""), size, timeout_s)
        templates = self._choice.counts()
        groups = self._choice.groups()
        self.facts = EnvironmentFacts(
            spec.name, spec.deterministic, spec.concurrency, templates, groups
        )

    def make_player(self, env_thread: EnvironmentThread) -> SpecPlayer:
        """Return a player for a session on its thread."""
        return SpecPlayer(
            env_thread, self.env_threads, self._choice, self._spec.system_prompt, info=self._info
        )
