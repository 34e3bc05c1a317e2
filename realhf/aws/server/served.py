"""Describes the AWS environment to the environment server: requests, schemas, metadata, playground."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

from fastapi import FastAPI
from pydantic import BaseModel

from realhf.aws.models import AwsAction, AwsObservation, AwsState
from realhf.aws.server.command_tool import CommandTool
from realhf.aws.server.config import AwsServerConfig
from realhf.aws.server.requests import checked_action, checked_reset
from realhf.env.server.interfaces import McpDoor, Page, Player, SlotPool


class StartedPool(SlotPool, Protocol):
    """Is a pool of simulators, or a real account in its place."""

    def start(self) -> None:
        """Start the simulators. Raises RuntimeError when they do not come up."""
        ...

    def stop(self) -> None:
        """End the simulators."""
        ...

    def containment(self) -> str:
        """Say what keeps the commands of agents from the machine."""
        ...


class AwsServed:
    """Implements ``realhf.env.server.interfaces.ServedEnvironment``. ``make_player`` returns the player of a slot of
    ``pool``, whose ``step`` takes a command. ``mount`` adds the playground, where ``config`` wants one.
    ``templates`` are the numbers under which episodes are counted."""

    title: str = "realhf AWS environment"
    about: str = "AWS tasks on MiniStack over the OpenEnv wire"
    slots_are: str = "MiniStack pool"
    slot_label: str = "rule"
    action_model: type[BaseModel] = AwsAction
    own_guard: str = "/web"

    def __init__(
        self,
        config: AwsServerConfig,
        pool: StartedPool,
        make_player: Callable[[Any], Player],
        mount: Callable[[FastAPI, AwsServerConfig], Page] | None = None,
        *,
        templates: Collection[int] = (),
    ) -> None:
        self.pool: SlotPool = pool
        self._started_pool = pool
        self._make_player = make_player
        self.mcp: McpDoor = CommandTool(config.max_command_bytes)
        self.home: str = "/web" if config.web_mounted else "/health"
        self._config = config
        self._mount = mount
        self._templates = templates

    def make_player(self, slot: Any) -> Player:
        """See ``ServedEnvironment``."""
        return self._make_player(slot)

    def check_reset(self, data: Any) -> dict[str, Any]:
        """See ``ServedEnvironment``."""
        return checked_reset(data)

    def check_action(self, data: Any) -> dict[str, Any]:
        """See ``ServedEnvironment``."""
        return checked_action(data, self._config.max_command_bytes)

    def step_argument(self, action: dict[str, Any]) -> str:
        """Return the command."""
        return action["command"]

    def outcome(self, observation: Mapping[str, Any]) -> str:
        """Say whether the task was achieved, the simulator lost over a command, or the account not to be read."""
        if observation.get("simulator_lost"):
            return "simulator_lost"
        if observation["task_achieved"]:
            return "achieved"
        kind = observation.get("account_unreadable")
        return f"unreadable_{kind}" if kind else "truncated"

    def template(self, observation: Mapping[str, Any]) -> str:
        """Return the number of the template, "other" for a task that a client wrote."""
        number = (observation.get("task") or {}).get("task_id")
        return str(number) if number in self._templates else "other"

    def schema(self) -> dict[str, Any]:
        """See ``ServedEnvironment``."""
        models = {"action": AwsAction, "observation": AwsObservation, "state": AwsState}
        return {name: model.model_json_schema() for name, model in models.items()}

    def metadata(self) -> dict[str, Any]:
        """See ``ServedEnvironment``."""
        return {
            "name": "realhf-aws",
            "description": "AWS tasks on MiniStack, one simulator per session",
            "max_concurrent_envs": self._config.pool_size,
            "max_steps": self._config.max_steps,
            "reward_mode": self._config.reward_mode,
            "backend_type": self._config.backend_type,
            "correlation": True,
            "simulated": self._config.injected.described(),
        }

    def blank_state(self) -> dict[str, Any]:
        """See ``ServedEnvironment``."""
        return AwsState().model_dump()

    def mount(self, app: FastAPI) -> Page | None:
        """Add the playground where the settings want one."""
        return self._mount(app, self._config) if self._mount is not None and self._config.web_mounted else None

    def start(self) -> None:
        """Start the simulators."""
        self._started_pool.start()

    def stop(self) -> None:
        """End the simulators."""
        self._started_pool.stop()

    def announcement(self) -> list[str]:
        """Say what contains the commands of agents."""
        return [self._started_pool.containment()]
