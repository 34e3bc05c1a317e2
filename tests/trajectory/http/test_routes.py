"""The wire contract, as stock clients see it: docs/reference/trajectory.md 2."""

from __future__ import annotations

import gzip
import json
import socket

import httpx
import pytest

from tests.trajectory.conftest import ENV, REGISTRATION, register_env, running_server, start
from tests.trajectory.groups import EVERYTHING, encoded, group

STOCK_KEYS = (
    "tokens masks scores advantages ref_logprobs inference_logprobs generation_params messages "
    "images"
)
EMPTY_EXAMPLE = {name: [] for name in STOCK_KEYS.split()}


def test_before_a_trainer_registers(api):
    assert api.get("/").json() == {"message": "AtroposLib API"}
    assert api.get("/wandb_info").json() == {"group": None, "project": None}
    assert api.get("/info").json() == {"batch_size": -1, "max_token_len": -1}
    assert api.get("/status").json() == {"current_step": 0, "queue_size": 0}
    assert api.post("/register-env", json=ENV).json() == {"status": "wait for trainer to start"}
    assert api.get("/batch").json() == {
        "status": "error",
        "message": "Trainer not registered. Call /register first.",
        "batch": [],
    }
    assert api.get("/latest_example").json() == EMPTY_EXAMPLE
    assert api.post("/disconnect-env", json={"env_id": 0}).json()["status"] == "failure"
    assert api.post("/scored_data", json=group()).json() == {"status": "received"}
    assert api.get("/status").json() == {"current_step": 0, "queue_size": 1}
    reset = api.get("/reset_data")
    assert (reset.status_code, reset.text) == (200, "Reset successful")
    assert reset.headers["content-type"].startswith("text/plain")


def test_registration(api):
    answer = api.post("/register", json=REGISTRATION)
    body = json.loads(answer.text)
    assert list(body) == ["uuid"]
    assert body["uuid"].bit_length() > 64
    assert answer.headers["x-trainer-id"] == str(body["uuid"])
    assert api.get("/info").json() == {"batch_size": 8, "max_token_len": 64}
    assert api.get("/wandb_info").json() == {"group": "g", "project": "p"}
    assert api.post("/register-env", json=ENV).json() == {"status": "wait for trainer to start"}
    assert api.get("/batch").json() == {"batch": None}
    assert api.post("/register-env", json=ENV).json() == {
        "status": "success",
        "env_id": 0,
        "wandb_name": "env_0",
        "checkpoint_dir": "c",
        "starting_step": 0,
        "checkpoint_interval": 10,
        "num_steps": 100,
    }
    for _ in range(2):
        assert api.post("/disconnect-env", json={"env_id": 0}).json() == {"status": "success"}
    assert api.post("/disconnect-env", json={"env_id": -1}).json()["status"] == "failure"


def test_half_a_surrogate_pair_has_no_place_in_a_registration(api):
    half = json.dumps("half \ud800")
    for path, field, values in (
        ("/register", "wandb_group", REGISTRATION),
        ("/register-env", "desired_name", ENV),
    ):
        answer = api.post(path, content=json.dumps(values | {field: "@@"}).replace('"@@"', half))
        assert (answer.status_code, answer.json()["detail"][0]["loc"]) == (422, ["body", field])
    assert api.get("/wandb_info").json() == {"group": None, "project": None}


@pytest.mark.parametrize(("method", "path", "status", "body"), [
    ("GET", "/nothing", 404, {"detail": "Not Found"}), ("GET", "/register", 405, {"detail": "Method Not Allowed"}),
    ("POST", "/batch", 405, {"detail": "Method Not Allowed"}),
    ("PUT", "/scored_data", 405, {"detail": "Method Not Allowed"}),
])  # fmt: skip
def test_unknown_paths_and_methods(api, method, path, status, body):
    answer = api.request(method, path)
    assert (answer.status_code, answer.json()) == (status, body)


def test_a_trailing_slash_is_redirected(api):
    answer = api.get("/status/")
    assert answer.status_code == 307
    assert answer.headers["location"].endswith("/status")


