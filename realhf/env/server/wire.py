"""OpenEnv wire format: JSON text frames, with one reply per request, in order.

Requests are checked by hand-written code, which takes a few microseconds. The environment checks
the data of resets and actions. Source: docs/reference/environment.md 2.1.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

INVALID_JSON = "INVALID_JSON"
UNKNOWN_TYPE = "UNKNOWN_TYPE"
VALIDATION_ERROR = "VALIDATION_ERROR"
EXECUTION_ERROR = "EXECUTION_ERROR"
CAPACITY_REACHED = "CAPACITY_REACHED"
FACTORY_ERROR = "FACTORY_ERROR"
SESSION_ERROR = "SESSION_ERROR"
UNAVAILABLE = "UNAVAILABLE"

MAX_FRAME_BYTES = 1 << 20
"""Largest frame in bytes; also the largest HTTP body."""
MAX_NAME_CHARS = 255
"""Maximum length of the id of an episode, a task or a request."""
MAX_NUMBER = (1 << 63) - 1
"""Largest absolute value of an integer."""

_ALLOWED_KEYS = {
    "reset": frozenset({"type", "data", "id"}),
    "step": frozenset({"type", "data", "id"}),
    "mcp": frozenset({"type", "data", "id"}),
    "state": frozenset({"type", "id"}),
    "close": frozenset({"type", "id"}),
}
Check = Callable[[Any], dict[str, Any]]
"""A function that returns the checked data of a request, or raises WireError."""


class WireError(Exception):
    """Raised for a request that cannot be served.

    ``code``: one of the codes above. ``errors``: the invalid fields. ``retryable``: nothing was
    executed, and the same request may be sent again. ``kind``: how the environment failed, one of
    ``realhf.api.environment.FAILURE_KINDS``, or "".
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        request_id: str | int | None = None,
        field: str = "",
        retryable: bool = False,
        kind: str = "",
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.request_id = request_id
        self.retryable = retryable
        self.kind = kind
        self.errors = [{"loc": field.split("."), "msg": message}] if field else []


@dataclass(frozen=True, slots=True)
class WireRequest:
    """A request whose format and data have been checked."""

    kind: str
    """reset, step, state, mcp or close."""
    data: dict[str, Any]
    """Payload; {} for a request without one."""
    request_id: str | int | None = None
    """Id that the reply repeats."""


def _reject_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_reject_constant)
_ENCODE = json.JSONEncoder(separators=(",", ":")).encode


def parse_request(text: str, check_reset: Check, check_action: Check) -> WireRequest:
    """Parse the request in a text frame. ``check_reset`` and ``check_action`` check the data of a
    reset and of a step. Raises WireError; the session can continue after it."""
    try:
        message = _DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        detail = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise WireError(INVALID_JSON, f"invalid JSON: {detail}"[:200]) from None
    if not isinstance(message, dict):
        raise WireError(VALIDATION_ERROR, "a message is a JSON object")
    request_id = _request_id(message)
    kind = message.get("type")
    if not isinstance(kind, str) or kind not in _ALLOWED_KEYS:
        kind_text = json.dumps(kind)[:64]
        raise WireError(
            UNKNOWN_TYPE, f"unknown message type {kind_text}", request_id=request_id, field="type"
        )
    extra = message.keys() - _ALLOWED_KEYS[kind]
    if extra:
        name = min(extra)[:64]
        text = f"unexpected key {name!a} in a {kind} message"
        raise WireError(VALIDATION_ERROR, text, request_id=request_id, field=name)
    try:
        if kind == "step":
            data = check_action(message.get("data"))
        elif kind == "reset":
            data = check_reset(message.get("data"))
        elif kind == "mcp":
            data = require_object(message.get("data"), "mcp needs data: a JSON-RPC request")
        else:
            data = {}
    except WireError as error:
        error.request_id = request_id
        raise
    return WireRequest(kind, data, request_id)


def _request_id(message: dict[str, Any]) -> str | int | None:
    if "id" not in message:
        return None
    value = message["id"]
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise WireError(VALIDATION_ERROR, "id must be a string or an integer", field="id")
    if problem := size_problem(value):
        raise WireError(VALIDATION_ERROR, f"id {problem}", field="id")
    return value


def size_problem(value: Any) -> str:
    """Return why an identifier (a string or number) is too large or cannot be encoded; "" if it is
    valid."""
    if isinstance(value, str):
        if len(value) > MAX_NAME_CHARS:
            return f"is longer than {MAX_NAME_CHARS} characters"
        if any("\ud800" <= char <= "\udfff" for char in value):
            return "is not valid Unicode text"
    if isinstance(value, int) and abs(value) > MAX_NUMBER:
        return f"is not from -{MAX_NUMBER} to {MAX_NUMBER}"
    return ""


def require_object(data: Any, problem: str) -> dict[str, Any]:
    """Return ``data`` if it is an object; otherwise raise WireError with the message
    ``problem``."""
    if not isinstance(data, dict):
        raise WireError(VALIDATION_ERROR, problem, field="data")
    return data


RESET_TYPES: Mapping[str, tuple[type, ...]] = {
    "seed": (int,),
    "episode_id": (str,),
    "task": (dict,),
    "task_id": (int, str),
    "split": (str,),
}


def validate_reset_data(
    data: Any, types_of: Mapping[str, tuple[type, ...]] = RESET_TYPES
) -> dict[str, Any]:
    """Return the checked data of a reset; {} if ``data`` is None. Each key of ``types_of`` must
    have one of its types or be null. Raises WireError."""
    if data is None:
        return {}
    data = require_object(data, "reset data must be an object")
    for key, types in types_of.items():
        value = data.get(key)
        is_bool = isinstance(value, bool) and bool not in types
        if value is not None and (is_bool or not isinstance(value, types)):
            names = " or ".join(kind.__name__ for kind in types)
            raise WireError(VALIDATION_ERROR, f"{key} must be {names} or null", field=f"data.{key}")
        if problem := size_problem(value):
            raise WireError(VALIDATION_ERROR, f"{key} {problem}", field=f"data.{key}")
    return data


def encode_reply(kind: str, data: Mapping[str, Any], request_id: str | int | None = None) -> str:
    """Return the text of a reply frame. Raises ValueError or TypeError for a value that JSON cannot
    represent."""
    reply: dict[str, Any] = {"type": kind, "data": data}
    if request_id is not None:
        reply["id"] = request_id
    return _ENCODE(reply)


def encode_observation(
    observation: Mapping[str, Any],
    reward: float | None,
    done: bool,
    request_id: str | int | None = None,
) -> str:
    """Return the reply to a reset or step. A reward that is not finite is sent as null."""
    reply = {"observation": observation, "reward": finite_or_none(reward), "done": done}
    return encode_reply("observation", reply, request_id)


def finite_or_none(reward: float | None) -> float | None:
    """Return the reward, or None if it is not finite, because JSON cannot represent it."""
    return reward if reward is not None and math.isfinite(reward) else None


def encode_error(error: WireError) -> str:
    """Return an error frame:
    ``{"type":"error","data":{"message","code","kind"?,"errors"?,"retryable"?}}``."""
    data: dict[str, Any] = {"message": error.message, "code": error.code}
    if error.kind:
        data["kind"] = error.kind
    if error.retryable:
        data["retryable"] = True
    if error.errors:
        data["errors"] = error.errors
    return encode_reply("error", data, error.request_id)
