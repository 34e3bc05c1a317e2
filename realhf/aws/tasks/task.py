"""Task instances: the request to the agent, the set-up of its account, and the success criteria.

In a *drift task* the account was in the desired state until some requests changed it. Each of these
changes is a drift; the agent has to find and undo them.

``to_json`` returns the wire format, with the field names of docs/reference/environment.md 6.
``from_json`` ignores unknown keys and accepts missing optional ones, so that task objects written
by other clients can be parsed.
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
"""Account id of every simulator slot. ARNs in task texts contain it."""
MAX_SETUP_COMMANDS = 40
MAX_COMMAND_CHARS = 65536
"""Maximum length of a set-up command, in characters of its command line or of its parameters."""
MAX_CRITERIA_CHARS = 65536
"""Maximum length of ``success_criteria``, in characters of its Python representation."""
MAX_ASSETS = 16
MAX_ASSET_CHARS = 65536
MIN_DRIFTS = 2
MAX_DRIFTS = 3
"""Minimum and maximum number of drifts that a reset draws."""
T = TypeVar("T")


class TaskError(ValueError):
    """A task object or template is invalid; the message names the field."""


@dataclass(frozen=True)
class SetupCommand:
    """One set-up request, which the environment itself sends to build the account, to introduce a
    drift or to add an unrelated resource.

    It is given either as ``service``, ``operation`` and ``params`` or as ``command``. Raises
    TaskError if it has neither, or is too long.
    """

    service: str = ""
    """Service of the API request (botocore's name), e.g. "s3"."""
    operation: str = ""
    """Operation of the API request, e.g. "CreateBucket"."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of the API request, in botocore's format."""
    command: str = ""
    """Command line as an agent would write it, as an alternative to an API request."""
    description: str = ""
    """Free text for readers of the task."""
    ignore_failure: bool = False
    """Whether the set-up continues if this command fails."""
    repair: tuple[str, ...] = ()
    """If this command introduces a drift: the commands that undo it."""

    def __post_init__(self) -> None:
        if not self.command and not (self.service and self.operation):
            raise TaskError(
                "neither a command line nor an object with service, operation and params"
            )
        if len(self.command) > MAX_COMMAND_CHARS or len(repr(self.params)) > MAX_COMMAND_CHARS:
            raise TaskError(f"longer than {MAX_COMMAND_CHARS} characters")

    def __str__(self) -> str:
        return self.command or f"{self.service}:{self.operation}"

    def to_json(self) -> dict[str, Any]:
        """Return the command in the format that ``Task.from_json`` reads, without empty fields."""
        request = {
            "service": self.service,
            "operation": self.operation,
            "params": dict(self.params),
        }
        data: dict[str, Any] = {"command": self.command} if self.command else request
        if self.description:
            data["description"] = self.description
        if self.repair:
            data["repair"] = list(self.repair)
        return data | ({"ignore_failure": True} if self.ignore_failure else {})


Commands = Annotated[tuple[SetupCommand, ...], msgspec.Meta(max_length=MAX_SETUP_COMMANDS)]


@dataclass(frozen=True)
class Task:
    """A task instance. Its fields are the schema of the wire format.

    Only ``task_id``, ``tier``, ``description`` and ``desired_state_spec`` may ever be shown to an
    agent. Strings may contain captures such as ``${setup1:path}``, which are filled from the
    responses to the set-up requests (see ``captures``).
    """

    task_id: Annotated[int, msgspec.Meta(ge=0)]
    """Number of the template."""
    template: str
    """Name of the template."""
    tier: str
    """One of ``TIERS``; ``difficulty`` on the wire."""
    seed: int
    """Seed from which names, values and phrasing are drawn."""
    description: str
    """The request to the agent, in words."""
    setup: Commands
    """Requests that build the account; called ``setup_commands`` on the wire."""
    success: Mapping[str, Any]
    """Success criteria as plain data (see ``criteria.parse_criteria``); called ``success_criteria``
    on the wire. If empty, the account is compared with the state that ``solution`` leads to."""
    solution: tuple[str, ...] = ()
    """The canonical commands. For a drift task: the commands that repair the drifts of this
    seed."""
    any_of: tuple[tuple[str, ...], ...] = ()
    """Alternative solutions that are graded as equally good."""
    free: tuple[str, ...] = ()
    """Fields whose values the agent may choose, as "service/kind: path = value | value"."""
    may_change: tuple[str, ...] = ()
    """Glob patterns for set-up resources that the agent may change, matched against
    service/kind/identity."""
    verbatim: tuple[str, ...] = ()
    """Resource kinds ("service/kind") whose policies are compared word for word instead of by
    meaning."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """Drawn names and values, by the parameter names of the template."""
    desired_state_spec: str = ""
    """Description of the desired state, for a drift task."""
    possible_drifts: Commands = ()
    """Requests that introduce drifts; a reset draws some of them."""
    decoys: Commands = ()
    """Requests that create resources unrelated to the task."""
    assets: Annotated[Mapping[str, Any], msgspec.Meta(max_length=MAX_ASSETS)] = field(
        default_factory=dict
    )
    """Contents of the files in the session's folder, by file name."""

    def to_json(self) -> dict[str, Any]:
        """Return the task as JSON-compatible data, the ``task`` argument of a reset on the wire.

        Optional fields are included only if they are set.
        """
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
        """Parse a task from a mapping or a JSON string. Raises TaskError, which names the invalid
        field."""
        try:
            data = json.loads(data) if isinstance(data, str) else data
        except ValueError as error:
            raise TaskError(f"task is not JSON: {error}") from None
        if not isinstance(data, Mapping):
            raise TaskError("task is not an object")
        fields: dict[Any, Any] = {
            "template": f"task-{data.get('task_id')}",
            "seed": 0,
            "setup": [],
            "success": {},
        }
        fields |= {
            _WIRE_NAMES.get(name, name): value
            for name, value in data.items()
            if value is not None and name not in _WIRE_NAMES.values()
        }
        for name in ("setup", "possible_drifts", "decoys"):
            fields[name] = _normalize_commands(fields.get(name) or [])
        try:
            task = msgspec.convert(fields, cls)
        except ValueError as error:
            raise TaskError(f"task: {_FIELD_NAME.sub(_replace_by_wire_name, str(error))}") from None
        task._check()
        return task

    def _check(self) -> None:
        if self.tier not in TIERS:
            raise TaskError(f"task.difficulty is {self.tier!r}; known: {', '.join(TIERS)}")
        if not self.success and not self.solution:
            raise TaskError(
                "task.success_criteria is missing, and no solution whose state could be the target"
            )
        if len(repr(self.success)) > MAX_CRITERIA_CHARS:
            raise TaskError(f"task.success_criteria is longer than {MAX_CRITERIA_CHARS} characters")
        for name, content in self.assets.items():
            if not isinstance(content, str) or len(content) > MAX_ASSET_CHARS:
                raise TaskError(
                    f"task.assets[{name!r}] is not a text of at most {MAX_ASSET_CHARS} characters"
                )


_WIRE_NAMES: Mapping[str, str] = {
    "difficulty": "tier",
    "setup_commands": "setup",
    "success_criteria": "success",
}
"""Names of ``Task`` fields by their names on the wire, for fields with different names."""
_FIELD_NAME = re.compile(r"(?<=`)(\$\.)?(tier|setup|success)\b")
"""Matches a field name in an error message of msgspec; it is replaced by the field's name on the
wire."""


def _replace_by_wire_name(match: re.Match[str]) -> str:
    return (match[1] or "") + next(wire for wire, name in _WIRE_NAMES.items() if name == match[2])


def _normalize_commands(commands: Any) -> Any:
    """Return a list of set-up commands with every command as an object: a string becomes
    ``command``, and null values are dropped. Anything else is left unchanged; the later validation
    rejects it."""
    if not isinstance(commands, list):
        return commands
    objects = ({"command": one} if isinstance(one, str) else one for one in commands)
    return [
        {key: value for key, value in one.items() if value is not None}
        if isinstance(one, Mapping)
        else one
        for one in objects
    ]


def choose_drifts(possible: Sequence[T], seed: int) -> list[T]:
    """Return two or three of the possible drifts, drawn by ``seed``, in their original order.
    Return all if there are fewer."""
    rng = random.Random(f"drift:{seed}")
    count = min(rng.randint(MIN_DRIFTS, MAX_DRIFTS), len(possible))
    return [possible[i] for i in sorted(rng.sample(range(len(possible)), count))]


def repairs(drifts: Iterable[SetupCommand]) -> list[str]:
    """Return the commands that undo these drifts, in the order of the drifts."""
    return [command for drift in drifts for command in drift.repair]
