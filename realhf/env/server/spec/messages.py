"""Messages between a client and any environment: their definition and validation.

An invalid frame is refused. An invalid tool call is a mistake of the policy, so it is passed to the
environment with a description of the problem, and the environment answers it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from realhf.api.environment import SPLITS, AssistantMessage, Opening, ToolCall, Turn
from realhf.api.messages import tool_problems
from realhf.api.tool_parser import MAX_CALLS, CallProblem, build_call, malformed_call, read_json
from realhf.env.loader.validation import (
    BrokenContract,
    format_value,
    info_problems,
    require_valid,
    state_key_problems,
    turn_problems,
    validate_messages,
    validate_number,
    validate_numbers,
)
from realhf.env.server import wire
from realhf.env.server.wire import VALIDATION_ERROR, WireError, require_object


class SpecAction(BaseModel):
    """Action: a turn of the policy. ``content`` alone is enough."""

    model_config = ConfigDict(extra="forbid")
    content: str | None = Field(
        default=None, description="what the policy said, without reasoning and tool calls"
    )
    tool_calls: list[Any] | None = Field(
        default=None,
        description='calls of tools, {"name", "arguments"} or in the form of the OpenAI chat API; '
        "a call that is "
        "wrong is answered by the environment",
    )
    reasoning: str | None = Field(default=None, description="what the policy thought")
    text: str | None = Field(
        default=None, description="all that the policy wrote; the content where it is absent"
    )
    token_count: int | None = Field(default=None, ge=0, description="how many tokens were sampled")
    metadata: dict[str, Any] | None = Field(default=None, description="is not read")


class SpecObservation(BaseModel):
    """Observation: the environment's answer. The reply contains reward and done next to it."""

    model_config = ConfigDict(extra="allow")
    messages: list[dict[str, Any]] = Field(
        description="chat messages: role, content, perhaps name and tool_call_id"
    )
    tools: list[dict[str, Any]] | None = Field(
        default=None,
        description="after a reset: the episode's tools, in the form of the OpenAI chat API",
    )
    metrics: dict[str, float] = Field(
        default_factory=dict, description="numbers: success, progress and others"
    )
    rewards: dict[str, float] | None = Field(
        default=None, description="named components of the reward"
    )
    final: bool | None = Field(
        default=None, description="true: the reward replaces the sum of those before"
    )
    info: dict[str, Any] | None = Field(default=None, description="for people; with --info true")
    state_key: str | None = Field(
        default=None,
        description="the same wherever episodes of one task are in the same state; absent: not "
        "said",
    )


class SpecState(BaseModel):
    """State of a session, which is cheap to get. It never contains the task itself."""

    episode_id: str | None = None
    step_count: int = 0
    playing: bool = Field(default=False, description="whether an episode is open")
    task_id: str | None = None
    template: str | None = Field(default=None, description="what task_id of a reset names")
    group: str | None = None
    split: str | None = None
    seed: int | None = None


_TEXTS = ("content", "text", "reasoning")
"""Fields of an action that hold text."""
_ACTION_KEYS = frozenset({*_TEXTS, "tool_calls", "token_count", "metadata"})
"""All fields of an action."""
_NEEDED = "step needs data: an object with content, tool_calls or both"
"""Error text for an action without content."""


def validate_reset(data: Any) -> dict[str, Any]:
    """Return validated reset data, without entries that are null.

    Raises WireError, also for an unknown key, because otherwise a misspelled name would silently
    select another task.
    """
    fields = {
        key: value for key, value in wire.validate_reset_data(data).items() if value is not None
    }
    if unknown := fields.keys() - wire.RESET_TYPES.keys():
        name = min(unknown)[:64]
        raise WireError(
            VALIDATION_ERROR, f"unexpected key {name!a} in reset data", field=f"data.{name}"
        )
    if fields.get("split", SPLITS[0]) not in SPLITS:
        raise WireError(
            VALIDATION_ERROR, f"split is one of {', '.join(SPLITS)}", field="data.split"
        )
    if "task" in fields and (redundant := fields.keys() & {"task_id", "split"}):
        name = min(redundant)
        raise WireError(VALIDATION_ERROR, f"a whole task needs no {name}", field=f"data.{name}")
    return fields


def validate_action(data: Any) -> dict[str, Any]:
    """Return a validated action (the data of a step), without entries that are null. Raises
    WireError."""
    fields = {
        key: value for key, value in require_object(data, _NEEDED).items() if value is not None
    }
    if unknown := fields.keys() - _ACTION_KEYS:
        name = min(unknown)[:64]
        raise WireError(
            VALIDATION_ERROR, f"unexpected key {name!a} in the action", field=f"data.{name}"
        )
    if not fields.keys() & {"content", "text", "tool_calls"}:
        raise WireError(VALIDATION_ERROR, _NEEDED, field="data.content")
    for key in _TEXTS:
        _check_text(key, fields.get(key, ""))
    if not isinstance(fields.get("tool_calls", []), list):
        raise WireError(VALIDATION_ERROR, "tool_calls must be a list", field="data.tool_calls")
    count = fields.get("token_count", 0)
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= wire.MAX_NUMBER:
        raise WireError(
            VALIDATION_ERROR, "token_count must be a whole number from 0", field="data.token_count"
        )
    if not isinstance(fields.get("metadata", {}), dict):
        raise WireError(
            VALIDATION_ERROR, "metadata must be an object or null", field="data.metadata"
        )
    return fields


