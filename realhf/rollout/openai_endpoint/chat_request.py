"""Checks a request for a chat completion, as the ``openai`` package sends it, and reduces it to messages and tools."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from realhf.rollout.openai_endpoint.messages import Call, Message, Tools

MAX_MESSAGES = 512
MAX_TOOLS = 128
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


class ApiError(Exception):
    """An answer other than a completion, in the words of the OpenAI API."""

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


class FunctionCall(BaseModel):
    """What is called, and with which arguments, as JSON text."""

    name: str = Field(min_length=1, max_length=256)
    arguments: str


class CallPart(BaseModel):
    """One tool call of an assistant's message."""

    id: str = Field(max_length=256)
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(BaseModel):
    """One message of a conversation; ``content`` is a text, a list of text parts, or null."""

    role: str
    content: str | list[TextPart] | None = None
    tool_calls: list[CallPart] | None = None
    tool_call_id: str | None = Field(None, max_length=256)


class Function(BaseModel):
    """Checks what describes a function; other keys, such as ``description``, are the policy's to read."""

    name: str = Field(min_length=1, max_length=256)
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    """Checks what describes a tool that the policy may call."""

    type: Literal["function"]
    function: Function


def _checked_tool(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema as it was sent: the policy reads its keys in this order."""
    Tool.model_validate(schema)
    return schema


class StreamOptions(BaseModel):
    """Options of a streamed answer; ``include_usage`` asks for a last chunk with token counts."""

    include_usage: bool = False


class ChatRequest(BaseModel):
    """Declares the fields that are honoured, and those that are refused. The policy is sampled as it is trained:
    temperature, top_p, max_tokens, seed and the like of a request do not change that, and are ignored like unknown
    fields. For the same reason nothing can make it call a tool, or only one: ``tool_choice`` is auto or none."""

    model_config = ConfigDict(extra="ignore")
    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    model: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    n: int | None = None
    stop: Any = None
    tools: list[Annotated[dict[str, Any], AfterValidator(_checked_tool)]] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None
    response_format: dict[str, Any] | None = None

    def conversation(self) -> list[Message]:
        """Return the messages. Raises ApiError for what the endpoint cannot do."""
        self._check()
        tool_of: dict[str, str] = {}
        messages = []
        for message in self.messages:
            role = _role(message.role)
            calls = tuple(Call(c.id, c.function.name, c.function.arguments) for c in message.tool_calls or ())
            if (calls and role != "assistant") or (role == "tool") != (message.tool_call_id is not None):
                raise ApiError(400, "invalid_request", "tool_calls are an assistant's, tool_call_id is a tool's")
            tool_of |= {call.id: call.name for call in calls}
            call_id = message.tool_call_id or ""
            messages.append(Message(role, _text(message.content), calls, call_id, tool_of.get(call_id, "")))
        return messages

    def toolbox(self) -> Tools:
        """Return the tools; with the choice ``none`` the policy still reads about them."""
        schemas = tuple(self.tools or ())
        return Tools(schemas, bool(schemas) and self.tool_choice in (None, "auto"))

    def _check(self) -> None:
        refused = {
            "n": self.n not in (None, 1),
            "top_logprobs": bool(self.top_logprobs),
            "stop": bool(self.stop),
            "functions": bool(self.functions),
            "tool_choice": self.tool_choice not in (None, "auto", "none"),
            "parallel_tool_calls": bool(self.tools) and self.parallel_tool_calls is False,
            "response_format": self.response_format not in (None, {"type": "text"}),
        }
        for field, wrong in refused.items():
            if wrong:
                raise ApiError(400, "unsupported", f"{field}: not supported by this endpoint")


def _role(role: str) -> str:
    if role not in _ROLES:
        raise ApiError(400, "unsupported", f"messages of the role {role[:32]!r} are not supported")
    return _ROLES[role]


def _text(content: str | list[TextPart] | None) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content or ())
