"""Who may come in: cookies, origins, CSRF tokens, logins. No simulator is started here."""

import json
import re
from collections.abc import Callable
from importlib import resources

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from realhf.aws.playground.playground import Playground
from realhf.aws.playground.routes import mount
from realhf.aws.server_config import AwsServerConfig

ORIGIN = "http://127.0.0.1:8000"
STATIC = resources.files("realhf.aws.playground").joinpath("static")
Browse = Callable[..., TestClient]


@pytest.fixture
def browse():
    """Makes browsers of one playground; ``settings`` are those of the server."""
    mounted: list[Playground] = []
    apps: dict[str, FastAPI] = {}

    def make(peer: str = "127.0.0.1", url: str = ORIGIN, **settings: object) -> TestClient:
        key = repr(settings)
        if key not in apps:
            apps[key] = FastAPI()
            mounted.append(mount(apps[key], AwsServerConfig(**settings)))  # pyright: ignore[reportArgumentType]
        return TestClient(apps[key], base_url=url, client=(peer, 40000), headers={"Origin": url})

    yield make
    for playground in mounted:
        playground.close()


def enter(client: TestClient) -> TestClient:
    client.headers["X-CSRF-Token"] = client.get("/web/session").json()["csrf"]
    return client


@pytest.mark.slow
def test_what_changes_something_needs_cookie_csrf_token_and_origin(browse: Browse) -> None:
    for path in ("/web/reset", "/web/step", "/web/leave"):
        assert browse().post(path, json={}).json()["code"] == "NO_SESSION"
        client = enter(browse())
        token = client.headers.pop("X-CSRF-Token")
        assert client.post(path, json={}).json()["code"] == "CSRF"
        client.headers["X-CSRF-Token"] = enter(browse()).headers["X-CSRF-Token"]
        assert client.post(path, json={}).status_code == 403
        client.headers["X-CSRF-Token"] = token
        for origin in (
            "http://evil.example",
            "null",
            "http://127.0.0.1:8001",
            "http://127.0.0.1:8000.evil.example",
        ):
            refused = client.post(path, json={}, headers={"Origin": origin})
            assert refused.status_code == 403 and refused.json()["code"] == "FOREIGN_ORIGIN"
        del client.headers["Origin"]
        assert client.post(path, json={}).json()["code"] == "FOREIGN_ORIGIN"
    assert (
        client.post("/web/leave", json={}, headers={"Sec-Fetch-Site": "same-origin"}).status_code
        == 200
    )


def test_a_cookie_is_signed_and_out_of_reach_of_scripts_and_other_sites(browse: Browse) -> None:
    client = browse()
    cookie = client.get("/web/session").headers["set-cookie"]
    assert all(word in cookie for word in ("HttpOnly", "SameSite=strict", "Path=/web"))
    name, value = re.match(r"([^=]+)=([^;]+)", cookie).groups()  # pyright: ignore[reportOptionalMemberAccess]
    visitor, _, signature = value.partition(".")
    for forged in (f"x{visitor}.{signature}", f"{visitor}.{signature[:-1]}", visitor, "", "."):
        other = browse()
        other.cookies.set(name, forged, path="/web")
        assert other.get("/web/state").status_code == 401
    assert client.get("/web/state").status_code == 200
    assert "set-cookie" not in client.get("/web/session").headers


def test_without_a_token_it_is_for_this_machine_only(browse: Browse) -> None:
    assert browse(peer="192.0.2.7").get("/web").json()["code"] == "NOT_LOCAL"
    assert browse(url="http://rebound.example:8000").get("/web").status_code == 403
    for url in ("http://localhost:8000", "http://[::1]:8000"):
        assert browse(peer="::1", url=url).get("/web").status_code == 200


def test_with_a_token_visitors_log_in(browse: Browse) -> None:
    client = browse(peer="192.0.2.7", url="http://lab.example", token="let-me-in")
    assert client.get("/web/session").json() == {"login": True}
    assert client.get("/web/tasks").status_code == 401
    for body in ({"token": "let-me"}, {"token": 3}, {"token": "\ud800"}, {}):
        assert client.post("/web/login", content=json.dumps(body)).status_code == 401
    assert (
        client.post(
            "/web/login", json={"token": "let-me-in"}, headers={"Origin": "http://x"}
        ).status_code
        == 403
    )
    assert client.post("/web/login", json={"token": "let-me-in"}).status_code == 200
    assert enter(client).get("/web/tasks").status_code == 200
    assert browse().post("/web/login", json={"token": ""}).status_code == 401


def test_solutions_need_the_flag(browse: Browse) -> None:
    assert enter(browse()).get("/web/solution").status_code == 404
    assert enter(browse(web_solutions=True)).get("/web/solution").status_code == 409


def test_the_page_is_closed_in_itself(browse: Browse) -> None:
    reply = browse().get("/web")
    policy = reply.headers["content-security-policy"]
    assert (
        "default-src 'none'" in policy
        and "unsafe" not in policy
        and "frame-ancestors 'none'" in policy
    )
    for file in STATIC.iterdir():
        text = file.read_text("utf-8")
        assert browse().get(f"/web/{file.name}").content == file.read_bytes()
        assert not re.search(r"(?:src|href|url|from|import)\W{1,3}(?:https?:)?//", text), (
            f"{file.name}: another host"
        )
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|srcdoc", text
        ), file.name
    page = STATIC.joinpath("index.html").read_text("utf-8")
    assert not re.search(r"<script(?![^>]*\bsrc=)|\son\w+=|\sstyle=", page), (
        "the policy would not let this run"
    )
    assert browse().get("/web/..%2f..%2fdoor.py").status_code == 404
