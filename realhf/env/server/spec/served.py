"""Describes any environment of the registry to the environment server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from realhf.env.server.served import McpDoor, Player, SlotPool
from realhf.env.server.spec.config import SpecServerConfig
from realhf.env.server.spec.host import Facts
from realhf.env.server.spec.models import SpecAction, SpecObservation, SpecState
from realhf.env.server.spec.places import Places
from realhf.env.server.spec.processes import Processes
from realhf.env.server.spec.requests import checked_action, checked_reset
from realhf.env.server.spec.tool_door import ToolDoor


class SpecServed:
    """Implements ``realhf.env.server.served.ServedEnvironment`` for an environment of which ``facts`` are known, and
    whose sessions take a slot of ``pool``; ``player`` makes of a slot what plays in it."""

    slots_are: str = "environment"
    slot_label: str = "kind"
    action_model: type[BaseModel] = SpecAction
    own_guard: str = ""
    home: str = "/health"

    def __init__(
        self, facts: Facts, pool: Places | Processes, player: Callable[[Any], Player], config: SpecServerConfig
    ) -> None:
        self.title: str = f"realhf environment {facts.name}"
        self.about: str = f"Episodes of {facts.name} over the OpenEnv wire"
        self._facts, self._config, self._pool, self._player = facts, config, pool, player
        self.pool: SlotPool = pool
        self.mcp: McpDoor = ToolDoor()

    def start(self) -> None:
        """Nothing is needed before the first session."""

    def stop(self) -> None:
        """Break off every call of the environment."""
        self._pool.stop()

    def announcement(self) -> list[str]:
        """Say how many tasks there are."""
        counts = (f"{count} templates of the split {split}" for split, count in self._facts.templates.items())
        return [f"{self._facts.name}: {', '.join(counts)}"]

    def make_player(self, slot: Any) -> Player:
        """See ``ServedEnvironment``."""
        return self._player(slot)

    def check_reset(self, data: Any) -> dict[str, Any]:
        """See ``ServedEnvironment``."""
        return checked_reset(data)

    def check_action(self, data: Any) -> dict[str, Any]:
        """See ``ServedEnvironment``."""
        return checked_action(data)

    def step_argument(self, action: dict[str, Any]) -> dict[str, Any]:
        """Return the action: a player reads what the policy said."""
        return action

    def outcome(self, observation: Mapping[str, Any]) -> str:
        """Say whether the task was solved, where the environment says so."""
        success = observation["metrics"].get("success")
        return "finished" if success is None else "achieved" if success >= 1 else "failed"

    def template(self, observation: Mapping[str, Any]) -> str:
        """Return "": what a task was made of is not said over the wire."""
        return ""

    def schema(self) -> dict[str, Any]:
        """See ``ServedEnvironment``."""
        models = {"action": SpecAction, "observation": SpecObservation, "state": SpecState}
        return {name: model.model_json_schema() for name, model in models.items()}

    def metadata(self) -> dict[str, Any]:
        """See ``ServedEnvironment``."""
        return {
            "name": f"realhf-{self._facts.name}",
            "description": self.about,
            "environment": self._facts.name,
            "messages": True,
            "max_concurrent_envs": self._config.pool_size,
            "call_timeout_s": self._config.call_timeout_s,
            "deterministic": self._facts.deterministic,
            "templates": self._facts.templates,
            "groups": self._facts.groups,
            "correlation": True,
            "simulated": self._config.injected.described(),
        }

    def blank_state(self) -> dict[str, Any]:
        """See ``ServedEnvironment``."""
        return SpecState().model_dump(exclude_none=True)

    def mount(self, app: FastAPI) -> None:
        """An environment brings no pages."""
        del app