def to_message(action: Mapping[str, Any]) -> AssistantMessage:
    """Convert a validated action to the policy's message. If ``content`` is missing, ``text`` is
    used as the content. Calls beyond ``MAX_CALLS`` are replaced by one malformed call, whose
    ``problem`` names the limit."""
    content = action.get("content", action.get("text", ""))
    calls = action.get("tool_calls", [])
    tool_calls = [_to_call(entry, position) for position, entry in enumerate(calls[:MAX_CALLS])]
    if len(calls) > MAX_CALLS:
        tool_calls.append(malformed_call(f"a turn has at most {MAX_CALLS} calls", "", MAX_CALLS))
    return AssistantMessage(
        content,
        tuple(tool_calls),
        action.get("reasoning", ""),
        action.get("text", content),
        action.get("token_count", 0),
    )


def _check_text(key: str, value: Any) -> None:
    """Raise WireError unless a value is a string of valid Unicode."""
    if not isinstance(value, str):
        raise WireError(VALIDATION_ERROR, f"{key} must be a string", field=f"data.{key}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise WireError(
            VALIDATION_ERROR, f"{key} is not valid Unicode text", field=f"data.{key}"
        ) from None


def _to_call(entry: Any, position: int) -> ToolCall:
    """Convert one tool call, given as ``{"name", "arguments"}`` or in the format of the OpenAI API,
    where the arguments are JSON text. An entry in neither format becomes a call with a
    ``problem``."""
    try:
        text = json.dumps(entry, separators=(",", ":"))
    except RecursionError:
        return malformed_call("nested too deep", "", position)
    inner = entry.get("function", entry) if isinstance(entry, dict) else entry
    try:
        value, _ = read_json(json.dumps(inner), 0)
        if isinstance(value, dict) and isinstance(value.get("arguments"), str):
            value["arguments"] = _parse_whole(value["arguments"])
    except CallProblem as problem:
        name = inner.get("name") if isinstance(inner, dict) else None
        return malformed_call(
            str(problem),
            text,
            position,
            name=name if isinstance(name, str) and name.isascii() else "",
        )
    call = build_call(value, text, position, arguments_key="arguments")
    call_id = entry.get("id") if isinstance(entry, dict) else None
    if isinstance(call_id, str) and call_id and not wire.size_problem(call_id):
        return replace(call, id=call_id)
    return call


def _parse_whole(text: str) -> Any:
    """Parse text that must consist of a single JSON value. Raises CallProblem."""
    start = len(text) - len(text.lstrip())
    value, end = read_json(text, start)
    if text[end:].strip():
        raise CallProblem(f"arguments are JSON and then {text[end:].strip()[:32]!a}")
    return value


def opening_observation(opening: Any, system_prompt: str) -> dict[str, Any]:
    """Return the observation for a reset. ``system_prompt`` is put first, unless the environment's
    messages start with a system message. Raises BrokenContract."""
    if not isinstance(opening, Opening):
        raise BrokenContract(f"reset must return an Opening, not {format_value(opening)}")
    messages = [dict(message) for message in validate_messages(opening.messages, "messages")]
    if system_prompt and (not messages or messages[0]["role"] != "system"):
        messages.insert(0, {"role": "system", "content": system_prompt})
    tools = [dict(tool) for tool in require_valid(opening.tools, tool_problems(opening.tools))]
    require_valid(opening.info, info_problems(opening.info))
    require_valid(opening.state_key, state_key_problems(opening.state_key))
    return _add_optional_fields({"messages": messages, "tools": tools, "metrics": {}}, opening)


def turn_observation(turn: Any) -> tuple[dict[str, Any], float | None, bool]:
    """Return (observation of a step, reward, whether the episode is over). Raises
    BrokenContract."""
    if not isinstance(turn, Turn):
        raise BrokenContract(f"step must return a Turn, not {format_value(turn)}")
    require_valid(turn, turn_problems(turn))
    observation: dict[str, Any] = {
        "messages": [dict(message) for message in turn.messages],
        "metrics": validate_numbers(turn.metrics, "metrics"),
    }
    if turn.rewards:
        observation["rewards"] = validate_numbers(turn.rewards, "rewards")
    if turn.final:
        observation["final"] = True
    reward = None if turn.reward is None else validate_number(turn.reward, "reward")
    return _add_optional_fields(observation, turn), reward, turn.done


def _add_optional_fields(observation: dict[str, Any], answer: Opening | Turn) -> dict[str, Any]:
    """Return ``observation`` with the optional fields of an answer that are set."""
    if answer.info:
        observation["info"] = dict(answer.info)
    if answer.state_key:
        observation["state_key"] = answer.state_key
    return observation
