"""Lets a program that wants to call a model be played as an environment: its calls become what the
policy reads, and what the policy says becomes the answer to the call.

The program calls an endpoint of this process, in the form of the OpenAI chat API, and waits there
until the policy has spoken. Every conversation has a model name of its own.
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
from realhf.env.loader.validation import json_problem, shown, whole_text
from realhf.web.connections import MOST_HEAD_BYTES

SECRET_HEADER = "x-policy-secret"
_MOST_HEADERS = 64
_MOST_BODY = 64 << 20
_REQUEST_S = 60.0
"""A request has arrived within this time; it may then wait for the policy as long as its episode
lasts."""
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


class Unplayable(ValueError):
    """The program calls its model in a way that is no conversation in turns."""


class HeadTooLarge(Exception):
    """The head of a request has more bytes than ``MOST_HEAD_BYTES``."""


@dataclass
class ModelCall:
    """One call that waits for the policy: ``messages`` are all of the conversation, ``answer`` what
    is returned."""

    messages: Sequence[ChatMessage]
    tools: Sequence[Mapping[str, Any]]
    answer: asyncio.Future[dict[str, Any]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Conversation:
    """The calls that one program makes of its model, one after the other."""

    def __init__(self) -> None:
        self.calls: asyncio.Queue[ModelCall] = asyncio.Queue()
        self._waiting: set[asyncio.Future[dict[str, Any]]] = set()
        self._seen: list[ChatMessage] = []
        self._said = False

    async def ask(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Wait for the policy's answer to a request. Raises Unplayable for a request that is none,
        and when the episode ends meanwhile."""
        call = ModelCall(read_messages(body.get("messages")), read_tools(body.get("tools")))
        self.calls.put_nowait(call)
        self._waiting.add(call.answer)
        try:
            return await call.answer
        finally:
            self._waiting.discard(call.answer)

    def end(self) -> None:
        """Answer those who still wait that the episode is over."""
        for answer in self._waiting:
            if not answer.done():
                answer.set_exception(Unplayable("the episode is over"))

    def new_messages(self, call: ModelCall) -> Sequence[ChatMessage]:
        """The messages of a call that the policy has not read or said yet. Raises Unplayable when
        the conversation before them was changed."""
        known = self._seen
        found = call.messages
        size = len(known) + self._said
        same = [_compared(message) for message in found[: len(known)]] == [
            _compared(message) for message in known
        ]
        if not same or (
            self._said and (len(found) < size or found[size - 1].get("role") != "assistant")
        ):
            raise Unplayable(
                "it changed the conversation between two calls of its model, or holds several at "
                "once"
            )
        self._seen = [*found]
        return found[size:]

    def answered(self, call: ModelCall, message: AssistantMessage) -> None:
        """Return the policy's turn to the program."""
        if not call.answer.done():
            call.answer.set_result(written(message))
        self._said = True


def written(message: AssistantMessage) -> dict[str, Any]:
    """A turn of the policy as a message of the chat API. A call that could not be parsed keeps its
    text as arguments, so that the program reports it."""
    calls = [_written_call(number, call) for number, call in enumerate(message.tool_calls)]
    said: dict[str, Any] = {"role": "assistant", "content": whole_text(message.content)}
    return said | {"tool_calls": calls} if calls else said


def _written_call(number: int, call: ToolCall) -> dict[str, Any]:
    readable = not call.problem and not json_problem(call.arguments)
    arguments = (
        json.dumps(dict(call.arguments))
        if readable
        else whole_text(call.text or call.problem or "?")
    )
    function = {"name": whole_text(call.name) or "unknown", "arguments": arguments}
    return {"id": call.id or f"call_{number}", "type": "function", "function": function}


def read_messages(found: Any) -> list[ChatMessage]:
    """The messages of a request, with text as content. Raises Unplayable for what is no message,
    and for pictures and the like."""
    if not isinstance(found, list) or not found:
        raise Unplayable(f"it sent no messages but {shown(found)}")
    read = [_read_message(message) for message in found]
    for problem in message_problems(read, "messages"):
        raise Unplayable(f"it sent what is no message: {problem}")
    return read


