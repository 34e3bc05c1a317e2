"""Blocking side of a session: validates requests, chooses the task and plays episodes on one slot.

It never updates a curriculum. A trainer sends the task with each reset; without one, every training
template is equally likely. If the server learned from the results that clients report, one client
could mislead it (docs/reference/environment.md 2.1, trainer mode and local mode).
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from realhf.aws.cli.command_text import read_command
from realhf.aws.cli.executor import SimulatorLost
from realhf.aws.episode.episode import Episode, EpisodeError, StepData
from realhf.aws.simulator.pool import Slot
from realhf.aws.tasks.loader import instantiate, load_templates
from realhf.aws.tasks.task import Task, TaskError
from realhf.env.server import wire
from realhf.env.server.interfaces import Reply
from realhf.env.server.wire import VALIDATION_ERROR, WireError, require_object

MAX_METADATA_CHARS = 16 << 10
"""Maximum length of an action's ``metadata`` as JSON, in characters."""
_ACTION_KEYS = frozenset({"command", "metadata"})
_RESET_TYPES: Mapping[str, tuple[type, ...]] = {
    "seed": (int,),
    "episode_id": (str,),
    "task": (dict,),
    "task_id": (int, str),
    "chaos": (bool,),
    "split": (str,),
}
"""Allowed types of each argument of a reset, in the order in which errors are reported."""


def check_action(data: Any, max_command_bytes: int) -> dict[str, Any]:
    """Validate an action (the data of a step) and return it with the command that ``read_command``
    finds in it. Raises WireError."""
    data = require_object(data, "step needs data: an object with a command")
    command = data.get("command")
    if not isinstance(command, str):
        raise WireError(VALIDATION_ERROR, "command must be a string", field="data.command")
    if len(data) > 1 and (extra := data.keys() - _ACTION_KEYS):
        name = min(extra)[:64]
        raise WireError(
            VALIDATION_ERROR, f"unexpected key {name!a} in the action", field=f"data.{name}"
        )
    if data.get("metadata") is not None and not _is_small_object(data["metadata"]):
        text = (
            f"metadata must be an object of at most {MAX_METADATA_CHARS} characters of JSON, or "
            f"null"
        )
        raise WireError(VALIDATION_ERROR, text, field="data.metadata")
    try:
        size = len(command.encode())
    except UnicodeEncodeError:
        raise WireError(
            VALIDATION_ERROR, "command is not valid Unicode text", field="data.command"
        ) from None
    if size > max_command_bytes:
        raise WireError(
            VALIDATION_ERROR,
            f"command of {size} bytes, at most {max_command_bytes}",
            field="data.command",
        )
    return {**data, "command": read_command(command)}


check_reset = partial(wire.validate_reset_data, types_of=_RESET_TYPES)


def _is_small_object(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and len(json.dumps(value, separators=(",", ":"))) <= MAX_METADATA_CHARS
    )


_LOG = logging.getLogger(__name__)


class EpisodePlayer:
    """``realhf.env.server.interfaces.Player`` that plays episodes on one slot. Not thread-safe,
    except for ``kill``."""

    def __init__(
        self, slot: Slot, max_steps: int, *, reward_mode: str = "potential", chaos: bool = True
    ) -> None:
        self._slot = slot
        self._episode = Episode(slot, max_steps, reward_mode=reward_mode, chaos=chaos)
        self._random = random.Random()

    def reset(self, data: dict[str, Any]) -> Reply:
        """Start an episode and return the first observation. All keys of ``data`` are optional:

        - ``task``: a complete task.
        - ``task_id``: a template, if there is no ``task``; default: a random training template.
        - ``seed``: default: the task's own seed, or a random one for a template.
        - ``episode_id``: default: a random one.
        - ``split``: the set of resource names that a template is filled with.
        - ``chaos``: whether chaos may disturb the episode.

        Raises WireError: VALIDATION_ERROR for an invalid request, otherwise EXECUTION_ERROR.
        """
        seed = data.get("seed")
        name = data.get("episode_id")
        chaos = data.get("chaos")
        return self._play(lambda: self._episode.reset(self._task(data), seed, name, chaos=chaos))

    def step(self, action: dict[str, Any]) -> Reply:
        """Run the command of a validated action. Raises WireError (EXECUTION_ERROR)."""
        return self._play(lambda: self._episode.step(action["command"]))

    def state(self) -> dict[str, Any]:
        """Return the fields of ``AwsState``, which never include criteria, set-up, seed or
        solution.

        List calls are sent only for services that have changed since they were last listed.
        ``slot_id`` lets a pool of clients check that its sessions have different slots.
        """
        return {**self._episode.state(), "slot_id": self._slot.index}

    def fill(self, commands: Sequence[str]) -> list[str]:
        """Return commands with the values that the current task's set-up captured. Raises
        CaptureError."""
        return self._episode.fill(commands)

    def kill(self) -> None:
        """Abort the running command by killing the CLI workers. New ones are started when
        needed."""
        for pid in self._slot.worker_pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _task(self, data: dict[str, Any]) -> Task:
        if data.get("task") is not None:
            return Task.from_json(data["task"])
        seed = data.get("seed")
        if seed is None:
            seed = self._random.randrange(1 << 31)
        task_id = data.get("task_id")
        if task_id is None:
            task_id = self._random.choice(load_templates(split="train")).task_id
        try:
            return instantiate(int(task_id), seed, data.get("split") or "train")
        except ValueError as error:
            raise TaskError(str(error)) from None

    def _play(self, action: Callable[[], StepData]) -> Reply:
        try:
            result = action()
        except TaskError as error:
            raise WireError(wire.VALIDATION_ERROR, str(error)[:300], field="data.task") from None
        except EpisodeError as error:
            raise WireError(wire.EXECUTION_ERROR, str(error)[:300]) from None
        except SimulatorLost as error:
            _LOG.warning("slot %d: %s", self._slot.index, error)
            raise WireError(wire.EXECUTION_ERROR, "simulator lost; call reset") from None
        except Exception as error:
            _LOG.exception("slot %d: the environment failed", self._slot.index)
            raise WireError(
                wire.EXECUTION_ERROR, f"environment failure ({type(error).__name__})"
            ) from None
        return result.observation, result.reward, result.done
