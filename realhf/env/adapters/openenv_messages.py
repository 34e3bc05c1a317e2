"""Plays episodes on a server that serves messages (``python -m workers.env_worker --env NAME``): what the policy says
and what the environment answers cross the wire as they are. Source: docs/environments/server.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from realhf.api.environment import (
    TRAIN,
    AssistantMessage,
    ChatMessage,
    EnvironmentFailure,
    Opening,
    Task,
    ToolCall,
    Turn,
)
from realhf.env.adapters.openenv_session import Session, reset_data
from realhf.env.client.openenv_client import OpenEnvClient
from realhf.env.doors.checks import BrokenContract, checked_messages, checked_numbers, json_problem, whole_text
from realhf.env.doors.values import shown

_OF_AN_ACTION = frozenset({"content", "tool_calls"})


def speaks_messages(action: Any, metadata: Mapping[str, Any]) -> bool:
    """Whether a server with this schema of its action and these metadata serves messages."""
    properties = action.get("properties") if isinstance(action, Mapping) else None
    return metadata.get("messages") is True and isinstance(properties, Mapping) and {*properties} >= _OF_AN_ACTION


class ServedTaskSet:
    """An endless set whose seeds draw from the tasks of a server's split; the server keeps its splits apart."""

    def __init__(self, name: str, split: str) -> None:
        self._name, self._split = name, split
        self.group_of: Mapping[str, str] = {name: name}
        self.groups: Sequence[str] = (name,)

    def instantiate(self, template_id: str, seed: int) -> Task:
        """Return the task of a seed. Raises KeyError for an unknown template."""
        if template_id != self._name:
            raise KeyError(template_id)
        held_out = "" if self._split == TRAIN else f" {self._split}"
        return Task(f"{self._name}{held_out}@{seed}", self._name, {"split": self._split}, seed=seed)


class MessagesEnvironment:
    """Plays one episode after another on a session that is opened when it is needed."""

    def __init__(self, clients: Sequence[Callable[[], OpenEnvClient]]) -> None:
        self._session = Session(clients)

    async def reset(self, task: Mapping[str, Any], *, seed: int) -> Opening:
        """Begin an episode. Raises EnvironmentFailure."""
        result = await self._session.reset(reset_data(task, seed))
        seen = result.observation
        tools = seen.get("tools") or []
        if not isinstance(tools, list) or not all(_is_tool(tool) for tool in tools) or json_problem(tools):
            raise EnvironmentFailure("internal", f"the server's tools are no tools: {shown(tools)}")
        return Opening(_messages(seen), tools, _info(seen))

    async def step(self, message: AssistantMessage) -> Turn:
        """Send a turn and return the answer to it. Raises EnvironmentFailure."""
        result = await self._session.step(_action(message))
        seen = result.observation
        rewards, metrics = _numbers(seen, "rewards"), _numbers(seen, "metrics")
        final = seen.get("final") is True
        return Turn(_messages(seen), result.done, result.reward, rewards, metrics, _info(seen), final)

    async def close(self) -> None:
        """End the session."""
        await self._session.close()


def _action(message: AssistantMessage) -> dict[str, Any]:
    action: dict[str, Any] = {"content": whole_text(message.content), "token_count": message.token_count}
    if message.tool_calls:
        action["tool_calls"] = [_call(call) for call in message.tool_calls]
    return action | {
        name: whole_text(value) for name, value in (("reasoning", message.reasoning), ("text", message.text)) if value
    }


def _call(call: ToolCall) -> dict[str, Any]:
    """A call; one that could not be parsed is sent as it was written, and the server says what is wrong with it."""
    readable = not call.problem and not json_problem(call.arguments)
    written = {"name": whole_text(call.name), "arguments": dict(call.arguments)}
    if not readable:
        written["arguments"] = whole_text(call.text or call.problem or "?")
    return written | ({"id": whole_text(call.id)} if call.id else {})


def _messages(seen: Mapping[str, Any]) -> Sequence[ChatMessage]:
    try:
        return checked_messages(seen.get("messages"), "the server's messages")
    except BrokenContract as error:
        raise EnvironmentFailure("internal", str(error)) from None


def _numbers(seen: Mapping[str, Any], name: str) -> dict[str, float]:
    try:
        return checked_numbers(seen.get(name) or {}, f"the server's {name}")
    except BrokenContract as error:
        raise EnvironmentFailure("internal", str(error)) from None


def _info(seen: Mapping[str, Any]) -> Mapping[str, Any]:
    info = seen.get("info") or {}
    return info if isinstance(info, Mapping) and not json_problem(info) else {}


def _is_tool(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str) and bool(function["name"])
