"""Drives OpenEnv sessions over a WebSocket and reads what a server reports about itself.

Connecting is a handshake and a state probe. A request whose answer did not arrive (timeout,
cancellation, lost connection) poisons the connection: it is closed at once and never used again, so
a late reply can never be read as the answer to another request. Where the server echoes ids, every
reply must carry its request's. Source: docs/reference/environment.md 2.1, 2.3, 2.4.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from ssl import SSLContext
from typing import Any
from urllib.parse import urlsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

from realhf.api.environment import FAILURE_KINDS

_ENCODE = json.JSONEncoder(separators=(",", ":")).encode
_MAX_REPLY_BYTES = 4 << 20
_CLOSE_S = 2.0
_ARITHMETIC = (
    "a trainer opens one session per episode of its generation batch (per-device batch x "
    "accumulation steps x "
    "devices), and the server must have at least as many (--pool-size)"
)


@dataclass(frozen=True)
class StepResult:
    """An OpenEnv server's reply to ``reset`` or ``step``."""

    observation: dict[str, Any]
    """The observation as a JSON object."""
    reward: float | None
    """Reward of the step, if any."""
    done: bool
    """Whether the episode has ended."""


class ConnectError(ConnectionError):
    """The session could not be opened."""


class CapacityError(ConnectError):
    """The server has no free session. ``retry_after_s`` is the server's advice."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ConnectionLost(ConnectionError):
    """The server closed the connection or vanished in the middle of a request."""


class ConnectionPoisoned(ConnectionError):
    """The connection was given up after a request without an answer, or was never opened."""


class MessageTimeout(TimeoutError):
    """No reply came within the message timeout."""


class EnvError(RuntimeError):
    """The server answered with an error frame; the session stays usable. ``code`` is the wire's
    error code; ``retryable``: the server reports that nothing was executed and the request may be
    sent again; ``details`` is what a stock server says of each field of a message that it refuses,
    any JSON; ``kind`` is how the environment failed (``realhf.api.environment.FAILURE_KINDS``), ""
    where the server does not say it."""

    def __init__(
        self,
        code: str,
        message: str,
        *,
        retryable: bool = False,
        details: Any = None,
        kind: str = "",
    ) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.retryable = retryable
        self.details = details
        self.kind = kind


def failure_kind(error: EnvError | ConnectionError | TimeoutError) -> str:
    """Return how an environment failed that answered with ``error``, or did not answer
    (``FAILURE_KINDS``)."""
    if isinstance(error, EnvError):
        return "unavailable" if error.retryable else "internal"
    if isinstance(error, CapacityError):
        return "capacity"
    return "timeout" if isinstance(error, TimeoutError) else "lost"


class OpenEnvClient:
    """Drives one session over the wire. One request at a time; use it on one event loop.

    Args:
        base_url: ``http(s)://`` or ``ws(s)://`` address of the server.
        connect_timeout_s: handshake and probe together. message_timeout_s: each request.
        ping_interval_s, ping_timeout_s: the timeout tolerates a peer that is busy for minutes.
        token: sent as ``Authorization: Bearer``. tls: what an https server is checked by (None: the authorities that
            this machine believes, or those in the file that the variable SSL_CERT_FILE names).
        correlate: number the requests and check the ids of the replies (for servers whose ``/metadata`` says
            ``"correlation": true``).

    After a loss ``connect`` opens a new session. ``probe`` is the state that the server showed at
    connecting.
    """

    def __init__(
        self,
        base_url: str,
        *,
        connect_timeout_s: float = 10.0,
        message_timeout_s: float = 60.0,
        ping_interval_s: float = 20.0,
        ping_timeout_s: float = 600.0,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
        correlate: bool = False,
    ) -> None:
        self.probe: dict[str, Any] = {}
        self.url = websocket_url(base_url)
        self._connect_timeout = connect_timeout_s
        self._message_timeout = message_timeout_s
        self._ping = (ping_interval_s, ping_timeout_s)
        self._headers = {"Authorization": f"Bearer {token}"} if token else None
        self._tls: dict[str, Any] = {} if tls is None else {"ssl": tls}
        self._numbers = itertools.count() if correlate else None
        self._connection: ClientConnection | None = None
        self._asking = False

    @property
    def usable(self) -> bool:
        """Whether a request may be sent now."""
        return self._connection is not None and not self._asking

    async def connect(self) -> None:
        """Open the socket and make one state round trip. Raises CapacityError or ConnectError."""
        if self._connection is not None:
            return
        try:
            async with asyncio.timeout(self._connect_timeout):
                self._connection = await connect(
                    self.url,
                    additional_headers=self._headers,
                    compression=None,
                    proxy=None,
                    max_size=_MAX_REPLY_BYTES,
                    open_timeout=None,
                    close_timeout=_CLOSE_S,
                    ping_interval=self._ping[0],
                    ping_timeout=self._ping[1],
                    **self._tls,
                )
                self.probe = await self._first_state(self._connection)
        except InvalidStatus as error:
            raise _refusal(self.url, error) from None
        except EnvError as error:
            self.abort()
            if error.code == "CAPACITY_REACHED":
                raise CapacityError(
                    f"{self.url} refused the session: {error}; {_ARITHMETIC}"
                ) from error
            raise ConnectError(f"{self.url} refused the session: {error}") from error
        except (OSError, InvalidHandshake, TimeoutError) as error:
            self.abort()
            detail = str(error) or f"no answer within {self._connect_timeout:g} s"
            raise ConnectError(f"cannot open a session at {self.url}: {detail}") from error
        except BaseException:
            self.abort()
            raise

    async def reset(self, /, **kwargs: Any) -> StepResult:
        """Start an episode. Raises EnvError, ConnectionLost, ConnectionPoisoned or
        MessageTimeout."""
        return await self._result({"type": "reset", "data": kwargs})

    async def step(self, command: str | Mapping[str, Any]) -> StepResult:
        """Run a command (or send another environment's action). Raises as ``reset``."""
        action = {"command": command} if isinstance(command, str) else dict(command)
        return await self._result({"type": "step", "data": action})

    async def state(self) -> dict[str, Any]:
        """Return the state of the session. Raises as ``reset``."""
        return (await self._reply({"type": "state"}, "state"))["data"]

    async def _first_state(self, connection: ClientConnection) -> dict[str, Any]:
        """Probe the state. A full server says so and closes, perhaps before it is asked; that
        answer counts all the same."""
        try:
            return await self.state()
        except ConnectionLost:
            with contextlib.suppress(ConnectionClosed, KeyError, TypeError, ValueError):
                words = json.loads(await connection.recv())["data"]
                raise EnvError(words["code"], words["message"]) from None
            raise

    async def _result(self, message: dict[str, Any]) -> StepResult:
        data = (await self._reply(message, "observation"))["data"]
        try:
            return StepResult(data["observation"], data["reward"], data["done"])
        except (KeyError, TypeError) as error:
            raise self._not_the_wire(error) from error

    async def close(self) -> None:
        """Say goodbye and close, within seconds; harmless when the server is gone or hangs, or when
        repeated."""
        connection = self._connection
        self._connection = None
        if connection is None:
            return
        try:
            if not self._asking:
                async with asyncio.timeout(_CLOSE_S):
                    await connection.send('{"type":"close"}')
                    await connection.wait_closed()
        except (ConnectionClosed, TimeoutError):
            pass
        finally:
            connection.transport.abort()

    def abort(self) -> None:
        """Drop the connection without a word; call it on the loop."""
        connection = self._connection
        self._connection = None
        self._asking = False
        if connection is not None:
            connection.transport.abort()

    async def _reply(self, message: dict[str, Any], kind: str) -> dict[str, Any]:
        """Send a request and return its reply."""
        connection = self._connection
        if connection is None:
            raise ConnectionPoisoned(f"no usable connection to {self.url}")
        if self._asking:
            raise RuntimeError("the reply to the previous request was not taken")
        if self._numbers is not None:
            message["id"] = next(self._numbers)
        request = _ENCODE(message)
        self._asking = True
        try:
            async with asyncio.timeout(self._message_timeout):
                await connection.send(request)
                text = await connection.recv()
        except TimeoutError as error:
            self.abort()
            raise MessageTimeout(
                f"no reply from {self.url} within {self._message_timeout:g} s"
            ) from error
        except ConnectionClosed as error:
            self.abort()
            raise ConnectionLost(f"{self.url} closed the connection: {error}") from error
        except BaseException:
            self.abort()
            raise
        try:
            reply = json.loads(text)
            if reply["type"] not in (kind, "error"):
                raise ValueError(f"a {kind} reply was due, not {reply['type']!r}")
            if reply.get("id") != message.get("id"):
                raise ValueError(
                    f"the reply to request {message.get('id')} was due, not to {reply.get('id')!r}"
                )
            data = reply["data"]
            failure = _said(data) if reply["type"] == "error" else None
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise self._not_the_wire(error) from error
        self._asking = False
        if failure is not None:
            raise failure
        return reply

    def _not_the_wire(self, error: Exception) -> ConnectionLost:
        self.abort()
        return ConnectionLost(f"{self.url} does not speak the OpenEnv wire: {error!r}")


def _said(data: Mapping[str, Any]) -> EnvError:
    retryable = data.get("retryable") is True
    details = data.get("errors")
    kind = str(data.get("kind"))
    kind = kind if kind in FAILURE_KINDS else ""
    return EnvError(data["code"], data["message"], retryable=retryable, details=details, kind=kind)


def websocket_url(base_url: str) -> str:
    """Turn ``http://host:port`` into ``ws://host:port/ws``. Raises ValueError on another scheme."""
    scheme, separator, rest = base_url.partition("://")
    schemes = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
    if not separator or scheme not in schemes or not rest.strip("/"):
        raise ValueError(f"not the address of an environment server: {base_url!r}")
    rest = rest.rstrip("/")
    return (
        f"{schemes[scheme]}://{rest}" if rest.endswith("/ws") else f"{schemes[scheme]}://{rest}/ws"
    )


def _refusal(url: str, error: InvalidStatus) -> ConnectError:
    response = error.response
    if response.status_code != 503:
        return ConnectError(f"{url} answered HTTP {response.status_code}")
    detail = "server at capacity"
    with contextlib.suppress(KeyError, ValueError):
        detail = json.loads(response.body or b"{}")["message"]
    try:
        retry_after = float(response.headers.get("Retry-After", "1"))
    except ValueError:
        retry_after = 1.0
    return CapacityError(f"{url}: {detail.rstrip('.')}; {_ARITHMETIC}", retry_after)


_MOST_BYTES = 1 << 20


def without_token(url: str) -> tuple[str, str | None]:
    """Return an address without the token that stands before its host (``http://:TOKEN@HOST``), and
    the token; None where there is none."""
    scheme, separator, rest = url.partition("://")
    before, at, host = rest.partition("@")
    if not at or "/" in before:
        return url, None
    return f"{scheme}{separator}{host}", before.removeprefix(":") or None


async def fetch_metadata(
    base_url: str, token: str | None = None, timeout_s: float = 20.0, tls: SSLContext | None = None
) -> dict[str, Any]:
    """Return the JSON object at ``/metadata``; {} when the server has none or does not answer in
    time (connecting tells why). Raises ValueError for a bad address."""
    websocket_url(base_url)
    try:
        found = await fetch_page(base_url, "metadata", token, timeout_s, tls)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


async def fetch_page(
    base_url: str,
    page: str,
    token: str | None = None,
    timeout_s: float = 20.0,
    tls: SSLContext | None = None,
) -> Any:
    """Return the JSON at ``/page`` of a server. ``tls``: as of ``OpenEnvClient``. Raises OSError
    when nobody answers in time, and ValueError for a bad address, another status than 200, and what
    is not JSON."""
    address = urlsplit(websocket_url(base_url))
    path = f"{address.path.removesuffix('/ws')}/{page}"
    lines = [
        f"GET {path} HTTP/1.1",
        f"Host: {address.netloc}",
        "Accept: application/json",
        "Connection: close",
    ]
    if token:
        lines.append(f"Authorization: Bearer {token}")
    request = "\r\n".join([*lines, "", ""]).encode()
    secure: SSLContext | bool | None = (tls or True) if address.scheme == "wss" else None
    try:
        async with asyncio.timeout(timeout_s):
            raw = await _exchange(
                str(address.hostname), address.port or (443 if secure else 80), secure, request
            )
    except TimeoutError:
        raise TimeoutError(f"no answer from {base_url} within {timeout_s:g} s") from None
    try:
        return _json_body(raw)
    except (HTTPException, RecursionError) as error:
        raise ValueError(f"{path} is not an HTTP answer with JSON: {error!r:.200}") from None


async def _exchange(
    host: str, port: int, secure: SSLContext | bool | None, request: bytes
) -> bytes:
    reader, writer = await asyncio.open_connection(host, port, ssl=secure)
    try:
        writer.write(request)
        chunks = []
        size = 0
        while size < _MOST_BYTES and (chunk := await reader.read(1 << 16)):
            chunks.append(chunk)
            size += len(chunk)
        return b"".join(chunks)
    finally:
        writer.transport.abort()


class _Received:
    """Is the part of a socket that HTTPResponse reads."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    def makefile(self, *_: Any) -> io.BytesIO:
        """Return what was received, as a file."""
        return io.BytesIO(self._raw)


def _json_body(raw: bytes) -> Any:
    response = HTTPResponse(_Received(raw))  # type: ignore[arg-type]
    response.begin()
    body = response.read()
    if response.status != 200:
        raise ValueError(f"HTTP {response.status}")
    return json.loads(body)
