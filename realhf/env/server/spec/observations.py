"""Turns what an environment returned into what the wire carries, after a check against the contract."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from realhf.api.environment import Opening, Turn
from realhf.env.doors.checks import BrokenContract, checked_messages, checked_number, checked_numbers, json_problem
from realhf.env.doors.values import shown


def of_opening(opening: Any, system_prompt: str) -> dict[str, Any]:
    """Return the observation of a reset; ``system_prompt`` comes first, unless the environment opens with one of its
    own. Raises BrokenContract."""
    if not isinstance(opening, Opening):
        raise BrokenContract(f"reset must return an Opening, not {shown(opening)}")
    messages = [dict(message) for message in checked_messages(opening.messages, "messages")]
    if system_prompt and (not messages or messages[0]["role"] != "system"):
        messages.insert(0, {"role": "system", "content": system_prompt})
    seen: dict[str, Any] = {"messages": messages, "tools": _tools(opening.tools), "metrics": {}}
    return _with_info(seen, opening.info)


def of_turn(turn: Any) -> tuple[dict[str, Any], float | None, bool]:
    """Return the observation of a step, its reward and whether the episode is over. Raises BrokenContract."""
    if not isinstance(turn, Turn):
        raise BrokenContract(f"step must return a Turn, not {shown(turn)}")
    if not isinstance(turn.done, bool) or not isinstance(turn.final, bool):
        raise BrokenContract(f"done and final must be true or false, not {shown((turn.done, turn.final))}")
    seen: dict[str, Any] = {
        "messages": [dict(message) for message in checked_messages(turn.messages, "messages")],
        "metrics": checked_numbers(turn.metrics, "metrics"),
    }
    if turn.rewards:
        seen["rewards"] = checked_numbers(turn.rewards, "rewards")
    if turn.final:
        seen["final"] = True
    reward = None if turn.reward is None else checked_number(turn.reward, "reward")
    return _with_info(seen, turn.info), reward, turn.done


def _tools(tools: Any) -> list[dict[str, Any]]:
    if isinstance(tools, (str, bytes)) or not isinstance(tools, Sequence):
        raise BrokenContract(f"tools must be a list of JSON schemas, not {shown(tools)}")
    for number, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise BrokenContract(f"tools[{number}] must have a function with a name, not {shown(tool)}")
        if problem := json_problem(tool):
            raise BrokenContract(f"tools[{number}]: {problem}")
    return [dict(tool) for tool in tools]


def _with_info(seen: dict[str, Any], info: Any) -> dict[str, Any]:
    if not isinstance(info, Mapping):
        raise BrokenContract(f"info must be a map, not {shown(info)}")
    if info:
        if problem := json_problem(info):
            raise BrokenContract(f"info: {problem}")
        seen["info"] = dict(info)
    return seen
