"""Validation of the messages and data rows that users provide. No other module validates them.

These modules call it:

- rows of demonstrations (JSONL of supervised training and of a warm start):
  ``realhf.data.chat_dataset``; the vocabulary that the built-in policy learns from them:
  ``realhf.backends.builtin_policy``;
- rows of tasks (``env.data``, ``env.heldout_data`` and an author's ``tasks(split)``):
  ``realhf.env.loader``;
- openings and turns of every environment that is played here: ``realhf.rollout.player``; before
  that, those of an author's class in ``realhf.env.loader`` and of a remote server in
  ``realhf.env.adapters.openenv_episode``; for serving, ``realhf.env.server.spec``; for trying an
  environment out, ``realhf.env.check``;
- requests of a program of the package ``verifiers`` to its model:
  ``realhf.env.adapters.policy_endpoint``;
- requests of an agent to the endpoint of the OpenAI API: ``realhf.rollout.openai_requests``;
- rows of supervised training and of preferences (``dataset.path``): ``realhf.data.row_formats``.

The trajectory server forwards ``messages`` to other trainers by its own rules
(docs/reference/trajectory.md 2.6): each message needs a role and a content, neither of which is
interpreted, and training uses token ids.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from realhf.base.json_values import format_value, json_problem

ROLES = ("system", "user", "assistant", "tool")
"""Roles of messages."""
ANSWERING_ROLES = ("system", "user", "tool")
"""Roles in an environment's answer to a turn. Only the policy sends assistant messages."""
_ASSISTANT_KEYS = ("tool_calls", "reasoning_content", "train")
"""Keys that only an assistant message may have."""
_FOREIGN_KEYS = {
    "weight": "train (true or false)",
    "reasoning": "reasoning_content",
    "thinking": "reasoning_content",
    "function_call": "tool_calls",
}
"""Keys that other programs use in demonstrated turns and that would be ignored here, with the
replacement for each."""


def message_problems(messages: Any, what: str, roles: Sequence[str] = ROLES) -> Iterator[str]:
    """Yield a sentence, beginning with ``what``, for each invalid message.

    A message is a JSON object with a known ``role``. Its ``content`` must be a string, which may be
    null or missing only if there are ``tool_calls``. Each call has a name and arguments; these are
    an object, or a string with the object as JSON. Only assistant messages may have
    ``reasoning_content`` (a string) and ``train`` (true or false). ``name`` and ``tool_call_id``
    are strings. Null counts as missing, and so does an empty list of ``tool_calls``, because chat
    exports contain one in every message.

    roles: the valid roles, which the error about an invalid role lists.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        yield f"{what} must be a list of messages, not {format_value(messages)}"
        return
    for number, message in enumerate(messages):
        if problem := _message_problem(message, roles):
            yield f"{what}[{number}]{problem}"


def _message_problem(message: Any, roles: Sequence[str]) -> str:
    """Return what is wrong with a message; "" if it is valid."""
    if not isinstance(message, Mapping):
        return f" must be a map with role and content, not {format_value(message)}"
    calls = message.get("role") == "assistant" and message.get("tool_calls") not in (None, [])
    for key in ("role",) if calls else ("role", "content"):
        if key not in message:
            return f" has no {key}: {format_value(dict(message))}"
    if message["role"] not in ROLES:
        return f": the role is one of {', '.join(roles)}: {format_value(message['role'])}"
    content = message.get("content")
    if not isinstance(content, str) and not (calls and content is None):
        return f": the content must be text, not {format_value(content)}"
    problem = _optional_problem(message) or json_problem(message)
    return f": {problem}" if problem else ""


def _optional_problem(message: Mapping[str, Any]) -> str:
    """Return what is wrong with the optional keys of a message; "" if they are valid."""
    present = {key: value for key, value in message.items() if value is not None}
    if present.get("tool_calls") == []:
        del present["tool_calls"]
    for key in _ASSISTANT_KEYS:
        if key in present and message["role"] != "assistant":
            return f"{key} is for messages of the role assistant, not {message['role']}"
    for key in ("name", "tool_call_id", "reasoning_content"):
        if key in present and not isinstance(present[key], str):
            return f"{key} must be text, not {format_value(present[key])}"
    if "train" in present and not isinstance(present["train"], bool):
        return f"train must be true or false, not {format_value(present['train'])}"
    return _calls_problem(present["tool_calls"]) if "tool_calls" in present else ""


def _calls_problem(calls: Any) -> str:
    if isinstance(calls, (str, bytes, Mapping)) or not isinstance(calls, Sequence):
        return f"tool_calls must be a list, not {format_value(calls)}"
    for number, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if (
            not isinstance(function, Mapping)
            or not isinstance(function.get("name"), str)
            or not function["name"]
        ):
            form = '{"type": "function", "function": {"name": ..., "arguments": ...}}'
            return f"tool_calls[{number}] must be {form}, not {format_value(call)}"
        if not _is_json_object(function.get("arguments")):
            arguments_text = format_value(function.get("arguments"))
            return f"tool_calls[{number}].arguments must be an object or its JSON text, not {arguments_text}"
    return ""


def _is_json_object(value: Any) -> bool:
    """Return whether a value is a mapping, or a string that contains a JSON object."""
    if not isinstance(value, str):
        return isinstance(value, Mapping)
    try:
        return isinstance(json.loads(value), dict)
    except (ValueError, RecursionError):
        return False


def find_missing_request(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return why valid messages do not ask the policy for anything, as the end of a sentence; "" if
    they ask for something.

    Messages ask for something if any message other than a system message has text or calls.
    """
    if not messages:
        return "has no message"
    if any(_has_content(message) for message in messages if message["role"] != "system"):
        return ""
    if all(message["role"] == "system" for message in messages):
        return "has only a system message, so it asks the policy nothing"
    return "is blank, so it asks the policy nothing"


