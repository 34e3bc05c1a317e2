"""One grammar on both ends of the simulators' wire: what could be read in two ways is no message at
all."""

import asyncio
import contextlib
import socket
import threading

import pytest
from botocore.awsrequest import AWSPreparedRequest
from botocore.compat import HTTPHeaders
from botocore.exceptions import ConnectionClosedError

from realhf.aws.cli.pinned_http import (
    BadHttp,
    PinnedConnection,
    has_encoded_slash,
    is_internal_path,
    parse_request_head,
)
from realhf.aws.cli.policy import RefusedRequest, refuse
from realhf.aws.simulator.asgi_http import HttpConnection, ParsedRequests

HOST = b"\r\nHost: localhost:4566"
AMBIGUOUS = {
    "bare LF between fields": b"GET / HTTP/1.1\r\nHost: h\nX: y",
    "bare CR in a value": b"GET / HTTP/1.1\r\nHost: h\r\nX: a\rb",
    "bare LF in the request line": b"GET /\n HTTP/1.1" + HOST,
    "NUL in a value": b"GET / HTTP/1.1" + HOST + b"\r\nX: a\0b",
    "a folded line": b"GET / HTTP/1.1" + HOST + b"\r\nX: a\r\n b",
    "a space before the colon": b"GET / HTTP/1.1" + HOST + b"\r\nContent-Length : 3",
    "a name with a space": b"GET / HTTP/1.1" + HOST + b"\r\na b: c",
    "an empty name": b"GET / HTTP/1.1" + HOST + b"\r\n: c",
    "a line without a colon": b"GET / HTTP/1.1" + HOST + b"\r\nabc",
    "two lengths": b"GET / HTTP/1.1" + HOST + b"\r\nContent-Length: 3\r\nContent-Length: 3",
    "a list of lengths": b"GET / HTTP/1.1" + HOST + b"\r\nContent-Length: 3, 3",
    "a signed length": b"GET / HTTP/1.1" + HOST + b"\r\nContent-Length: +3",
    "a negative length": b"GET / HTTP/1.1" + HOST + b"\r\nContent-Length: -1",
    "a length with an underscore": b"GET / HTTP/1.1" + HOST + b"\r\nContent-Length: 1_0",
    "a hexadecimal length": b"GET / HTTP/1.1" + HOST + b"\r\nContent-Length: 0x10",
    "a length of other digits": b"GET / HTTP/1.1" + HOST + b"\r\nContent-Length: \xd9\xa3",
    "a huge length": b"GET / HTTP/1.1" + HOST + b"\r\nContent-Length: 99999999999",
    "length and coding": b"GET / HTTP/1.1"
    + HOST
    + b"\r\nContent-Length: 3\r\nTransfer-Encoding: chunked",
    "a coding": b"GET / HTTP/1.1" + HOST + b"\r\nTransfer-Encoding: chunked",
    "no host": b"GET / HTTP/1.1\r\nX: y",
    "two hosts": b"GET / HTTP/1.1" + HOST + HOST,
    "a host with a path": b"GET / HTTP/1.1\r\nHost: localhost/x",
    "a host with a user": b"GET / HTTP/1.1\r\nHost: a@localhost",
    "an absolute target": b"GET http://localhost/ HTTP/1.1" + HOST,
    "a target with a space": b"GET /a b HTTP/1.1" + HOST,
    "a target with a fragment": b"GET /a#b HTTP/1.1" + HOST,
    "a target that is not ASCII": b"GET /\xc3\xa4 HTTP/1.1" + HOST,
    "a target with a broken escape": b"GET /%4 HTTP/1.1" + HOST,
    "another version": b"GET / HTTP/1.0" + HOST,
    "no version": b"GET /" + HOST,
    "two spaces": b"GET  / HTTP/1.1" + HOST,
    "an empty line first": b"\r\nGET / HTTP/1.1" + HOST,
    "a method that is no token": b"G(T / HTTP/1.1" + HOST,
}


@pytest.mark.parametrize("head", AMBIGUOUS.values(), ids=AMBIGUOUS)
def test_an_ambiguous_head_is_refused(head: bytes) -> None:
    with pytest.raises(BadHttp):
        parse_request_head(head)


def test_a_sound_head_is_read() -> None:
    fields = b"\r\nX-Amz-Meta-A:  \xc3\xa4 b\t\r\nContent-Length: 7"
    head = parse_request_head(b"PUT /b/a%20b?x=1&y HTTP/1.1" + HOST + fields)
    assert (head.method, head.target, head.length) == ("PUT", b"/b/a%20b?x=1&y", 7)
    assert head.field(b"x-amz-meta-a") == b"\xc3\xa4 b" and head.field(b"absent") == b""


