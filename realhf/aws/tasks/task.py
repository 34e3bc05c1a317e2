"""Describes a task instance: what the agent is asked, how its world is set up, and what counts as success.

The wire form (``to_json``) uses the field names of docs/reference/environment.md 6; unknown keys are ignored and
missing optional ones tolerated, so that full task objects of other clients parse.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

import msgspec

TIERS = ("warmup", "beginner", "intermediate", "advanced", "expert")
ACCOUNT_ID = "000000000000"
"""The account of every simulator slot; ARNs in task texts are written with it."""
MAX_SETUP_COMMANDS = 40
MAX_COMMAND_CHARS = 65536
"""Longest set-up command, in characters as text or as parameters in JSON."""
MAX_CRITERIA_CHARS = 65536
MAX_ASSETS = 16
MAX_ASSET_CHARS = 65536
FEWEST_DRIFTS, MOST_DRIFTS = 2, 3
T = TypeVar("T")


class TaskError(ValueError):
    """A task object or template cannot be used; the text names the field."""


@dataclass(frozen=True)
class SetupCommand:
    """Describes one request of the environment's own that makes, disturbs or clutters the world: ``operation`` of
    ``service`` with ``params`` as botocore takes them, or ``command``, a line as an agent would write it. With
    ``ignore_failure`` the world counts as built even if it fails. ``repair``: the commands that undo a drift."""

    service: str = ""
    operation: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)
    command: str = ""
    description: str = ""
    ignore_failure: bool = False
    repair: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.command and not (self.service and self.operation):
            raise TaskError("neither a command line nor an object with service, operation and params")
        if len(self.command) > MAX_COMMAND_CHARS or len(repr(self.params)) > MAX_COMMAND_CHARS:
            raise TaskError(f"longer than {MAX_COMMAND_CHARS} characters")

    def __str__(self) -> str:
        return self.command or f"{self.service}:{self.operation}"

    def to_json(self) -> dict[str, Any]:
        """Return the command as ``Task.from_json`` reads it; what is not set is left out."""
        request = {"service": self.service, "operation": self.operation, "params": dict(self.params)}
        found: dict[str, Any] = {"command": self.command} if self.command else request
        if self.description:
            found["description"] = self.description
        if self.repair:
            found["repair"] = list(self.repair)
        return found | ({"ignore_failure": True} if self.ignore_failure else {})


Commands = Annotated[tuple[SetupCommand, ...], msgspec.Meta(max_length=MAX_SETUP_COMMANDS)]


@dataclass(frozen=True)
class Task:
    """Describes one instance; its fields are the schema of what is sent.

    ``task_id`` is the template's number, ``template`` its name, ``seed`` what drew its names; ``success`` holds the
    criteria as plain data (see ``criteria.parse_criteria``), and is empty where the account has to be as the solution
    leaves it; ``solution`` the canonical commands (of a drift task: those that repair what its seed draws), ``any_of``
    solutions that lead to states that are as good, ``free`` fields of the agent's choice ("service/kind: path"),
    ``may_change`` globs of service/kind/identity of what the set-up made and the agent may touch, ``verbatim`` kinds
    ("service/kind") whose policies count word for word, ``possible_drifts`` the disturbances of which a reset draws
    some, ``decoys`` resources that are only in the way, ``assets`` the files of the session's folder. Only ``task_id``,
    ``tier``, ``description`` and ``desired_state_spec`` may ever be shown to an agent.

    Texts may hold ``${setup1:path}``: filled from the answers to the set-up's calls (see ``captures``).
    """

    task_id: Annotated[int, msgspec.Meta(ge=0)]
    template: str
    tier: str
    seed: int
    description: str
    setup: Commands
    success: Mapping[str, Any]
    solution: tuple[str, ...] = ()
    any_of: tuple[tuple[str, ...], ...] = ()
    free: tuple[str, ...] = ()
    may_change: tuple[str, ...] = ()
    verbatim: tuple[str, ...] = ()
    params: Mapping[str, Any] = field(default_factory=dict)
    desired_state_spec: str = ""
    possible_drifts: Commands = ()
    decoys: Commands = ()
    assets: Annotated[Mapping[str, Any], msgspec.Meta(max_length=MAX_ASSETS)] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the task as JSON-able data, the ``task`` of a wire reset. Optional fields appear where they are
        set."""
        optional = {
            "desired_state_spec": self.desired_state_spec,
            "possible_drifts": [command.to_json() for command in self.possible_drifts],
            "decoys": [command.to_json() for command in self.decoys],
            "assets": dict(self.assets),
            "any_of": [list(commands) for commands in self.any_of],
            "free": list(self.free),
            "may_change": list(self.may_change),
            "verbatim": list(self.verbatim),
        }
        return {
            "task_id": self.task_id,
            "template": self.template,
            "difficulty": self.tier,
            "seed": self.seed,
            "description": self.description,
            "setup_commands": [command.to_json() for command in self.setup],
            "success_criteria": dict(self.success),
            "solution": list(self.solution),
            "params": dict(self.params),
        } | {key: value for key, value in optional.items() if value}

    @classmethod
    def from_json(cls, data: Mapping[str, Any] | str) -> Task:
        """Parse the task in a map or its JSON text. Raises TaskError naming the field that is wrong."""
        try:
            data = json.loads(data) if isinstance(data, str) else data
        except ValueError as error:
            raise TaskError(f"task is not JSON: {error}") from None
        if not isinstance(data, Mapping):
            raise TaskError("task is not an object")
        given: dict[Any, Any] = {"template": f"task-{data.get('task_id')}", "seed": 0, "setup": [], "success": {}}
        given |= {
            _WIRE_NAMES.get(name, name): value
            for name, value in data.items()
            if value is not None and name not in _WIRE_NAMES.values()
        }
        for name in ("setup", "possible_drifts", "decoys"):
            given[name] = _commands(given.get(name) or [])
        try:
            task = msgspec.convert(given, cls)
        except ValueError as error:
            raise TaskError(f"task: {_NAMED.sub(_in_wire_names, str(error))}") from None
        task._check()
        return task

    def _check(self) -> None:
        if self.tier not in TIERS:
            raise TaskError(f"task.difficulty is {self.tier!r}; known: {', '.join(TIERS)}")
        if not self.success and not self.solution:
            raise TaskError("task.success_criteria is missing, and no solution whose state could be the target")
        if len(repr(self.success)) > MAX_CRITERIA_CHARS:
            raise TaskError(f"task.success_criteria is longer than {MAX_CRITERIA_CHARS} characters")
        for name, content in self.assets.items():
            if not isinstance(content, str) or len(content) > MAX_ASSET_CHARS:
                raise TaskError(f"task.assets[{name!r}] is not a text of at most {MAX_ASSET_CHARS} characters")


