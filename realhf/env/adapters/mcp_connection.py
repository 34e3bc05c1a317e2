"""Connection to an MCP server of somebody else's, for one episode: a process that speaks over its
standard streams, or an address.

The official SDK speaks the protocol. Its transport over standard streams is replaced, because a
server here is contained, and what it sends is bounded. Every wait has a deadline. Whatever is wrong
with the server is an EnvironmentFailure. Source: MCP 2025-11-25 and 2026-07-28; mcp 2.3.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import anyio
import httpx2  # pyright: ignore[reportMissingImports]
import mcp_types as types  # pyright: ignore[reportMissingImports]
from mcp.client import Client  # pyright: ignore[reportMissingImports]
from mcp.client.streamable_http import streamable_http_client  # pyright: ignore[reportMissingImports]
from mcp.shared.exceptions import MCPError  # pyright: ignore[reportMissingImports]
from mcp.shared.message import SessionMessage  # pyright: ignore[reportMissingImports]

from realhf.api.environment import EnvironmentFailure
from realhf.base.text import shorten
from realhf.env.containment.programs import WorkingFolder

T = TypeVar("T")
MAX_LINE_BYTES = 8 << 20
"""Maximum size of one message of a server."""
MAX_ANSWER_BYTES = 32 << 20
"""Maximum number of bytes that a server sends between two requests."""
MAX_STRAY_LINES = 200
"""Maximum number of lines of a server, between two requests, that are no messages."""
MAX_TOOLS = 256
"""Maximum number of tools that a server may list."""
_MAX_PAGES = 64
"""Maximum number of pages of a list of tools."""
_ERROR_BYTES = 2000
"""Number of bytes of a server's standard error that a failure quotes."""
_MAX_REASON_CHARS = 600
"""Maximum number of characters of a server's own words in a failure."""
_EXIT_S = 1.0
"""Seconds in which a server may end by itself after its standard input was closed."""
_KILLED_S = 5.0
"""Seconds to wait for the end of a killed server, and for that of a connection."""
_NO_BOUND_S = 3600.0
"""Read timeout of HTTP responses, in seconds; the deadline of each request ends them earlier."""
_INVALID_PARAMETERS = -32602
"""JSON-RPC error code for a call with wrong arguments, which is the policy's mistake. Any other
error is the server's: a name that it does not list is refused before it is asked."""
_LOG = logging.getLogger(__name__)

Streams = tuple[Any, Any]
"""Streams of the SDK: messages of the server, and messages to it."""


class CallMistake(Exception):
    """Raised for a call that the server refuses as wrong; the message is for the policy."""