@pytest.mark.parametrize(
    "path",
    [
        "/_ministack/reset",
        "//_x",
        "/%5f",
        "/%255fx",
        "/%25255fx",
        "/\\_x",
        "/a/../b",
        "/a/%2e%2e/b",
        "/b/_ministack/x",
        "/..",
    ],
)
def test_internal_paths_are_known_in_every_spelling(path: str) -> None:
    assert is_internal_path(path)


def test_ordinary_paths_are_not_internal() -> None:
    assert not any(
        map(
            is_internal_path,
            ("/", "/bucket/_key", "/b/a..b", "/2015-03-31/functions/my_f", "/b/..a"),
        )
    )
    assert has_encoded_slash("/functions/a%2Fb") and has_encoded_slash("/functions/a%2fb")
    assert not has_encoded_slash("/bucket/a/b%252F")


class _Echo:
    """An application whose answer is the path; it may be held back."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.release = asyncio.Event()
        self.release.set()
        self.headers: list[tuple[bytes, bytes]] = []
        self.failure: Exception | None = None

    async def __call__(self, scope, receive, send) -> None:
        self.paths.append(scope["path"])
        if self.failure is not None:
            raise self.failure
        await self.release.wait()
        await send({"type": "http.response.start", "status": 200, "headers": self.headers})
        await send(
            {
                "type": "http.response.body",
                "body": (await receive())["body"] or scope["path"].encode(),
            }
        )


class _Server:
    """The server on one end of a socket pair; the other end is ``reader`` and ``writer``."""

    def __init__(self, entrance: str = "port") -> None:
        self.app, self.parsed, self._entrance = _Echo(), ParsedRequests(), entrance

    async def __aenter__(self):
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        await loop.connect_accepted_socket(
            lambda: HttpConnection(self.app, loop, self.parsed, self._entrance), theirs
        )
        self.reader, self.writer = await asyncio.open_connection(sock=ours)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()

    async def until_closed(self) -> bytes:
        async with asyncio.timeout(60):
            return await self.reader.read()


INTERNAL = b"HTTP/1.1 500 Internal Server Error\r\n"
REQUEST = b"POST /%s HTTP/1.1" + HOST + b"\r\nContent-Length: 2\r\n\r\nab"


async def test_requests_one_after_the_other_are_counted() -> None:
    async with _Server() as server:
        for name in (b"one", b"two"):
            for byte in REQUEST % name:  # however the bytes arrive
                server.writer.write(bytes([byte]))
                await asyncio.sleep(0)
            assert await server.reader.readuntil(b"ab")
        report = server.parsed.report()
        assert (report["count"], report["refused"]) == (2, {})
        assert [each["target"] for each in report["requests"]] == ["/one", "/two"]
        assert [each["number"] for each in server.parsed.report(after=1)["requests"]] == [2]


async def test_the_owner_is_told_of_every_failure_whatever_words_it_has() -> None:
    """An agent may have named half a character, which the error repeats: an answer that cannot be
    encoded would leave the owner waiting. To HEAD there is no body: it would be taken for the next
    answer."""
    async with _Server("owner") as server, asyncio.timeout(20):
        server.app.failure = KeyError("\ud800")
        server.writer.write(b"HEAD / HTTP/1.1" + HOST + b"\r\n\r\n")
        assert await server.reader.readuntil(b"\r\n\r\n") == INTERNAL + b"content-length: 0\r\n\r\n"
        server.writer.write(b"GET / HTTP/1.1" + HOST + b"\r\nConnection: close\r\n\r\n")
        assert (await server.until_closed()).startswith(INTERNAL)


async def test_a_second_request_in_the_same_bytes_ends_it_all() -> None:
    """Neither is run: nobody can say which of the two was meant."""
    async with _Server() as server:
        server.writer.write(REQUEST % b"one" + REQUEST % b"two")
        assert (await server.until_closed()).startswith(b"HTTP/1.1 400 ")
        assert (
            server.app.paths == []
            and server.parsed.count == 0
            and sum(server.parsed.refused.values()) == 1
        )


async def test_a_second_request_before_the_answer_ends_it_all() -> None:
    async with _Server() as server:
        server.app.release.clear()
        server.writer.write(REQUEST % b"one")
        while not server.app.paths:
            await asyncio.sleep(0)
        server.writer.write(REQUEST % b"two")
        answer = await server.until_closed()
        server.app.release.set()
        assert answer.startswith(b"HTTP/1.1 400 ") and answer.count(b"HTTP/1.1") == 1
        assert server.app.paths == ["/one"]


@pytest.mark.parametrize(
    "header", [(b"x", b"a\r\nb: c"), (b"x\r\ny", b"a"), (b"a b", b"c"), (b"x", b"a\0")]
)
async def test_an_answer_cannot_be_split(header: tuple[bytes, bytes]) -> None:
    async with _Server() as server:
        server.app.headers = [header]
        server.writer.write(REQUEST % b"one")
        server.writer.write_eof()
        answer = await asyncio.wait_for(server.reader.readuntil(b"\r\n\r\n"), 60)
        assert answer == b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 0\r\n\r\n"


async def test_an_answer_is_framed_by_its_own_bytes() -> None:
    """The application's idea of the length does not count."""
    async with _Server() as server:
        server.app.headers = [(b"Content-Length", b"0"), (b"Transfer-Encoding", b"chunked")]
        server.writer.write(REQUEST % b"one")
        assert await asyncio.wait_for(server.reader.readuntil(b"ab"), 60) == (
            b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nab"
        )


