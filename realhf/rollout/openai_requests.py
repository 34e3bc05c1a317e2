"""Requests for chat completions, as the ``openai`` package sends them: validation and parsing.

A client sends earlier answers back, but not byte for byte: it may write JSON arguments differently,
and an empty content as null or not at all. ``OpenAiMessage`` objects of such variants are equal;
all other differences make them unequal.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from realhf.api.environment import AssistantMessage
from realhf.api.messages import message_problems
from realhf.api.tool_parser import CallProblem, read_json

_WHOLE_FLOATS = 2.0**53
"""Every integer below this number can be represented exactly as a float."""


@dataclass(frozen=True)
class OpenAiCall:
    """One tool call. Calls are equal if the JSON values of their arguments are."""

    id: str
    """Id of the call."""
    name: str
    """Name of the tool."""
    arguments: str = field(compare=False)
    """JSON text of the arguments, as the client or the policy wrote it."""
    _value: str = ""
    """Canonical JSON of the arguments."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_value", canonical_json(self.arguments))


@dataclass(frozen=True)
class OpenAiMessage:
    """One message of a conversation."""

    role: str
    """Role name as in chat templates: system, user, assistant or tool."""
    content: str
    """Text of the message."""
    calls: tuple[OpenAiCall, ...] = ()
    """Tool calls of an assistant's message."""
    call_id: str = ""
    """For the role ``tool``: id of the call whose result this is."""
    name: str = ""
    """For the role ``tool``: name of the called tool; "" if no earlier call has this id."""

    def for_template(self) -> dict[str, Any]:
        """Return the message in the form of the chat API, which chat templates expect."""
        body: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.calls:
            body["tool_calls"] = [call_body(call) for call in self.calls]
        if self.role == "tool":
            body |= {"tool_call_id": self.call_id} | ({"name": self.name} if self.name else {})
        return body


@dataclass(frozen=True)
class Tools:
    """Tools offered in a request."""

    schemas: tuple[Mapping[str, Any], ...] = ()
    """Descriptions of the tools in the form of the chat API."""
    read_calls: bool = False
    """Whether calls in the policy's answer are parsed; otherwise they remain text."""

    @property
    def key(self) -> str:
        """String that identifies the tools as the policy sees them."""
        return json.dumps(self.schemas)


NO_TOOLS = Tools()


def call_body(call: OpenAiCall) -> dict[str, Any]:
    """Convert a call to the form of the chat API."""
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def build_message(
    turn: AssistantMessage, prompt: Sequence[int], ids: Sequence[int]
) -> OpenAiMessage:
    """Return the message that a client gets for a turn that was sampled as ``ids`` after
    ``prompt``.

    The ids of its calls are a hash of ``prompt`` and ``ids``. Calls that could not be parsed remain
    in the content. If no call could be parsed, the content is the whole text.
    """
    calls = [call for call in turn.tool_calls if not call.problem]
    if not calls:
        return OpenAiMessage("assistant", turn.text)
    broken = dict.fromkeys(call.text for call in turn.tool_calls if call.problem)
    digest = hashlib.blake2b(array("q", [len(prompt), *prompt, *ids]).tobytes(), digest_size=16)
    return OpenAiMessage(
        "assistant",
        "\n".join(filter(None, [turn.content, *broken])),
        tuple(
            OpenAiCall(
                _call_id(digest.digest(), number),
                call.name,
                json.dumps(call.arguments, ensure_ascii=False),
            )
            for number, call in enumerate(calls)
        ),
    )


def canonical_json(text: str) -> str:
    """Return ``text`` as canonical JSON, or unchanged if it is not JSON that every parser reads the
    same way."""
    words = text.strip()
    try:
        value, end = read_json(words, 0)
    except CallProblem:
        return text
    return (
        json.dumps(_normalize_numbers(value), sort_keys=True, separators=(",", ":"))
        if end == len(words)
        else text
    )


def _normalize_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _normalize_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_normalize_numbers(item) for item in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < _WHOLE_FLOATS:
        return int(value)
    return value


def _call_id(digest: bytes, number: int) -> str:
    """Return a call id of nine letters and digits, the form that some chat templates require."""
    return "c" + hashlib.blake2b(digest + number.to_bytes(4, "big"), digest_size=4).hexdigest()


MAX_MESSAGES = 512
"""Maximum number of messages in a request."""
MAX_TOOLS = 128
"""Maximum number of tools in a request."""
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
"""Maps each role of the API to the role that chat templates use."""


class ApiError(Exception):
    """Error response of the OpenAI API, with HTTP status, code and message."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code

    def body(self) -> dict[str, Any]:
        """Return the JSON body of the error, as the OpenAI API writes it."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "code": self.code, "param": None}}


class TextPart(BaseModel):
    """One text part of a message's content."""

    type: Literal["text"]
    text: str


