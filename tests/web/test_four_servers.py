"""The rules for hosts, pages, tokens, heads and bodies, on each of the four real servers and the
playground."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator

import pytest

from realhf.web import bodies
from realhf.web.connections import MAX_HEAD_BYTES
from tests.web.servers import SERVERS, TOKEN, Served, ServerPool, ask, head_of, send, status_of

CHROME = (
    "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/140.0.0.0 "
    "Safari/537.36"
)
FOREIGN = {
    "another origin": {"Origin": "http://evil.example"},
    "another port of this machine": {"Origin": "http://127.0.0.1:1"},
    "an opaque origin": {"Origin": "null"},
    "an origin without a scheme": {"Origin": "127.0.0.1"},
    "a broken origin": {"Origin": "http://["},
    "a page that sends no origin": {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
    "a page of the same site": {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "no-cors"},
    "a form in a frame": {
        "Sec-Fetch-Site": "cross-site",
        "Sec-Fetch-Mode": "navigate",
        "Sec-Fetch-Dest": "iframe",
    },
    "an origin that contradicts the site": {
        "Origin": "http://evil.example",
        "Sec-Fetch-Site": "same-origin",
    },
}
HOSTILE_HOSTS = {
    "a name that resolves to this machine": {"Host": "evil.example"},
    "the same with its port": {"Host": "evil.example:80"},
    "the same with its origin": {"Host": "evil.example", "Origin": "http://evil.example"},
    "the same as the browser sees it": {"Host": "evil.example", "Sec-Fetch-Site": "same-origin"},
    "a name that begins like the loopback": {"Host": "localhost.evil.example"},
    "a name with an address in it": {"Host": "127.0.0.1.evil.example"},
    "a user in front": {"Host": "localhost@evil.example"},
    "a loopback behind a user": {"Host": "evil.example@localhost"},
    "a broken host": {"Host": "[nonsense"},
}
OLD_BROWSERS = {
    "an old browser that sends nothing": {"User-Agent": CHROME},
    "an old browser with a foreign page": {
        "User-Agent": CHROME,
        "Referer": "http://evil.example/page",
    },
}
WITH_TOKEN = [name for name in SERVERS if name not in ("view", "playground")]
WITH_BODY = [name for name in SERVERS if name != "view"]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerPool]:
    servers = ServerPool(tmp_path_factory.mktemp("servers"))
    yield servers
    servers.close()


@pytest.mark.parametrize("name", SERVERS)
@pytest.mark.parametrize(
    "headers", [*FOREIGN.values(), *HOSTILE_HOSTS.values()], ids=[*FOREIGN, *HOSTILE_HOSTS]
)
def test_a_foreign_page_and_a_foreign_host_are_refused(
    pool: ServerPool, name: str, headers: dict[str, str]
) -> None:
    answer = ask(pool.get(name), headers)
    assert answer in (400, 403) if "[" in headers.get("Host", "") else answer == 403


@pytest.mark.parametrize("name", WITH_BODY)
@pytest.mark.parametrize("headers", OLD_BROWSERS.values(), ids=OLD_BROWSERS)
def test_a_browser_that_does_not_name_its_page_changes_nothing(
    pool: ServerPool, name: str, headers: dict[str, str]
) -> None:
    assert ask(pool.get(name), headers) == 403


@pytest.mark.parametrize("name", SERVERS)
def test_a_second_host_is_refused(pool: ServerPool, name: str) -> None:
    """Which one counts would depend on who reads the request."""
    served = pool.get(name)
    twice = head_of(served, {}).replace("Connection:", "Host: evil.example\r\nConnection:")
    assert status_of(send(served, twice, b"" if served.write[2] is None else b"{}")) in (400, 403)


@pytest.mark.parametrize("name", [name for name in SERVERS if name != "playground"])
def test_programs_and_pages_of_the_server_itself_are_served(pool: ServerPool, name: str) -> None:
    served = pool.get(name)
    for headers in (
        {},
        {"Host": "localhost"},
        {"Host": f"LOCALHOST:{served.address[1]}"},
        {"Host": "[::1]:8000"},
        {"Origin": served.url},
        {"Sec-Fetch-Site": "same-origin", "User-Agent": CHROME},
        {"Sec-Fetch-Site": "none", "User-Agent": CHROME},
        {"Origin": served.url, "User-Agent": CHROME},
        {"Referer": f"{served.url}/page", "User-Agent": CHROME},
        {"User-Agent": "python-requests/2.32"},
    ):
        assert ask(served, headers) in (200, 422), headers


def test_the_playground_serves_its_own_page_only(pool: ServerPool) -> None:
    """Programs have no business there. 401: the page has no cookie yet."""
    served = pool.get("playground")
    assert ask(served, {}) == 403
    assert (
        ask(served, {"Origin": served.url}) == ask(served, {"Sec-Fetch-Site": "same-origin"}) == 401
    )


@pytest.mark.parametrize("name", WITH_TOKEN)
def test_the_token_is_asked_for(pool: ServerPool, name: str) -> None:
    served = pool.get(name, TOKEN)
    assert served.token_header is not None
    header, value = served.token_header
    assert ask(served, {header: value}) in (200, 422)
    for wrong in (
        "",
        value[:-1],
        f"{value}x",
        value.upper(),
        value.replace(TOKEN, ""),
        f"Basic {TOKEN}",
    ):
        assert ask(served, {header: wrong}) == 401, wrong
    twice = head_of(served, {header: value}).replace(
        "Connection:", f"{header}: {value[:-1]}\r\nConnection:"
    )
    if header == "Authorization":
        assert status_of(send(served, twice, b"{}")) == 401


@pytest.mark.parametrize("name", ["environment", "training"])
def test_a_token_does_not_open_the_server_to_foreign_hosts(pool: ServerPool, name: str) -> None:
    served = pool.get(name, TOKEN)
    assert served.token_header is not None
    token = dict([served.token_header])
    for headers in (*FOREIGN.values(), HOSTILE_HOSTS["a name that resolves to this machine"]):
        assert ask(served, token | headers) == 403, headers


@pytest.mark.parametrize("name", SERVERS)
def test_a_head_that_is_too_long_is_refused(pool: ServerPool, name: str) -> None:
    served = pool.get(name)
    for headers in (
        {"X-Long": "x" * MAX_HEAD_BYTES},
        {f"X-{i}": "y" * 64 for i in range(MAX_HEAD_BYTES // 64)},
    ):
        assert status_of(send(served, head_of(served, headers))) == 431


def _own_page(served: Served) -> dict[str, str]:
    """Headers of a page of the server, which the playground asks for."""
    return {"Origin": served.url}


@pytest.mark.parametrize("name", WITH_BODY)
def test_a_body_that_is_too_large_is_refused_before_it_is_sent(pool: ServerPool, name: str) -> None:
    served = _with_bodies(pool, name)
    assert served.max_body_bytes is not None
    head = head_of(served, _own_page(served), length=served.max_body_bytes + 1)
    assert status_of(send(served, head, b"{")) == 413
    endless = head_of(served, _own_page(served) | {"Content-Length": "9" * 30})
    assert status_of(send(served, endless, b"{")) in (400, 413)


@pytest.mark.parametrize("name", WITH_BODY)
def test_a_body_in_chunks_is_bounded(pool: ServerPool, name: str) -> None:
    """Its length is not known before its end: it is counted as it comes, or refused."""
    served = _with_bodies(pool, name)
    assert served.max_body_bytes is not None
    head = head_of(
        served, _own_page(served) | {"Content-Length": "", "Transfer-Encoding": "chunked"}
    )
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    assert (
        status_of(send(served, head, chunk * (served.max_body_bytes // 0x10000 + 2) + b"0\r\n\r\n"))
        == 413
    )
    body = json.dumps(served.write[2]).encode()
    small = status_of(send(served, head, b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)))
    assert small in (200, 422) if served.takes_chunks else small == 413


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_BODY)
def test_a_body_that_does_not_come_ends_its_request(
    pool: ServerPool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would hold its connection, and its share of the memory for bodies."""
    monkeypatch.setattr(bodies, "GRACE_S", 0.3)
    served = _with_bodies(pool, name)
    began = time.monotonic()
    answer = send(served, head_of(served, _own_page(served), length=100), b"{")
    # it reads no body of a browser without a cookie
    expected = 401 if name == "playground" else 503
    assert status_of(answer) == expected and time.monotonic() - began < 30


@pytest.mark.slow
def test_the_page_over_runs_waits_for_no_body(pool: ServerPool) -> None:
    served = pool.get("view")
    with socket.create_connection(served.address, timeout=60) as connection:
        head = head_of(served, {"Content-Length": "1000000000"})
        connection.sendall(head.encode())
        assert connection.recv(99).startswith(b"HTTP/1.1 200")
    assert status_of(send(served, head.replace("GET /api/runs", "POST /api/runs"))) == 405


def _with_bodies(pool: ServerPool, name: str) -> Served:
    served = pool.get(name)
    if served.max_body_bytes is None:
        pytest.skip("the routes of the training API need the package tinker (make test-tinker)")
    return served
