"""The Responses API of OpenAI (``POST responses``): requests, answers and stream events.

A request becomes a conversation of ``OpenAiMessage`` objects, in which the items of one turn of the
policy (reasoning, message, function calls) are one message again. So a conversation continues
whether its client sends all items back or names the last response (``previous_response_id``).
"""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, StrictBool

from realhf.api.chat_template import TemplateChat
from realhf.rollout.answer_rules import AnswerRules, JsonAnswer, ToolChoice, check_tool_names
from realhf.rollout.api_errors import ApiError, check_fields, invalid, openai_error, unsupported
from realhf.rollout.endpoint_api import (
    MODEL,
    EndpointApi,
    answer_request,
    count_reasoning,
    format_event,
    json_response,
)
from realhf.rollout.json_schema import read_schema, read_strict_schemas
from realhf.rollout.openai_requests import (
    MAX_MESSAGES,
    MAX_TOOLS,
    OpenAiCall,
    OpenAiMessage,
    ToolSchemas,
    check_call_count,
    check_message,
    name_tool_results,
    read_text,
    validate_part,
)
from realhf.rollout.openai_sessions import OpenAiSession, OpenAiSessions, OpenTurn

_PREFIX = "resp_"
"""Start of the ids of responses."""
_ITEM_ID = re.compile(r"(?:rs|msg|fc)_([0-9a-f]{24})(?:_\d+)?")
"""Form of the ids of output items, which contain the id of their response without its prefix."""
_CUT_REASON = "max_output_tokens"
"""Reason of an incomplete response; the OpenAI Agents SDK raises an error that contains it."""
_LOGPROBS = "message.output_text.logprobs"
"""Value of ``include`` that asks for log-probabilities."""
_TEXT_TYPES = ("input_text", "output_text", "text")
"""Types of content parts that are read."""
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
"""Maps each role of messages to the role that chat templates use."""
_SERVED_ITEMS = "message, function_call, function_call_output, reasoning and item_reference"
"""Types of input items, for error messages."""
_IGNORED = frozenset(
    {
        "max_output_tokens",
        "max_tool_calls",
        "model",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "reasoning",
        "safety_identifier",
        "service_tier",
        "stream_options",
        "temperature",
        "top_p",
        "user",
    }
)
"""Fields that are ignored: the policy is sampled as it is trained."""
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "background": ((False,), "a response is returned when it is complete"),
    "context_management": (([],), "the agent shortens its conversation"),
    "conversation": ((), "use previous_response_id, or send the whole input"),
    "moderation": ((), "nothing is moderated"),
    "prompt": ((), "write it into instructions and input"),
    "top_logprobs": ((0,), "logprobs are those of the sampled tokens only"),
    "truncation": (("disabled",), "the agent shortens its conversation"),
}
"""Fields that would change the answer and are not served: the values that ask for nothing, and what
is served."""


class FunctionCallItem(BaseModel):
    """Input item with a function call of an earlier turn."""

    call_id: str = Field(max_length=256)
    name: str = Field(min_length=1, max_length=256)
    arguments: str


class FunctionOutputItem(BaseModel):
    """Input item with the result of a function call: text, or a list of text parts."""

    call_id: str = Field(max_length=256)
    output: Any


class FunctionTool(BaseModel):
    """Function that the policy may call. The policy sees name, description and parameters."""

    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None

    def schema_for_template(self) -> dict[str, Any]:
        """Return the tool in the form of the chat API, which chat templates expect."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        if self.parameters is not None:
            function["parameters"] = self.parameters
        return {"type": "function", "function": function}


class TextOptions(BaseModel):
    """Format of the answer's text; ``verbosity`` is ignored."""

    format: dict[str, Any] | None = None


