"""Leases, idempotency, epochs, back-pressure and restarts over HTTP: docs/reference/trajectory.md
5."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from tests.trajectory.conftest import (
    ENV,
    REGISTRATION,
    register_env,
    running_server,
    start,
    wait_until,
)
from tests.trajectory.groups import binary, encoded, group

pytestmark = pytest.mark.slow

MSGPACK = {"Content-Type": "application/msgpack"}


def pushed(api: httpx.Client, count: int, first: int = 0, **more: Any) -> None:
    for number in range(first, first + count):
        answer = api.post(
            "/scored_data", json=group(4, 8, seed=number, group_overrides={"id": number}, **more)
        )
        assert answer.json() == {"status": "received"}


def ids(answer: httpx.Response) -> list[int]:
    return [item["group_overrides"]["id"] for item in answer.json()["batch"]]


def test_acks_renewals_and_returns(api):
    start(api)
    pushed(api, 6)
    headers = {"X-Trainer-Id": "a", "X-Ack-Mode": "explicit"}
    first = api.get("/batch", headers=headers)
    lease = {"lease_id": first.headers["x-lease-id"]}
    assert api.post("/batch/renew", json=lease).json()["expires_in_s"] == pytest.approx(600)
    second = api.get("/batch", headers=headers | {"X-Ack": lease["lease_id"]})
    assert api.post("/batch/ack", json=lease).status_code == 200, "once more does no harm"
    assert api.post("/batch/nack", json=lease).status_code == 409
    assert (
        api.post("/batch/nack", json={"lease_id": second.headers["x-lease-id"]}).status_code == 200
    )
    assert (
        api.post("/batch/renew", json={"lease_id": second.headers["x-lease-id"]}).status_code == 409
    )
    again = api.get("/batch", params={"trainer_id": "b"})
    assert (ids(again), again.headers["x-batch-step"], again.headers["x-redelivered"]) == (
        ids(second),
        "1",
        "1",
    )
    assert (
        api.post("/batch/ack", json={"lease_id": second.headers["x-lease-id"]}).status_code == 409
    )
    assert api.post("/batch/ack", json={"lease_id": "x"}).status_code == 404
    assert api.get("/batch", headers={"X-Ack": "x"}).status_code == 404


@pytest.mark.nightly
def test_a_client_that_leaves_in_the_middle_loses_nothing(url, api):
    start(api, batch_size=4)
    large = group(4, 400_000)
    assert api.post("/scored_data", content=encoded(large)).status_code == 200
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"GET /batch HTTP/1.1\r\nHost: x\r\nAccept-Encoding: identity\r\n\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        assert [lease["state"] for lease in api.get("/leases").json()["leases"]] == ["sending"]
    wait_until(
        lambda: [lease["state"] for lease in api.get("/leases").json()["leases"]] == ["returned"]
    )
    again = api.get("/batch")
    assert again.headers["x-batch-step"] == "0"
    assert again.json()["batch"][0]["tokens"] == large["tokens"]
    assert api.get("/status").json()["current_step"] == 1
    wait_until(
        lambda: [lease["state"] for lease in api.get("/leases").json()["leases"]] == ["sent"]
    )


@pytest.mark.nightly
def test_a_slow_reader_gets_everything(url, api):
    start(api, batch_size=4)
    assert api.post("/scored_data", content=encoded(group(4, 300_000))).status_code == 200
    with httpx.stream(
        "GET", url + "/batch", headers={"Accept-Encoding": "identity"}, timeout=300
    ) as answer:
        parts = []
        for number, part in enumerate(answer.iter_raw(1 << 20)):
            parts.append(part)
            if number < 4:
                time.sleep(0.05)
                assert api.get("/status").status_code == 200
    assert len(json.loads(b"".join(parts))["batch"][0]["tokens"][3]) == 300_000


def test_two_anonymous_pullers_never_share_a_batch(url, api):
    start(api)
    pushed(api, 40)
    got: list[int] = []

    def pull() -> None:
        with httpx.Client(base_url=url) as own:
            while (answer := own.get("/batch")).json()["batch"] is not None:
                got.extend(ids(answer))

    pullers = [threading.Thread(target=pull) for _ in range(2)]
    for puller in pullers:
        puller.start()
    for puller in pullers:
        puller.join(60)
    assert sorted(got) == list(range(40))


def test_keys_make_pushes_and_registrations_safe_to_repeat(url, api):
    key = {"Idempotency-Key": "r1"}
    first = api.post("/register", json=REGISTRATION, headers=key)
    api.get("/batch")
    again = api.post("/register", json=REGISTRATION, headers=key)
    assert again.text == first.text
    assert again.headers["idempotency-replayed"] == "true"
    assert again.headers["x-epoch"] == first.headers["x-epoch"]
    for _ in range(2):
        assert (
            api.post("/register-env", json=ENV, headers={"Idempotency-Key": "e"}).json()["env_id"]
            == 0
        )
    assert api.post("/register-env", json=ENV).json()["env_id"] == 1
    answers = []

    def push() -> None:
        answers.append(
            httpx.post(url + "/scored_data", json=group(4), headers={"Idempotency-Key": "p"})
        )

    threads = [threading.Thread(target=push) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [answer.json() for answer in answers] == [{"status": "received"}] * 8
    assert sum("idempotency-replayed" in answer.headers for answer in answers) == 7
    assert api.get("/status").json()["queue_size"] == 1
    assert (
        api.post("/scored_data", json=group(2), headers={"Idempotency-Key": "p"}).status_code == 422
    )
    assert (
        api.post("/scored_data_list", json=[group(4)], headers={"Idempotency-Key": "p"}).status_code
        == 422
    )
    assert (
        api.post("/scored_data", json=group(4), headers={"Idempotency-Key": "x" * 129}).status_code
        == 422
    )


def test_the_answer_to_wait_is_not_repeated_for_a_key(api):
    """An environment that asks again under one key takes part as soon as the trainer has asked, and
    then once."""
    key = {"Idempotency-Key": "this environment"}
    for _ in range(2):
        waits = api.post("/register-env", json=ENV, headers=key)
        assert waits.json() == {"status": "wait for trainer to start"}
        assert "idempotency-replayed" not in waits.headers
    start(api)
    answers = [api.post("/register-env", json=ENV, headers=key) for _ in range(2)]
    assert [answer.json()["env_id"] for answer in answers] == [0, 0]
    assert answers[1].headers["idempotency-replayed"] == "true"


def test_a_client_of_an_older_run_is_fenced(api):
    start(api)
    env = register_env(api)
    old = {"X-Epoch": api.get("/status").headers["x-epoch"]}
    assert api.post("/scored_data", json=group(4, env_id=env), headers=old).status_code == 200
    start(api, wandb_group="another")
    for method, path, body in (
        ("POST", "/scored_data", group(4)),
        ("POST", "/scored_data_list", [group(4)]),
        ("POST", "/status-env", {"env_id": 0}),
        ("GET", "/batch", None),
    ):
        assert api.request(method, path, json=body, headers=old).status_code == 409
    assert api.get("/status").json()["queue_size"] == 0
    joined = api.post("/register", json=REGISTRATION, headers={"X-Join": "1"})
    assert joined.headers["x-epoch"] == api.get("/status").headers["x-epoch"]


def test_full_is_503_never_429_and_passes():
    with running_server(max_queue_groups=2) as url, httpx.Client(base_url=url) as api:
        start(api, batch_size=4)
        pushed(api, 2)
        refused = api.post("/scored_data", json=group(4))
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert api.get("/batch").json()["batch"]
        assert api.post("/scored_data_list", json=[group(4), group(4)]).status_code == 503
        assert api.get("/batch").json()["batch"]
        assert api.post("/scored_data", json=group(4)).status_code == 200


def test_versions_and_staleness(api):
    start(api, max_staleness=1)
    api.post("/scored_data", json=group(4, policy_version=0, group_overrides={"id": 0}))
    api.post(
        "/scored_data", json=group(4, group_overrides={"id": 1}), headers={"X-Policy-Version": "4"}
    )
    api.post("/scored_data_list", json=[group(4, policy_version=5, group_overrides={"id": 2})])
    assert api.post("/policy_version", json={"version": 5}).json()["policy_version"] == 5
    answer = api.get("/batch")
    assert ids(answer) == [1, 2]
    assert (answer.headers["x-min-policy-version"], answer.headers["x-max-policy-version"]) == (
        "4",
        "5",
    )
    assert api.get("/quarantine").json()["by_reason"] == {"too_stale": 1}
    assert (
        api.post("/scored_data", json=group(4), headers={"X-Policy-Version": "x"}).status_code
        == 422
    )
    assert api.delete("/quarantine").json()["deleted"] == 1


def test_the_binary_wire_both_ways(api):
    start(api, batch_size=12)
    plain = group(4, 600, group_overrides={"id": 7})
    assert api.post("/scored_data", content=binary(plain), headers=MSGPACK).json() == {
        "status": "received"
    }
    body = msgspec.msgpack.encode([msgspec.Raw(binary(plain, floats="f8"))])
    assert (
        api.post("/scored_data_list", content=body, headers=MSGPACK).json()["groups_processed"] == 1
    )
    assert api.post("/scored_data", json=plain).status_code == 200
    latest = api.get("/latest_example", headers={"Accept": "application/msgpack"})
    assert latest.headers["content-type"] == "application/msgpack"
    answer = api.get("/batch", headers={"Accept": "application/msgpack", "Accept-Encoding": "gzip"})
    items = msgspec.msgpack.decode(answer.content)["batch"]
    for item in items:
        assert np.frombuffer(item["tokens"]["data"], "<i4").tolist() == [*sum(plain["tokens"], [])]  # noqa: RUF017
        assert len(item) == 14
    assert msgspec.msgpack.decode(latest.content)["tokens"]["dtype"] == "i4"


def test_everything_survives_a_restart(tmp_path):
    store = f"sqlite:{tmp_path}"
    with running_server(store=store) as url, httpx.Client(base_url=url) as api:
        start(api)
        env = register_env(api, 4)
        pushed(api, 5, env_id=env)
        last = group(4, env_id=env, group_overrides={"id": 5})
        api.post("/scored_data", json=group(3, env_id=env))
        api.post("/scored_data", json=group(5))
        api.post("/scored_data", json=last, headers={"Idempotency-Key": "k"})
        first = api.get("/batch", headers={"X-Trainer-Id": "a", "X-Ack-Mode": "explicit"})
        before = {
            path: api.get(path).json()
            for path in ("/status", "/info", "/wandb_info", "/quarantine")
        }
    with running_server(store=store) as url, httpx.Client(base_url=url) as api:
        after = {path: api.get(path).json() for path in before}
        for answers in (before, after):
            for item in answers["/quarantine"]["items"]:
                del item["age_s"]
        assert after == before
        assert api.post("/status-env", json={"env_id": env}).json()["self_queue_size"] == 4
        assert api.get("/buffers").json()["buffers"][0]["sequences"] == 3
        replay = api.post("/scored_data", json=last, headers={"Idempotency-Key": "k"})
        assert replay.headers["idempotency-replayed"] == "true"
        assert register_env(api) == 1
        assert (
            api.post("/batch/ack", json={"lease_id": first.headers["x-lease-id"]}).status_code
            == 200
        )
        assert ids(api.get("/batch")) == [2, 3]
        assert ids(api.get("/batch")) == [4, 5]
        assert api.get("/latest_example").json()["group_overrides"] == {"id": 5}


def test_a_damaged_payload_goes_to_quarantine_and_the_others_are_served(tmp_path):
    with running_server(store=f"sqlite:{tmp_path}") as url, httpx.Client(base_url=url) as api:
        start(api)
        pushed(api, 3)
        [segment] = tmp_path.glob("*.seg")
        with segment.open("r+b") as file:
            file.seek(10)
            file.write(b"?")
        refused = api.get("/batch")
        assert (refused.json(), refused.headers["x-batch-reason"]) == (
            {"batch": None},
            "payload_lost",
        )
        served = api.get("/batch")
        assert (sorted(ids(served)), served.headers["x-batch-step"]) == ([1, 2], "0")
        assert api.get("/quarantine").json()["by_reason"] == {"payload_lost": 1}


ALLOCATIONS = """
import platform, resource, sys
from realhf.trajectory.http.server import keep_buffers

if sys.argv[1] == "kept" and not keep_buffers():
    sys.exit(77)

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

buffer = b"x" * (2 << 20)
before = faults()
for _ in range(50):
    parts = [bytearray(buffer) for _ in range(4)]
    del parts
print(faults() - before)
"""


def page_faults(way: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", ALLOCATIONS, way],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode == 77:
        pytest.skip("this C library has no mallopt")
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.nightly
def test_kept_buffers_cost_no_new_pages():
    """Freed buffers stay with the process, up to a bound."""
    assert page_faults("kept") * 3 < page_faults("as it was")
