"""Defines the messages between a client and any environment, as pydantic models; ``/schema`` shows them."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class SpecAction(BaseModel):
    """What the policy said in a turn. Content alone is enough."""

    model_config = ConfigDict(extra="forbid")
    content: str | None = Field(default=None, description="what the policy said, without reasoning and tool calls")
    tool_calls: list[Any] | None = Field(
        default=None,
        description='calls of tools, {"name", "arguments"} or in the form of the OpenAI chat API; a call that is '
        "wrong is answered by the environment",
    )
    reasoning: str | None = Field(default=None, description="what the policy thought")
    text: str | None = Field(default=None, description="all that the policy wrote; the content where it is absent")
    token_count: int | None = Field(default=None, ge=0, description="how many tokens were sampled")
    metadata: dict[str, Any] | None = Field(default=None, description="is not read")


class SpecObservation(BaseModel):
    """What the environment answers. Reward and done lie beside it in the reply."""

    model_config = ConfigDict(extra="allow")
    messages: list[dict[str, Any]] = Field(description="chat messages: role, content, perhaps name and tool_call_id")
    tools: list[dict[str, Any]] | None = Field(
        default=None, description="after a reset: the episode's tools, in the form of the OpenAI chat API"
    )
    metrics: dict[str, float] = Field(default_factory=dict, description="numbers: success, progress and others")
    rewards: dict[str, float] | None = Field(default=None, description="named components of the reward")
    final: bool | None = Field(default=None, description="true: the reward replaces the sum of those before")
    info: dict[str, Any] | None = Field(default=None, description="for people; with --info true")


class SpecState(BaseModel):
    """Cheap view of a session. Never holds the task itself."""

    episode_id: str | None = None
    step_count: int = 0
    playing: bool = Field(default=False, description="whether an episode is open")
    task_id: str | None = None
    template: str | None = Field(default=None, description="what task_id of a reset names")
    group: str | None = None
    split: str | None = None
    seed: int | None = None