class ResponsesRequest(BaseModel):
    """Body of a request: the fields that the endpoint honours, and all others in ``model_extra``,
    of which those in ``_IGNORED`` are ignored and the others refused."""

    model_config = ConfigDict(extra="allow")
    input: Any = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: StrictBool | None = None
    stream: StrictBool | None = None
    tools: list[dict[str, Any]] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Any = None
    parallel_tool_calls: StrictBool | None = None
    text: TextOptions | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None

    def read_conversation(self, session: OpenAiSession) -> tuple[list[OpenAiMessage], str]:
        """Return the conversation that the request continues or starts (the instructions, the
        stored conversation up to the previous response, the input), and the id of the response that
        is its last assistant message, "" if the request does not contain it.

        Instructions of earlier requests are not part of a stored conversation. Raises ApiError for
        fields and items that are not served and for ids that the session does not know.
        """
        check_fields(self.model_extra, _IGNORED, _REFUSED)
        earlier: Sequence[OpenAiMessage] = ()
        if self.previous_response_id is not None:
            stored = session.stored.get(self.previous_response_id)
            if stored is None:
                raise _not_found("previous_response_id", "response", self.previous_response_id)
            earlier = stored
        added, after = _read_items(self.input, session)
        if not any(message.role == "assistant" for message in added):
            after = self.previous_response_id or ""
        messages = [*earlier, *added]
        if not messages:
            raise invalid("input", "a text or a list of items is required")
        if len(messages) > MAX_MESSAGES:
            raise invalid("input", f"the conversation has more than {MAX_MESSAGES} messages")
        if self.instructions:
            system = OpenAiMessage("system", self.instructions)
            check_message(system, "instructions")
            messages = [system, *messages]
        return name_tool_results(messages), after

    def without_instructions(self, messages: Sequence[OpenAiMessage]) -> list[OpenAiMessage]:
        """Return what later requests continue by the id of the response: ``messages`` without the
        instructions of this request."""
        return list(messages[1 if self.instructions else 0 :])

    def read_tools(self) -> tuple[FunctionTool, ...]:
        """Return the offered tools. Raises ApiError for tools that are no functions."""
        tools = []
        for number, tool in enumerate(self.tools or ()):
            kind = tool.get("type")
            if kind != "function":
                raise unsupported(
                    f"tools.{number}.type", f"only function is served, not {str(kind)[:32]!r}"
                )
            tools.append(validate_part(FunctionTool, tool, f"tools.{number}"))
        return tuple(tools)

    def read_rules(self, tools: Sequence[FunctionTool]) -> AnswerRules:
        """Return what the request asks of the answer. Raises ApiError."""
        choice, names = _read_tool_choice(self.tool_choice)
        rules = AnswerRules(
            tool_choice=choice,
            tool_names=names,
            parallel_calls=self.parallel_tool_calls is not False,
            json=_read_format(self.text.format if self.text is not None else None),
            strict_tools=read_strict_schemas(
                (tool.name, tool.parameters or {}, f"tools.{number}.parameters")
                for number, tool in enumerate(tools)
                if tool.strict
            ),
        )
        check_tool_names(rules, [tool.schema_for_template() for tool in tools])
        return rules


def _read_tool_choice(value: Any) -> tuple[ToolChoice, tuple[str, ...]]:
    """Return whether the answer has to contain calls, and the tools that it may call. Raises
    ApiError."""
    match value:
        case None | "auto":
            return "auto", ()
        case "none":
            return "none", ()
        case "required":
            return "required", ()
        case {"type": "function", "name": str(name)}:
            return "required", (name,)
        case {"type": "allowed_tools", "mode": ("auto" | "required") as mode, "tools": list(tools)}:
            names = [
                tool["name"]
                for tool in tools
                if isinstance(tool, Mapping)
                and tool.get("type") == "function"
                and isinstance(tool.get("name"), str)
            ]
            if names and len(names) == len(tools):
                return mode, tuple(names)
    raise unsupported(
        "tool_choice", "auto, none, required, a function by its name, or allowed_tools are served"
    )


def _read_format(value: Any) -> JsonAnswer | None:
    match value:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return JsonAnswer()
        case {"type": "json_schema", "schema": schema}:
            return JsonAnswer(read_schema(schema, "text.format.schema"))
        case {"type": "json_schema"}:
            raise invalid("text.format.schema", "the schema is missing")
    raise unsupported("text.format", "text, json_object and json_schema are served")


def _not_found(param: str, what: str, key: Any) -> ApiError:
    text = f"{param}: this session stored no {what} {str(key)[:64]!r}"
    return ApiError(404, f"{what}_not_found", text, param)


