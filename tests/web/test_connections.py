"""HTTP by uvicorn: its certificates, and what strangers can hold of a server."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
import uvicorn

import realhf
from realhf.base.tls import context_trusting, embed_certificate, in_memory_file, split_certificate
from realhf.web import connections
from realhf.web.certificates import certificate_problem, plaintext_warning
from realhf.web.connections import guarded_http
from tests.certificates import self_signed

FLAGS = ("--tls-cert", "--tls-key")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return self_signed(tmp_path_factory.mktemp("pair"))


def test_what_is_wrong_with_a_certificate_is_one_line(pair, tmp_path):
    cert, key = pair
    assert certificate_problem("", "", FLAGS) == certificate_problem(cert, key, FLAGS) == ""
    assert certificate_problem(cert, "", FLAGS) == "--tls-cert is given without --tls-key"
    assert certificate_problem("", key, FLAGS) == "--tls-key is given without --tls-cert"
    assert (
        certificate_problem(cert, "/nowhere", FLAGS)
        == "--tls-key /nowhere: No such file or directory"
    )
    (tmp_path / "text").write_text("nothing")
    other = self_signed(tmp_path, "other")[1]
    for wrong in ((str(tmp_path / "text"), key), (cert, other), (key, cert)):
        problem = certificate_problem(*wrong, FLAGS)
        assert problem.startswith(f"--tls-cert {wrong[0]} and --tls-key") and "\n" not in problem


def test_a_file_of_authorities_that_holds_none_is_named(tmp_path):
    (tmp_path / "text").write_text("nothing")
    with pytest.raises(ValueError, match="no certificates in it"):
        context_trusting(str(tmp_path / "text"))
    with pytest.raises(ValueError, match="/nowhere: No such file"):
        context_trusting("/nowhere")


def test_only_a_server_that_others_reach_is_warned_of():
    assert (
        plaintext_warning("127.0.0.1", "", FLAGS)
        == plaintext_warning("0.0.0.0", "cert", FLAGS)
        == ""
    )
    warning = plaintext_warning("0.0.0.0", "", FLAGS)
    assert "0.0.0.0 without TLS" in warning and "--tls-cert" in warning and "\n" not in warning


def test_an_address_may_name_the_one_certificate_of_its_server(pair, tmp_path):
    """Whatever name the server is reached by, as in a run whose certificate holds none; another one
    is refused."""
    certificate = Path(pair[0]).read_text()
    assert embed_certificate("http://h:1", certificate) == "http://h:1"
    assert split_certificate("http://h:1") == ("http://h:1", None)
    address, context = split_certificate(embed_certificate("https://:secret@h:1", certificate))
    assert address == "https://:secret@h:1" and context is not None
    with pytest.raises(ValueError, match=r"https://h:1: what follows # is not a certificate"):
        split_certificate("https://h:1#bm90aGluZw==")
    for shown, believed in ((pair, True), (self_signed(tmp_path), False)):
        with in_memory_file(Path(shown[0]).read_text() + Path(shown[1]).read_text()) as path:
            server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            server.load_cert_chain(path)
        assert _shaken(server, context) is believed


def test_the_certificate_of_a_run_is_believed_whatever_the_clock_says():
    """That of a host may be minutes behind the launcher's, which has just made it."""
    pytest.importorskip("cryptography")
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([])
    begins = datetime.now(UTC) + timedelta(hours=1)
    made = x509.CertificateBuilder(
        name, name, key.public_key(), 1, begins, begins + timedelta(days=1)
    )
    certificate = made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()
    private = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with in_memory_file(
        certificate + key.private_bytes(serialization.Encoding.PEM, *private).decode()
    ) as path:
        server.load_cert_chain(path)
    _, context = split_certificate(embed_certificate("https://h:1", certificate))
    assert context is not None and _shaken(server, context)


def test_a_client_that_shakes_no_hands_is_let_go(pair, monkeypatch):
    """As early as one that sends no request; a loop by itself gives it a minute."""
    monkeypatch.setattr(connections, "HEAD_S", 0.1)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*pair)

    async def silent():
        server = await asyncio.get_running_loop().create_server(
            asyncio.Protocol, "127.0.0.1", 0, ssl=context
        )
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        try:
            return await asyncio.wait_for(reader.read(), 45)
        finally:
            writer.close()
            server.close()

    with asyncio.Runner(loop_factory=connections.HandshakeLoop) as runner:
        assert runner.run(silent()) == b""


