"""Checks a request for a chat completion, as the ``openai`` package sends it, and reduces it to its messages."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_MESSAGES = 512
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

Message = tuple[str, str]
"""A (role, content) pair with the role system, user or assistant."""


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


class ChatMessage(BaseModel):
    """One message of a conversation; ``content`` is a text, a list of text parts, or null."""

    role: str
    content: str | list[TextPart] | None = None


class StreamOptions(BaseModel):
    """Options of a streamed answer; ``include_usage`` asks for a last chunk with token counts."""

    include_usage: bool = False


class ChatRequest(BaseModel):
    """Declares the fields that are honoured, and those that are refused. The policy is sampled as it is trained:
    temperature, top_p, max_tokens, seed and the like of a request do not change that, and are ignored like unknown
    fields."""

    model_config = ConfigDict(extra="ignore")
    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    model: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    n: int | None = None
    stop: Any = None
    tools: list[Any] | None = None
    functions: list[Any] | None = None
    response_format: dict[str, Any] | None = None

    def conversation(self) -> list[Message]:
        """Return the messages as pairs. Raises ApiError for what the endpoint cannot do."""
        self._check()
        return [(_role(message.role), _text(message.content)) for message in self.messages]

    def _check(self) -> None:
        refused = {
            "n": self.n not in (None, 1),
            "top_logprobs": bool(self.top_logprobs),
            "stop": bool(self.stop),
            "tools": bool(self.tools or self.functions),
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