def _has_content(message: Mapping[str, Any]) -> bool:
    """Return whether a message has text or calls."""
    return bool((message.get("content") or "").strip() or message.get("tool_calls"))


def demonstration_problems(row: Mapping[str, Any]) -> Iterator[str]:
    """Yield each problem of a demonstration row.

    A row has ``messages``, in which an assistant answers earlier messages, and optionally
    ``tools``, a list of schemas. Turns to be trained on must not be empty.
    """
    if "messages" not in row:
        yield f"the row has no messages (it has {', '.join(map(format_value, [*row][:8])) or 'nothing'})"
        return
    messages = row["messages"]
    if problems := [*message_problems(messages, "messages")]:
        yield from problems
        return
    if row.get("tools") is not None:
        yield from tool_problems(row["tools"])
    turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns or turns[0] == 0:
        yield "messages: a demonstration needs an assistant turn, and a message before the first one"
    elif problem := find_missing_request(messages[: turns[0]]):
        yield f"messages: the opening {problem}"
    for number in turns:
        yield from (
            f"messages[{number}]: {problem}" for problem in _turn_problems(messages[number])
        )


def _turn_problems(turn: Mapping[str, Any]) -> Iterator[str]:
    """Yield each problem of a demonstrated turn: keys that would be ignored, and an empty turn,
    which would train the policy to write nothing."""
    for key, instead in _FOREIGN_KEYS.items():
        if turn.get(key) is not None:
            yield f"{key} is not read here; write {instead}"
    if turn.get("train") is not False and not (
        _has_content(turn) or (turn.get("reasoning_content") or "").strip()
    ):
        yield (
            "the turn is empty and would train the policy to say nothing; leave it out, or write "
            "train: false"
        )


def tool_problems(tools: Any, what: str = "tools") -> Iterator[str]:
    """Yield a sentence, beginning with ``what``, for each invalid tool schema. A schema is a JSON
    object with a name."""
    if not isinstance(tools, (list, tuple)):
        yield f"{what} must be a list of JSON schemas, not {format_value(tools)}"
        return
    for number, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if (
            not isinstance(function, Mapping)
            or not isinstance(function.get("name"), str)
            or not function["name"]
        ):
            form = '{"type": "function", "function": {"name": ..., ...}}'
            yield f"{what}[{number}] must be {form}, not {format_value(tool)}"
        elif problem := json_problem(tool):
            yield f"{what}[{number}]: {problem}"
