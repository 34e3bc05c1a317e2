"""What web pages and other machines may do without a token, and what pages show with one.

Source: docs/reference/trajectory.md 1.1, 2.1, 3.11."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.types import Message

from realhf.trajectory.http.config import TrajectoryConfig
from realhf.trajectory.http.server import create_app, drained_send
from tests.chromium import ABSENT, PROGRAM, Chromium
from tests.trajectory.conftest import REGISTRATION, running_server, serving, start
from tests.trajectory.groups import group

CHROME = (
    "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/140.0.0.0 "
    "Safari/537.36"
)
FOREIGN: list[dict[str, str]] = [
    {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"},
    {"Sec-Fetch-Site": "same-site", "Origin": "http://127.0.0.1:1"}, {"Origin": "http://evil.example"},
    {"Origin": "null"}, {"Origin": "http://127.0.0.1:1"}, {"User-Agent": CHROME},
    {"User-Agent": CHROME, "Referer": "http://evil.example/page"}, {"Host": "evil.example"},
    {"Sec-Fetch-Site": "none", "Host": "evil.example:80"}, {"Host": "[nonsense"}, {"Origin": "http://[nonsense"},
]  # fmt: skip
"""Requests as pages of elsewhere cause them: an image, another port, a form, an old browser, a name
that was given the address of this machine."""
CHANGING: list[tuple[str, str, Any]] = [
    ("GET", "/reset_data", None), ("GET", "/batch", None), ("POST", "/register", REGISTRATION),
    ("POST", "/scored_data", group(4)), ("POST", "/scored_data_list", [group(4)]), ("DELETE", "/quarantine", None),
    ("POST", "/policy_version", {"version": 3}), ("POST", "/status-env", {"env_id": 0}),
    ("GET", "/status-env?env_id=0", None), ("POST", "/disconnect-env", {"env_id": 0}), ("GET", "/reset_data/", None),
]  # fmt: skip


@pytest.mark.parametrize("headers", FOREIGN, ids=str)
def test_a_page_of_elsewhere_changes_nothing(api, headers):
    start(api)
    api.post("/scored_data", json=group(4))
    before = api.get("/status")
    for method, path, body in CHANGING:
        answer = api.request(method, path, json=body, headers=headers)
        assert answer.status_code == 403, (method, path)
    after = api.get("/status")
    assert (after.json(), after.headers["x-epoch"]) == (before.json(), before.headers["x-epoch"])
    assert api.get("/batch").json() == {"batch": None}
    assert api.get("/info").json()["batch_size"] == 8


def test_the_servers_own_pages_and_programs_may_do_everything(url, api):
    own = [
        {"Sec-Fetch-Site": "same-origin", "User-Agent": CHROME}, {"Sec-Fetch-Site": "none", "User-Agent": CHROME},
        {"Origin": url, "User-Agent": CHROME}, {"Referer": url + "/docs", "User-Agent": CHROME},
        {"User-Agent": "python-requests/2.32"}, {"Host": "localhost:8000"}, {"Host": "trajectory:8000"},
        {"Host": "10.1.2.3"}, {"Host": "[::1]:8000"},
    ]  # fmt: skip
    for headers in own:
        assert api.post("/register", json=REGISTRATION, headers=headers).status_code == 200, headers
        assert api.get("/reset_data", headers=headers).status_code == 200, headers


def test_numbers_stay_open_to_any_origin_and_examples_do_not(api):
    elsewhere = {"Origin": "http://somewhere", "Sec-Fetch-Site": "cross-site"}
    for path in ("/", "/status", "/info", "/metrics", "/docs", "/openapi.json", "/ui"):
        answer = api.get(path, headers=elsewhere)
        assert answer.status_code == 200, path
        assert answer.headers["access-control-allow-origin"] in ("*", "http://somewhere")
    for path in ("/latest_example", "/ui/data"):
        assert api.get(path, headers=elsewhere).status_code == 403, (
            "what is trained on is nobody else's"
        )
        assert api.get(path).status_code == 200


@pytest.mark.slow
def test_names_of_the_server_can_be_allowed():
    with (
        running_server(allowed_hosts="traj.example, other.example") as url,
        httpx.Client(base_url=url) as api,
    ):
        assert api.get("/status", headers={"Host": "traj.example:8000"}).status_code == 200
        refused = api.get("/status", headers={"Host": "evil.example"})
        assert refused.status_code == 403
        assert "--allowed-hosts" in refused.text


@pytest.mark.slow
def test_with_a_token_pages_load_and_their_data_needs_it():
    with running_server(token="s") as url, httpx.Client(base_url=url) as api:
        for page in ("/ui", "/ui/status.js", "/ui/look.css", "/docs", "/openapi.json"):
            assert api.get(page).status_code == 200, page
        policy = api.get("/ui").headers["content-security-policy"]
        assert "default-src 'self'" in policy and "unsafe" not in policy
        assert "<script>" not in api.get("/ui").text and " style=" not in api.get("/ui").text
        assert api.get("/openapi.json").json()["security"] == [{"token": []}], (
            "the page can be told the token"
        )
        assert api.get("/ui/data").status_code == 401
        bearer = {"Authorization": "Bearer s", "Origin": "http://dashboard.example"}
        assert api.get("/ui/data", headers=bearer).status_code == 200
        assert api.post("/scored_data", json=group(4), headers=bearer).status_code == 200, (
            "who knows the token may"
        )
        for header in ({}, {"Origin": url}):
            assert api.get("/reset_data", headers=header).status_code == 401


@pytest.mark.slow
@pytest.mark.skipif(PROGRAM is None, reason=ABSENT)
def test_a_browser_shows_the_data_with_the_token_from_the_address():
    with running_server(token="s") as url, closing(Chromium()) as page:
        page.open(url + "/ui")
        page.wait("document.getElementById('notice').textContent.includes('a token is needed')")
        refused = list(page.problems)
        page.problems[:] = []
        assert all("401" in problem for problem in refused)
        page.open(url + "/ui?again#token=s")
        page.wait("document.getElementById('state').textContent.includes('no trainer registered')")
        assert "batch size\n–" in page.js("document.body.innerText").lower(), "it used to be -1"
        for scheme in ("light", "dark"):
            page.look(390, 800, scheme)
            assert page.js("document.documentElement.scrollWidth") <= 390
        asked = page.js("performance.getEntriesByType('resource').map((one) => one.name)")
        assert len(asked) > 5 and all(one.startswith(url) for one in asked)
        page.open("about:blank")
        assert page.problems == []


@pytest.fixture
def plain_uvicorn() -> Iterator[Any]:
    """Runs an app as ``uvicorn module:app`` does, without the settings of the house. Gives its
    port."""
    with ExitStack() as running:

        def run(host: str, **options: Any) -> int:
            app = create_app(TrajectoryConfig(store="memory", **options))
            return running.enter_context(serving(uvicorn.Config(app, host=host, port=0)))

        yield run


@pytest.mark.slow
def test_the_app_itself_serves_no_other_machine_without_a_token(plain_uvicorn):
    """However it is started: a connection to another address of this machine than loopback is one
    from outside."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no address but loopback")
        outside = probe.getsockname()[0]
    if outside.startswith("127."):
        pytest.skip("this machine has no address but loopback")
    port = plain_uvicorn("0.0.0.0")
    for path in ("/", "/status", "/reset_data"):
        refused = httpx.get(f"http://{outside}:{port}{path}")
        assert refused.status_code == 403
        assert "--token" in refused.text
        assert httpx.get(f"http://127.0.0.1:{port}{path}").status_code == 200
    assert (
        httpx.get(f"http://{outside}:{plain_uvicorn('0.0.0.0', insecure=True)}/status").status_code
        == 200
    )


