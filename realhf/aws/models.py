"""Defines the messages between an agent and the AWS environment, as pydantic models.

``/schema`` of the server shows them, the client returns them. Source: docs/reference/environment.md 2.1, 10. Parsing
drops nothing: a field that is not known here is kept as an extra attribute, a field that is missing (another OpenEnv
server, an older one) has its neutral value.
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
    difficulty: str = ""
    description: str = ""
    desired_state_spec: str | None = None


class AwsObservation(BaseModel):
    """What an agent sees after reset and step. Reward and done lie beside it in the reply."""

    model_config = ConfigDict(extra="allow")
    episode_id: str = ""
    step_count: int = 0
    command_success: bool = True
    command_output: str = ""
    error: str = ""
    task: TaskInfo | None = None
    task_achieved: bool = False
    partial_progress: float = Field(default=0.0, ge=0.0, le=1.0)
    hints_used: int = 0
    hint_text: str = ""
    truncated: bool = False
    refusal: str | None = None
    steps_left: int = 0
    account_changes: list[dict[str, Any]] = Field(default_factory=list)
    account_key: str = ""
    simulator_lost: bool = False
    account_unreadable: str = ""


class AwsState(BaseModel):
    """Cheap view of a session. Never holds success criteria, setup commands, seed or solution."""

    model_config = ConfigDict(extra="allow")
    episode_id: str | None = None
    step_count: int = 0
    current_task: TaskInfo | None = None
    tracker: dict[str, Any] = Field(default_factory=dict)
    infra_state: dict[str, Any] = Field(default_factory=dict)
    chaos_occurred: bool = False
    current_tier: str | None = None
    slot_id: int | None = None


@dataclass(frozen=True)
class AwsStepResult:
    """The reply to reset or step. ``reward`` is None after a reset, where the server sends none."""

    observation: AwsObservation
    reward: float | None
    done: bool
