"""Serves the Model Context Protocol's part of the wire: JSON-RPC 2.0 with one tool, ``aws``.

Source: docs/reference/environment.md 2.1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from realhf.env.server.wire import size_problem

PARSE_ERROR = -32700
INVALID_REQUEST = -32600
UNKNOWN_METHOD = -32601
INVALID_PARAMS = -32602
SERVER_ERROR = -32000

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
Step = tuple[Mapping[str, Any], float | None, bool]


def rpc_result(request_id: Any, result: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON-RPC reply with this result."""
    return {"jsonrpc": "2.0", "id": request_id, "result": dict(result)}


def rpc_error(request_id: Any, code: int, message: str, data: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return a JSON-RPC error reply; ``data`` is left out when it is empty."""
    error: dict[str, Any] = {"code": code, "message": message}
    return {"jsonrpc": "2.0", "id": request_id, "error": error | ({"data": dict(data)} if data else {})}


def checked(request: Any, max_command_bytes: int) -> dict[str, Any] | None:
    """Return the answer to a request that is wrong, or that needs no simulator; None for a sound tools/call."""
    if not isinstance(request, Mapping):
        return rpc_error(None, INVALID_REQUEST, "a request is an object")
    request_id = request.get("id")
    if isinstance(request_id, bool) or not isinstance(request_id, str | int | None):
        return rpc_error(None, INVALID_REQUEST, "id is a string or an integer")
    if problem := size_problem(request_id):
        return rpc_error(None, INVALID_REQUEST, f"id {problem}")
    if request.get("jsonrpc") != "2.0":
        return rpc_error(request_id, INVALID_REQUEST, "jsonrpc is '2.0'")
    if request.get("method") == "tools/list":
        return rpc_result(request_id, {"tools": [TOOL]})
    if request.get("method") != "tools/call":
        return rpc_error(request_id, UNKNOWN_METHOD, "known methods: tools/list, tools/call")
    problem = _parameter_problem(request.get("params"), max_command_bytes)
    return rpc_error(request_id, INVALID_PARAMS, problem) if problem else None


def _parameter_problem(params: Any, max_command_bytes: int) -> str:
    if not isinstance(params, Mapping) or params.get("name") != TOOL["name"]:
        return "params name the tool 'aws'"
    arguments = params.get("arguments")
    if not isinstance(arguments, Mapping) or set(arguments) != {"command"} or not isinstance(arguments["command"], str):
        return "arguments hold one text: command"
    try:
        too_long = len(arguments["command"].encode()) > max_command_bytes
    except UnicodeEncodeError:
        return "command is not valid Unicode text"
    return f"command is longer than {max_command_bytes} bytes" if too_long else ""


def call_tool(request: Mapping[str, Any], step: Callable[[str], Step]) -> dict[str, Any]:
    """Run a checked tools/call as a step of the episode; the structured content is the whole reply of a step."""
    observation, reward, done = step(request["params"]["arguments"]["command"])
    failed = not observation.get("command_success", False)
    text = observation.get("error") if failed else observation.get("command_output")
    return rpc_result(
        request.get("id"),
        {
            "content": [{"type": "text", "text": text or ""}],
            "isError": failed,
            "structuredContent": {"observation": dict(observation), "reward": reward, "done": done},
        },
    )