def _read_items(value: Any, session: OpenAiSession) -> tuple[list[OpenAiMessage], str]:
    """Return the messages of the request's input, and the id of the response that is the last
    assistant message, "" if its items contain none. Raises ApiError, which names the item."""
    if value is None or isinstance(value, str):
        return [] if value is None else [OpenAiMessage("user", value)], ""
    if not isinstance(value, list):
        raise invalid("input", "must be text or a list of items")
    messages: list[OpenAiMessage] = []
    # index of the turn to which the next call may belong
    turn: int | None = None
    # response of that turn, and of the reasoning before the current item; "" if unknown
    reply = ""
    reasoning = ""
    for number, item in enumerate(_resolve_references(value, session)):
        param = f"input.{number}"
        if not isinstance(item, Mapping):
            raise invalid(param, "must be an item")
        kind = item.get("type") or ("message" if "role" in item else None)
        if kind == "reasoning":
            # The reasoning of a turn precedes its other items; the ids of the turn contain it.
            turn = None
            reasoning = _find_reply(item)
            continue
        message = _read_item(kind, item, param)
        check_message(message, param)
        # Clients may put the result of each call directly after it.
        own = _find_reply(item)
        if message.calls and turn is not None:
            earlier = messages[turn]
            if own and reply:
                is_same = own == reply
            elif turn == len(messages) - 1:
                is_same = not session.ledger.are_two_turns(earlier, message.calls)
            else:
                is_same = session.ledger.share_turn(earlier.calls, message.calls)
            if is_same:
                messages[turn] = replace(earlier, calls=earlier.calls + message.calls)
                check_call_count(messages[turn], param)
                reply = reply or own
                continue
        messages.append(message)
        if len(messages) > MAX_MESSAGES:
            raise invalid("input", f"the conversation has more than {MAX_MESSAGES} messages")
        if message.role == "assistant":
            turn = len(messages) - 1
            reply = own or reasoning
        elif message.role != "tool":
            turn = None
        reasoning = ""
    return messages, reply


def _find_reply(item: Mapping[str, Any]) -> str:
    """Return the id of the response that has an item as output; "" if its id is of another
    form."""
    match = _ITEM_ID.fullmatch(str(item.get("id")))
    return "" if match is None else _PREFIX + match[1]


def _read_item(kind: Any, item: Mapping[str, Any], param: str) -> OpenAiMessage:
    if kind == "message":
        role = _ROLES.get(str(item.get("role")))
        if role is None:
            raise invalid(f"{param}.role", f"must be one of {', '.join(_ROLES)}")
        return OpenAiMessage(role, read_text(item.get("content"), f"{param}.content", _TEXT_TYPES))
    if kind == "function_call":
        call = validate_part(FunctionCallItem, item, param)
        return OpenAiMessage(
            "assistant", "", (OpenAiCall(call.call_id, call.name, call.arguments),)
        )
    if kind == "function_call_output":
        result = validate_part(FunctionOutputItem, item, param)
        text = read_text(result.output, f"{param}.output", _TEXT_TYPES)
        return OpenAiMessage("tool", text, call_id=result.call_id)
    raise unsupported(f"{param}.type", f"items are {_SERVED_ITEMS}, not {str(kind)[:32]!r}")


def read_output(items: Sequence[Mapping[str, Any]]) -> OpenAiMessage:
    """Return the turn that a response has as its output. Raises ApiError for items that are not
    those of a turn."""
    pieces = [
        _read_item(item.get("type"), item, f"output.{number}")
        for number, item in enumerate(items)
        if item.get("type") != "reasoning"
    ]
    return OpenAiMessage(
        "assistant",
        "".join(piece.content for piece in pieces),
        tuple(call for piece in pieces for call in piece.calls),
    )


def _resolve_references(items: Sequence[Any], session: OpenAiSession) -> Iterator[Any]:
    """Yield the items, with the stored output item in place of each reference to one."""
    for number, item in enumerate(items):
        if not isinstance(item, Mapping) or item.get("type") != "item_reference":
            yield item
            continue
        stored = session.stored_items.get(str(item.get("id")))
        if stored is None:
            raise _not_found(f"input.{number}.id", "item", item.get("id"))
        yield stored


def add_routes(app: FastAPI, sessions: OpenAiSessions) -> None:
    """Add ``responses``."""

    @app.post("/sessions/{key}/v1/responses")
    async def respond(key: str, body: ResponsesRequest, request: Request) -> Response:
        session = sessions.find(key)
        messages, after = body.read_conversation(session)
        tools = body.read_tools()
        rules = body.read_rules(tools)
        schemas: ToolSchemas = tuple(tool.schema_for_template() for tool in tools)
        turn = await answer_request(
            session, request, messages, schemas, rules, id_prefix=_PREFIX, after=after
        )
        if turn is None:
            return Response(status_code=499)
        answer = build_response(turn, body, sessions.chat)
        if body.store is not False:
            session.store(turn, body.without_instructions(messages), items=answer["output"])
        if body.stream:
            return StreamingResponse(stream_response(answer), media_type="text/event-stream")
        return json_response(answer)


RESPONSES = EndpointApi(("POST responses",), add_routes, openai_error)


