"""Setup of a server for any registered environment, and the adapter through which the environment
server uses it."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from realhf.base.process import block_exit_in_threads
from realhf.env.loader.load import build_environment, parse_options
from realhf.env.server.config import ServerConfig
from realhf.env.server.interfaces import Player, ServedEnvironment
from realhf.env.server.spec.messages import (
    SpecAction,
    SpecObservation,
    SpecState,
    validate_action,
    validate_reset,
)
from realhf.env.server.spec.player import EnvironmentFacts, EnvironmentHost, SpecPlayer
from realhf.env.server.spec.processes import Processes, ProcessPlayer
from realhf.env.server.spec.slots import EnvironmentThreads
from realhf.registry import environments
from realhf.web.settings import SettingError, setting


@dataclass(frozen=True)
class SpecServerConfig(ServerConfig):
    """Settings of one server process. Raises SettingError that names the variable and the flag of
    an invalid setting."""

    call_timeout_s: float = setting(
        30.0, "seconds that the environment may take for a reset or a step", limits=(0.01, 3600)
    )
    info: bool = setting(
        False, "observations carry info, which is for people and may hold the solution"
    )
    processes: int = setting(
        -1,
        "processes that the environment lives in, apart from the server's; a crash ends the "
        "sessions of one of them. "
        "0: the server's own, which is faster for cheap environments; -1: 4, and 0 for a "
        "registered environment",
        limits=(-1, 256),
    )


_NO_ARGUMENTS = {"type": "object", "properties": {}}
"""JSON schema of a tool without arguments."""
_MISTAKES = ("error:", "{'error':")
"""How an environment's answer to a mistake begins, see ``realhf.api.environment.Turn``."""


class SpecServed(ServedEnvironment):
    """Any registered environment in the form that the environment server needs; actions and
    observations carry messages."""

    slots_are = "environment"
    slot_label = "kind"
    action_model = SpecAction
    observation_model = SpecObservation
    state_model = SpecState

    def __init__(
        self,
        facts: EnvironmentFacts,
        pool: EnvironmentThreads | Processes,
        player: Callable[[Any], Player],
        config: SpecServerConfig,
    ) -> None:
        super().__init__(config, pool, player)
        self.title = f"realhf environment {facts.name}"
        self.about = f"Episodes of {facts.name} over the OpenEnv wire"
        self._facts = facts
        self._call_timeout_s = config.call_timeout_s

    def check_reset(self, data: Any) -> dict[str, Any]:
        """Return validated reset data. Raises WireError."""
        return validate_reset(data)

    def check_action(self, data: Any) -> dict[str, Any]:
        """Return a validated action. Raises WireError."""
        return validate_action(data)

    def outcome(self, observation: Mapping[str, Any]) -> str:
        """Return "achieved" or "failed" according to the metric ``success``; "finished" if the
        environment does not report it."""
        success = observation["metrics"].get("success")
        return "finished" if success is None else "achieved" if success >= 1 else "failed"

    def tools(
        self, player: SpecPlayer | ProcessPlayer | None
    ) -> Sequence[Mapping[str, Any]] | None:
        """Return the tools of the player's episode in MCP format; None without a player. Raises
        WireError if no episode is open."""
        if player is None:
            return None
        return [
            {
                "name": function["name"],
                "description": function.get("description", ""),
                "inputSchema": function.get("parameters", _NO_ARGUMENTS),
            }
            for function in (tool["function"] for tool in player.tools())
        ]

    def call_problem(self, params: Any) -> str:
        """Return what is wrong with the format of a call, or "". Whether the call itself makes
        sense is left to the environment."""
        if (
            not isinstance(params, Mapping)
            or not isinstance(params.get("name"), str)
            or not params["name"]
        ):
            return "params name a tool"
        return "" if isinstance(params.get("arguments", {}), Mapping) else "arguments are an object"

    def call_action(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return an action that consists of this one call."""
        return {
            "tool_calls": [{"name": params["name"], "arguments": dict(params.get("arguments", {}))}]
        }

    def call_answer(self, observation: Mapping[str, Any]) -> tuple[str, bool]:
        """Return (text of the environment's messages, whether the call failed). The second is
        always False, because the messages themselves explain a wrong call."""
        return "\n".join(
            str(message.get("content") or "") for message in observation["messages"]
        ), False

    def tool_result(self, observation: Mapping[str, Any]) -> tuple[str, bool]:
        """Return (text of the environment's messages, whether they explain a mistake)."""
        text, _ = self.call_answer(observation)
        return text, text.startswith(_MISTAKES)

    def instructions(self, observation: Mapping[str, Any]) -> str:
        """Return the messages that open the episode, with the system prompt first."""
        return "\n\n".join(str(message.get("content") or "") for message in observation["messages"])

    def metadata(self) -> dict[str, Any]:
        """Return the metadata for clients: that actions and observations carry messages, the time
        limit of a call, and the tasks."""
        return super().metadata() | {
            "name": f"realhf-{self._facts.name}",
            "environment": self._facts.name,
            "messages": True,
            "call_timeout_s": self._call_timeout_s,
            "deterministic": self._facts.deterministic,
            "templates": self._facts.templates,
            "groups": self._facts.groups,
        }

    def blank_state(self) -> dict[str, Any]:
        """Return the state before the first reset, without fields that are not yet known."""
        return SpecState().model_dump(exclude_none=True)

    def announcement(self) -> str:
        """Return a line for the log with the numbers of tasks."""
        counts = (
            f"{count} templates of the split {split}"
            for split, count in self._facts.templates.items()
        )
        return f"{self._facts.name}: {', '.join(counts)}"


ABOUT = "Serve episodes of an environment over the OpenEnv wire, an instance for each session."
"""Description of the server program."""
PROCESSES = 4
"""Default number of processes for an environment that is not registered, for example one that the
user wrote."""
_LOG = logging.getLogger(__name__)


def prepare(arguments: argparse.Namespace, config: ServerConfig) -> tuple[SpecServed, ServerConfig]:
    """Return (the environment for the server, the settings limited to as many sessions as the
    environment allows).

    Raises SettingError that says what is wrong with the environment or its options.
    """
    assert isinstance(config, SpecServerConfig)
    count = (
        config.processes
        if config.processes >= 0
        else 0
        if arguments.env in environments
        else PROCESSES
    )
    pool: EnvironmentThreads | Processes
    player: Callable[[Any], Player]
    try:
        options = parse_options(arguments.option)
        if count:
            size = config.pool_size
            timeout_s = config.call_timeout_s
            count = min(count, config.pool_size)
            pool = Processes(arguments.env, options, count, size, timeout_s, info=config.info)
            facts = pool.facts
            player = lambda slot: slot
        else:
            block_exit_in_threads()
            spec = build_environment(arguments.env, options)
            host = EnvironmentHost(spec, config.pool_size, config.call_timeout_s, info=config.info)
            facts = host.facts
            pool = host.env_threads
            player = host.make_player
    except ValueError as error:
        raise SettingError(f"--env {arguments.env}: {error}") from error
    if facts.concurrency is not None and facts.concurrency < config.pool_size:
        _LOG.warning(
            "%s allows %d instances at once, so there are no more sessions",
            facts.name,
            facts.concurrency,
        )
        config = replace(config, pool_size=facts.concurrency)
        pool.size = config.pool_size
    return SpecServed(facts, pool, player, config), config
