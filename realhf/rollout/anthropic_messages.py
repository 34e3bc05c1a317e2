"""The Messages API of Anthropic (``POST messages``): requests, answers, stream events and errors.

A request becomes a conversation of ``OpenAiMessage`` objects: each ``tool_result`` block is a
message of the role tool, and the blocks of an assistant are one message. So a conversation
continues with the ids that were sampled, although its form differs from the chat API's.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, StrictBool

from realhf.api.chat_template import TemplateChat
from realhf.rollout.answer_rules import (
    AnswerRules,
    JsonAnswer,
    ToolChoice,
    check_stop,
    check_tool_names,
)
from realhf.rollout.api_errors import ApiError, check_fields, invalid, unsupported
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
from realhf.rollout.openai_sessions import OpenAiSessions, OpenTurn

_PREFIX = "msg_"
"""Start of the ids of messages."""
_JOINER = "\n"
"""String between the text blocks of one message."""
_ROLES = ("user", "assistant", "system")
"""Roles of messages in a request."""
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
"""Error type of the API for each HTTP status; those above 499 are ``api_error``, all others
``invalid_request_error``."""
_TOO_LONG = "prompt is too long: "
"""Start of Anthropic's message for a conversation that exceeds the context; clients look for it."""
_IGNORED = frozenset({"cache_control", "model", "thinking"})
"""Fields that are ignored: the policy is sampled as it is trained."""
_IGNORED_OF_TURNS = _IGNORED | {
    "diagnostics",
    "inference_geo",
    "metadata",
    "service_tier",
    "speed",
    "temperature",
    "top_k",
    "top_p",
}
"""Fields that are ignored in requests for a turn."""
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "container": ((), "no code is run here; offer a tool"),
    "context_management": (({}, {"edits": []}), "the agent shortens its conversation"),
    "mcp_servers": (([],), "no server is called here; offer a tool"),
    "thread": ((), "conversations are not held here; send the whole conversation"),
}
"""Fields that would change the answer and are not served: the values that ask for nothing, and what
is served."""


class ToolUseBlock(BaseModel):
    """A tool call of an earlier turn."""

    id: str = Field(max_length=256)
    name: str = Field(min_length=1, max_length=256)
    input: dict[str, Any]


class ToolResultBlock(BaseModel):
    """The result of a tool call: text, or a list of text blocks."""

    tool_use_id: str = Field(max_length=256)
    content: Any = None
    is_error: StrictBool | None = None

    def message(self, param: str) -> OpenAiMessage:
        """Return the result as a message; that of an error starts with the word error."""
        content = "" if self.content is None else self.content
        text = read_text(content, f"{param}.content", ("text",), joiner=_JOINER)
        if self.is_error and not text.lower().startswith("error"):
            text = f"error: {text}"
        return OpenAiMessage("tool", text, call_id=self.tool_use_id)


class CustomTool(BaseModel):
    """Tool that the policy may call. The policy sees name, description and ``input_schema``."""

    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    input_schema: dict[str, Any]
    strict: StrictBool | None = None

    def schema_for_template(self) -> dict[str, Any]:
        """Return the tool in the form of the chat API, which chat templates expect."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": function | {"parameters": self.input_schema}}


class AnthropicToolChoice(BaseModel):
    """Which tools the policy is asked to call."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: StrictBool | None = None

    def read(self) -> tuple[ToolChoice, tuple[str, ...]]:
        """Return whether the answer has to contain calls, and the tools that it may call. Raises
        ApiError."""
        match self.type:
            case "auto":
                return "auto", ()
            case "none":
                return "none", ()
            case "any":
                return "required", ()
            case "tool" if self.name is not None:
                return "required", (self.name,)
        raise unsupported("tool_choice", "auto, any, none, or a tool by its name are served")


class OutputConfig(BaseModel):
    """Format of the answer's text; ``effort`` is ignored."""

    format: dict[str, Any] | None = None

    def read(self) -> JsonAnswer | None:
        """Return which JSON the answer is; None for any text. Raises ApiError."""
        match self.format:
            case None:
                return None
            case {"type": "json_schema", "schema": schema}:
                return JsonAnswer(read_schema(schema, "output_config.format.schema"))
        raise unsupported("output_config.format", "a json_schema with a schema is served")


