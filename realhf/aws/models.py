"""Messages between an agent and the AWS environment, as pydantic models.

The server publishes their schemas at ``/schema``, and the client returns instances of them. Parsing
drops nothing: unknown fields are kept as extra attributes. Fields that an older or another OpenEnv
server does not send get a neutral default. Source: docs/reference/environment.md 2.1, 10.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class AwsAction(BaseModel):
    """What an agent sends: one AWS CLI command line."""

    model_config = ConfigDict(extra="forbid")
    command: str = Field(description="a command line that starts with 'aws '")


class TaskInfo(BaseModel):
    """The part of a task that an agent may see."""

    model_config = ConfigDict(extra="allow")
    task_id: int = Field(default=0, ge=0)
    """Number of the template."""
    difficulty: str = ""
    """Tier of the task."""
    description: str = ""
    """The task in words."""
    desired_state_spec: str | None = None
    """Desired state of the account in words; None except for tasks whose resources may have
    drifted."""


class AwsObservation(BaseModel):
    """What an agent sees after a reset or step. ``reward`` and ``done`` are not part of it: they
    are separate fields of the reply."""

    model_config = ConfigDict(extra="allow")
    episode_id: str = ""
    """Id of the episode."""
    step_count: int = 0
    """Number of commands so far."""
    command_success: bool = True
    """Whether the last command succeeded; True after a reset."""
    command_output: str = ""
    """Standard output of the last command, cut to the server's limit."""
    error: str = ""
    """Error text of the last command."""
    task: TaskInfo | None = None
    """The task, as far as agents may see it."""
    task_achieved: bool = False
    """Whether the task is solved."""
    partial_progress: float = Field(default=0.0, ge=0.0, le=1.0)
    """Progress of the task, 0 to 1."""
    hints_used: int = 0
    """Number of hints requested."""
    hint_text: str = ""
    """The hint, if the last command requested one, else ""."""
    truncated: bool = False
    """Whether the episode ended without solving the task."""
    refusal: str | None = None
    """Policy rule that refused the command; None if the command was not refused."""
    steps_left: int = 0
    """Number of commands that the episode still allows."""
    account_changes: list[dict[str, Any]] = Field(default_factory=list)
    """Changes of the account so far, in the format of ``AccountChanges.describe``."""
    account_key: str = ""
    """Digest of the account's state, "" if unknown."""
    simulator_lost: bool = False
    """Whether a command broke the simulator."""
    account_unreadable: str = ""
    """Kind of the error that made the account unreadable, "" if none."""


class AwsState(BaseModel):
    """State of a session that is cheap to compute. It never contains success criteria, set-up
    commands, seed or solution."""

    model_config = ConfigDict(extra="allow")
    episode_id: str | None = None
    """Id of the current episode."""
    step_count: int = 0
    """Number of commands so far."""
    current_task: TaskInfo | None = None
    """The task, as far as agents may see it."""
    tracker: dict[str, Any] = Field(default_factory=dict)
    """Progress, hints and commands of the episode."""
    infra_state: dict[str, Any] = Field(default_factory=dict)
    """Names of the resources by service and type."""
    chaos_occurred: bool = False
    """Whether chaos disturbed the episode; revealed at its end."""
    current_tier: str | None = None
    """Tier of the task."""
    slot_id: int | None = None
    """Number of the simulator slot that the session uses."""


@dataclass(frozen=True)
class AwsStepResult:
    """Reply to reset or step."""

    observation: AwsObservation
    """What the agent sees."""
    reward: float | None
    """Reward of the step; None after a reset."""
    done: bool
    """Whether the episode has ended."""
