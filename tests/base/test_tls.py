"""Certificates of HTTP servers: what is wrong with them is said before anybody comes."""

import asyncio
import socket
import ssl
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from realhf.base import http_guard
from realhf.base.tls import (
    believing,
    certificate_problem,
    in_memory,
    in_the_clear,
    with_certificate,
    without_certificate,
)
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
    assert certificate_problem(cert, "/nowhere", FLAGS) == "--tls-key /nowhere: No such file or directory"
    (tmp_path / "text").write_text("nothing")
    other = self_signed(tmp_path, "other")[1]
    for wrong in ((str(tmp_path / "text"), key), (cert, other), (key, cert)):
        problem = certificate_problem(*wrong, FLAGS)
        assert problem.startswith(f"--tls-cert {wrong[0]} and --tls-key") and "\n" not in problem


def test_a_file_of_authorities_that_holds_none_is_named(tmp_path):
    (tmp_path / "text").write_text("nothing")
    with pytest.raises(ValueError, match="no certificates in it"):
        believing(str(tmp_path / "text"))
    with pytest.raises(ValueError, match="/nowhere: No such file"):
        believing("/nowhere")


def test_only_a_server_that_others_reach_is_warned_of():
    assert in_the_clear("127.0.0.1", "", FLAGS) == in_the_clear("0.0.0.0", "cert", FLAGS) == ""
    warning = in_the_clear("0.0.0.0", "", FLAGS)
    assert "0.0.0.0 without TLS" in warning and "--tls-cert" in warning and "\n" not in warning


def test_an_address_may_name_the_one_certificate_of_its_server(pair, tmp_path):
    """Whatever name the server is reached by, as in a run whose certificate holds none; another one is refused."""
    certificate = Path(pair[0]).read_text()
    assert with_certificate("http://h:1", certificate) == "http://h:1"
    assert without_certificate("http://h:1") == ("http://h:1", None)
    address, context = without_certificate(with_certificate("https://:secret@h:1", certificate))
    assert address == "https://:secret@h:1" and context is not None
    with pytest.raises(ValueError, match=r"https://h:1: what follows # is no certificate"):
        without_certificate("https://h:1#bm90aGluZw==")
    for shown, believed in ((pair, True), (self_signed(tmp_path), False)):
        with in_memory(Path(shown[0]).read_text() + Path(shown[1]).read_text()) as path:
            server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            server.load_cert_chain(path)
        assert _shaken(server, context) is believed


def test_the_certificate_of_a_run_is_believed_whatever_the_clock_says():
    """That of a host may be minutes behind the launcher's, which has just made it."""
    pytest.importorskip("cryptography")
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    begins = datetime.now(UTC) + timedelta(hours=1)
    made = x509.CertificateBuilder(name, name, key.public_key(), 1, begins, begins + timedelta(days=1))
    certificate = made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()
    private = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with in_memory(certificate + key.private_bytes(serialization.Encoding.PEM, *private).decode()) as path:
        server.load_cert_chain(path)
    _, context = without_certificate(with_certificate("https://h:1", certificate))
    assert context is not None and _shaken(server, context)


def test_a_client_that_shakes_no_hands_is_let_go(pair, monkeypatch):
    """As early as one that sends no request; a loop by itself gives it a minute."""
    monkeypatch.setattr(http_guard, "HEAD_S", 0.1)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*pair)

    async def silent():
        server = await asyncio.get_running_loop().create_server(asyncio.Protocol, "127.0.0.1", 0, ssl=context)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        try:
            return await asyncio.wait_for(reader.read(), 45)
        finally:
            writer.close()
            server.close()

    with asyncio.Runner(loop_factory=http_guard.HandshakeLoop) as runner:
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
