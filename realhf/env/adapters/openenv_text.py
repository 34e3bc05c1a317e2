"""Shows observations of an OpenEnv server to the policy, as text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from realhf.env.client.openenv_client import EnvError
from realhf.env.doors.checks import json_problem, whole_text

_WORDS_OF_THE_WIRE = ("done", "reward", "metadata")
_MOST_PROBLEMS = 3


def observation_text(observation: Mapping[str, Any], field: str, most: int) -> str:
    """One field of an observation, or all of it as JSON where the field is not named or not there; at most ``most``
    characters of it. Raises ValueError for what is not JSON."""
    if problem := json_problem(observation):
        raise ValueError(problem)
    if field and observation.get(field) is not None:
        shown = observation[field]
    else:
        shown = {name: value for name, value in observation.items() if name not in _WORDS_OF_THE_WIRE}
    return cut(shown if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False), most)


def result_text(observation: Mapping[str, Any], most: int) -> str:
    """What a tool of the server returned, or why it could not be called. Raises ValueError for what is not JSON."""
    if problem := json_problem(observation):
        raise ValueError(problem)
    error = observation.get("error")
    if error:
        message = error.get("message") if isinstance(error, Mapping) else error
        return cut(f"error: {message if isinstance(message, str) else json.dumps(error)}", most)
    result = observation.get("result")
    if isinstance(result, Mapping):
        result = next((result[key] for key in ("data", "structured_content") if result.get(key) is not None), result)
    if isinstance(result, Mapping) and isinstance(parts := result.get("content"), list):
        texts = [part["text"] for part in parts if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
        result = "\n".join(texts) if texts else result
    if result is None:
        return observation_text(observation, "", most)
    return cut(result if isinstance(result, str) else json.dumps(result, ensure_ascii=False), most)


def refusal_text(error: EnvError, most: int) -> str:
    """What the policy reads when the server refused its action, with what the server says of each field."""
    said = [f"error: {error}"]
    for detail in error.details[:_MOST_PROBLEMS] if isinstance(error.details, list) else ():
        if isinstance(detail, Mapping) and isinstance(detail.get("msg"), str):
            place = detail.get("loc")
            where = ".".join(map(str, place)) if isinstance(place, list) else ""
            said.append(f"{where[:200]}: {detail['msg']}" if where else detail["msg"])
    return cut("\n".join(said), most)


def cut(text: str, most: int) -> str:
    """The text, or its beginning and how much is left out, in characters that can be encoded."""
    text = whole_text(text)
    return text if len(text) <= most else f"{text[:most]}... ({len(text) - most} more characters)"