def _request(
    url: str = "http://localhost:4566/b/k", method: str = "PUT", **headers: str
) -> AWSPreparedRequest:
    fields = HTTPHeaders()
    for name, value in headers.items():
        fields[name] = value
    return AWSPreparedRequest(method, url, fields, b"x", False)


class _Peer:
    """A connection whose other end plays ``answer`` for every request it reads."""

    def __init__(self, answer: bytes) -> None:
        self.ours, theirs = socket.socketpair()
        self.connection = PinnedConnection(refuse)
        self.connection.attach(theirs)
        self.received: list[bytes] = []
        self._answer = answer
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(ConnectionError):
            while data := self.ours.recv(65536):
                self.received.append(data)
                self.ours.sendall(self._answer)


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nx-amz-meta-A: v\r\n\r\ny"


def test_the_client_sends_what_it_says_and_reads_the_answer() -> None:
    peer = _Peer(OK)
    answer = peer.connection.send(
        _request(**{"X-Amz-Meta-a": "ä", "Host": "evil", "Transfer-Encoding": "chunked"})
    )
    assert (answer.status_code, answer.content, answer.headers["x-amz-meta-A"]) == (200, b"y", "v")
    assert peer.received == [
        b"PUT /b/k HTTP/1.1\r\nHost: localhost:4566\r\nX-Amz-Meta-a: \xc3\xa4\r\nContent-Length: "
        b"1\r\n\r\nx"
    ]
    assert peer.connection.send(_request()).status_code == 200


@pytest.mark.parametrize(
    "make",
    [
        lambda: _request(**{"x: 1\r\nContent-Length: 0\r\n\r\nPOST /x HTTP/1.1\r\nX": "1"}),
        lambda: _request(**{"a b": "1"}),
        lambda: _request(**{"a:b": "1"}),
        lambda: _request(**{"": "1"}),
        lambda: _request(**{"ä": "1"}),
        lambda: _request(a="b\nc"),
        lambda: _request(a="b\rc"),
        lambda: _request(a="b\0c"),
        lambda: _request("http://localhost:4566/a b"),
        lambda: _request("http://localhost:4566/a\r\nb"),
        lambda: _request("http://localhost:4566/a?b\nc"),
        lambda: _request("http://localhost:4566/a\tb"),
        lambda: _request("http://localhost:4566/ä"),
        lambda: _request("http://localhost:4566/a#b"),
        lambda: _request("http://localhost:4566/a%2Fb"),
        lambda: _request("http://localhost:4566.evil/"),
        lambda: _request("http://a@localhost:4566/"),
        lambda: _request("http://localhost:45667/"),
        lambda: _request("https://localhost:4566/"),
        lambda: _request("http://localhost:4566\\@evil/"),
        lambda: _request("http://[/"),
        lambda: _request(method="GET / HTTP/1.1\r\nX: y\r\n\r\nPUT"),
    ],
)
def test_the_client_sends_nothing_that_could_be_read_otherwise(make) -> None:
    peer = _Peer(OK)
    with pytest.raises(RefusedRequest):
        peer.connection.send(make())
    assert peer.received == [] and peer.connection.sent == 0 and peer.connection.usable


def test_nothing_is_sent_while_something_waits_to_be_read() -> None:
    """It would be taken for the answer, and every later answer for that of the request before."""
    peer = _Peer(OK)
    peer.ours.sendall(OK)
    with pytest.raises(ConnectionClosedError):
        peer.connection.send(_request())
    assert peer.received == [] and not peer.connection.usable


@pytest.mark.parametrize(
    "answer",
    [
        OK + OK,
        OK + b"z",
        b"HTTP/1.1 200 OK\r\n\r\ny",
        b"HTTP/1.1 100 Continue\r\n\r\n" + OK,
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\ny",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 2x OK\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 0\nX: y\r\n\r\n",
        b"hello\r\n\r\n",
    ],
)
def test_the_client_takes_one_whole_answer_or_none(answer: bytes) -> None:
    peer = _Peer(answer)
    with pytest.raises(ConnectionClosedError):
        peer.connection.send(_request())
    assert not peer.connection.usable
