"""Client of OpenEnv sessions over a WebSocket, and of the HTTP pages on which a server describes
itself.

To connect, the client makes the handshake and requests the state. A request without a reply
(timeout, cancellation, lost connection) makes the connection unusable; it is closed at once, so
that a late reply can never be taken for the reply to another request. If the server echoes ids,
each reply must have the id of its request. Source: docs/reference/environment.md 2.1, 2.3, 2.4.
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
"""Maximum size of a reply in bytes."""
_CLOSE_S = 2.0
"""Seconds that closing a connection may take."""
_CAPACITY_ADVICE = (
    "a trainer opens one session per episode of its generation batch (per-device batch x "
    "accumulation steps x "
    "devices), and the server must have at least as many (--pool-size)"
)
"""Advice on the number of sessions, for errors of a server without a free session."""


@dataclass(frozen=True)
class StepResult:
    """An OpenEnv server's reply to ``reset`` or ``step``."""

    observation: dict[str, Any]
    """The observation as a JSON object."""
    reward: float | None
    """Reward of the step; None if there is none."""
    done: bool
    """Whether the episode has ended."""


class ConnectError(ConnectionError):
    """Raised if a session cannot be opened."""


class CapacityError(ConnectError):
    """Raised if a server has no free session. ``retry_after_s``: seconds after which the server
    advises to try again."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ConnectionLost(ConnectionError):
    """Raised if the server closed the connection, or if it was lost during a request."""


class ConnectionPoisoned(ConnectionError):
    """Raised if a connection is used that was closed after a request without a reply, or was never
    opened."""


class MessageTimeout(TimeoutError):
    """Raised if no reply came within the message timeout."""


class EnvError(RuntimeError):
    """Raised for an error frame from the server; the session stays usable.

    Args:
        code: Error code on the wire.
        message: Description of the error.
        retryable: Whether the server reports that nothing was executed and the request may be
            repeated.
        details: Description of invalid fields by a stock server, as any JSON value.
        kind: Kind of the environment's failure (``realhf.api.environment.FAILURE_KINDS``); "" if
            the server does not report it.
    """

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
    """Return the kind of failure (``FAILURE_KINDS``) that corresponds to an error of a request or a
    connection."""
    if isinstance(error, EnvError):
        return "unavailable" if error.retryable else "internal"
    if isinstance(error, CapacityError):
        return "capacity"
    return "timeout" if isinstance(error, TimeoutError) else "lost"


class OpenEnvClient:
    """Client of one session. It handles one request at a time, on one event loop.

    After a lost connection, ``connect`` opens a new session. ``probe`` is the state that the server
    returned at connecting.

    Args:
        base_url: ``http(s)://`` or ``ws(s)://`` address of the server.
        connect_timeout_s: Time limit of handshake and state request together.
        message_timeout_s: Time limit of each request.
        ping_interval_s: Interval of keep-alive pings.
        ping_timeout_s: Time limit of a ping; by default, a server may be busy for minutes.
        token: Sent as ``Authorization: Bearer``.
        tls: Context to verify an https server; None uses the certificate authorities of this
            machine, or those in the file that the variable SSL_CERT_FILE names.
        correlate: Number the requests and check the ids of the replies, for servers whose
            ``/metadata`` has ``"correlation": true``.
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
        self._awaits_reply = False

    @property
    def usable(self) -> bool:
        """Whether a request may be sent now."""
        return self._connection is not None and not self._awaits_reply

    async def connect(self) -> None:
        """Open the connection and request the state once. Raises CapacityError or ConnectError."""
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
                self.probe = await self._request_first_state(self._connection)
        except InvalidStatus as error:
            raise _read_refusal(self.url, error) from None
        except EnvError as error:
            self.abort()
            if error.code == "CAPACITY_REACHED":
                raise CapacityError(
                    f"{self.url} refused the session: {error}; {_CAPACITY_ADVICE}"
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
        return await self._request_step({"type": "reset", "data": kwargs})

    async def step(self, command: str | Mapping[str, Any]) -> StepResult:
        """Run a command, or send an action in another environment's format. Raises the errors of
        ``reset``."""
        action = {"command": command} if isinstance(command, str) else dict(command)
        return await self._request_step({"type": "step", "data": action})

    async def state(self) -> dict[str, Any]:
        """Return the state of the session. Raises the errors of ``reset``."""
        return (await self._reply({"type": "state"}, "state"))["data"]

    async def _request_first_state(self, connection: ClientConnection) -> dict[str, Any]:
        """Request the state. If the connection is lost, raise the EnvError that a server without a
        free session may have sent before it closed the connection."""
        try:
            return await self.state()
        except ConnectionLost:
            with contextlib.suppress(ConnectionClosed, KeyError, TypeError, ValueError):
                error_data = json.loads(await connection.recv())["data"]
                raise EnvError(error_data["code"], error_data["message"]) from None
            raise

    async def _request_step(self, message: dict[str, Any]) -> StepResult:
        data = (await self._reply(message, "observation"))["data"]
        try:
            return StepResult(data["observation"], data["reward"], data["done"])
        except (KeyError, TypeError) as error:
            raise self._protocol_error(error) from error

    async def close(self) -> None:
        """Send a close message and close the connection, within seconds. May be called again, and
        when the server is gone or hangs."""
        connection = self._connection
        self._connection = None
        if connection is None:
            return
        try:
            if not self._awaits_reply:
                async with asyncio.timeout(_CLOSE_S):
                    await connection.send('{"type":"close"}')
                    await connection.wait_closed()
        except (ConnectionClosed, TimeoutError):
            pass
        finally:
            connection.transport.abort()

    def abort(self) -> None:
        """Drop the connection without a close message; must be called on the loop."""
        connection = self._connection
        self._connection = None
        self._awaits_reply = False
        if connection is not None:
            connection.transport.abort()

    async def _reply(self, message: dict[str, Any], kind: str) -> dict[str, Any]:
        """Send a request and return its reply, which must be of type ``kind``.

        Raises the errors of ``reset``. An invalid reply closes the connection and raises
        ConnectionLost.
        """
        connection = self._connection
        if connection is None:
            raise ConnectionPoisoned(f"no usable connection to {self.url}")
        if self._awaits_reply:
            raise RuntimeError("the reply to the previous request was not taken")
        if self._numbers is not None:
            message["id"] = next(self._numbers)
        request = _ENCODE(message)
        self._awaits_reply = True
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
            failure = _read_error(data) if reply["type"] == "error" else None
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise self._protocol_error(error) from error
        self._awaits_reply = False
        if failure is not None:
            raise failure
        return reply

    def _protocol_error(self, error: Exception) -> ConnectionLost:
        self.abort()
        return ConnectionLost(f"{self.url} does not speak the OpenEnv wire: {error!r}")


def _read_error(data: Mapping[str, Any]) -> EnvError:
    retryable = data.get("retryable") is True
    details = data.get("errors")
    kind = str(data.get("kind"))
    kind = kind if kind in FAILURE_KINDS else ""
    return EnvError(data["code"], data["message"], retryable=retryable, details=details, kind=kind)


def websocket_url(base_url: str) -> str:
    """Convert ``http://host:port`` to ``ws://host:port/ws``. Raises ValueError for another
    scheme."""
    scheme, separator, remainder = base_url.partition("://")
    schemes = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
    if not separator or scheme not in schemes or not remainder.strip("/"):
        raise ValueError(f"not the address of an environment server: {base_url!r}")
    remainder = remainder.rstrip("/")
    return (
        f"{schemes[scheme]}://{remainder}"
        if remainder.endswith("/ws")
        else f"{schemes[scheme]}://{remainder}/ws"
    )


def _read_refusal(url: str, error: InvalidStatus) -> ConnectError:
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
    return CapacityError(f"{url}: {detail.rstrip('.')}; {_CAPACITY_ADVICE}", retry_after)


_MAX_PAGE_BYTES = 1 << 20
"""Maximum size of a page in bytes."""


def split_token(url: str) -> tuple[str, str | None]:
    """Split an address ``http://:TOKEN@HOST``. Return (address without the token, token or
    None)."""
    scheme, separator, remainder = url.partition("://")
    credentials, separator_at, host = remainder.partition("@")
    if not separator_at or "/" in credentials:
        return url, None
    return f"{scheme}{separator}{host}", credentials.removeprefix(":") or None


async def fetch_metadata(
    base_url: str, token: str | None = None, timeout_s: float = 20.0, tls: SSLContext | None = None
) -> dict[str, Any]:
    """Return the JSON object at ``/metadata``; {} if the server has none or does not answer in
    time.

    The reason is left to ``connect``. Raises ValueError for an invalid address.
    """
    websocket_url(base_url)
    try:
        page = await fetch_page(base_url, "metadata", token, timeout_s, tls)
    except (OSError, ValueError):
        return {}
    return page if isinstance(page, dict) else {}


async def fetch_page(
    base_url: str,
    page: str,
    token: str | None = None,
    timeout_s: float = 20.0,
    tls: SSLContext | None = None,
) -> Any:
    """Return the JSON value at ``/page`` of a server; ``tls`` is that of ``OpenEnvClient``.

    Raises OSError if the server does not answer in time, and ValueError for an invalid address, a
    status other than 200 and an answer that is not JSON.
    """
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
        while size < _MAX_PAGE_BYTES and (chunk := await reader.read(1 << 16)):
            chunks.append(chunk)
            size += len(chunk)
        return b"".join(chunks)
    finally:
        writer.transport.abort()


class _ReceivedBytes:
    """The part of a socket's interface that HTTPResponse needs, over bytes already received."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    def makefile(self, *_: Any) -> io.BytesIO:
        """Return the received bytes as a file."""
        return io.BytesIO(self._raw)


def _json_body(raw: bytes) -> Any:
    response = HTTPResponse(_ReceivedBytes(raw))  # type: ignore[arg-type]
    response.begin()
    body = response.read()
    if response.status != 200:
        raise ValueError(f"HTTP {response.status}")
    return json.loads(body)
