"""Model Context Protocol over the server's connections: JSON-RPC 2.0 with the tools of the
environment.

Source: docs/reference/environment.md 2.1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from realhf.env.server.interfaces import Player, Reply, ServedEnvironment
from realhf.env.server.wire import size_problem

PARSE_ERROR = -32700
INVALID_REQUEST = -32600
UNKNOWN_METHOD = -32601
INVALID_PARAMS = -32602
SERVER_ERROR = -32000


def rpc_result(request_id: Any, result: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON-RPC reply with this result."""
    return {"jsonrpc": "2.0", "id": request_id, "result": dict(result)}


def rpc_error(
    request_id: Any, code: int, message: str, data: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return a JSON-RPC error reply; ``data`` is left out when it is empty."""
    error: dict[str, Any] = {"code": code, "message": message}
    return {
        "jsonrpc": "2.0",
        "id": request_id,
        "error": error | ({"data": dict(data)} if data else {}),
    }


def check_request(request: Any, served: ServedEnvironment) -> dict[str, Any] | None:
    """Return the reply to an invalid request, or to a request that needs no session; None for a
    request that ``answer_request`` must answer."""
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
        tools = served.tools(None)
        return None if tools is None else _tools_reply(request_id, tools)
    if request.get("method") != "tools/call":
        return rpc_error(request_id, UNKNOWN_METHOD, "known methods: tools/list, tools/call")
    problem = served.call_problem(request.get("params"))
    return rpc_error(request_id, INVALID_PARAMS, problem) if problem else None


def answer_request(
    request: Mapping[str, Any],
    served: ServedEnvironment,
    player: Player,
    step: Callable[[dict[str, Any]], Reply],
) -> dict[str, Any]:
    """Answer a checked request: list the tools of the player's episode, or play a tools/call as an
    action by calling ``step``. The structured content is the complete reply of the step. Raises
    WireError."""
    if request["method"] == "tools/list":
        return _tools_reply(request.get("id"), served.tools(player) or ())
    observation, reward, done = step(served.call_action(request["params"]))
    text, failed = served.call_answer(observation)
    return rpc_result(
        request.get("id"),
        {
            "content": [{"type": "text", "text": text}],
            "isError": failed,
            "structuredContent": {"observation": dict(observation), "reward": reward, "done": done},
        },
    )


def _tools_reply(request_id: Any, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return rpc_result(request_id, {"tools": [dict(tool) for tool in tools]})
