"""HTTP/1.1 client that uses one connection to one simulator, and grammar checks that both ends of
the connection apply.

Text written by an agent ends up in header names, header values and request targets. Whatever RFC
9110 and RFC 9112 do not allow there is refused, never escaped, cut or guessed. So both ends see the
same requests in the same bytes.

In a CLI worker, the owner opens the connection and passes it on as a descriptor; the worker has no
other network access. ``botocore`` means the copy that the process uses, which is the CLI's own in a
worker. The next request is sent only after the previous answer was read.
"""

from __future__ import annotations

import io
import re
import select
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import unquote, urlsplit

from botocore.awsrequest import AWSPreparedRequest, AWSResponse
from botocore.exceptions import ConnectionClosedError, ReadTimeoutError
from botocore.parsers import ResponseParserError

from realhf.aws.cli.policy import REGION, Refuse

MAX_BODY_BYTES = 64 * 1024 * 1024
"""Maximum size of a message body, in bytes."""
_TOKEN = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_KEPT_FIELDS = 512
"""Number of header fields, read or written last, that are not checked again. Most requests and
answers have the same ones."""
_KEPT_FIELD_BYTES = 256
"""Maximum length of such a field, in bytes."""
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_TARGET = re.compile(rb"/(?:[A-Za-z0-9\-._~!$&'()*+,;=:@/?]|%[0-9A-Fa-f]{2})*")
_HOST = re.compile(rb"(?:[A-Za-z0-9.\-_]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")
_LENGTH = re.compile(rb"[0-9]{1,9}")
_SLASH_IN_A_SEGMENT = re.compile(r"%2f", re.IGNORECASE)
_FOREIGN_ROUTE = re.compile(r"/+(?:iceberg[^/]*|health|log(?:in|out)|oauth2|v2|v20180820)(?:/|$)")
"""Paths that the simulator routes to a service other than S3."""
_DECODINGS = 4
"""How often a path is percent-decoded before it is checked."""


class BadHttp(ValueError):
    """A message violates the HTTP grammar. The error names the invalid part without quoting it."""


@dataclass(frozen=True)
class RequestHead:
    """Parsed request line and header of a request."""

    method: str
    """HTTP method."""
    target: bytes
    """Path and query, percent-encoded."""
    fields: tuple[tuple[bytes, bytes], ...]
    """Header fields as (name, value) in their order; names are in lower case."""
    length: int
    """Length of the body in bytes."""

    def field(self, name: bytes) -> bytes:
        """Return the value of a header field, b"" if it is missing. ``name``: in lower case."""
        return next((value for known, value in self.fields if known == name), b"")


def check_field(name: bytes, value: bytes) -> None:
    """Raise BadHttp if a header field is invalid, for example because it could be read as several
    fields."""
    if not _TOKEN.fullmatch(name):
        raise BadHttp("a header name is not a token")
    if _CONTROL.search(value):
        raise BadHttp("a header value holds a control character")


def check_request_line(method: bytes, target: bytes) -> None:
    """Raise BadHttp if the method is not a token, or the target is not a path with an optional
    query."""
    if not _TOKEN.fullmatch(method):
        raise BadHttp("the method is not a token")
    if not _TARGET.fullmatch(target):
        raise BadHttp("the request target holds a character that is not allowed there")


def parse_request_head(head: bytes) -> RequestHead:
    """Parse the head of a request, given without the final empty line.

    Raises BadHttp for everything ambiguous: a bare CR or LF, folded lines, a space before a colon,
    a missing or second Host, a second Content-Length, any Transfer-Encoding.
    """
    lines = head.split(b"\r\n")
    words = lines[0].split(b" ")
    if len(words) != 3 or words[2] != b"HTTP/1.1":
        raise BadHttp("the request line is not METHOD TARGET HTTP/1.1")
    check_request_line(words[0], words[1])
    fields = parse_fields(lines[1:])
    hosts = _field_values(fields, b"host")
    if len(hosts) != 1:
        raise BadHttp("a request has one Host")
    if not _HOST.fullmatch(hosts[0]):
        raise BadHttp("the host is not a name or address")
    return RequestHead(words[0].decode(), words[1], fields, body_length(fields) or 0)


def parse_fields(lines: Iterable[bytes]) -> tuple[tuple[bytes, bytes], ...]:
    """Parse header lines, given without their line ends, to (name, value) pairs. Raises BadHttp."""
    return tuple(
        _parse_known_field(line) if len(line) <= _KEPT_FIELD_BYTES else _parse_field(line)
        for line in lines
    )


