"""Is any environment as a server of the Model Context Protocol: the tools of the open episode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from realhf.env.server.served import Player
from realhf.env.server.spec.player import SpecPlayer
from realhf.env.server.spec.processes import ProcessPlayer

_NO_ARGUMENTS = {"type": "object", "properties": {}}


class ToolDoor:
    """Implements ``realhf.env.server.served.McpDoor``."""

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