@pytest.mark.slow
def test_a_plain_uvicorn_hands_out_batches(plain_uvicorn):
    with httpx.Client(base_url=f"http://127.0.0.1:{plain_uvicorn('127.0.0.1')}") as api:
        start(api)
        api.post("/scored_data_list", json=[group(4), group(4)])
        assert len(api.get("/batch").json()["batch"]) == 2


async def test_writes_count_when_they_have_left_the_process():
    """The transport of a real connection, as an ASGI server holds it, keeps nothing back without
    saying so."""

    class Cycle:
        def __init__(self, transport: asyncio.BaseTransport) -> None:
            self.transport = transport

        async def send(self, message: Message) -> None: ...

    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    assert writer.transport.get_write_buffer_limits() != (0, 0)
    assert drained_send(Cycle(writer.transport).send)
    assert writer.transport.get_write_buffer_limits() == (0, 0)
    assert drained_send(Cycle(asyncio.BaseTransport()).send) is None
    writer.close()
    server.close()


def test_an_unknown_asgi_server_gets_no_batch():
    """It would have to say when a batch has left the process."""
    app = create_app(TrajectoryConfig(store="memory"))

    async def ask() -> httpx.Response:
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1")
        async with app.router.lifespan_context(app), client:
            return await client.get("/batch")

    assert asyncio.run(ask()).status_code == 501