class ServerProcess:
    """Process of a server, and the SDK's transport over its standard streams.

    command: words that start it, given the folder that it may write to; called in a thread.
    variables: its environment, given the folder. The folder is made when the process starts, and
    removed after it. ``failure`` is set when the process ends or sends too much.
    """

    def __init__(
        self,
        command: Callable[[Path], Sequence[str]],
        variables: Callable[[Path], Mapping[str, str]],
    ) -> None:
        self._command = command
        self._variables = variables
        self.folder: Path | None = None
        self.failure: asyncio.Future[EnvironmentFailure] = (
            asyncio.get_running_loop().create_future()
        )
        self._errors = b""
        self._bytes_left = MAX_ANSWER_BYTES
        self._stray_left = MAX_STRAY_LINES
        self._is_closing = False

    def allow_answer(self) -> None:
        """Renew the bound on what the server sends; to be called with each request."""
        self._bytes_left = MAX_ANSWER_BYTES
        self._stray_left = MAX_STRAY_LINES

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Streams]:
        """Context manager that runs the process and yields its streams. Raises EnvironmentFailure
        if it cannot be started."""
        # Not in a thread, whose folder would be nobody's if this call were cancelled.
        working = WorkingFolder()
        self.folder = working.path
        try:
            try:
                words = await asyncio.to_thread(self._command, self.folder)
                process = await asyncio.create_subprocess_exec(
                    *words,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                    cwd=self.folder,
                    env=dict(self._variables(self.folder)),
                    start_new_session=True,
                    limit=MAX_LINE_BYTES,
                )
            except OSError as error:
                raise EnvironmentFailure(
                    "internal", f"the MCP server cannot be started: {error}"
                ) from None
            try:
                async with self._run_streams(process) as streams:
                    yield streams
            finally:
                with anyio.CancelScope(shield=True):
                    await _end_process(process)
        finally:
            with anyio.CancelScope(shield=True):
                await asyncio.to_thread(working.remove)

    @asynccontextmanager
    async def _run_streams(self, process: asyncio.subprocess.Process) -> AsyncIterator[Streams]:
        arriving, incoming = anyio.create_memory_object_stream[Any](0)
        outgoing, leaving = anyio.create_memory_object_stream[Any](0)
        tasks = [
            asyncio.create_task(self._read_messages(process, arriving)),
            asyncio.create_task(self._write_messages(process, leaving)),
            asyncio.create_task(self._read_errors(process)),
        ]
        try:
            yield incoming, outgoing
        finally:
            self._is_closing = True
            for task in tasks:
                task.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.wait(tasks, timeout=_KILLED_S)
            for stream in (arriving, incoming, outgoing, leaving):
                stream.close()

    async def _read_messages(self, process: asyncio.subprocess.Process, arriving: Any) -> None:
        """Pass on the messages of the server until its output ends or is too much."""
        assert process.stdout is not None
        try:
            while True:
                line = await process.stdout.readuntil(b"\n")
                self._bytes_left -= len(line)
                if self._bytes_left < 0:
                    self._fail("internal", f"sent more than {MAX_ANSWER_BYTES >> 20} MiB at once")
                    return
                try:
                    message = types.jsonrpc_message_adapter.validate_json(line, by_name=False)
                except ValueError:
                    self._stray_left -= bool(line.strip())
                    if self._stray_left < 0:
                        text = repr(line[:80].decode("utf-8", "replace"))
                        self._fail("internal", f"sends no messages but text, such as {text}")
                        return
                    continue
                await arriving.send(SessionMessage(message))
        except asyncio.LimitOverrunError:
            self._fail("internal", f"sent a message of more than {MAX_LINE_BYTES >> 20} MiB")
        except asyncio.IncompleteReadError:
            await self._report_end(process)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
            self._fail("lost", "is gone")
        finally:
            arriving.close()

    async def _report_end(self, process: asyncio.subprocess.Process) -> None:
        """Set the failure for a server whose output has ended, with its exit code if it has
        one."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_EXIT_S):
                await process.wait()
        code = process.returncode
        self._fail("lost", "closed its output" if code is None else f"ended with code {code}")

    async def _write_messages(self, process: asyncio.subprocess.Process, leaving: Any) -> None:
        """Write the messages to the server, one per line."""
        assert process.stdin is not None
        try:
            async for sent in leaving:
                text = sent.message.model_dump_json(by_alias=True, exclude_unset=True)
                process.stdin.write(text.encode() + b"\n")
                await process.stdin.drain()
        except (OSError, RuntimeError):  # uvloop raises the latter for a closed pipe
            self._fail("lost", "does not read what it is sent")

    async def _read_errors(self, process: asyncio.subprocess.Process) -> None:
        """Keep the end of what the server writes to its standard error."""
        assert process.stderr is not None
        while data := await process.stderr.read(1 << 16):
            self._errors = (self._errors + data)[-_ERROR_BYTES:]

    def _fail(self, kind: str, problem: str) -> None:
        if self._is_closing or self.failure.done():
            return
        errors = shorten(
            " ".join(self._errors.decode("utf-8", "replace").split()), _MAX_REASON_CHARS
        )
        text = f"the MCP server {problem}{f': {errors}' if errors else ''}"
        self.failure.set_result(EnvironmentFailure(kind, text))


async def _end_process(process: asyncio.subprocess.Process) -> None:
    """Close the server's standard input, and kill its process group if it does not end soon. All
    waits are bounded, because a descendant that left the group may hold its pipes open."""
    assert process.stdin is not None
    process.stdin.close()
    for limit_s in (_EXIT_S, _KILLED_S):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await process.wait()
        # The group may live on without the process that it is named after.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        if process.returncode is not None:
            break
    else:
        _LOG.error("the MCP server with the process id %d was not collected", process.pid)
    transport = getattr(process, "_transport", None)
    if transport is not None:
        transport.close()


class ServerAddress:
    """The SDK's transport to a server at an address. ``failure`` is never set: what goes wrong over
    HTTP is an error of the request. ``folder`` is None."""

    def __init__(self, url: str, token: str | None) -> None:
        self._url = url
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._bounds = _BoundedTransport()
        self.folder: Path | None = None
        self.failure: asyncio.Future[EnvironmentFailure] = (
            asyncio.get_running_loop().create_future()
        )

    def allow_answer(self) -> None:
        """Renew the bound on what the server sends; to be called with each request."""
        self._bounds.bytes_left = MAX_ANSWER_BYTES

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Streams]:
        """Context manager that yields the streams of a session; the session is ended with it."""
        timeout = httpx2.Timeout(30.0, read=_NO_BOUND_S)
        async with (
            httpx2.AsyncClient(
                headers=self._headers,
                timeout=timeout,
                transport=self._bounds,
                trust_env=False,
                follow_redirects=True,
            ) as client,
            streamable_http_client(self._url, http_client=client) as streams,
        ):
            yield streams


class _BoundedTransport(httpx2.AsyncHTTPTransport):
    """HTTP transport whose responses together have at most ``bytes_left`` bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes_left = MAX_ANSWER_BYTES

    async def handle_async_request(self, request: Any) -> Any:
        """Send a request and return the response. Reading more than the bound of its body raises
        httpx2.ReadError."""
        # The bound counts bytes as they are sent; compressed ones could grow a thousandfold.
        request.headers["Accept-Encoding"] = "identity"
        response = await super().handle_async_request(request)
        if response.headers.get("content-encoding", "identity") != "identity":
            await response.aclose()
            raise httpx2.ReadError("the answer is compressed, though that was not accepted")
        response.stream = _BoundedStream(self, response.stream)
        return response