def _parse_field(line: bytes) -> tuple[bytes, bytes]:
    """Return (name in lower case, value) of a header line. Raises BadHttp."""
    name, colon, value = line.partition(b":")
    if not colon:
        raise BadHttp("a header line has no colon")
    value = value.strip(b" \t")
    check_field(name, value)
    return name.lower(), value


_parse_known_field = lru_cache(_KEPT_FIELDS)(_parse_field)


def write_field(name: bytes, value: bytes) -> bytes:
    """Return a header field as a line with its end. Raises BadHttp."""
    if len(name) + len(value) <= _KEPT_FIELD_BYTES:
        return _write_known_field(name, value)
    return _write_field(name, value)


def _write_field(name: bytes, value: bytes) -> bytes:
    """See ``write_field``."""
    check_field(name, value)
    return name + b": " + value + b"\r\n"


_write_known_field = lru_cache(_KEPT_FIELDS)(_write_field)


def body_length(fields: tuple[tuple[bytes, bytes], ...]) -> int | None:
    """Return the Content-Length, or None if there is none. Raises BadHttp for a second
    Content-Length and for any Transfer-Encoding, because the length of a body must be
    unambiguous."""
    if _field_values(fields, b"transfer-encoding"):
        raise BadHttp("a transfer coding is not accepted")
    lengths = _field_values(fields, b"content-length")
    if len(lengths) > 1:
        raise BadHttp("a message has one Content-Length")
    if not lengths:
        return None
    if not _LENGTH.fullmatch(lengths[0]) or int(lengths[0]) > MAX_BODY_BYTES:
        raise BadHttp("the Content-Length is not a number of bytes that is accepted")
    return int(lengths[0])


def is_internal_path(path: str) -> bool:
    """Return whether a path, after repeated percent-decoding, contains ".." or leads to an endpoint
    of the simulator that is not part of AWS."""
    for _ in range(_DECODINGS):
        path = unquote(path)
    plain = path.replace("\\", "/")
    return plain.lstrip("/").startswith("_") or "/../" in f"{plain}/" or "/_ministack" in plain


def is_foreign_route(path: str) -> bool:
    """Return whether the simulator would route a request for this path to a service other than S3,
    although it is signed for S3. This happens if the bucket has the name of such a route."""
    return _FOREIGN_ROUTE.match(path) is not None


def has_encoded_slash(path: str) -> bool:
    """Return whether an undecoded path contains an encoded slash. Decoding it would split a path
    segment and turn the request into another operation (``functions/a%2Fconcurrency``)."""
    return _SLASH_IN_A_SEGMENT.search(path) is not None


def _field_values(fields: tuple[tuple[bytes, bytes], ...], name: bytes) -> list[bytes]:
    return [value for known, value in fields if known == name]


_AUTHORITY = "localhost:4566"
ENDPOINT = f"http://{_AUTHORITY}"
"""Endpoint URL that every client is configured with. The connections themselves lead to the
simulator's real address."""
_READ_TIMEOUT_S = 8.0
"""Deadline for an answer, in seconds."""
_MAX_RESPONSE_BYTES = 16 << 20
_MAX_HEAD_BYTES = 256 << 10
_RECEIVE_BYTES = 1 << 16
SIGNED_FOR_S3 = "/s3/aws4_request"
"""Part of a signature that names S3."""
_LINE_END_AND_HOST = f" HTTP/1.1\r\nHost: {_AUTHORITY}\r\n".encode("ascii")
_KEPT_URLS = 256
"""Number of URLs that are not checked again."""
_KEPT_URL_CHARS = 256
"""Maximum length of such a URL."""
_DROPPED_HEADERS = (
    "expect", "transfer-encoding", "content-length", "connection", "host", "keep-alive", "upgrade", "te", "trailer",
    "proxy-connection",
)  # fmt: skip


class AnswerTooLarge(ValueError):
    """The Content-Length of an answer exceeds the limit."""


