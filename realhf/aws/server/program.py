"""Assembly of the AWS environment server: its ``ServedEnvironment``, simulator pool, episode
players and playground.

Source: docs/reference/environment.md 2.1.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.responses import PlainTextResponse

from realhf.aws.episode.player import EpisodePlayer, check_action, check_reset
from realhf.aws.models import AwsAction, AwsObservation, AwsState
from realhf.aws.playground.routes import mount
from realhf.aws.real_aws.account import RealAwsPool
from realhf.aws.server_config import AwsServerConfig, aws_endpoints, output_limits, simulator_pool
from realhf.aws.simulator.pool import MiniStackPool
from realhf.aws.tasks.loader import load_templates
from realhf.env.server.config import ServerConfig
from realhf.env.server.interfaces import Page, Player, ServedEnvironment
from realhf.env.server.process import ServerProcess
from realhf.env.server.wire import WireError
from realhf.web.settings import SettingError

TOOL = {
    "name": "aws",
    "description": "Run one AWS CLI command and return its output.",
    "inputSchema": {
        "type": "object",
        "properties": {
            "command": {"type": "string", "description": "a command line that starts with 'aws '"}
        },
        "required": ["command"],
        "additionalProperties": False,
    },
}


class AwsServed(ServedEnvironment):
    """The AWS environment as the generic environment server serves it.

    Replies contain the whole observation but no text for a policy; the client formats that
    (``realhf.aws.environment``). ``make_player`` replaces the default ``EpisodePlayer``, for tests.
    """

    title = "realhf AWS environment"
    about = "AWS tasks on MiniStack over the OpenEnv wire"
    slots_are = "MiniStack pool"
    slot_label = "rule"
    action_model = AwsAction
    observation_model = AwsObservation
    state_model = AwsState
    own_guard = "/web"

    def __init__(
        self,
        config: AwsServerConfig,
        pool: MiniStackPool | RealAwsPool,
        make_player: Callable[[Any], Player] | None = None,
    ) -> None:
        chaos = config.enable_chaos and config.backend_type == "simulator"

        def episodes(slot: Any) -> EpisodePlayer:
            return EpisodePlayer(
                slot, config.max_steps, reward_mode=config.reward_mode, chaos=chaos
            )

        super().__init__(config, pool, make_player or episodes)
        self._settings = config
        self._simulators = pool
        self.home = "/web" if config.web_mounted else self.home
        self._templates = frozenset(template.task_id for template in load_templates())

    def check_reset(self, data: Any) -> dict[str, Any]:
        """Validate and parse the arguments of a reset. Raises WireError."""
        return check_reset(data)

    def check_action(self, data: Any) -> dict[str, Any]:
        """Validate and parse a command. Raises WireError."""
        return check_action(data, self._settings.max_command_bytes)

    def outcome(self, observation: Mapping[str, Any]) -> str:
        """Return how the episode ended: achieved, simulator_lost, unreadable_KIND or truncated."""
        if observation.get("simulator_lost"):
            return "simulator_lost"
        if observation["task_achieved"]:
            return "achieved"
        kind = observation.get("account_unreadable")
        return f"unreadable_{kind}" if kind else "truncated"

    def template(self, observation: Mapping[str, Any]) -> str:
        """Return the id of the observation's task template, or "other" for a task written by a
        client."""
        number = (observation.get("task") or {}).get("task_id")
        return str(number) if number in self._templates else "other"

    def tools(self, player: Any) -> Sequence[Mapping[str, Any]]:
        """Return the only tool. No simulator is needed for this."""
        del player
        return [TOOL]

    def call_problem(self, params: Any) -> str:
        """Return what is wrong with a tool call, or "" if it is valid."""
        if not isinstance(params, Mapping) or params.get("name") != TOOL["name"]:
            return "params name the tool 'aws'"
        arguments = params.get("arguments")
        if not isinstance(arguments, Mapping) or set(arguments) != {"command"}:
            return "arguments hold one text: command"
        try:
            self.check_action(arguments)
        except WireError as error:
            return error.message
        return ""

    def call_action(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the action of a tool call."""
        return self.check_action(params["arguments"])

    def call_answer(self, observation: Mapping[str, Any]) -> tuple[str, bool]:
        """Return (text, failed) for a tool call: the command's output, or its error text if it
        failed."""
        failed = not observation.get("command_success", False)
        text = observation.get("error") if failed else observation.get("command_output")
        return text or "", failed

    def instructions(self, observation: Mapping[str, Any]) -> str:
        """Return the task in words."""
        return (observation.get("task") or {}).get("description", "")

    def metadata(self) -> dict[str, Any]:
        """Return metadata for clients, including the episode length and the reward mode."""
        return super().metadata() | {
            "name": "realhf-aws",
            "description": "AWS tasks on MiniStack, one simulator per session",
            "max_steps": self._settings.max_steps,
            "reward_mode": self._settings.reward_mode,
            "backend_type": self._settings.backend_type,
        }

    def mount(self, app: FastAPI) -> Page | None:
        """Add the playground to the server if the settings enable it. Otherwise add a route at its
        address that answers with how to enable it."""
        if self._settings.web_mounted:
            return mount(app, self._settings)
        if absent := self._settings.web_absent:
            app.add_api_route(
                "/web", lambda: PlainTextResponse(f"{absent}\n", 404), include_in_schema=False
            )
        return None

    def announcement(self) -> str:
        """Return text for the log: how the simulators are contained and, if ``web=auto`` does not
        serve the playground, how to enable it."""
        statement = self._simulators.containment()
        return (
            f"{statement}\naws-env: {self._settings.web_absent}"
            if self._settings.web_absent
            else statement
        )


ABOUT = "Serve AWS episodes on MiniStack over the OpenEnv wire, one simulator per session."


def make_pool(config: AwsServerConfig) -> MiniStackPool | RealAwsPool:
    """Return a simulator pool, or the pool of the real account if ``backend_type`` is aws; not
    started yet."""
    simulators = simulator_pool(config, config.pool_size, config.ministack_base_port)
    if config.backend_type == "aws":
        limits = output_limits(config)
        return RealAwsPool(
            config.allow_real_aws, config.allow_file, limits, simulators, aws_endpoints()
        )
    return simulators


def prepare(arguments: argparse.Namespace, config: ServerConfig) -> tuple[AwsServed, ServerConfig]:
    """Return the environment, which is not started yet, and its settings.

    Raises SettingError for ``--option``, which this environment does not have.
    """
    assert isinstance(config, AwsServerConfig)
    if arguments.option:
        raise SettingError(
            f"--option {arguments.option[0]!r} has no effect without --env; the settings are flags "
            f"here"
        )
    return AwsServed(config, make_pool(config)), config


class EnvServerProcess(ServerProcess):
    """Process of the AWS environment server (``python -m workers.env_worker``) with ``pool_size``
    simulators on free ports; see ``ServerProcess``."""

    def __init__(self, pool_size: int, *arguments: str, timeout_s: float = 60.0) -> None:
        super().__init__(
            "--ministack-base-port",
            "0",
            "--pool-size",
            str(pool_size),
            *arguments,
            timeout_s=timeout_s,
        )
