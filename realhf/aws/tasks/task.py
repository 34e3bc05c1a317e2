"""Describes a task instance: what the agent is asked, how its world is set up, and what counts as success.

The wire form (``to_json``) uses the field names of docs/reference/environment.md 6; unknown keys are ignored and
missing optional ones tolerated, so that full task objects of other clients parse.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

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

    def __str__(self) -> str:
        return self.command or f"{self.service}:{self.operation}"

    def to_json(self) -> dict[str, Any]:
        """Return the command as ``parse_setup`` reads it; what is not set is left out."""
        request = {"service": self.service, "operation": self.operation, "params": dict(self.params)}
        found: dict[str, Any] = {"command": self.command} if self.command else request
        if self.description:
            found["description"] = self.description
        if self.repair:
            found["repair"] = list(self.repair)
        return found | ({"ignore_failure": True} if self.ignore_failure else {})


@dataclass(frozen=True)
class Task:
    """Describes one instance.

    ``task_id`` is the template's number, ``template`` its name, ``seed`` what drew its names; ``success`` holds the
    criteria as plain data (see ``grader.parse_criteria``), and is empty where the account has to be as the solution
    leaves it; ``solution`` the canonical commands (of a drift task: those that repair what its seed draws), ``any_of``
    solutions that lead to states that are as good, ``free`` fields of the agent's choice ("service/kind: path"),
    ``may_change`` globs of service/kind/identity of what the set-up made and the agent may touch, ``possible_drifts``
    the disturbances of which a reset draws some, ``decoys`` resources that are only in the way, ``assets`` the files of
    the session's folder. Only ``task_id``, ``tier``, ``description`` and ``desired_state_spec`` may ever be shown to an
    agent.

    Texts may hold ``${setup1:path}``: filled from the answers to the set-up's calls (see ``captures``).
    """

    task_id: int
    template: str
    tier: str
    seed: int
    description: str
    setup: tuple[SetupCommand, ...]
    success: Mapping[str, Any]
    solution: tuple[str, ...] = ()
    any_of: tuple[tuple[str, ...], ...] = ()
    free: tuple[str, ...] = ()
    may_change: tuple[str, ...] = ()
    params: Mapping[str, Any] = field(default_factory=dict)
    desired_state_spec: str = ""
    possible_drifts: tuple[SetupCommand, ...] = ()
    decoys: tuple[SetupCommand, ...] = ()
    assets: Mapping[str, str] = field(default_factory=dict)

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
            success=_criteria(data),
            solution=_lines(_typed(data, "solution", list, [])),
            any_of=tuple(_lines(one, "any_of") for one in _lists(_typed(data, "any_of", list, []))),
            free=_lines(_typed(data, "free", list, []), "free"),
            may_change=_lines(_typed(data, "may_change", list, []), "may_change"),
            params=_typed(data, "params", dict, {}),
            desired_state_spec=_typed(data, "desired_state_spec", str, ""),
            possible_drifts=parse_setup(data.get("possible_drifts") or [], "possible_drifts"),
            decoys=parse_setup(data.get("decoys") or [], "decoys"),
            assets=_assets(_typed(data, "assets", dict, {})),
        )


def choose_drifts(possible: Sequence[T], seed: int) -> list[T]:
    """Choose two or three of them (fewer where there are not so many), in their order, decided by ``seed``."""
    rng = random.Random(f"drift:{seed}")
    count = min(rng.randint(FEWEST_DRIFTS, MOST_DRIFTS), len(possible))
    return [possible[i] for i in sorted(rng.sample(range(len(possible)), count))]


def repairs(drifts: Iterable[SetupCommand]) -> list[str]:
    """Return the commands that undo these drifts, in their order."""
    return [command for drift in drifts for command in drift.repair]


def parse_setup(commands: Any, where: str = "setup_commands") -> tuple[SetupCommand, ...]:
    """Parse commands from plain data, each a command line, ``{"command": line}`` or a request; ``where`` is the field's
    name in messages. Raises TaskError."""
    if not isinstance(commands, list) or len(commands) > MAX_SETUP_COMMANDS:
        raise TaskError(f"task.{where} is not a list of at most {MAX_SETUP_COMMANDS} commands")
    parsed = []
    for index, command in enumerate(commands):
        try:
            parsed.append(_setup_command(command))
        except TaskError as error:
            raise TaskError(f"task.{where}[{index}]: {error}") from None
    return tuple(parsed)


def _setup_command(data: Any) -> SetupCommand:
    if isinstance(data, str):
        data = {"command": data}
    if not isinstance(data, Mapping):
        raise TaskError("neither a command line nor an object with service, operation and params")
    command = _typed(data, "command", str, "")
    params = _typed(data, "params", dict, {})
    if len(command) > MAX_COMMAND_CHARS or len(repr(params)) > MAX_COMMAND_CHARS:
        raise TaskError(f"longer than {MAX_COMMAND_CHARS} characters")
    return SetupCommand(
        service="" if command else _typed(data, "service", str),
        operation="" if command else _typed(data, "operation", str),
        params=params,
        command=command,
        description=_typed(data, "description", str, ""),
        ignore_failure=_typed(data, "ignore_failure", bool, False),
        repair=_lines(_typed(data, "repair", list, []), "repair"),
    )


def _lines(lines: list[Any], where: str = "solution") -> tuple[str, ...]:
    if not all(isinstance(line, str) for line in lines):
        raise TaskError(f"task.{where} holds something else than command lines")
    return tuple(lines)


def _lists(lines: list[Any]) -> list[list[Any]]:
    if not all(isinstance(line, list) for line in lines):
        raise TaskError("task.any_of holds something else than lists of command lines")
    return lines


def _criteria(data: Mapping[str, Any]) -> Mapping[str, Any]:
    success = _typed(data, "success_criteria", dict, {})
    if not success and not data.get("solution"):
        raise TaskError("task.success_criteria is missing, and there is no solution whose state could be the target")
    if len(repr(success)) > MAX_CRITERIA_CHARS:
        raise TaskError(f"task.success_criteria is longer than {MAX_CRITERIA_CHARS} characters")
    return success


def _assets(assets: Mapping[str, Any]) -> Mapping[str, str]:
    if len(assets) > MAX_ASSETS:
        raise TaskError(f"task.assets has more than {MAX_ASSETS} files")
    for name, content in assets.items():
        if not isinstance(content, str) or len(content) > MAX_ASSET_CHARS:
            raise TaskError(f"task.assets[{name!r}] is not a text of at most {MAX_ASSET_CHARS} characters")
    return assets


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