class PinnedConnection:
    """Replacement for botocore's HTTP session that sends all requests over one connection, one at a
    time. All clients share it.

    ``dial`` opens a new connection, at the first request and whenever the connection is broken.
    Without ``dial`` a broken connection stays broken.
    """

    def __init__(self, refuse: Refuse, dial: Callable[[], socket.socket] | None = None) -> None:
        self._refuse = refuse
        self._dial = dial
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()
        self.sent = 0

    def attach(self, connection: socket.socket) -> None:
        """Use this connected socket from now on."""
        connection.settimeout(_READ_TIMEOUT_S)
        self._socket = connection

    @property
    def usable(self) -> bool:
        """Whether there is an open connection."""
        return self._socket is not None

    def send(self, request: AWSPreparedRequest) -> AWSResponse:
        """Send a request and return the complete answer. Raises RefusedRequest,
        ConnectionClosedError or ReadTimeoutError, and ResponseParserError if the answer is too
        large."""
        fields = request.headers.items()
        is_for_s3 = SIGNED_FOR_S3 in str(request.headers.get("Authorization"))
        body = _body_bytes(request.body)
        data = self.encode(request.method, request.url, fields, body, is_for_s3=is_for_s3)
        status, headers, content = self.exchange(data, request.method, request.url)
        response = AWSResponse(request.url, status, headers, _ResponseBody(content))
        if not request.stream_output:
            response._content = content
        return response

    def encode(
        self,
        method: str,
        url: str,
        fields: Iterable[tuple[Any, Any]],
        body: bytes,
        *,
        is_for_s3: bool,
    ) -> bytes:
        """Return a request as it is sent. Raises RefusedRequest. ``fields``: its header, in texts or
        bytes. ``is_for_s3``: whether its signature names S3."""
        target, rule, message = (
            _find_known_target(url, is_for_s3)
            if len(url) <= _KEPT_URL_CHARS
            else _find_target(url, is_for_s3)
        )
        if rule:
            self._refuse(rule, message)
        try:
            raw_method = method.encode("ascii")
            check_request_line(raw_method, target)
            lines = [raw_method + b" " + target + _LINE_END_AND_HOST]
            for name, value in fields:
                if name.lower() not in _DROPPED_HEADERS:
                    lines.append(write_field(_as_bytes(name, "ascii"), _as_bytes(value, "utf-8")))
        except UnicodeEncodeError:
            self._refuse("malformed", "a header name is not ASCII, or its value is not Unicode")
        except BadHttp as error:
            self._refuse("malformed", f"the request cannot be sent: {error}")
        lines.append(b"Content-Length: %d\r\n\r\n" % len(body))
        lines.append(body)
        return b"".join(lines)

    def exchange(self, data: bytes, method: str, url: str) -> tuple[int, dict[str, str], bytes]:
        """Send an encoded request and return (status, headers, body) of the answer. Raises as
        ``send`` does, except RefusedRequest."""
        with self._lock:
            try:
                return self._exchange(data, method)
            except AnswerTooLarge as error:
                self._drop()
                raise ResponseParserError(str(error)) from error
            except TimeoutError as error:
                self._drop()
                raise ReadTimeoutError(endpoint_url=url, error=error) from error
            except (OSError, ValueError) as error:
                self._drop()
                raise ConnectionClosedError(error=error, endpoint_url=url) from error

    def _exchange(self, data: bytes, method: str) -> tuple[int, dict[str, str], bytes]:
        reused = self._socket is not None
        try:
            return self._exchange_once(data, method)
        except ConnectionError:
            # The simulator was replaced since the last call: nothing of this request reached the
            # new one.
            if not reused or self._dial is None:
                raise
            self._drop()
            return self._exchange_once(data, method)

    def _exchange_once(self, data: bytes, method: str) -> tuple[int, dict[str, str], bytes]:
        if self._socket is None and self._dial is not None:
            self.attach(self._dial())
        if self._socket is None:
            raise ConnectionResetError("no connection")
        _check_no_input(self._socket)
        self._socket.sendall(data)
        self.sent += 1
        return read_answer(self._socket, method)

    def close(self) -> None:
        """Do nothing. A client calls this when it is garbage collected, but the connection is
        shared."""

    def disconnect(self) -> None:
        """Close the connection."""
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None


def _find_target(url: str, is_for_s3: bool) -> tuple[bytes, str, str]:
    """Return (request target of a URL, "", ""), or (b"", rule, message) if it is refused."""
    try:
        target = url.encode("ascii")
        parts = urlsplit(url)
    except ValueError:
        return b"", "malformed", "the request has no address that can be sent"
    prefix = ENDPOINT.encode("ascii")
    if not target.startswith(prefix) or target[len(prefix) : len(prefix) + 1] not in (
        b"",
        b"/",
        b"?",
    ):
        return b"", "endpoint", "requests leave only for this session's endpoint"
    if is_internal_path(parts.path):
        return b"", "internal-path", "this path is not part of AWS"
    if is_for_s3 and is_foreign_route(unquote(parts.path)):
        return b"", "internal-path", "a bucket of this name would not be answered by S3 here"
    if has_encoded_slash(parts.path):
        return b"", "malformed", "a name in the path of the request holds a slash"
    target = target[len(prefix) :]
    return target if target.startswith(b"/") else b"/" + target, "", ""


_find_known_target = lru_cache(_KEPT_URLS)(_find_target)


