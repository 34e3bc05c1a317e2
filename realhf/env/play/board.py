"""Draws a game: messages, tools, rewards. What an environment says is shown as it is, without control characters."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from realhf.api.environment import EnvironmentSpec, Opening, Task, Turn
from realhf.base.text import printable
from realhf.env.check.scripts import functions

_LONGEST = 20_000
_STYLES = {"system": "magenta", "user": "cyan", "tool": "yellow", "assistant": "green"}


def _shown(text: object) -> str:
    """Return a text whose control characters are shown and not obeyed, cut after 20,000 characters."""
    shown = str(text)
    cut = f"… ({len(shown) - _LONGEST:,} more characters)" if len(shown) > _LONGEST else ""
    return printable(shown[:_LONGEST]) + cut


class Board:
    """Shows a game on a console."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def title(self, spec: EnvironmentSpec, task: Task, split: str, seed: int) -> None:
        """Say which episode begins."""
        group = f", group {task.group}" if task.group else ""
        self.line(f"── {spec.name}, task {task.id}{group}, split {split}, seed {seed}", "bold")

    def opening(self, system_prompt: str, opening: Opening) -> None:
        """Show how an episode begins."""
        if system_prompt:
            self.message("system", system_prompt)
        self.messages(opening.messages)
        self.tools(opening.tools)

    def tools(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """Show the tools, each with its parameters."""
        if not tools:
            self.line("no tools: the environment reads plain text", "dim")
        about = {tool["function"]["name"]: tool["function"].get("description", "") for tool in tools}
        for name, parameters in functions(tools):
            self.line(f"tool {signature(name, parameters)}", "yellow")
            self.line(f"     {about[name]}", "dim")

    def messages(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Show messages of the environment."""
        for message in messages:
            self.message(str(message.get("role")), message.get("content") or message.get("tool_calls", ""))

    def message(self, role: str, content: object) -> None:
        """Show one message."""
        self._console.print(Text(f"{_shown(role)}: ", style=_STYLES.get(role, "")), end="", soft_wrap=True)
        self._console.print(Text(_shown(content)), soft_wrap=True)

    def turn(self, turn: Turn, so_far: float) -> None:
        """Show an answer; ``so_far`` is the return of the episode with it."""
        self.messages(turn.messages)
        parts = []
        if turn.reward is not None:
            parts.append(f"reward {turn.reward:+g}{' (final)' if turn.final else ''}")
        parts += [f"{name} {value:+g}" for name, value in turn.rewards.items()]
        parts += [f"{name} {value:g}" for name, value in turn.metrics.items()]
        self.line("  ".join([*parts, f"return {so_far:g}"]), "dim")
        if turn.info:
            self.line(f"info {json.dumps(turn.info, ensure_ascii=False, default=repr)[:_LONGEST]}", "dim")

    def line(self, text: str, style: str = "") -> None:
        """Print a line."""
        self._console.print(Text(_shown(text), style=style), soft_wrap=True)


def signature(name: str, parameters: Mapping[str, Any]) -> str:
    """Return ``read(path: string, lines: integer = optional)`` of a tool."""
    required = parameters.get("required") or ()
    shown = [
        f"{key}: {_kind(schema)}{'' if key in required else ' (optional)'}"
        for key, schema in (parameters.get("properties") or {}).items()
    ]
    return f"{name}({', '.join(shown)})"


def _kind(schema: Any) -> str:
    if not isinstance(schema, Mapping):
        return "any"
    if "enum" in schema:
        return " | ".join(map(str, schema["enum"]))
    kinds = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(kinds, list):
        return " | ".join(map(_kind, kinds))
    kind = schema.get("type", "any")
    return kind if isinstance(kind, str) else " | ".join(map(str, kind))
