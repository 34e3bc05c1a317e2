"""Is the environment as a server of the Model Context Protocol: one tool, ``aws``.

Source: docs/reference/environment.md 2.1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from realhf.env.server.interfaces import Player

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