def _check_content(content: object) -> object:
    """Raise ValueError for content other than text. This runs before pydantic's union check, whose
    errors would name the union's types instead of the problem."""
    if content is not None and not isinstance(content, str | list):
        raise ValueError("must be text, a list of parts of text, or null")
    for number, part in enumerate(content if isinstance(content, list) else ()):
        if not isinstance(part, Mapping):
            raise ValueError(f"only text is read, and part {number} is not a valid part")
        if part.get("type") != "text":
            raise ValueError(
                f"only text is read, and part {number} is of the type "
                f"{str(part.get('type'))[:32]!r}"
            )
        if not isinstance(part.get("text"), str):
            raise ValueError(f"part {number} has no text")
    return content


class FunctionCall(BaseModel):
    """Function name of a call, and its arguments as JSON text."""

    name: str = Field(min_length=1, max_length=256)
    arguments: str


class CallPart(BaseModel):
    """One tool call of an assistant's message."""

    id: str = Field(max_length=256)
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(BaseModel):
    """One message of a conversation; ``content`` is a string, a list of text parts, or null."""

    role: str
    content: Annotated[str | list[TextPart] | None, BeforeValidator(_check_content)] = None
    tool_calls: list[CallPart] | None = None
    tool_call_id: str | None = Field(None, max_length=256)

    def text(self) -> str:
        """Return the whole content as one string."""
        return (
            self.content
            if isinstance(self.content, str)
            else "".join(part.text for part in self.content or ())
        )

    def calls(self) -> tuple[OpenAiCall, ...]:
        """Return the tool calls."""
        return tuple(
            OpenAiCall(c.id, c.function.name, c.function.arguments) for c in self.tool_calls or ()
        )


class Function(BaseModel):
    """Description of a function. Other keys, such as ``description``, are not checked because only
    the policy reads them."""

    name: str = Field(min_length=1, max_length=256)
    parameters: dict[str, Any] | None = None


class OpenAiTool(BaseModel):
    """Description of a tool that the policy may call."""

    type: Literal["function"]
    function: Function


def _check_tool(schema: dict[str, Any]) -> dict[str, Any]:
    """Validate the schema of a tool and return it unchanged: the policy sees its keys in this
    order."""
    OpenAiTool.model_validate(schema)
    return schema


class StreamOptions(BaseModel):
    """Options of a streamed answer; ``include_usage`` asks for a last chunk with token counts."""

    include_usage: bool = False


class ChatRequest(BaseModel):
    """Body of a request: the fields that the endpoint honours or refuses.

    The policy is sampled as it is trained, so temperature, top_p, max_tokens, seed and the like are
    ignored, as are unknown fields. For the same reason the policy cannot be forced to call a tool,
    or limited to one call: ``tool_choice`` is auto or none.
    """

    model_config = ConfigDict(extra="ignore")
    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    model: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    n: int | None = None
    stop: Any = None
    tools: list[Annotated[dict[str, Any], AfterValidator(_check_tool)]] | None = Field(
        None, max_length=MAX_TOOLS
    )
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None
    response_format: dict[str, Any] | None = None

    def conversation(self) -> list[OpenAiMessage]:
        """Return the messages. Raises ApiError for features that the endpoint does not support."""
        self._check_supported()
        tool_of: dict[str, str] = {}
        messages = []
        for message in self.messages:
            role = _template_role(message.role)
            calls = message.calls()
            if (calls and role != "assistant") or (role == "tool") != (
                message.tool_call_id is not None
            ):
                raise ApiError(
                    400,
                    "invalid_request",
                    "tool_calls are an assistant's, tool_call_id is a tool's",
                )
            tool_of |= {call.id: call.name for call in calls}
            call_id = message.tool_call_id or ""
            messages.append(
                OpenAiMessage(role, message.text(), calls, call_id, tool_of.get(call_id, ""))
            )
        for problem in message_problems(
            [message.for_template() for message in messages], "messages"
        ):
            raise ApiError(400, "invalid_request", problem)
        return messages

    def parse_tools(self) -> Tools:
        """Return the tools. With ``tool_choice`` none, the policy still sees them."""
        schemas = tuple(self.tools or ())
        return Tools(schemas, bool(schemas) and self.tool_choice in (None, "auto"))

    def _check_supported(self) -> None:
        is_refused = {
            "n": self.n not in (None, 1),
            "top_logprobs": bool(self.top_logprobs),
            "stop": bool(self.stop),
            "functions": bool(self.functions),
            "tool_choice": self.tool_choice not in (None, "auto", "none"),
            "parallel_tool_calls": bool(self.tools) and self.parallel_tool_calls is False,
            "response_format": self.response_format not in (None, {"type": "text"}),
        }
        for name, refused in is_refused.items():
            if refused:
                raise ApiError(400, "unsupported", f"{name}: not supported by this endpoint")


def _template_role(role: str) -> str:
    if role not in _ROLES:
        raise ApiError(400, "unsupported", f"messages of the role {role[:32]!r} are not supported")
    return _ROLES[role]
