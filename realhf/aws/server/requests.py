"""Checks what an agent sends: the data of a reset and of a step (docs/reference/environment.md 2.1)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from realhf.env.server import wire
from realhf.env.server.wire import VALIDATION_ERROR, WireError, checked_object

MAX_METADATA_CHARS = 16 << 10
_ACTION_KEYS = frozenset({"command", "metadata"})
_RESET_TYPES: Mapping[str, tuple[type, ...]] = MappingProxyType(
    {
        "seed": (int,),
        "episode_id": (str,),
        "task": (dict,),
        "task_id": (int, str),
        "chaos": (bool,),
        "split": (str,),
    }
)
"""In the order in which mistakes are told."""


def checked_action(data: Any, max_command_bytes: int) -> dict[str, Any]:
    """Check an action, the data of a step. Raises WireError."""
    data = checked_object(data, "step needs data: an object with a command")
    command = data.get("command")
    if not isinstance(command, str):
        raise WireError(VALIDATION_ERROR, "command must be a string", field="data.command")
    if len(data) > 1 and (extra := data.keys() - _ACTION_KEYS):
        name = min(extra)[:64]
        raise WireError(VALIDATION_ERROR, f"unexpected key {name!a} in the action", field=f"data.{name}")
    if data.get("metadata") is not None and not _is_small_object(data["metadata"]):
        text = f"metadata must be an object of at most {MAX_METADATA_CHARS} characters of JSON, or null"
        raise WireError(VALIDATION_ERROR, text, field="data.metadata")
    try:
        size = len(command.encode())
    except UnicodeEncodeError:
        raise WireError(VALIDATION_ERROR, "command is not valid Unicode text", field="data.command") from None
    if size > max_command_bytes:
        raise WireError(VALIDATION_ERROR, f"command of {size} bytes, at most {max_command_bytes}", field="data.command")
    return data


def checked_reset(data: Any) -> dict[str, Any]:
    """Check the data of a reset, {} where there is none. Raises WireError."""
    return wire.checked_reset(data, _RESET_TYPES)


def _is_small_object(value: Any) -> bool:
    return isinstance(value, dict) and len(json.dumps(value, separators=(",", ":"))) <= MAX_METADATA_CHARS
