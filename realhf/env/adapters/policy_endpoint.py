"""Endpoint that lets a program that calls a model be played as an environment: the policy reads the
messages of the program's calls, and the policy's turns are returned as the model's answers.

The program calls this process with the OpenAI chat API, and gets its answer once the policy has
generated its turn. Every conversation has its own model name.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from realhf.api.environment import AssistantMessage, ChatMessage, ToolCall
from realhf.api.messages import message_problems
from realhf.env.loader.validation import format_value, json_problem, replace_surrogates
from realhf.web.connections import MAX_HEAD_BYTES

SECRET_HEADER = "x-policy-secret"
"""Header in which the program sends the endpoint's secret."""
_MAX_HEADERS = 64
"""Maximum number of header lines of a request."""
_MAX_BODY_BYTES = 64 << 20
"""Maximum bytes of the body of a request."""
_REQUEST_S = 60.0
"""Seconds within which a request must have arrived. After that it may wait for the policy until its
episode ends."""
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
"""Roles of messages in a request, and the role that the policy sees for each."""


class Unplayable(ValueError):
    """Raised if the program's model calls do not form a conversation in turns."""


class HeadTooLarge(Exception):
    """Raised if the head of a request is larger than ``MAX_HEAD_BYTES``."""


@dataclass
class ModelCall:
    """A model call by the program that waits for the policy's turn."""

    messages: Sequence[ChatMessage]
    """All messages of the conversation so far."""
    tools: Sequence[Mapping[str, Any]]
    """Tools that the call offers to the model."""
    answer: asyncio.Future[dict[str, Any]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """Future of the message that is returned to the program."""


class ModelConversation:
    """The model calls of one program, made one after another."""

    def __init__(self) -> None:
        self.calls: asyncio.Queue[ModelCall] = asyncio.Queue()
        self._waiting: set[asyncio.Future[dict[str, Any]]] = set()
        self._known_messages: list[ChatMessage] = []
        self._has_answered = False

    async def ask(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Wait for the policy's answer to a request and return it. Raises Unplayable for an invalid
        request, or if the episode ends while it waits."""
        call = ModelCall(read_messages(body.get("messages")), read_tools(body.get("tools")))
        self.calls.put_nowait(call)
        self._waiting.add(call.answer)
        try:
            return await call.answer
        finally:
            self._waiting.discard(call.answer)

    def end(self) -> None:
        """Answer all waiting calls with an error that says that the episode is over."""
        for answer in self._waiting:
            if not answer.done():
                answer.set_exception(Unplayable("the episode is over"))

    def new_messages(self, call: ModelCall) -> Sequence[ChatMessage]:
        """Return the messages of a call that the policy has not yet read or written. Raises
        Unplayable if the earlier messages have changed."""
        known = self._known_messages
        messages = call.messages
        known_count = len(known) + self._has_answered
        same = [_comparison_key(message) for message in messages[: len(known)]] == [
            _comparison_key(message) for message in known
        ]
        if not same or (
            self._has_answered
            and (
                len(messages) < known_count or messages[known_count - 1].get("role") != "assistant"
            )
        ):
            raise Unplayable(
                "it changed the conversation between two calls of its model, or holds several at "
                "once"
            )
        self._known_messages = [*messages]
        return messages[known_count:]

    def answer_call(self, call: ModelCall, message: AssistantMessage) -> None:
        """Return the policy's turn to the program as the answer to its call."""
        if not call.answer.done():
            call.answer.set_result(to_chat_message(message))
        self._has_answered = True


def to_chat_message(message: AssistantMessage) -> dict[str, Any]:
    """Return a turn of the policy as a message of the chat API. A call that could not be parsed
    keeps its text as arguments, so that the program reports the problem."""
    calls = [_to_chat_call(number, call) for number, call in enumerate(message.tool_calls)]
    chat_message: dict[str, Any] = {
        "role": "assistant",
        "content": replace_surrogates(message.content),
    }
    return chat_message | {"tool_calls": calls} if calls else chat_message


def _to_chat_call(number: int, call: ToolCall) -> dict[str, Any]:
    """Return the policy's tool call in the chat API format. ``number`` is used to make an id if the
    call has none."""
    readable = not call.problem and not json_problem(call.arguments)
    arguments = (
        json.dumps(dict(call.arguments))
        if readable
        else replace_surrogates(call.text or call.problem or "?")
    )
    function = {"name": replace_surrogates(call.name) or "unknown", "arguments": arguments}
    return {"id": call.id or f"call_{number}", "type": "function", "function": function}


def read_messages(value: Any) -> list[ChatMessage]:
    """Return the messages of a request, with their content as text. Raises Unplayable for invalid
    messages, and for content other than text, such as images."""
    if not isinstance(value, list) or not value:
        raise Unplayable(f"it sent no messages but {format_value(value)}")
    messages = [_read_message(message) for message in value]
    for problem in message_problems(messages, "messages"):
        raise Unplayable(f"it sent something that is not a message: {problem}")
    return messages


def _read_message(message: Any) -> Any:
    """Return a message with a role and text content. An assistant's tool calls are left out,
    because the policy made them itself."""
    if not isinstance(message, Mapping):
        return message
    role = message.get("role")
    chat_message = {
        "role": _ROLES.get(role, role) if isinstance(role, str) else role,
        "content": _content_text(message.get("content")),
    }
    return chat_message | {
        key: message[key] for key in ("name", "tool_call_id") if message.get(key) is not None
    }


def _content_text(content: Any) -> str:
    """Return content as text; the parts of a list are joined by newlines. Raises Unplayable for
    content other than text."""
    if content is None or isinstance(content, str):
        return replace_surrogates(content or "")
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        if all(isinstance(part, str) for part in parts):
            return replace_surrogates("\n".join(str(part) for part in parts))
    raise Unplayable(f"it sent a message that is not text: {format_value(content)}")


def read_tools(value: Any) -> list[Mapping[str, Any]]:
    """Return the tools of a request. Raises Unplayable for anything but a list of functions."""
    tools = value or []
    if not isinstance(tools, list) or not all(
        isinstance(tool, Mapping) and isinstance(tool.get("function"), Mapping) for tool in tools
    ):
        raise Unplayable(f"it sent tools that are not functions: {format_value(value)}")
    return tools


def _comparison_key(message: ChatMessage) -> tuple[Any, Any]:
    """Return the parts of a message, (role, content), that must stay the same in later calls. An
    assistant's content is None here, because the program may send it back in another form."""
    return (message["role"], None if message["role"] == "assistant" else message["content"])


class PolicyEndpoint:
    """HTTP server with the chat API for local programs that know its ``secret``; it runs on the
    event loop that starts it."""

    def __init__(self) -> None:
        self.secret = secrets.token_urlsafe(24)
        self.url = ""
        self._server: asyncio.Server | None = None
        self._conversations: dict[str, ModelConversation] = {}

    async def start(self) -> None:
        """Start listening on a free loopback port."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=MAX_HEAD_BYTES)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"

    async def stop(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def add(self, conversation: ModelConversation) -> str:
        """Register a conversation; return the model name under which it is called."""
        name = f"policy-{secrets.token_hex(8)}"
        self._conversations[name] = conversation
        return name

    def remove(self, name: str) -> None:
        """End a conversation; later calls with its model name get an error."""
        if conversation := self._conversations.pop(name, None):
            conversation.end()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection, which carries one request."""
        try:
            status, answer = await self._answer(reader)
            body = json.dumps(answer).encode()
            head = (
                f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: "
                f"{len(body)}\r\n"
            )
            writer.write(f"{head}Connection: close\r\n\r\n".encode() + body)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, TimeoutError):
            return
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError, TimeoutError):
                await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader) -> tuple[str, dict[str, Any]]:
        """Read a request; return the status line and the body of the response."""
        try:
            async with asyncio.timeout(_REQUEST_S):
                line, headers = await _read_head(reader)
                if not hmac.compare_digest(
                    headers.get(SECRET_HEADER, "").encode(), self.secret.encode()
                ):
                    return "401 Unauthorized", _error("the secret is missing or wrong")
                if not line.startswith("POST ") or not line.split()[1].endswith(
                    "/chat/completions"
                ):
                    return "404 Not Found", _error("only POST .../chat/completions is served")
                body = json.loads(await reader.readexactly(_body_length(headers)))
            conversation = self._conversations.get(body["model"])
            if conversation is None:
                return "404 Not Found", _error(f"no such model: {format_value(body['model'])}")
            if body.get("stream"):
                raise Unplayable("it requested a stream, which is not supported")
            message = await conversation.ask(body)
        except HeadTooLarge:
            return "431 Request Header Fields Too Large", _error(
                f"the head of a request has at most {MAX_HEAD_BYTES} bytes"
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            return "400 Bad Request", _error(str(error))
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        choice = {"index": 0, "finish_reason": reason, "message": message}
        completion = {
            "id": body["model"],
            "object": "chat.completion",
            "created": 0,
            "model": body["model"],
        }
        return "200 OK", completion | {"choices": [choice]}


async def _read_head(reader: asyncio.StreamReader) -> tuple[str, dict[str, str]]:
    """Return the request line and the headers, with names in lower case. Raises HeadTooLarge, and
    ValueError for too many headers."""
    line = await _read_line(reader)
    size = len(line)
    headers: dict[str, str] = {}
    for _ in range(_MAX_HEADERS):
        field_line = await _read_line(reader)
        size += len(field_line)
        if size > MAX_HEAD_BYTES:
            raise HeadTooLarge
        name, colon, value = field_line.partition(":")
        if not colon:
            return line, headers
        headers[name.strip().lower()] = value.strip()
    raise ValueError(f"more than {_MAX_HEADERS} headers")


async def _read_line(reader: asyncio.StreamReader) -> str:
    """Return the next line of a request. Raises HeadTooLarge."""
    try:
        return (await reader.readline()).decode("latin-1")
    except ValueError:  # no end of line within the reader's limit
        raise HeadTooLarge from None


def _body_length(headers: Mapping[str, str]) -> int:
    """Return the length of the body in bytes. Raises ValueError if it is missing or too large."""
    length = headers.get("content-length", "")
    if not length.isdigit() or int(length) > _MAX_BODY_BYTES:
        raise ValueError(f"a body has a Content-Length of at most {_MAX_BODY_BYTES}")
    return int(length)


def _error(message: str) -> dict[str, Any]:
    """Return an error in the format of the chat API."""
    return {"error": {"message": message, "type": "invalid_request_error"}}
