"""Puts the server of the AWS environment together: its description for the environment server, pools, episodes,
playground.

Source: docs/reference/environment.md 2.1.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.responses import PlainTextResponse

from realhf.aws.episode.player import EpisodePlayer, checked_action, checked_reset
from realhf.aws.models import AwsAction, AwsObservation, AwsState
from realhf.aws.playground.routes import mount
from realhf.aws.real_aws.account import RealAwsPool
from realhf.aws.server_config import AwsServerConfig, aws_endpoints, output_limits, simulator_pool
from realhf.aws.simulator.pool import MiniStackPool
from realhf.aws.tasks.loader import load_templates
from realhf.env.server.config import ConfigError, ServerConfig
from realhf.env.server.interfaces import Page, Player, ServedEnvironment
from realhf.env.server.process import ServerProcess
from realhf.env.server.wire import WireError

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


class AwsServed(ServedEnvironment):
    """Is AWS as the server sees it. The wire shows the whole observation, and no text for a policy: that is the
    client's business (``realhf.aws.environment``). ``make_player``: in place of an ``EpisodePlayer``."""

    title = "realhf AWS environment"
    about = "AWS tasks on MiniStack over the OpenEnv wire"
    slots_are, slot_label = "MiniStack pool", "rule"
    action_model, observation_model, state_model = AwsAction, AwsObservation, AwsState
    own_guard = "/web"

    def __init__(
        self,
        config: AwsServerConfig,
        pool: MiniStackPool | RealAwsPool,
        make_player: Callable[[Any], Player] | None = None,
    ) -> None:
        chaos = config.enable_chaos and config.backend_type == "simulator"

        def episodes(slot: Any) -> EpisodePlayer:
            return EpisodePlayer(slot, config.max_steps, reward_mode=config.reward_mode, chaos=chaos)

        super().__init__(config, pool, make_player or episodes)
        self._settings, self._simulators = config, pool
        self.home = "/web" if config.web_mounted else self.home
        self._templates = frozenset(template.task_id for template in load_templates())

    def check_reset(self, data: Any) -> dict[str, Any]:
        """Check which task, seed and chaos are asked for."""
        return checked_reset(data)

    def check_action(self, data: Any) -> dict[str, Any]:
        """Check a command and its length, and read it."""
        return checked_action(data, self._settings.max_command_bytes)

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

    def tools(self, player: Any) -> Sequence[Mapping[str, Any]]:
        """Return the one tool; no simulator is needed to know it."""
        del player
        return [TOOL]

    def call_problem(self, params: Any) -> str:
        """Say what is wrong with a call of the tool."""
        if not isinstance(params, Mapping) or params.get("name") != TOOL["name"]:
            return "params name the tool 'aws'"
        given = params.get("arguments")
        if not isinstance(given, Mapping) or set(given) != {"command"}:
            return "arguments hold one text: command"
        try:
            self.check_action(given)
        except WireError as error:
            return error.message
        return ""

    def call_action(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the action that is the command."""
        return self.check_action(params["arguments"])

    def call_answer(self, observation: Mapping[str, Any]) -> tuple[str, bool]:
        """Return the command's output, or its error and that it failed."""
        failed = not observation.get("command_success", False)
        text = observation.get("error") if failed else observation.get("command_output")
        return text or "", failed

    def metadata(self) -> dict[str, Any]:
        """Return what clients want to know: how long episodes are, and how rewards are read."""
        return super().metadata() | {
            "name": "realhf-aws",
            "description": "AWS tasks on MiniStack, one simulator per session",
            "max_steps": self._settings.max_steps,
            "reward_mode": self._settings.reward_mode,
            "backend_type": self._settings.backend_type,
        }

    def mount(self, app: FastAPI) -> Page | None:
        """Add the playground where the settings want one, else an answer at its address that says what would."""
        if self._settings.web_mounted:
            return mount(app, self._settings)
        if absent := self._settings.web_absent:
            app.add_api_route("/web", lambda: PlainTextResponse(f"{absent}\n", 404), include_in_schema=False)
        return None

    def announcement(self) -> str:
        """Say what keeps the commands of agents from the machine, and how to get a playground that is not served."""
        statement = self._simulators.containment()
        return f"{statement}\naws-env: {self._settings.web_absent}" if self._settings.web_absent else statement


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
    return AwsServed(config, make_pool(config)), config


class EnvServerProcess(ServerProcess):
    """Runs ``python -m workers.env_worker`` with ``pool_size`` simulators on free ports; see ``ServerProcess``."""

    def __init__(self, pool_size: int, *arguments: str, timeout_s: float = 60.0) -> None:
        super().__init__("--ministack-base-port", "0", "--pool-size", str(pool_size), *arguments, timeout_s=timeout_s)
