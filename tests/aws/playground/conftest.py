"""One real server with a playground for all of its tests; it is played by one visitor at a time."""

import httpx
import pytest

from realhf.aws.server.program import EnvServerProcess


@pytest.fixture(scope="session")
def web_server():
    with EnvServerProcess(
        2, "--web", "dedicated", "--web-ministack-port", "0", "--web-solutions", "true"
    ) as server:
        yield server


def enter(url: str, **settings) -> httpx.Client:
    """A browser that opened the page: cookie, origin, CSRF token."""
    client = httpx.Client(base_url=url, headers={"Origin": url}, timeout=300, **settings)
    client.headers["X-CSRF-Token"] = client.get("/web/session").json()["csrf"]
    return client


@pytest.fixture
def visit(web_server: EnvServerProcess):
    """Makes visitors; they leave after the test."""
    visitors: list[httpx.Client] = []

    def come() -> httpx.Client:
        visitors.append(enter(web_server.url))
        return visitors[-1]

    yield come
    for client in visitors:
        assert client.post("/web/leave", json={}).status_code == 200
        client.close()