def _shaken(server, client):
    """Whether the client believes the server."""
    ours, theirs = socket.socketpair()
    ours.settimeout(60)
    theirs.settimeout(60)

    def serve():
        try:
            server.wrap_socket(theirs, server_side=True).close()
        except OSError:
            theirs.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        client.wrap_socket(ours).close()
        return True
    except ssl.SSLCertVerificationError:
        return False
    finally:
        ours.close()
        thread.join()


HALF = b"GET / HTTP/1.1\r\nHost: x\r\n"
WAIT_S = 30.0
MOST = 8
STRANGERS = 30
LARGE = 24 << 20


async def app(scope, receive, send):
    """Answers at once, after a second for /slow, with ``LARGE`` bytes for /large; greets on a web
    socket and answers what it hears."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.accept"})
        while (await receive())["type"] != "websocket.disconnect":
            await send({"type": "websocket.send", "text": "here"})
        return
    await asyncio.sleep(1.0 if scope["path"] == "/slow" else 0.0)
    body = b"x" * LARGE if scope["path"] == "/large" else b"ok"
    await send(
        {
            "type": "http.response.start",
            "status": 200,
            "headers": [(b"content-length", b"%d" % len(body))],
        }
    )
    await send({"type": "http.response.body", "body": body})


@contextlib.contextmanager
def served(kind, **bounds):
    """A server on the loopback; its address."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    config = uvicorn.Config(
        app,
        http=guarded_http(kind, **bounds),
        ws="websockets-sansio",
        lifespan="off",
        log_level="error",
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()
    finally:
        server.should_exit = True
        thread.join(WAIT_S)
        listener.close()


def connected(address, said):
    found = socket.create_connection(address, timeout=WAIT_S)
    found.sendall(said)
    return found


def closed(connection):
    """Whether the server ends a connection, without another word."""
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["h11", "httptools"])
def test_a_head_that_does_not_come_ends_its_connection(kind: str):
    """Also that of a second request, after which the clock of an idle connection runs no longer.
    What is at work goes on, however long it takes."""
    with served(kind, head_s=0.4) as address, contextlib.ExitStack() as stack:
        silent, half, again, slow = (
            stack.enter_context(connected(address, said))
            for said in (b"", HALF, HALF + b"\r\n", HALF.replace(b"/ ", b"/slow ") + b"\r\n")
        )
        assert again.recv(99).startswith(b"HTTP/1.1 200")
        again.sendall(HALF)
        assert closed(silent) and closed(half)
        assert b"ok" in again.recv(9) or closed(again)
        assert slow.recv(99).startswith(b"HTTP/1.1 200"), "it took longer than a head may take"


LONGEST = connections.MAX_HEAD_BYTES


def heard(connection) -> bytes:
    """Everything that the server says until it ends the connection."""
    said = b""
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(1 << 16):
            said += part
    return said


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["h11", "httptools"])
@pytest.mark.parametrize("where", ["one header", "many headers", "target", "whole", "no line"])
def test_a_head_beyond_its_bound_is_refused(kind: str, where: str):
    """httptools took any, and a time that grows with its square, before any token was looked at: an
    endless header held up everybody."""
    endless = {
        "one header": HALF + b"X: " + b"x" * LONGEST,
        "many headers": HALF + b"X: y\r\n" * (LONGEST // 6),
        "target": b"GET /" + b"x" * LONGEST,
        "whole": HALF + b"X: " + b"x" * LONGEST + b"\r\n\r\n",
        "no line": b"x" * 2 * LONGEST,
    }[where]
    with served(kind) as address, connected(address, endless) as connection:
        assert heard(connection)[:12] in (
            (b"HTTP/1.1 431",) if where != "no line" else (b"HTTP/1.1 431", b"HTTP/1.1 400")
        )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["h11", "httptools"])