def test_docs_list_every_endpoint(api):
    assert api.get("/docs").status_code == 200
    paths = api.get("/openapi.json").json()["paths"]
    stock = (
        "register wandb_info info status register-env disconnect-env status-env scored_data "
        "scored_data_list batch"
    )
    assert {
        f"/{name}" for name in (*stock.split(), "", "latest_example", "reset_data", "batch/ack")
    } <= set(paths)
    assert {"get", "post"} <= set(paths["/status-env"])
    assert "tokens" in json.dumps(paths["/scored_data"])


def test_lax_types_and_missing_fields(api):
    lax = REGISTRATION | {
        "batch_size": "8",
        "max_token_len": 64.0,
        "num_steps": True,
        "unknown": [1],
    }
    assert api.post("/register", content=json.dumps(lax)).status_code == 200, "no Content-Type"
    assert api.get("/info").json() == {"batch_size": 8, "max_token_len": 64}
    for wrong in (
        {"batch_size": 8.5},
        {"batch_size": None},
        {"wandb_group": 3},
        {"batch_size": 2**63},
    ):
        answer = api.post("/register", json=REGISTRATION | wrong)
        assert answer.status_code == 422
        assert set(answer.json()["detail"][0]) == {"type", "loc", "msg", "input"}
        assert answer.json()["detail"][0]["loc"] == ["body", next(iter(wrong))]
    missing = api.post(
        "/register",
        json={name: value for name, value in REGISTRATION.items() if name != "num_steps"},
    )
    assert missing.json()["detail"][0]["type"] == "missing"
    text = api.post(
        "/register", content=json.dumps(REGISTRATION), headers={"Content-Type": "text/plain"}
    )
    assert text.status_code == 422
    assert api.post("/register-env", json=ENV | {"weight": None}).status_code == 422
    assert api.post("/register-env", json=ENV | {"desired_name": None}).status_code == 422
    assert (
        api.post("/register-env", content=json.dumps(ENV | {"weight": float("nan")})).status_code
        == 422
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "body", [b"", b"{", b"null", b"[]", b"NaN", b"\xff", b"9" * 5000, b"[" * 50_000]
)
@pytest.mark.parametrize("path", [
    "/register", "/register-env", "/disconnect-env", "/status-env", "/scored_data", "/scored_data_list",
    "/batch/ack", "/policy_version", "/quarantine/requeue",
])  # fmt: skip
def test_nonsense_is_4xx_everywhere(api, path, body):
    answer = api.post(path, content=body)
    assert answer.status_code in (400, 422) or (path, body) == ("/scored_data_list", b"[]")
    assert api.get("/status").json() == {"current_step": 0, "queue_size": 0}


def test_status_env_in_its_three_forms(api):
    start(api, batch_size=64)
    first = register_env(api, 2)
    second = register_env(api, 4)
    for env, size, count in ((first, 2, 2), (second, 4, 3)):
        for _ in range(count):
            assert api.post("/scored_data", json=group(size, env_id=env)).json() == {
                "status": "received"
            }
    expected = {
        "current_step": 0, "queue_size": 8, "unallocated_fraction": 1.0, "self_queue_size": 2, "max_group_size": 4,
        "env_weight": 0.5,
    }  # fmt: skip
    assert api.request("GET", "/status-env", json={"env_id": first}).json() == expected
    assert api.get("/status-env", params={"env_id": first}).json() == expected
    assert api.post("/status-env", json={"env_id": first}).json() == expected
    both = api.request("GET", "/status-env", params={"env_id": first}, json={"env_id": second})
    assert (both.json()["queue_size"], both.json()["self_queue_size"]) == (4, 3), "the body wins"
    assert api.get("/status").json()["queue_size"] == 5
    for unknown in (7, -1):
        answer = api.post("/status-env", json={"env_id": unknown})
        assert (answer.status_code, answer.json()) == (404, {"detail": "unknown env_id"})
    assert api.get("/status-env").status_code == 422
    assert api.get("/status-env", params={"env_id": "x"}).status_code == 422


