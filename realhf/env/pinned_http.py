"""HTTP to one simulator over one connection.

In a CLI worker the connection is made by the owner and handed over as a descriptor; there is no other way out.
``botocore`` is here whichever copy of it the process uses: the CLI's own in a worker.
"""

from __future__ import annotations

import io
import re
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote, urlsplit

from botocore.awsrequest import AWSPreparedRequest, AWSResponse
from botocore.exceptions import ConnectionClosedError, ReadTimeoutError

from realhf.env.refusal import Refuse

_MAX_RESPONSE_BYTES = 16 << 20
_DROPPED_HEADERS = frozenset({"expect", "transfer-encoding", "content-length", "connection", "host"})
_INTERNAL_PATH = re.compile(r"^/*_")


class PinnedConnection:
    """Stands in for botocore's HTTP session. Requests are serialised; all clients share it.

    ``dial`` makes the first and every later connection; without it a broken connection stays broken."""

    def __init__(
        self,
        authority: str,
        refuse: Refuse,
        dial: Callable[[], socket.socket] | None = None,
        read_timeout_s: float = 5.0,
    ) -> None:
        self._authority = authority
        self._refuse = refuse
        self._dial = dial
        self._read_timeout_s = read_timeout_s
        self._socket: socket.socket | None = None
        self._file: io.BufferedReader | None = None
        self._lock = threading.Lock()
        self.sent = 0

    def attach(self, connection: socket.socket) -> None:
        """Use this connected socket from now on."""
        connection.settimeout(self._read_timeout_s)
        self._socket = connection
        self._file = connection.makefile("rb")

    @property
    def usable(self) -> bool:
        return self._socket is not None

    def send(self, request: AWSPreparedRequest) -> AWSResponse:
        """The answer, read whole. Raises RefusedRequest, ConnectionClosedError, ReadTimeoutError."""
        data = self._encode(request)
        with self._lock:
            try:
                status, headers, content = self._exchange(data, request.method)
            except TimeoutError as error:
                self._drop()
                raise ReadTimeoutError(endpoint_url=request.url, error=error) from error
            except (OSError, ValueError) as error:
                self._drop()
                raise ConnectionClosedError(error=error, request=request, endpoint_url=request.url) from error
        response = AWSResponse(request.url, status, headers, _Raw(content))
        if not request.stream_output:
            response._content = content
        return response

    def _encode(self, request: AWSPreparedRequest) -> bytes:
        target = self._target(request)
        body = _body_bytes(request.body)
        lines = [f"{request.method} {target} HTTP/1.1\r\nHost: {self._authority}\r\n".encode()]
        for name, value in request.headers.items():
            if name.lower() not in _DROPPED_HEADERS:
                raw = value if isinstance(value, bytes) else str(value).encode("utf-8")
                if b"\r" in raw or b"\n" in raw:
                    self._refuse("newline", "a header would contain a line break")
                lines.append(name.encode("ascii") + b": " + raw + b"\r\n")
        lines.append(b"Content-Length: %d\r\n\r\n" % len(body))
        lines.append(body)
        return b"".join(lines)

    def _exchange(self, data: bytes, method: str) -> tuple[int, dict[str, str], bytes]:
        reused = self._socket is not None
        try:
            return self._exchange_once(data, method)
        except ConnectionError:
            # The simulator was replaced since the last call: nothing of this request reached the new one.
            if not reused or self._dial is None:
                raise
            self._drop()
            return self._exchange_once(data, method)

    def _exchange_once(self, data: bytes, method: str) -> tuple[int, dict[str, str], bytes]:
        if self._socket is None and self._dial is not None:
            self.attach(self._dial())
        if self._socket is None or self._file is None:
            raise ConnectionResetError("no connection")
        self._socket.sendall(data)
        self.sent += 1
        return _read_response(self._file, method)

    def close(self) -> None:
        """Clients close their session when garbage collected; the connection is everybody's and stays."""

    def disconnect(self) -> None:
        """Drop the connection."""
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = self._file = None

    def _target(self, request: AWSPreparedRequest) -> str:
        parts = urlsplit(request.url)
        if parts.netloc != self._authority or parts.scheme != "http":
            self._refuse("endpoint", "requests leave only for this session's endpoint")
        path = parts.path
        for _ in range(3):
            path = unquote(path)
        if _INTERNAL_PATH.match(path.replace("\\", "/")) or "/../" in f"{path}/" or "/_ministack" in path:
            self._refuse("internal-path", "this path is not part of AWS")
        return (parts.path or "/") + (f"?{parts.query}" if parts.query else "")


class _Raw(io.BytesIO):
    """What botocore expects of a response body."""

    def stream(self, amt: int = 65536, decode_content: bool | None = None) -> Iterator[bytes]:
        while chunk := self.read(amt):
            yield chunk


def _body_bytes(body: Any) -> bytes:
    if body is None:
        return b""
    if isinstance(body, str):
        return body.encode("utf-8")
    if isinstance(body, (bytes, bytearray)):
        return bytes(body)
    content = body.read()
    return content.encode("utf-8") if isinstance(content, str) else content


def _read_response(stream: io.BufferedReader, method: str) -> tuple[int, dict[str, str], bytes]:
    line = stream.readline(65536)
    if not line:
        raise ConnectionResetError("the simulator closed the connection")
    status = int(line.split(b" ", 2)[1])
    headers: dict[str, str] = {}
    while (line := stream.readline(65536)) not in (b"\r\n", b""):
        name, _, value = line.decode("utf-8", "replace").partition(":")
        headers[name] = value.strip()
    lowered = {name.lower(): value for name, value in headers.items()}
    if 100 <= status < 200:
        return _read_response(stream, method)
    length = int(lowered.get("content-length", "0"))
    if length > _MAX_RESPONSE_BYTES:
        raise ValueError("answer too large")
    content = b"" if method == "HEAD" or status in (204, 304) else stream.read(length)
    return status, headers, content