_WIRE_NAMES: Mapping[str, str] = {"difficulty": "tier", "setup_commands": "setup", "success_criteria": "success"}
_NAMED = re.compile(r"(?<=`)(\$\.)?(tier|setup|success)\b")


def _in_wire_names(match: re.Match[str]) -> str:
    return (match[1] or "") + next(wire for wire, name in _WIRE_NAMES.items() if name == match[2])


def _commands(commands: Any) -> Any:
    """Return a list of commands with the lines among them as objects, and without what is null."""
    if not isinstance(commands, list):
        return commands
    objects = ({"command": one} if isinstance(one, str) else one for one in commands)
    return [
        {key: value for key, value in one.items() if value is not None} if isinstance(one, Mapping) else one
        for one in objects
    ]


def choose_drifts(possible: Sequence[T], seed: int) -> list[T]:
    """Choose two or three of them (fewer where there are not so many), in their order, decided by ``seed``."""
    rng = random.Random(f"drift:{seed}")
    count = min(rng.randint(FEWEST_DRIFTS, MOST_DRIFTS), len(possible))
    return [possible[i] for i in sorted(rng.sample(range(len(possible)), count))]


def repairs(drifts: Iterable[SetupCommand]) -> list[str]:
    """Return the commands that undo these drifts, in their order."""
    return [command for drift in drifts for command in drift.repair]