class CountRequest(BaseModel):
    """Body of a request to count the tokens of a conversation: the fields that the endpoint
    honours, and all others in ``model_extra``, which are ignored or refused."""

    model_config = ConfigDict(extra="allow")
    ignored: ClassVar[frozenset[str]] = _IGNORED
    """Fields that are ignored."""
    messages: list[dict[str, Any]] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: Any = None
    tools: list[dict[str, Any]] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: AnthropicToolChoice | None = None
    output_config: OutputConfig | None = None

    def read_conversation(self) -> list[OpenAiMessage]:
        """Return the messages, the system prompt first. Raises ApiError for fields and blocks that
        are not served."""
        check_fields(self.model_extra, self.ignored, _REFUSED)
        messages: list[OpenAiMessage] = []
        if self.system not in (None, "", []):
            text = read_text(self.system, "system", ("text",), joiner=_JOINER)
            messages.append(OpenAiMessage("system", text))
            check_message(messages[0], "system")
        for number, message in enumerate(self.messages):
            messages += _read_message(message, f"messages.{number}")
            # the results of calls are messages of their own
            if len(messages) > MAX_MESSAGES:
                raise invalid("messages", f"more than {MAX_MESSAGES} messages and results")
        if messages[-1].role == "assistant":
            raise unsupported(
                "messages", "the last one is not the assistant's; a turn cannot be prefilled"
            )
        return name_tool_results(messages)

    def find_reply(self) -> str:
        """Return the id of the answer that is the last message of the assistant; "" if the message
        contains no thinking, whose signature is that id."""
        contents = [
            message.get("content")
            for message in self.messages
            if message.get("role") == "assistant"
        ]
        return find_signature(contents[-1]) if contents else ""

    def read_tools(self) -> tuple[CustomTool, ...]:
        """Return the offered tools. Raises ApiError for tools with a type of their own."""
        tools = []
        for number, tool in enumerate(self.tools or ()):
            kind = tool.get("type")
            if kind not in (None, "custom"):
                raise unsupported(
                    f"tools.{number}.type", f"only custom is served, not {str(kind)[:32]!r}"
                )
            tools.append(validate_part(CustomTool, tool, f"tools.{number}"))
        return tuple(tools)


class MessagesRequest(CountRequest):
    """Body of a request for a turn. ``max_tokens`` is required by the API and ignored: ``gen.*``
    decides."""

    ignored: ClassVar[frozenset[str]] = _IGNORED_OF_TURNS
    max_tokens: int = Field(ge=1)
    stream: StrictBool | None = None
    stop_sequences: list[str] | None = None

    def read_rules(self, tools: Sequence[CustomTool]) -> AnswerRules:
        """Return what the request asks of the answer. Raises ApiError."""
        choice = self.tool_choice or AnthropicToolChoice(type="auto")
        calls, names = choice.read()
        rules = AnswerRules(
            stop=check_stop(self.stop_sequences or (), "stop_sequences"),
            tool_choice=calls,
            tool_names=names,
            parallel_calls=not choice.disable_parallel_tool_use,
            json=self.output_config.read() if self.output_config is not None else None,
            strict_tools=read_strict_schemas(
                (tool.name, tool.input_schema, f"tools.{number}.input_schema")
                for number, tool in enumerate(tools)
                if tool.strict
            ),
        )
        check_tool_names(rules, _schemas(tools))
        return rules


def _schemas(tools: Sequence[CustomTool]) -> ToolSchemas:
    return tuple(tool.schema_for_template() for tool in tools)


