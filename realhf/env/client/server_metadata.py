"""Reads what an environment server reports about itself over HTTP: at ``/metadata`` whether it echoes request ids, how
its rewards are to be read, how many sessions it serves; at ``/schema`` what its actions and observations are. Source:
docs/reference/environment.md 2.1, 2.2, 7."""

from __future__ import annotations

import asyncio
import io
import json
from http.client import HTTPException, HTTPResponse
from ssl import SSLContext
from typing import Any
from urllib.parse import urlsplit

from realhf.env.client.openenv_client import websocket_url

_MOST_BYTES = 1 << 20


def without_token(url: str) -> tuple[str, str | None]:
    """Return an address without the token that stands before its host (``http://:TOKEN@HOST``), and the token; None
    where there is none."""
    scheme, separator, rest = url.partition("://")
    before, at, host = rest.partition("@")
    if not at or "/" in before:
        return url, None
    return f"{scheme}{separator}{host}", before.removeprefix(":") or None


async def fetch_metadata(
    base_url: str, token: str | None = None, timeout_s: float = 20.0, tls: SSLContext | None = None
) -> dict[str, Any]:
    """Return the JSON object at ``/metadata``; {} when the server has none or does not answer in time (connecting tells
    why). Raises ValueError for a bad address."""
    websocket_url(base_url)
    try:
        found = await fetch_page(base_url, "metadata", token, timeout_s, tls)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


async def fetch_page(
    base_url: str, page: str, token: str | None = None, timeout_s: float = 20.0, tls: SSLContext | None = None
) -> Any:
    """Return the JSON at ``/page`` of a server. ``tls``: as of ``OpenEnvClient``. Raises OSError when nobody answers in
    time, and ValueError for a bad address, another status than 200, and what is not JSON."""
    address = urlsplit(websocket_url(base_url))
    path = f"{address.path.removesuffix('/ws')}/{page}"
    lines = [f"GET {path} HTTP/1.1", f"Host: {address.netloc}", "Accept: application/json", "Connection: close"]
    if token:
        lines.append(f"Authorization: Bearer {token}")
    request = "\r\n".join([*lines, "", ""]).encode()
    secure: SSLContext | bool | None = (tls or True) if address.scheme == "wss" else None
    try:
        async with asyncio.timeout(timeout_s):
            raw = await _exchange(str(address.hostname), address.port or (443 if secure else 80), secure, request)
    except TimeoutError:
        raise TimeoutError(f"no answer from {base_url} within {timeout_s:g} s") from None
    try:
        return _json_body(raw)
    except (HTTPException, RecursionError) as error:
        raise ValueError(f"{path} is not an HTTP answer with JSON: {error!r:.200}") from None


async def _exchange(host: str, port: int, secure: SSLContext | bool | None, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(host, port, ssl=secure)
    try:
        writer.write(request)
        chunks, size = [], 0
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
