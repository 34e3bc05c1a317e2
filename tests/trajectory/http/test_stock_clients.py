"""Stock clients: the requests of an Atropos environment and of the example trainer, replayed
without a change.

Taken from the behaviour of atroposlib 0.4.0 (``envs/base.py``, ``example_trainer/api.py``): a new
connection for each request, gzip from 1024 bytes, three tries on connection errors and 5xx, data
dropped on 4xx, ``/status-env`` polled by GET with a JSON body, batches pulled anonymously. Source:
docs/reference/trajectory.md 5.
"""

from __future__ import annotations

import gzip
import http.client
import json
import threading
import time
from collections import Counter
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from tests.trajectory.conftest import ENV, STOCK, running_server
from tests.trajectory.groups import group

pytestmark = pytest.mark.slow

STEPS = 100
BATCH = 16
POLL_S = 0.01


def send(
    url: str, method: str, path: str, body: bytes, headers: dict[str, str]
) -> tuple[int, bytes]:
    """One request over a connection of its own: status and plain body. Raises OSError."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=300)
    try:
        connection.request(
            method, path, body or None, headers | {"Accept-Encoding": "gzip, deflate"}
        )
        answer = connection.getresponse()
        raw = answer.read()
        return answer.status, gzip.decompress(raw) if answer.headers[
            "Content-Encoding"
        ] == "gzip" else raw
    except http.client.HTTPException as error:
        raise OSError(str(error)) from error
    finally:
        connection.close()


def ask(url: str, method: str, path: str, value: Any = None) -> Any:
    """JSON of an answer that must be a success."""
    body = b"" if value is None else json.dumps(value).encode()
    status, raw = send(
        url, method, path, body, {"Content-Type": "application/json"} if body else {}
    )
    assert status == 200, (path, status, raw)
    return json.loads(raw)


class StockEnvironment(threading.Thread):
    """One rollout handler, pacing itself by the numbers it polls."""

    def __init__(self, url: str, number: int, group_size: int, stop: threading.Event) -> None:
        super().__init__(name=f"env-{number}", daemon=True)
        self._url = url
        self._number = number
        self._group_size = group_size
        self._stop_event = stop
        self.sent: list[str] = []
        self.dropped: list[int] = []

    def run(self) -> None:
        env_id = self._register()
        batch_size = ask(self._url, "GET", "/info")["batch_size"]
        while not self._stop_event.is_set():
            status = ask(self._url, "GET", "/status-env", {"env_id": env_id})
            if status["queue_size"] * self._group_size >= 3 * batch_size:
                time.sleep(POLL_S)
                continue
            self._send(env_id)

    def _register(self) -> int:
        while True:
            wanted = ENV | {"desired_name": f"env{self._number}", "group_size": self._group_size}
            answer = ask(
                self._url, "POST", "/register-env", wanted | {"min_batch_allocation": None}
            )
            if answer["status"] == "success":
                return answer["env_id"]
            time.sleep(POLL_S)

    def _send(self, env_id: int) -> None:
        name = f"{self._number}-{len(self.sent)}"
        tokens = 40 if len(self.sent) % 2 else 2
        item = group(self._group_size, tokens, group_overrides={"name": name}, env_id=env_id)
        listed = len(self.sent) % 5 == 0
        body = json.dumps([item] if listed else item).encode()
        headers = {"Content-Type": "application/json"}
        if len(body) >= 1024:
            body = gzip.compress(body)
            headers["Content-Encoding"] = "gzip"
        for _ in range(3):
            try:
                status, _ = send(
                    self._url,
                    "POST",
                    "/scored_data_list" if listed else "/scored_data",
                    body,
                    headers,
                )
            except OSError:
                continue
            if status < 400:
                self.sent.append(name)
                return
            if status < 500:
                break
        self.dropped.append(len(self.sent))


def train(url: str, steps: int) -> list[list[dict[str, Any]]]:
    """The example trainer: register, then poll for batches."""
    answer = ask(url, "POST", "/register", STOCK | {"batch_size": BATCH, "num_steps": steps})
    assert "uuid" in answer
    batches = []
    deadline = time.monotonic() + 120
    while len(batches) < steps:
        assert time.monotonic() < deadline, f"only {len(batches)} batches"
        data = ask(url, "GET", "/batch")
        assert data.get("status") != "error"
        if data["batch"] is None:
            time.sleep(POLL_S)
            continue
        batches.append(data["batch"])
    return batches


@pytest.mark.nightly
@pytest.mark.parametrize("strict", ["", "all"])
def test_a_hundred_steps_of_stock_clients(tmp_path, strict):
    with running_server(store=f"sqlite:{tmp_path}", strict=strict) as url:
        stop = threading.Event()
        environments = [
            StockEnvironment(url, number, size, stop) for number, size in enumerate((2, 4, 4))
        ]
        for environment in environments:
            environment.start()
        batches = train(url, STEPS)
        status = ask(url, "GET", "/status")
        stop.set()
        for environment in environments:
            environment.join(60)
        assert status["current_step"] == STEPS
        assert [environment.dropped for environment in environments] == [[], [], []]
        seen = Counter(item["group_overrides"]["name"] for batch in batches for item in batch)
        assert set(seen.values()) == {1}, "nothing twice"
        assert all(sum(len(item["tokens"]) for item in batch) == BATCH for batch in batches)
        assert all(len(item) == 14 for batch in batches for item in batch)
        for environment in environments:
            mine = sorted(
                int(name.partition("-")[2])
                for name in seen
                if name.startswith(f"{environment._number}-")
            )
            assert mine == list(range(len(mine))), "oldest first, without a gap"
            assert mine, "nobody starves"
        left = ask(url, "GET", "/status")["queue_size"]
        assert len(seen) + left == sum(len(environment.sent) for environment in environments)


def test_sessions_behind_one_address_do_not_acknowledge_each_other():
    """They carry a cookie without knowing; who carries none has the address for a name, as
    before."""
    with running_server() as url, ExitStack() as stack:
        first, second, third = (stack.enter_context(httpx.Client(base_url=url)) for _ in range(3))
        for rank in (first, second):
            assert rank.post("/register", json=STOCK | {"batch_size": 4}).cookies, (
                "told apart from the beginning"
            )
        assert third.get("/batch").cookies
        assert not third.get("/batch").cookies, "a name is given once"
        for number in range(6):
            first.post("/scored_data", json=group(4, seed=number))
        for session in (first, second, third):
            answer = session.get("/batch")
            assert len(answer.json()["batch"]) == 1
            assert not answer.cookies
        assert len(first.get("/leases").json()["leases"]) == 3, (
            "none was acknowledged by another's pull"
        )
        assert first.get("/batch").json()["batch"]
        assert [lease["step"] for lease in first.get("/leases").json()["leases"]] == [1, 2, 3]
        for _ in range(2):
            assert httpx.get(url + "/batch").json()["batch"], (
                "one without cookies acknowledges by its next pull"
            )
        assert [lease["step"] for lease in first.get("/leases").json()["leases"]] == [1, 2, 3, 5]
        for bad in ("x", "0" * 33, "é"):
            assert (
                httpx.get(
                    url + "/batch", headers={"Cookie": f"realhf_trainer={bad}".encode()}
                ).status_code
                == 200
            )
        named = httpx.get(url + "/batch", headers={"X-Trainer-Id": "n"})
        assert "set-cookie" not in named.headers