def add_routes(app: FastAPI, sessions: OpenAiSessions) -> None:
    """Add ``messages`` and ``messages/count_tokens``.

    Anthropic's clients append ``/v1/messages`` to their base URL. That of a session ends with
    ``/v1`` already, so the routes exist a second time with another ``/v1``.
    """

    @app.post("/sessions/{key}/v1/messages")
    @app.post("/sessions/{key}/v1/v1/messages")
    async def reply(key: str, body: MessagesRequest, request: Request) -> Response:
        session = sessions.find(key)
        messages = body.read_conversation()
        tools = body.read_tools()
        rules = body.read_rules(tools)
        turn = await answer_request(
            session,
            request,
            messages,
            _schemas(tools),
            rules,
            id_prefix=_PREFIX,
            after=body.find_reply(),
        )
        if turn is None:
            return Response(status_code=499)
        answer = build_reply(turn, sessions.chat)
        if body.stream:
            return StreamingResponse(stream_reply(answer), media_type="text/event-stream")
        return json_response(answer)

    @app.post("/sessions/{key}/v1/messages/count_tokens")
    @app.post("/sessions/{key}/v1/v1/messages/count_tokens")
    async def count(key: str, body: CountRequest) -> dict[str, Any]:
        ledger = sessions.find(key).ledger
        messages = body.read_conversation()
        tools = _schemas(body.read_tools())
        after = body.find_reply()
        return {"input_tokens": ledger.count_tokens(messages, tools, after=after)}


def anthropic_error(error: ApiError) -> dict[str, Any]:
    """Return the body of an error in Anthropic's form, with the code of the other APIs."""
    other = "api_error" if error.status >= 500 else "invalid_request_error"
    kind = _ERROR_TYPES.get(error.status, other)
    message = f"{_TOO_LONG if error.code == 'context_length_exceeded' else ''}{error}"
    body: dict[str, Any] = {
        "type": kind,
        "message": message,
        "code": error.code,
        "param": error.param,
    }
    if error.param == "thread":
        # With these the tool runner of Anthropic's package goes on without the field.
        body["details"] = {
            "error_code": "thread_unsupported_request",
            "unsupported": ["thread"],
        }
    return {"type": "error", "error": body, "request_id": None}


MESSAGES = EndpointApi(
    ("POST messages", "POST messages/count_tokens"),
    add_routes,
    anthropic_error,
    header="anthropic-version",
)


def _read_message(message: Mapping[str, Any], param: str) -> list[OpenAiMessage]:
    """Return the messages that one message of the API contains."""
    role = message.get("role")
    if role not in _ROLES:
        raise invalid(f"{param}.role", f"must be one of {', '.join(_ROLES)}")
    content = message.get("content")
    if isinstance(content, str):
        messages = [OpenAiMessage(role, content)]
    elif not isinstance(content, list):
        raise invalid(f"{param}.content", "must be text or a list of blocks")
    elif role == "assistant":
        messages = [read_turn(content, f"{param}.content")]
    else:
        messages = list(_read_blocks(role, content, f"{param}.content"))
    for each in messages:
        check_message(each, param)
    return messages


def read_turn(blocks: Sequence[Any], param: str) -> OpenAiMessage:
    """Return the assistant's message with these blocks, which are at ``param``.

    Thinking is left out: the ids of the turn contain it. Raises ApiError for other blocks than text
    and tool_use.
    """
    texts: list[str] = []
    calls: list[OpenAiCall] = []
    for number, block in enumerate(blocks):
        place = f"{param}.{number}"
        kind = _block_type(block, place)
        if kind == "tool_use":
            use = validate_part(ToolUseBlock, block, place)
            arguments = json.dumps(use.input, ensure_ascii=False)
            calls.append(OpenAiCall(use.id, use.name, arguments))
        elif kind == "text":
            texts.append(read_text([block], place, ("text",)))
        elif kind != "thinking":
            raise _refuse_block(kind, place, "text, thinking and tool_use")
    turn = OpenAiMessage("assistant", _JOINER.join(filter(None, texts)), tuple(calls))
    check_call_count(turn, param)
    return turn


def find_signature(blocks: Any) -> str:
    """Return the signature of the last thinking block, which is the id of the turn; "" if there is
    none."""
    signatures = [
        block.get("signature")
        for block in (blocks if isinstance(blocks, list) else ())
        if isinstance(block, Mapping) and block.get("type") == "thinking"
    ]
    return signatures[-1] if signatures and isinstance(signatures[-1], str) else ""