class _BoundedStream(httpx2.AsyncByteStream):
    """Body of a response, counted."""

    def __init__(self, owner: _BoundedTransport, stream: Any) -> None:
        self._owner = owner
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield the parts of the body."""
        async for part in self._stream:
            self._owner.bytes_left -= len(part)
            if self._owner.bytes_left < 0:
                raise httpx2.ReadError(f"more than {MAX_ANSWER_BYTES >> 20} MiB")
            yield part

    async def aclose(self) -> None:
        """Close the body."""
        await self._stream.aclose()


@dataclass(frozen=True)
class ToolResult:
    """Result of a call."""

    content: Sequence[Any]
    """Parts of the result in the SDK's types."""
    structured: Any
    """The result as a JSON value; None if the server gives none."""
    is_error: bool
    """Whether the tool reports a mistake."""


@dataclass
class ServerConnection:
    """Connection of one episode. The SDK's client belongs to a task of its own, since it must be
    left in the task that entered it, and an episode's calls may come from several."""

    endpoint: ServerProcess | ServerAddress
    """The server."""
    timeout_s: float
    """Seconds that the server may take for a request."""
    _client: Any = None
    _task: asyncio.Task[None] | None = None
    _opened: asyncio.Future[None] | None = None
    _closing: asyncio.Event = field(default_factory=asyncio.Event)

    async def open(self, timeout_s: float) -> list[Mapping[str, Any]]:
        """Start the server and return its tools in the format of chat templates. Raises
        EnvironmentFailure."""
        opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._opened = opened
        self._task = asyncio.create_task(self._run(opened), name="mcp-server")
        return await self._guard(self._list_tools(opened), timeout_s, "its start")

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Call a tool. Raises CallMistake and EnvironmentFailure."""
        if self._client is None:
            raise EnvironmentFailure("lost", "the MCP server is not connected")
        work = self._client.call_tool(name, dict(arguments))
        result = await self._guard(
            work, self.timeout_s, f"the tool {name[:60]!a}", may_be_mistake=True
        )
        return ToolResult(result.content, result.structured_content, result.is_error)

    async def close(self) -> None:
        """End the server."""
        self._client = None
        self._end()
        if self._task is None:
            return
        done, _ = await asyncio.wait((self._task,), timeout=_EXIT_S + 2 * _KILLED_S)
        if not done:
            self._task.cancel()
            await asyncio.wait((self._task,), timeout=_KILLED_S)

    async def _run(self, opened: asyncio.Future[None]) -> None:
        """Hold the client from its start until ``close``."""
        try:
            transport: AbstractAsyncContextManager[Streams] = self.endpoint.connect()
            async with Client(transport, cache=None) as client:
                self._client = client
                if not opened.done():
                    opened.set_result(None)
                await self._closing.wait()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            if opened.done():
                if not self._closing.is_set():
                    _LOG.warning("an MCP connection ended: %s", _describe(error))
            else:
                opened.set_exception(_first_cause(error))
        finally:
            self._client = None
            if not opened.done():
                opened.cancel()

    async def _list_tools(self, opened: asyncio.Future[None]) -> list[Mapping[str, Any]]:
        await opened
        tools: list[Any] = []
        cursor = None
        for _ in range(_MAX_PAGES):
            page = await self._client.list_tools(cursor=cursor)
            tools += page.tools
            cursor = page.next_cursor
            if len(tools) > MAX_TOOLS:
                raise EnvironmentFailure(
                    "internal", f"the MCP server lists more than {MAX_TOOLS} tools"
                )
            if cursor is None:
                return [_to_chat_tool(tool) for tool in tools]
        raise EnvironmentFailure("internal", "the MCP server's list of tools does not end")

    async def _guard(
        self, work: Awaitable[T], limit_s: float, what: str, *, may_be_mistake: bool = False
    ) -> T:
        """Await an answer of the server. Everything that goes wrong is an EnvironmentFailure, and
        the server is then ended, since its state is unknown.

        may_be_mistake: the arguments are the policy's; if the server refuses them, raise
        CallMistake.
        """
        self.endpoint.allow_answer()
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait(
                (task, self.endpoint.failure),
                timeout=limit_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not task.done() or task.cancelled():
                raise self._failure() or EnvironmentFailure(
                    "timeout", f"the MCP server has not answered within {limit_s:g} s: {what}"
                )
            return task.result()
        except MCPError as error:
            if failure := self._failure():
                self._end()
                raise failure from None
            reason = shorten(str(error), _MAX_REASON_CHARS)
            if may_be_mistake and error.code == _INVALID_PARAMETERS:
                raise CallMistake(reason) from None
            self._end()
            raise EnvironmentFailure(
                "internal", f"the MCP server answered {what} with an error: {reason}"
            ) from None
        except EnvironmentFailure:
            self._end()
            raise
        except Exception as error:
            self._end()
            if failure := self._failure():
                raise failure from None
            kind = "lost" if isinstance(error, (OSError, httpx2.TransportError)) else "internal"
            raise EnvironmentFailure(
                kind, f"the MCP server failed at {what}: {_describe(error)}"
            ) from None
        except asyncio.CancelledError:
            self._end()
            raise
        finally:
            if not task.done():
                task.cancel()

    def _end(self) -> None:
        """Let the client's task end, also while it still waits for the server's first answer."""
        self._closing.set()
        if self._task is not None and self._opened is not None and not self._opened.done():
            self._opened.cancel()
            self._task.cancel()

    def _failure(self) -> EnvironmentFailure | None:
        """Return why the server has ended; None if it has not."""
        failure = self.endpoint.failure
        return failure.result() if failure.done() else None


def _to_chat_tool(tool: Any) -> Mapping[str, Any]:
    """Return a tool of the SDK in the format of chat templates. Raises EnvironmentFailure for a
    schema that is not one of an object."""
    schema = tool.input_schema
    properties = schema.get("properties", {})
    if schema.get("type", "object") != "object" or not isinstance(properties, Mapping):
        raise EnvironmentFailure(
            "internal", f"the MCP server's tool {tool.name[:60]!a} has arguments that are no object"
        )
    function = {
        "name": tool.name,
        "description": tool.description or tool.title or "",
        "parameters": {"type": "object", "properties": {}, **schema},
    }
    return {"type": "function", "function": function}


def _first_cause(error: BaseException) -> BaseException:
    """Return the error itself, or the first one of a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _describe(error: BaseException) -> str:
    """Return an error in one line."""
    error = _first_cause(error)
    text = " ".join(str(error).split())
    return shorten(f"{type(error).__name__}: {text}", _MAX_REASON_CHARS)
