"""Checks the part of HTTP/1.1 that the environment speaks with its simulators, on both ends of the wire.

Agent text becomes header names, header values and request targets. What RFC 9110 and RFC 9112 do not allow there is
refused: it is never escaped, cut or guessed at, so both ends see the same requests in the same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import unquote

MAX_BODY_BYTES = 64 * 1024 * 1024

_TOKEN = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_TARGET = re.compile(rb"/(?:[A-Za-z0-9\-._~!$&'()*+,;=:@/?]|%[0-9A-Fa-f]{2})*")
_HOST = re.compile(rb"(?:[A-Za-z0-9.\-_]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")
_LENGTH = re.compile(rb"[0-9]{1,9}")
_SLASH_IN_A_SEGMENT = re.compile(r"%2f", re.IGNORECASE)
_FOREIGN_ROUTE = re.compile(r"/+(?:iceberg[^/]*|health|log(?:in|out)|oauth2|v2|v20180820)(?:/|$)")
_DECODINGS = 4


class BadHttp(ValueError):
    """The grammar does not allow a message; the text says which part, and quotes nothing of it."""


@dataclass(frozen=True)
class RequestHead:
    """Holds the head of a request: ``fields`` in the order of the message, names in lower case; ``length`` of the
    body."""

    method: str
    target: bytes
    fields: tuple[tuple[bytes, bytes], ...]
    length: int

    def field(self, name: bytes) -> bytes:
        """Return the value of a field, "" where it is not there."""
        return next((value for known, value in self.fields if known == name), b"")


def check_field(name: bytes, value: bytes) -> None:
    """Raise BadHttp for a header field that could be read as more or less than one field."""
    if not _TOKEN.fullmatch(name):
        raise BadHttp("a header name is not a token")
    if _CONTROL.search(value):
        raise BadHttp("a header value holds a control character")


def check_request_line(method: bytes, target: bytes) -> None:
    """Raise BadHttp for a method that is not a token and a target that is not a path with a query."""
    if not _TOKEN.fullmatch(method):
        raise BadHttp("the method is not a token")
    if not _TARGET.fullmatch(target):
        raise BadHttp("the request target holds a character that is not allowed there")


def check_host(host: bytes) -> None:
    """Raise BadHttp for text that is not a host with an optional port."""
    if not _HOST.fullmatch(host):
        raise BadHttp("the host is not a name or address")


def parse_request_head(head: bytes) -> RequestHead:
    """Parse the head of a request, without the empty line that ends it. Raises BadHttp for everything ambiguous: bare
    CR or LF, folded lines, space before a colon, no or several hosts, several lengths, any transfer coding."""
    lines = head.split(b"\r\n")
    words = lines[0].split(b" ")
    if len(words) != 3 or words[2] != b"HTTP/1.1":
        raise BadHttp("the request line is not METHOD TARGET HTTP/1.1")
    check_request_line(words[0], words[1])
    fields = parse_fields(lines[1:])
    hosts = _values(fields, b"host")
    if len(hosts) != 1:
        raise BadHttp("a request has one Host")
    check_host(hosts[0])
    return RequestHead(words[0].decode(), words[1], fields, body_length(fields) or 0)


def parse_fields(lines: Iterable[bytes]) -> tuple[tuple[bytes, bytes], ...]:
    """Parse the header fields of lines whose line ends are removed. Raises BadHttp."""
    fields = []
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon:
            raise BadHttp("a header line has no colon")
        value = value.strip(b" \t")
        check_field(name, value)
        fields.append((name.lower(), value))
    return tuple(fields)


def body_length(fields: tuple[tuple[bytes, bytes], ...]) -> int | None:
    """Return what Content-Length says, None without one. Raises BadHttp for a second one and for any Transfer-Encoding:
    the end of a body is a number that was read once."""
    if _values(fields, b"transfer-encoding"):
        raise BadHttp("a transfer coding is not accepted")
    lengths = _values(fields, b"content-length")
    if len(lengths) > 1:
        raise BadHttp("a message has one Content-Length")
    if not lengths:
        return None
    if not _LENGTH.fullmatch(lengths[0]) or int(lengths[0]) > MAX_BODY_BYTES:
        raise BadHttp("the Content-Length is not a number of bytes that is accepted")
    return int(lengths[0])


def is_internal_path(path: str) -> bool:
    """Return whether a path, decoded as often as anybody might, climbs or leads to what is not part of AWS."""
    for _ in range(_DECODINGS):
        path = unquote(path)
    plain = path.replace("\\", "/")
    return plain.lstrip("/").startswith("_") or "/../" in f"{plain}/" or "/_ministack" in plain


def is_foreign_route(path: str) -> bool:
    """Return whether the simulator would answer a request for this path by another service than S3, whatever the
    request is signed for: the path begins with the name of a bucket that is also an address."""
    return _FOREIGN_ROUTE.match(path) is not None


def hides_a_slash(path: str) -> bool:
    """Return whether a segment of an undecoded path holds a slash: after decoding it would be two segments, and the
    request another one than its operation says (``functions/a%2Fconcurrency``)."""
    return _SLASH_IN_A_SEGMENT.search(path) is not None


def _values(fields: tuple[tuple[bytes, bytes], ...], name: bytes) -> list[bytes]:
    return [value for known, value in fields if known == name]
