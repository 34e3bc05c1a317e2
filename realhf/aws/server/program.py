"""Puts the server of the AWS environment together: its description for the environment server, pools, episodes,
playground.

Source: docs/reference/environment.md 2.1.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from fastapi import FastAPI
from pydantic import BaseModel

from realhf.aws.episode.player import EpisodePlayer, checked_action, checked_reset
from realhf.aws.models import AwsAction, AwsObservation, AwsState
from realhf.aws.playground.routes import mount
from realhf.aws.real_aws.account import RealAwsPool
from realhf.aws.server_config import AwsServerConfig, aws_endpoints, output_limits, simulator_pool
from realhf.aws.simulator.pool import MiniStackPool
from realhf.aws.tasks.loader import load_templates
from realhf.env.server.config import ConfigError, ServerConfig
from realhf.env.server.interfaces import McpDoor, Page, Player, SlotPool
from realhf.env.server.process import ServerProcess

TOOL = {
    "name": "aws",
    "description": "Run one AWS CLI command and return its output.",
    "inputSchema": {
        "type": "object",
        "properties": {"command": {"type": "string", "description": "a command line that starts with 'aws '"}},
        "required": ["command"],
        "additionalProperties": False,
    },
}


class CommandTool:
    """Implements ``realhf.env.server.interfaces.McpDoor``."""

    def __init__(self, max_command_bytes: int) -> None:
        self._max_command_bytes = max_command_bytes

    def tools(self, player: Player | None) -> Sequence[Mapping[str, Any]]:
        """Return the one tool; no simulator is needed to know it."""
        del player
        return [TOOL]

    def problem(self, params: Any) -> str:
        """Say what is wrong with the parameters of a tools/call; "" when nothing is."""
        if not isinstance(params, Mapping) or params.get("name") != TOOL["name"]:
            return "params name the tool 'aws'"
        given = params.get("arguments")
        if not isinstance(given, Mapping) or set(given) != {"command"} or not isinstance(given["command"], str):
            return "arguments hold one text: command"
        try:
            too_long = len(given["command"].encode()) > self._max_command_bytes
        except UnicodeEncodeError:
            return "command is not valid Unicode text"
        return f"command is longer than {self._max_command_bytes} bytes" if too_long else ""

    def action(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the action that a sound tools/call means."""
        return {"command": params["arguments"]["command"]}

    def said(self, observation: Mapping[str, Any]) -> tuple[str, bool]:
        """Return the command's output, or its error and that it failed."""
        failed = not observation.get("command_success", False)
        text = observation.get("error") if failed else observation.get("command_output")
        return text or "", failed


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


ABOUT = "Serve AWS episodes on MiniStack over the OpenEnv wire, one simulator per session."


def make_pool(config: AwsServerConfig) -> MiniStackPool | RealAwsPool:
    """Return simulators, or the real account where that is confirmed; not started yet."""
    simulators = simulator_pool(config, config.pool_size, config.ministack_base_port)
    if config.backend_type == "aws":
        limits = output_limits(config)
        return RealAwsPool(config.allow_real_aws, config.allow_file, limits, simulators, aws_endpoints())
    return simulators


def prepare(arguments: argparse.Namespace, config: ServerConfig) -> tuple[AwsServed, ServerConfig]:
    """Return the environment as the server sees it, not started yet. Raises ConfigError for options of another
    environment."""
    assert isinstance(config, AwsServerConfig)
    if arguments.option:
        raise ConfigError(f"--option {arguments.option[0]!r} has no effect without --env; the settings are flags here")
    chaos = config.enable_chaos and config.backend_type == "simulator"

    def make_player(slot: Any) -> EpisodePlayer:
        return EpisodePlayer(slot, config.max_steps, reward_mode=config.reward_mode, chaos=chaos)

    templates = frozenset(template.task_id for template in load_templates())
    return AwsServed(config, make_pool(config), make_player, mount, templates=templates), config


class EnvServerProcess(ServerProcess):
    """Runs ``python -m workers.env_worker`` with ``pool_size`` simulators on free ports; see ``ServerProcess``."""

    def __init__(self, pool_size: int, *arguments: str, timeout_s: float = 60.0) -> None:
        super().__init__("--ministack-base-port", "0", "--pool-size", str(pool_size), *arguments, timeout_s=timeout_s)
