"""Puts the server of any environment of the registry together and describes it to the environment server."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from realhf.env.loader.load import build_environment, parse_options
from realhf.env.server.config import ConfigError, ServerConfig, setting
from realhf.env.server.interfaces import McpDoor, Player, SlotPool
from realhf.env.server.spec.messages import SpecAction, SpecObservation, SpecState, checked_action, checked_reset
from realhf.env.server.spec.player import Facts, Host, SpecPlayer
from realhf.env.server.spec.processes import Processes, ProcessPlayer
from realhf.env.server.spec.slots import Places, keep_this_process
from realhf.registry import environments


@dataclass(frozen=True)
class SpecServerConfig(ServerConfig):
    """Holds the settings of one server process. Raises ConfigError naming variable and flag of a bad one."""

    call_timeout_s: float = setting(
        30.0, "seconds that the environment may take for a reset or a step", limits=(0.01, 3600)
    )
    info: bool = setting(False, "observations carry info, which is for people and may hold the solution")
    processes: int = setting(
        -1,
        "processes that the environment lives in, apart from the server's; a crash ends the sessions of one of them. "
        "0: the server's own, which is faster for cheap environments; -1: 4, and 0 for a registered environment",
        limits=(-1, 256),
    )


_NO_ARGUMENTS = {"type": "object", "properties": {}}


class ToolDoor:
    """Implements ``realhf.env.server.interfaces.McpDoor``."""

    def tools(self, player: Player | None) -> Sequence[Mapping[str, Any]] | None:
        """Return the tools of the player's episode; None without a player. Raises WireError without an episode."""
        if not isinstance(player, SpecPlayer | ProcessPlayer):
            return None
        functions = [tool["function"] for tool in player.tools()]
        return [
            {
                "name": function["name"],
                "description": function.get("description", ""),
                "inputSchema": function.get("parameters", _NO_ARGUMENTS),
            }
            for function in functions
        ]

    def problem(self, params: Any) -> str:
        """Say what is wrong with the parameters of a tools/call; "" when nothing is."""
        if not isinstance(params, Mapping) or not isinstance(params.get("name"), str) or not params["name"]:
            return "params name a tool"
        return "" if isinstance(params.get("arguments", {}), Mapping) else "arguments are an object"

    def action(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return a turn of the policy that consists of the call."""
        return {"tool_calls": [{"name": params["name"], "arguments": dict(params.get("arguments", {}))}]}

    def said(self, observation: Mapping[str, Any]) -> tuple[str, bool]:
        """Return the messages of the environment. What a call did wrong is told in their words."""
        return "\n".join(str(message["content"]) for message in observation["messages"]), False


class SpecServed:
    """Implements ``realhf.env.server.interfaces.ServedEnvironment`` for an environment of which ``facts`` are known,
    and whose sessions take a slot of ``pool``; ``player`` makes of a slot what plays in it."""

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


ABOUT = "Serve episodes of an environment over the OpenEnv wire, an instance for each session."
PROCESSES = 4
"""In so many processes an author's environment lives, unless the server is told otherwise."""
_LOG = logging.getLogger(__name__)


def prepare(arguments: argparse.Namespace, config: ServerConfig) -> tuple[SpecServed, ServerConfig]:
    """Return the environment as the server sees it, and the settings, with no more sessions than the environment
    allows. Raises ConfigError that names what is wrong with the environment or its options."""
    assert isinstance(config, SpecServerConfig)
    count = config.processes if config.processes >= 0 else 0 if arguments.env in environments else PROCESSES
    pool: Places | Processes
    player: Callable[[Any], Player]
    try:
        options = parse_options(arguments.option)
        if count:
            size, timeout_s, count = config.pool_size, config.call_timeout_s, min(count, config.pool_size)
            pool = Processes(arguments.env, options, count, size, timeout_s, info=config.info)
            facts, player = pool.facts, lambda slot: slot
        else:
            keep_this_process()
            spec = build_environment(arguments.env, options)
            host = Host(spec, config.pool_size, config.call_timeout_s, info=config.info)
            facts, pool, player = host.facts, host.places, host.player
    except ValueError as error:
        raise ConfigError(f"--env {arguments.env}: {error}") from error
    if facts.concurrency is not None and facts.concurrency < config.pool_size:
        _LOG.warning("%s allows %d instances at once, so there are no more sessions", facts.name, facts.concurrency)
        config = replace(config, pool_size=facts.concurrency)
        pool.size = config.pool_size
    return SpecServed(facts, pool, player, config), config
