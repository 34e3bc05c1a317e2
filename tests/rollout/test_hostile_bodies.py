"""Hostile bodies over all APIs of the endpoint: each is answered, or refused with status 400 in the
form of its API, with the name of the field at fault."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from realhf.api.tool_parser import MAX_CALLS
from realhf.rollout.episode import EpisodeLimits
from tests.rollout.black_box import Endpoint, FakeTokens, served, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")
LIMITS = EpisodeLimits(max_total_tokens=6000, turn_tokens=20, max_turns=100_000)
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
ANSWER_SCHEMA = {"type": "json_schema", "schema": SCHEMA}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"x": 1}'}}
ITEM = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"x": 1}'}
USE = {"type": "tool_use", "id": "c1", "name": "look", "input": {"x": 1}}
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {
        "model": "policy",
        "messages": [
            {"role": "system", "content": "brief"},
            {"role": "user", "content": [{"type": "text", "text": "look"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "seen"},
        ],
        "tools": [
            {
                "type": "function",
                "function": {"name": "look", "parameters": SCHEMA, "strict": True},
            }
        ],
        "tool_choice": {"type": "function", "function": {"name": "look"}},
        "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
        "stop": ["END"],
        "parallel_tool_calls": False,
        "logprobs": True,
    },
    "responses": {
        "model": "policy",
        "instructions": "brief",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "look"}]},
            {"type": "reasoning", "id": "rs_1", "summary": []},
            ITEM,
            {"type": "function_call_output", "call_id": "c1", "output": "seen"},
            {"type": "message", "role": "assistant", "content": "so"},
            {"type": "message", "role": "user", "content": "again"},
        ],
        "tools": [{"type": "function", "name": "look", "parameters": SCHEMA, "strict": True}],
        "tool_choice": {"type": "function", "name": "look"},
        "text": {"format": {**ANSWER_SCHEMA, "name": "answer"}},
        "include": ["message.output_text.logprobs"],
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "store": False,
    },
    "messages": {
        "model": "policy",
        "max_tokens": 20,
        "system": [{"type": "text", "text": "brief"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "look"}]},
            {
                "role": "assistant",
                "content": [{"type": "thinking", "thinking": "hm", "signature": "s"}, USE],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "seen"}],
            },
        ],
        "tools": [{"name": "look", "input_schema": SCHEMA, "strict": True}],
        "tool_choice": {"type": "tool", "name": "look", "disable_parallel_tool_use": True},
        "output_config": {"format": ANSWER_SCHEMA},
        "stop_sequences": ["END"],
    },
}
VALUES: tuple[Any, ...] = (
    None,
    -1,
    "\ud800",
    [],
    {},
    [None],
    {"type": "\ud800"},
    {"$ref": "#"},
    "x" * 5000,
)
JSON = {"Content-Type": "application/json"}
"""Without it no body is read."""
NO_OBJECTS = (b"\xff\xfe{}", b"null", b"[]", b"1", b'"a"', b"{", b"", b'{"a": ' + b"[" * 5000)
"""Bodies that are no JSON objects, which have no field at fault."""


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each value in a body."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items if isinstance(value, dict | list) else ():
        if isinstance(item, dict | list):
            yield from places(item, (*path, key))
        else:
            yield (*path, key)


def replaced(body: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    changed = json.loads(json.dumps(body))
    parent: Any = changed
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    return changed


def check_refusal(route: str, reply: httpx.Response, place: str) -> dict[str, Any]:
    """Return the error of a reply that is a refusal in the form of its API."""
    assert reply.status_code == 400, (place, reply.status_code, reply.text[:300])
    body = reply.json()
    if route == "messages":
        assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["message"]
    return body["error"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def endpoint() -> AsyncIterator[Endpoint]:
    async with serving(LIMITS) as up:
        yield up


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("route", BODIES)
async def test_a_hostile_value_is_answered_or_its_field_is_named(
    endpoint: Endpoint, route: str
) -> None:
    body = BODIES[route]
    refused = 0
    for path in places(body):
        async with (
            served(endpoint, FakeTokens(lambda _: "ok")) as (server, session, _),
            httpx.AsyncClient(trust_env=False, verify=False, headers=JSON) as http,
        ):
            address = f"{server.base_url(session)}/{route}"
            assert (await http.post(address, json=body)).status_code == 200
            for value in (*VALUES, deep(300)):
                content = json.dumps(replaced(body, path, value))
                reply = await http.post(address, content=content)
                if reply.status_code == 200:
                    continue
                place = f"{'.'.join(map(str, path))} = {str(value)[:40]}"
                error = check_refusal(route, reply, place)
                refused += 1
                named = str(error["param"]).split(".")[0]
                # without the tool, the request for a call of it is wrong
                wrong = ("tool_choice", path[0]) if path[0] == "tools" else (path[0],)
                assert named in wrong, (place, error)
    assert refused > 100


@pytest.mark.parametrize("route", BODIES)
async def test_a_body_that_is_no_object_is_refused(endpoint: Endpoint, route: str) -> None:
    async with (
        served(endpoint, FakeTokens(lambda _: "ok")) as (server, session, _),
        httpx.AsyncClient(trust_env=False, verify=False, headers=JSON) as http,
    ):
        for content in NO_OBJECTS:
            reply = await http.post(f"{server.base_url(session)}/{route}", content=content)
            check_refusal(route, reply, str(content[:20]))
        assert not session.ledger.turns


def with_calls(route: str, count: int) -> tuple[dict[str, Any], str]:
    """A body in which a turn has so many calls, and the field that holds them."""
    if route == "chat/completions":
        calls = [{**CALL, "id": f"c{number}"} for number in range(count)]
        return replaced(
            BODIES[route], ("messages", 2, "tool_calls"), calls
        ), "messages.2.tool_calls"
    if route == "responses":
        calls = [{**ITEM, "call_id": f"c{number}"} for number in range(count)]
        given = [{"role": "user", "content": "look"}, *calls, {"role": "user", "content": "so"}]
        return replaced(BODIES[route], ("input",), given), f"input.{MAX_CALLS + 1}"
    calls = [{**USE, "id": f"c{number}"} for number in range(count)]
    return replaced(BODIES[route], ("messages", 1, "content"), calls), "messages.1.content"


@pytest.mark.parametrize("route", BODIES)
async def test_a_turn_has_as_many_calls_as_a_policy_may_make(
    endpoint: Endpoint, route: str
) -> None:
    async with (
        served(endpoint, FakeTokens(lambda _: "ok")) as (server, session, _),
        httpx.AsyncClient(trust_env=False, verify=False, headers=JSON) as http,
    ):
        address = f"{server.base_url(session)}/{route}"
        body, _ = with_calls(route, MAX_CALLS)
        assert (await http.post(address, json=body)).status_code == 200
        body, field = with_calls(route, MAX_CALLS + 1)
        error = check_refusal(route, await http.post(address, json=body), field)
        assert error["param"] == field and str(MAX_CALLS) in error["message"]