def _check_no_input(connection: socket.socket) -> None:
    """Check before sending a request that no bytes have arrived: they would be read as the
    request's answer. Raises ValueError for unsolicited bytes, and ConnectionResetError if the
    simulator closed the connection."""
    waiting = select.poll()
    waiting.register(connection, select.POLLIN)
    if waiting.poll(0):
        if connection.recv(1, socket.MSG_PEEK):
            raise ValueError("the simulator sent bytes that no request asked for")
        raise ConnectionResetError("the simulator closed the connection")


class _ResponseBody(io.BytesIO):
    """Response body with the interface that botocore expects."""

    def stream(self, amt: int = 65536, decode_content: bool | None = None) -> Iterator[bytes]:
        """Yield the rest of the body in chunks."""
        while chunk := self.read(amt):
            yield chunk


def _as_bytes(text: Any, encoding: str) -> bytes:
    return text if isinstance(text, bytes) else str(text).encode(encoding)


def _body_bytes(body: Any) -> bytes:
    if body is None:
        return b""
    if isinstance(body, str):
        return body.encode("utf-8")
    if isinstance(body, (bytes, bytearray)):
        return bytes(body)
    content = body.read()
    return content.encode("utf-8") if isinstance(content, str) else content


def read_answer(connection: socket.socket, method: str) -> tuple[int, dict[str, str], bytes]:
    """Read one answer and return (status, headers, body). Raises ValueError if the received bytes
    are not exactly one answer, and ConnectionResetError if the answer ends early."""
    received = bytearray()
    while (end := received.find(b"\r\n\r\n")) < 0:
        if len(received) > _MAX_HEAD_BYTES:
            raise ValueError("the head of the answer is too long")
        received += _receive(connection)
    first, *lines = bytes(received[:end]).split(b"\r\n")
    version, status, _ = (*first.split(b" ", 2), b"", b"")[:3]
    if version != b"HTTP/1.1" or not status.isdigit() or int(status) < 200:
        raise ValueError("not the beginning of an answer")
    fields = parse_fields(lines)
    empty = method == "HEAD" or int(status) in (204, 304)
    length = 0 if empty else body_length(fields)
    if length is None:
        raise ValueError("the answer has no length")
    if length > _MAX_RESPONSE_BYTES:
        raise AnswerTooLarge(
            f"the answer has {length} bytes, and {_MAX_RESPONSE_BYTES} can be read"
        )
    start = end + 4
    while len(received) < start + length:
        received += _receive(connection)
    if len(received) > start + length:
        raise ValueError("the simulator sent more than one answer")
    # Header names keep their case, because some contain metadata keys, which are case-sensitive for
    # their readers.
    names = (line.partition(b":")[0].decode("ascii") for line in lines)
    headers = {
        name: value.decode("utf-8", "replace")
        for name, (_, value) in zip(names, fields, strict=True)
    }
    return int(status), headers, bytes(received[start:])


def _receive(connection: socket.socket) -> bytes:
    data = connection.recv(_RECEIVE_BYTES)
    if not data:
        raise ConnectionResetError("the simulator closed the connection")
    return data


class Signature:
    """Replacement for SigV4 signing. The simulator reads only account, region and service from the
    header, so a constant signature suffices. Presigned URLs are shown to the agent, so they are
    signed as usual.

    ``header``: the constant value of the Authorization header.
    """

    def __init__(self, account: str, signing_name: str, sign: Callable[..., None]) -> None:
        self._sign = sign
        self.header = (
            f"AWS4-HMAC-SHA256 Credential={account}/20260101/{REGION}/{signing_name}/aws4_request, "
            f"SignedHeaders=host, Signature={'0' * 64}"
        )

    def __call__(self, operation_name: str, request: Any, *args: Any, **kwargs: Any) -> None:
        """Sign a request; see ``RequestSigner.sign``."""
        if "presign-url" in args:
            self._sign(operation_name, request, *args, **kwargs)
        else:
            request.headers["Authorization"] = self.header


def pin_client(client: Any, account: str, connection: PinnedConnection) -> Any:
    """Make a botocore client send over ``connection``, with a constant signature and user agent,
    and return the client."""
    service_id = client.meta.service_model.service_id.hyphenize()
    client._endpoint.http_session = connection
    signer = client._request_signer
    signer.sign = Signature(account, signer.signing_name, signer.sign)
    client.meta.events.unregister(
        f"request-created.{service_id}",
        client._user_agent_creator.rebuild_and_replace_user_agent_handler,
    )
    client._user_agent_creator.to_string = lambda: "aws-cli"
    return client