def _read_message(message: Any) -> Any:
    """A message in the form that is played here: an assistant's calls are the policy's own, and
    known."""
    if not isinstance(message, Mapping):
        return message
    role = message.get("role")
    read = {
        "role": _ROLES.get(role, role) if isinstance(role, str) else role,
        "content": _text(message.get("content")),
    }
    return read | {
        key: message[key] for key in ("name", "tool_call_id") if message.get(key) is not None
    }


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return whole_text(content or "")
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        if all(isinstance(part, str) for part in parts):
            return whole_text("\n".join(str(part) for part in parts))
    raise Unplayable(f"it sent a message that is not text: {shown(content)}")


def read_tools(found: Any) -> list[Mapping[str, Any]]:
    """The tools of a request. Raises Unplayable for what is no list of functions."""
    tools = found or []
    if not isinstance(tools, list) or not all(
        isinstance(tool, Mapping) and isinstance(tool.get("function"), Mapping) for tool in tools
    ):
        raise Unplayable(f"it sent tools that are no functions: {shown(found)}")
    return tools


def _compared(message: ChatMessage) -> tuple[Any, Any]:
    """What must stay the same of a message; an assistant's own words may be written back in another
    way."""
    return (message["role"], None if message["role"] == "assistant" else message["content"])


class PolicyEndpoint:
    """Serves the chat API to programs of this machine that know the ``secret``, on the event loop
    that starts it."""

    def __init__(self) -> None:
        self.secret = secrets.token_urlsafe(24)
        self.url = ""
        self._server: asyncio.Server | None = None
        self._conversations: dict[str, Conversation] = {}

    async def start(self) -> None:
        """Listen on a free port of the loopback."""
        self._server = await asyncio.start_server(
            self._serve, "127.0.0.1", 0, limit=MOST_HEAD_BYTES
        )
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"

    async def stop(self) -> None:
        """Listen no longer."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def add(self, conversation: Conversation) -> str:
        """Return the model name by which a conversation is called."""
        name = f"policy-{secrets.token_hex(8)}"
        self._conversations[name] = conversation
        return name

    def remove(self, name: str) -> None:
        """End a conversation; its calls find no model any more."""
        if conversation := self._conversations.pop(name, None):
            conversation.end()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
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
        try:
            async with asyncio.timeout(_REQUEST_S):
                line, headers = await _head(reader)
                if not hmac.compare_digest(
                    headers.get(SECRET_HEADER, "").encode(), self.secret.encode()
                ):
                    return "401 Unauthorized", _error("the secret is missing or wrong")
                if not line.startswith("POST ") or not line.split()[1].endswith(
                    "/chat/completions"
                ):
                    return "404 Not Found", _error("only POST .../chat/completions is served")
                body = json.loads(await reader.readexactly(_length(headers)))
            conversation = self._conversations.get(body["model"])
            if conversation is None:
                return "404 Not Found", _error(f"no such model: {shown(body['model'])}")
            if body.get("stream"):
                raise Unplayable("it asked for a stream")
            message = await conversation.ask(body)
        except HeadTooLarge:
            return "431 Request Header Fields Too Large", _error(
                f"the head of a request has at most {MOST_HEAD_BYTES} bytes"
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            return "400 Bad Request", _error(str(error))
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        choice = {"index": 0, "finish_reason": reason, "message": message}
        found = {
            "id": body["model"],
            "object": "chat.completion",
            "created": 0,
            "model": body["model"],
        }
        return "200 OK", found | {"choices": [choice]}


async def _head(reader: asyncio.StreamReader) -> tuple[str, dict[str, str]]:
    line = await _line(reader)
    size = len(line)
    headers: dict[str, str] = {}
    for _ in range(_MOST_HEADERS):
        field_line = await _line(reader)
        size += len(field_line)
        if size > MOST_HEAD_BYTES:
            raise HeadTooLarge
        name, colon, value = field_line.partition(":")
        if not colon:
            return line, headers
        headers[name.strip().lower()] = value.strip()
    raise ValueError(f"more than {_MOST_HEADERS} headers")


async def _line(reader: asyncio.StreamReader) -> str:
    try:
        return (await reader.readline()).decode("latin-1")
    except ValueError:  # it has no end within the reader's limit
        raise HeadTooLarge from None


def _length(headers: Mapping[str, str]) -> int:
    length = headers.get("content-length", "")
    if not length.isdigit() or int(length) > _MOST_BODY:
        raise ValueError(f"a body has a Content-Length of at most {_MOST_BODY}")
    return int(length)


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error"}}
