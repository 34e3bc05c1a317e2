"""Describes any environment of the registry to the environment server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from realhf.api.environment import AssistantMessage, EnvironmentSpec
from realhf.env.server.served import McpDoor, SlotPool
from realhf.env.server.spec.config import SpecServerConfig
from realhf.env.server.spec.models import SpecAction, SpecObservation, SpecState
from realhf.env.server.spec.place import Place
from realhf.env.server.spec.places import Places
from realhf.env.server.spec.player import SpecPlayer
from realhf.env.server.spec.requests import checked_action, checked_reset, message_of
from realhf.env.server.spec.task_choice import TaskChoice
from realhf.env.server.spec.tool_door import ToolDoor


class SpecServed:
    """Implements ``realhf.env.server.served.ServedEnvironment`` for a specification. Raises ValueError for an
    environment that has no tasks, or that lives on a service of its own."""

    slots_are: str = "environment"
    slot_label: str = "kind"
    action_model: type[BaseModel] = SpecAction
    own_guard: str = ""
    home: str = "/health"

    def __init__(self, spec: EnvironmentSpec, config: SpecServerConfig) -> None:
        if spec.launch is not None:
            raise ValueError(
                f"the environment {spec.name} is played on a server of its own: python -m {spec.launch.module}"
            )
        self.title: str = f"realhf environment {spec.name}"
        self.about: str = f"Episodes of {spec.name} over the OpenEnv wire"
        self._spec, self._config = spec, config
        self._choice = TaskChoice(spec)
        self._places = Places(spec.name, lambda: spec.make(""), config.pool_size, config.call_timeout_s)
        self.pool: SlotPool = self._places
        self.mcp: McpDoor = ToolDoor()

    def start(self) -> None:
        """Nothing is needed before the first session."""

    def stop(self) -> None:
        """Break off every call of the environment."""
        self._places.stop()

    def announcement(self) -> list[str]:
        """Say how many tasks there are."""
        counts = ", ".join(f"{count} templates of the split {split}" for split, count in self._choice.counts().items())
        return [f"{self._spec.name}: {counts}"]

    def make_player(self, slot: Place) -> SpecPlayer:
        """See ``ServedEnvironment``."""
        return SpecPlayer(slot, self._places, self._choice, self._spec.system_prompt, info=self._config.info)

    def check_reset(self, data: Any) -> dict[str, Any]:
        """See ``ServedEnvironment``."""
        return checked_reset(data)

    def check_action(self, data: Any) -> dict[str, Any]:
        """See ``ServedEnvironment``."""
        return checked_action(data)

    def step_argument(self, action: dict[str, Any]) -> AssistantMessage:
        """Return what the policy said."""
        return message_of(action)

    def outcome(self, observation: Mapping[str, Any]) -> str:
        """Say whether the task was solved, where the environment says so."""
        success = observation["metrics"].get("success")
        return "finished" if success is None else "achieved" if success >= 1 else "failed"

    def schema(self) -> dict[str, Any]:
        """See ``ServedEnvironment``."""
        models = {"action": SpecAction, "observation": SpecObservation, "state": SpecState}
        return {name: model.model_json_schema() for name, model in models.items()}

    def metadata(self) -> dict[str, Any]:
        """See ``ServedEnvironment``."""
        return {
            "name": f"realhf-{self._spec.name}",
            "description": self.about,
            "environment": self._spec.name,
            "messages": True,
            "max_concurrent_envs": self._config.pool_size,
            "call_timeout_s": self._config.call_timeout_s,
            "deterministic": self._spec.deterministic,
            "templates": self._choice.counts(),
            "groups": self._choice.groups(),
            "correlation": True,
            "simulated": self._config.injected.described(),
        }

    def blank_state(self) -> dict[str, Any]:
        """See ``ServedEnvironment``."""
        return SpecState().model_dump(exclude_none=True)

    def mount(self, app: FastAPI) -> None:
        """An environment brings no pages."""
        del app