def test_a_group_travels_unchanged(api):
    start(api, batch_size=3)
    assert api.post("/scored_data", json=EVERYTHING).json() == {"status": "received"}
    assert api.get("/latest_example").json() == EVERYTHING
    answer = api.get("/batch")
    assert answer.json() == {"batch": [EVERYTHING]}
    assert answer.headers["x-batch-step"] == "0"
    assert answer.headers["x-lease-id"]
    assert api.get("/status").json() == {"current_step": 1, "queue_size": 0}
    assert api.get("/latest_example").json() == EVERYTHING, "still there when the batch is gone"
    assert api.get("/batch").headers["x-batch-reason"] == "empty"
    assert api.get("/latest_example").json() == EVERYTHING


@pytest.mark.parametrize("encoding", ["gzip", "x-gzip"])
@pytest.mark.parametrize("tokens", [2, 400])
def test_gzip_in_and_out(api, encoding, tokens):
    start(api, batch_size=2)
    plain = group(2, tokens)
    sent = api.post(
        "/scored_data",
        content=gzip.compress(encoded(plain)),
        headers={"Content-Encoding": encoding},
    )
    assert sent.json() == {"status": "received"}
    answer = api.get("/batch", headers={"Accept-Encoding": "gzip"})
    assert answer.headers.get("content-encoding") == ("gzip" if tokens == 400 else None)
    assert answer.json()["batch"][0]["tokens"] == plain["tokens"]
    latest = api.get("/latest_example", headers={"Accept-Encoding": "identity"})
    assert "content-encoding" not in latest.headers
    api.post("/scored_data", json=plain)
    answer = api.get("/batch", headers={"Accept-Encoding": "identity"})
    assert "content-encoding" not in answer.headers
    assert answer.json()["batch"][0]["masks"] == plain["masks"]


@pytest.mark.slow
def test_damaged_and_oversized_bodies():
    with running_server(max_body_bytes=100_000) as url, httpx.Client(base_url=url) as api:
        good = gzip.compress(encoded(group()))
        for path in ("/scored_data", "/register"):
            for bad in (good[:-3], b"nonsense", good[:20] + b"?" + good[21:]):
                assert (
                    api.post(path, content=bad, headers={"Content-Encoding": "gzip"}).status_code
                    == 400
                )
            bomb = gzip.compress(b" " * 200_000)
            assert (
                api.post(path, content=bomb, headers={"Content-Encoding": "gzip"}).status_code
                == 413
            )
            assert api.post(path, content=b" " * 100_001).status_code == 413
        assert api.get("/status").json() == {"current_step": 0, "queue_size": 0}


def test_a_bad_item_stores_nothing_of_a_list(api):
    start(api)
    answer = api.post("/scored_data_list", json=[group(), {"tokens": 1}])
    assert answer.status_code == 422
    assert answer.json()["detail"][0]["loc"][:2] == ["body", 1]
    assert api.get("/status").json()["queue_size"] == 0
    assert api.post("/scored_data_list", json=[group(4), group(4)]).json() == {
        "status": "received",
        "groups_processed": 2,
    }


def test_cors_allows_any_origin_with_credentials(api):
    headers = {"Origin": "http://somewhere", "Access-Control-Request-Method": "POST"}
    preflight = api.options("/scored_data", headers=headers)
    assert preflight.headers["access-control-allow-origin"] == "http://somewhere"
    assert preflight.headers["access-control-allow-credentials"] == "true"
    assert api.get("/status", headers=headers).headers["access-control-allow-origin"] in (
        "*",
        "http://somewhere",
    )


def test_half_a_request_does_no_harm(url, api):
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(
            b"POST /scored_data HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{"
        )
    assert api.get("/status").status_code == 200


@pytest.mark.parametrize("batch_size", [0, -5])
def test_a_batch_size_that_makes_no_sense(api, batch_size):
    start(api, batch_size=batch_size)
    env = register_env(api, 0, weight=-1.0, min_batch_allocation=7.0)
    assert api.post("/scored_data", json=group(1, env_id=env)).status_code == 200
    answer = api.get("/batch")
    assert answer.json() == {"batch": None}
    assert answer.headers["x-batch-reason"] == "batch_size_not_positive"
    assert api.post("/status-env", json={"env_id": env}).status_code == 200