def _read_blocks(role: str, blocks: Sequence[Any], param: str) -> Iterator[OpenAiMessage]:
    """Yield the results of tool calls, and the text between them, as messages."""
    texts: list[str] = []
    is_empty = True
    for number, block in enumerate(blocks):
        place = f"{param}.{number}"
        kind = _block_type(block, place)
        if kind == "tool_result" and role == "user":
            if texts:
                yield OpenAiMessage(role, _JOINER.join(texts))
                texts = []
            yield validate_part(ToolResultBlock, block, place).message(place)
            is_empty = False
        elif kind == "text":
            texts.append(read_text([block], place, ("text",)))
        else:
            raise _refuse_block(kind, place, "text and, of a user, tool_result")
    if texts or is_empty:
        yield OpenAiMessage(role, _JOINER.join(texts))


def _block_type(block: Any, param: str) -> Any:
    if not isinstance(block, Mapping):
        raise invalid(param, "must be a block")
    return block.get("type")


def _refuse_block(kind: Any, param: str, served: str) -> ApiError:
    return unsupported(f"{param}.type", f"blocks are {served}, not {str(kind)[:32]!r}")


def build_reply(turn: OpenTurn, chat: TemplateChat) -> dict[str, Any]:
    """Return the body of a ``message``."""
    return {
        "id": turn.reply,
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": list(_blocks(turn)),
        "stop_reason": _stop_reason(turn),
        "stop_sequence": _stop_sequence(turn),
        "usage": _usage(turn, chat),
    }


def _blocks(turn: OpenTurn) -> Iterator[dict[str, Any]]:
    """Yield the blocks of a turn: its thinking, its text (always without calls), its calls."""
    answer = turn.answer
    if turn.parsed.reasoning:
        yield {
            "type": "thinking",
            "thinking": turn.parsed.reasoning,
            "signature": turn.reply,
        }
    if answer.content or not answer.calls:
        yield {"type": "text", "text": answer.content, "citations": None}
    for call in answer.calls:
        yield {
            "type": "tool_use",
            "id": call.id,
            "name": call.name,
            "input": json.loads(call.arguments),
        }


def _stop_reason(turn: OpenTurn) -> str:
    if turn.finish_reason == "length":
        return "max_tokens"
    if turn.answer.calls:
        return "tool_use"
    return "end_turn" if turn.stop is None else "stop_sequence"


def _stop_sequence(turn: OpenTurn) -> str | None:
    return turn.stop.string if _stop_reason(turn) == "stop_sequence" and turn.stop else None


def _usage(turn: OpenTurn, chat: TemplateChat) -> dict[str, Any]:
    return {
        "input_tokens": len(turn.prompt),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": len(turn.ids),
        "output_tokens_details": {"thinking_tokens": count_reasoning(turn, chat)},
    }


async def stream_reply(body: Mapping[str, Any]) -> AsyncIterator[str]:
    """Yield a message as server-sent events."""
    for event in _list_events(body):
        yield format_event(event, event["type"])


def _list_events(body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    begun = {
        **body,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": body["usage"] | {"output_tokens": 0},
    }
    yield {"type": "message_start", "message": begun}
    for index, block in enumerate(body["content"]):
        opened, deltas = _open_block(block)
        yield {"type": "content_block_start", "index": index, "content_block": opened}
        for delta in deltas:
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    ending = {"stop_reason": body["stop_reason"], "stop_sequence": body["stop_sequence"]}
    yield {"type": "message_delta", "delta": ending, "usage": body["usage"]}
    yield {"type": "message_stop"}


def _open_block(block: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a block as its start event has it, without its content, and the deltas that add the
    content."""
    if block["type"] == "thinking":
        return {**block, "thinking": "", "signature": ""}, [
            {"type": "thinking_delta", "thinking": block["thinking"]},
            {"type": "signature_delta", "signature": block["signature"]},
        ]
    if block["type"] == "tool_use":
        text = json.dumps(block["input"], ensure_ascii=False)
        return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": text}]
    return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