def test_a_head_within_its_bound_is_taken_and_bodies_have_none_here(kind: str):
    """Also of the second request of a connection; what is behind a body is no part of a head."""
    head = b"POST / HTTP/1.1\r\nHost: x\r\n%sContent-Length: %d\r\n\r\n"
    large = b"X: " + b"x" * (LONGEST - 200) + b"\r\n"
    body = b"b" * (3 * LONGEST)
    with (
        served(kind) as address,
        connected(address, head % (large, len(body)) + body) as connection,
    ):
        assert connection.recv(99).startswith(b"HTTP/1.1 200")
        connection.sendall(head % (large, len(body)) + body)
        connection.sendall(head % (b"Connection: close\r\n", 0))
        assert heard(connection).count(b"HTTP/1.1 200") >= 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["h11", "httptools"])
@pytest.mark.parametrize("what", ["trailer", "chunk"])
def test_what_belongs_to_a_chunk_is_bounded_as_a_head_is(kind: str, what: str):
    """The parser keeps an endless trailer, too, and the extension of a chunk."""
    begin = b"POST /slow HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    begin += b"0\r\nX: " if what == "trailer" else b"5;"
    with served(kind) as address, connected(address, begin) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(b"x" * 6 * LONGEST)
        assert b" 200 " not in heard(connection)[:12]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["h11", "httptools"])
def test_strangers_take_no_more_connections_than_there_may_be(kind: str):
    """300 half requests used to hold all descriptors of an environment server, and its sessions
    ended. The oldest of them goes; a session on a web socket, and a request at work, stay."""
    from websockets.sync.client import connect

    with served(kind, max_connections=MOST) as address, contextlib.ExitStack() as stack:
        url = f"{address[0]}:{address[1]}"
        session = stack.enter_context(connect(f"ws://{url}/", open_timeout=WAIT_S))
        slow = stack.enter_context(connected(address, HALF.replace(b"/ ", b"/slow ") + b"\r\n"))
        strangers = [stack.enter_context(connected(address, HALF)) for _ in range(STRANGERS)]
        assert httpx.get(f"http://{url}/", timeout=WAIT_S).text == "ok"
        session.send("there?")
        assert session.recv(WAIT_S) == "here"
        assert slow.recv(99).startswith(b"HTTP/1.1 200")
        assert all(closed(stranger) for stranger in strangers[: STRANGERS - MOST])
        strangers[-1].sendall(b"\r\n")
        assert strangers[-1].recv(99).startswith(b"HTTP/1.1 200"), "the last one was no stranger"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["h11", "httptools"])
def test_answers_that_nobody_reads_keep_nobody_out(kind: str):
    """One that is read, however slowly, is sent to its end: it counted as idle once its last byte
    was handed over, and was the first to go when strangers came."""
    asked = HALF.replace(b"/ ", b"/large ") + b"\r\n"

    def read(reader):
        size = 0
        while size < LARGE and (more := reader.recv(1 << 17)):
            size += len(more)
            time.sleep(0.005)
        return size

    # In a process that runs thousands of tests, the reader may stand still for a second.
    with served(kind, max_connections=MOST, head_s=4.0) as address, contextlib.ExitStack() as stack:
        reader = stack.enter_context(socket.socket())
        # else it holds more than is read in a while
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 17)
        reader.settimeout(WAIT_S)
        reader.connect(address)
        reader.sendall(asked)
        done = stack.enter_context(ThreadPoolExecutor(1)).submit(read, reader)
        for _ in range(MOST):
            stack.enter_context(connected(address, asked))
        answer = ""
        deadline = time.monotonic() + WAIT_S
        while answer != "ok" and time.monotonic() < deadline:
            with contextlib.suppress(httpx.TransportError):
                answer = httpx.get(f"http://{address[0]}:{address[1]}/", timeout=WAIT_S).text
        assert answer == "ok" and done.result(WAIT_S) >= LARGE


@pytest.mark.slow
def test_every_http_server_of_the_project_is_guarded():
    root = Path(realhf.__file__).parents[1]
    files = [path for folder in ("realhf", "workers") for path in (root / folder).rglob("*.py")]
    made = [
        (path, part) for path in files for part in path.read_text().split("uvicorn.Config(\n")[1:]
    ]
    assert len(made) >= 4
    assert not [
        path
        for path, part in made
        if not re.match(r"[^)]*?(\([^()]*\)[^()]*)*http=guarded_http\(", part)
    ]
