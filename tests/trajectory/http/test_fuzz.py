"""Nonsense at every endpoint: no 500, and the state stays whole. Source:
docs/reference/trajectory.md 5."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.trajectory.conftest import REGISTRATION, register_env, start
from tests.trajectory.groups import group

pytestmark = pytest.mark.slow

PATHS = (
    "/", "/register", "/wandb_info", "/info", "/status", "/register-env", "/disconnect-env", "/status-env", "/batch",
    "/scored_data", "/scored_data_list", "/latest_example", "/batch/ack", "/batch/nack", "/batch/renew", "/ui/data",
    "/policy_version", "/envs", "/buffers", "/leases", "/quarantine", "/quarantine/requeue",
)  # fmt: skip
KEYS = (
    *REGISTRATION, "env_id", "tokens", "masks", "scores", "messages", "images", "lease_id", "ids", "version", "weight",
    "desired_name", "group_size", "max_token_length", "min_batch_allocation", "__t__", "dtype",
)  # fmt: skip
SCALARS = (
    None,
    True,
    0,
    -1,
    2**63,
    10**30,
    1.5,
    1e308,
    "",
    "x",
    "\x00",
    "8",
    -(2**63),
    3,
    1,
    "\u2028",
)
HEADERS = (
    "X-Ack",
    "X-Epoch",
    "X-Trainer-Id",
    "X-Policy-Version",
    "Idempotency-Key",
    "X-Join",
    "Accept",
)


@pytest.mark.nightly
def test_schemathesis_finds_no_server_error(url):
    command = [
        str(Path(sys.executable).parent / "schemathesis"), "run", f"{url}/openapi.json", "--checks",
        "not_a_server_error", "--max-examples", "8", "--seed", "1", "--request-timeout", "60",
        "--suppress-health-check", "too_slow", "--no-color", "--phases", "coverage,fuzzing",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "generated" in done.stdout


def anything(rng: random.Random, depth: int = 0) -> Any:
    choice = rng.randrange(12 if depth < 4 else 8)
    if choice < 8:
        return rng.choice(SCALARS)
    if choice < 10:
        return [anything(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {rng.choice(KEYS): anything(rng, depth + 1) for _ in range(rng.randrange(5))}


def body_of(rng: random.Random) -> tuple[bytes, dict[str, str]]:
    """A body of some kind and the headers it is sent with."""
    base = rng.choice(
        [
            anything(rng),
            group(2, 3) | {rng.choice(KEYS): anything(rng)},
            [group(4, 2), anything(rng)],
            REGISTRATION | {rng.choice(KEYS): anything(rng)},
        ]
    )
    headers = {rng.choice(HEADERS): rng.choice(["1", "x", "-5", "9" * 50, "application/msgpack"])}
    if rng.random() < 0.3:
        try:
            return msgspec.msgpack.encode(base), headers | {"Content-Type": "application/msgpack"}
        except OverflowError:
            pass
    raw = json.dumps(base).encode()
    if rng.random() < 0.3:
        cut = rng.randrange(len(raw))
        raw = raw[:cut] + bytes(rng.randrange(256) for _ in range(3)) + raw[cut:]
    return raw, headers | {"Content-Encoding": "gzip"} if rng.random() < 0.05 else headers


@pytest.mark.nightly
def test_random_bodies_and_headers(api):
    rng = random.Random(7)
    statuses: set[int] = set()
    for _ in range(1500):
        body, headers = body_of(rng)
        answer = api.request(
            rng.choice(["GET", "POST", "DELETE"]), rng.choice(PATHS), content=body, headers=headers
        )
        statuses.add(answer.status_code)
        assert answer.status_code < 500, (answer.request.url, body, headers, answer.text)
    assert {200, 400, 405, 422} <= statuses
    api.get("/reset_data")
    start(api)
    env = register_env(api)
    api.post("/scored_data_list", json=[group(4, env_id=env), group(4, env_id=env)])
    assert len(api.get("/batch").json()["batch"]) == 2, "still at work"