def build_response(turn: OpenTurn, request: ResponsesRequest, chat: TemplateChat) -> dict[str, Any]:
    """Return the body of a ``response``."""
    is_cut = turn.finish_reason == "length"
    now = int(time.time())
    logprobs = _list_logprobs(turn, chat) if _LOGPROBS in (request.include or ()) else None
    text_format = request.text.format if request.text is not None else None
    return {
        "id": turn.reply,
        "object": "response",
        "created_at": now,
        "completed_at": None if is_cut else now,
        "status": "incomplete" if is_cut else "completed",
        "error": None,
        "incomplete_details": {"reason": _CUT_REASON} if is_cut else None,
        "instructions": request.instructions,
        "max_output_tokens": None,
        "metadata": request.metadata or {},
        "model": MODEL,
        "output": list(_output_items(turn, logprobs)),
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "reasoning": {"effort": None, "summary": None},
        "store": request.store is not False,
        "temperature": None,
        "text": {"format": text_format or {"type": "text"}},
        "tool_choice": request.tool_choice or "auto",
        "tools": request.tools or [],
        "top_p": None,
        "truncation": "disabled",
        "usage": _usage(turn, chat),
    }


def _output_items(
    turn: OpenTurn, logprobs: list[dict[str, Any]] | None
) -> Iterator[dict[str, Any]]:
    """Yield the items of a turn: its reasoning, its text (always without calls), its calls."""
    key = turn.reply.removeprefix(_PREFIX)
    status = "incomplete" if turn.finish_reason == "length" else "completed"
    answer = turn.answer
    if turn.parsed.reasoning:
        yield {
            "id": f"rs_{key}",
            "type": "reasoning",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": turn.parsed.reasoning}],
            "status": status,
        }
    if answer.content or not answer.calls:
        part = {"type": "output_text", "text": answer.content, "annotations": []}
        yield {
            "id": f"msg_{key}",
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [part if logprobs is None else part | {"logprobs": logprobs}],
        }
    for number, call in enumerate(answer.calls):
        yield {
            "id": f"fc_{key}_{number}",
            "type": "function_call",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
            "status": status,
        }


def _usage(turn: OpenTurn, chat: TemplateChat) -> dict[str, Any]:
    n_prompt = len(turn.prompt)
    n_sampled = len(turn.ids)
    return {
        "input_tokens": n_prompt,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": n_sampled,
        "output_tokens_details": {"reasoning_tokens": count_reasoning(turn, chat)},
        "total_tokens": n_prompt + n_sampled,
    }


def _list_logprobs(turn: OpenTurn, chat: TemplateChat) -> list[dict[str, Any]]:
    """Return the log-probabilities of all tokens of a turn, also those of reasoning and calls."""
    return [
        {
            "token": chat.decode([token]),
            "bytes": list(chat.bytes_of(token) or ()),
            "logprob": value,
            "top_logprobs": [],
        }
        for token, value in zip(turn.ids, turn.logprobs, strict=True)
    ]


async def stream_response(body: Mapping[str, Any]) -> AsyncIterator[str]:
    """Yield a response as server-sent events, each with its sequence number."""
    for number, event in enumerate(_list_events(body)):
        yield format_event(event | {"sequence_number": number}, event["type"])


def _list_events(body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    begun = {
        **body,
        "status": "in_progress",
        "output": [],
        "usage": None,
        "completed_at": None,
        "incomplete_details": None,
    }
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for index, item in enumerate(body["output"]):
        empty = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        opened = item | empty | {"status": "in_progress"}
        yield {"type": "response.output_item.added", "output_index": index, "item": opened}
        place = {"item_id": item["id"], "output_index": index}
        if item["type"] == "function_call":
            yield from _call_events(item, place)
        for number, part in enumerate(item.get("content", ())):
            yield from _part_events(part, place | {"content_index": number})
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": f"response.{body['status']}", "response": dict(body)}


def _call_events(item: Mapping[str, Any], place: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    kind = "response.function_call_arguments"
    yield {"type": f"{kind}.delta", **place, "delta": item["arguments"]}
    yield {"type": f"{kind}.done", **place, "name": item["name"], "arguments": item["arguments"]}


def _part_events(part: Mapping[str, Any], place: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    is_text = part["type"] == "output_text"
    kind = "response.output_text" if is_text else "response.reasoning_text"
    values = {"logprobs": part.get("logprobs", [])} if is_text else {}
    empty = {**part, "text": ""} | ({"logprobs": []} if "logprobs" in part else {})
    yield {"type": "response.content_part.added", **place, "part": empty}
    yield {"type": f"{kind}.delta", **place, "delta": part["text"], **values}
    yield {"type": f"{kind}.done", **place, "text": part["text"], **values}
    yield {"type": "response.content_part.done", **place, "part": dict(part)}
