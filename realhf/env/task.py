"""A task instance: what the agent is asked, how its world is set up, and what counts as success.

The wire form (``to_json``) uses the field names of environment spec section 6; unknown keys are ignored and
missing optional ones tolerated, so that full task objects of other clients parse.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TIERS = ("warmup", "beginner", "intermediate", "advanced", "expert")
ACCOUNT_ID = "000000000000"
"""The account of every simulator slot; ARNs in task texts are written with it."""
MAX_SETUP_COMMANDS = 40


class TaskError(ValueError):
    """A task object or template that cannot be used; the text names the field."""


@dataclass(frozen=True)
class SetupCommand:
    """One request that prepares the world, sent before the agent acts. ``params`` as botocore takes them."""

    service: str
    operation: str
    params: Mapping[str, Any]


@dataclass(frozen=True)
class Task:
    """One instance. ``task_id`` is the template's number, ``template`` its name, ``seed`` what drew its names;
    ``success`` holds the criteria as plain data (see ``grader.parse_criteria``), ``solution`` the canonical
    commands. Only ``task_id``, ``tier`` and ``description`` may ever be shown to an agent."""

    task_id: int
    template: str
    tier: str
    seed: int
    description: str
    setup: tuple[SetupCommand, ...]
    success: Mapping[str, Any]
    solution: tuple[str, ...] = ()
    params: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The task as JSON-able data, the ``task`` of a wire reset."""
        return {
            "task_id": self.task_id,
            "template": self.template,
            "difficulty": self.tier,
            "seed": self.seed,
            "description": self.description,
            "setup_commands": [
                {"service": s.service, "operation": s.operation, "params": dict(s.params)} for s in self.setup
            ],
            "success_criteria": dict(self.success),
            "solution": list(self.solution),
            "params": dict(self.params),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any] | str) -> Task:
        """The task in a map or its JSON text. Raises TaskError naming the field that is wrong."""
        if isinstance(data, str):
            try:
                data = json.loads(data)
            except ValueError as error:
                raise TaskError(f"task is not JSON: {error}") from None
        if not isinstance(data, Mapping):
            raise TaskError("task is not an object")
        tier = _typed(data, "difficulty", str)
        if tier not in TIERS:
            raise TaskError(f"task.difficulty is {tier!r}; known: {', '.join(TIERS)}")
        task_id = _typed(data, "task_id", int)
        if task_id < 0:
            raise TaskError("task.task_id is negative")
        return cls(
            task_id=task_id,
            template=_typed(data, "template", str, f"task-{task_id}"),
            tier=tier,
            seed=_typed(data, "seed", int, 0),
            description=_typed(data, "description", str),
            setup=parse_setup(data.get("setup_commands") or []),
            success=_typed(data, "success_criteria", dict),
            solution=tuple(_typed(data, "solution", list, [])),
            params=_typed(data, "params", dict, {}),
        )


def parse_setup(commands: Any) -> tuple[SetupCommand, ...]:
    """Setup commands from plain data. Raises TaskError."""
    if not isinstance(commands, list) or len(commands) > MAX_SETUP_COMMANDS:
        raise TaskError(f"task.setup_commands is not a list of at most {MAX_SETUP_COMMANDS} commands")
    parsed = []
    for index, command in enumerate(commands):
        if not isinstance(command, Mapping):
            raise TaskError(f"task.setup_commands[{index}] is not an object with service, operation and params")
        try:
            service, operation = _typed(command, "service", str), _typed(command, "operation", str)
            parsed.append(SetupCommand(service, operation, _typed(command, "params", dict, {})))
        except TaskError as error:
            raise TaskError(f"task.setup_commands[{index}]: {error}") from None
    return tuple(parsed)


_REQUIRED = object()


def _typed(data: Mapping[str, Any], key: str, kind: type, default: Any = _REQUIRED) -> Any:
    value = data.get(key)
    if value is None:
        if default is _REQUIRED:
            raise TaskError(f"task.{key} is missing")
        return default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise TaskError(f"task.{key} is not of type {kind.__name__}")
    return value
