"""The real server process with real MiniStack behind it: frames, capacity, isolation, end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from realhf.aws.server.program import EnvServerProcess
from realhf.aws.tasks.loader import instantiate
from realhf.aws.tasks.task import Task
from realhf.env.server.server import listen
from tests.env.server.fake_stage import ask
from tests.process_family import family, gone

pytestmark = pytest.mark.sim
POOL = 2
OBSERVATION_KEYS = {
    "account_key", "episode_id", "step_count", "command_success", "command_output", "error", "task", "task_achieved",
    "partial_progress", "hints_used", "hint_text", "truncated", "refusal", "steps_left",
}  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[EnvServerProcess]:
    with EnvServerProcess(POOL, "--max-steps", "4") as process:
        yield process


def open_session(server: EnvServerProcess) -> ClientConnection:
    return connect(server.url.replace("http", "ws") + "/ws", compression=None, proxy=None)


def step(session: ClientConnection, command: str) -> dict[str, Any]:
    return ask(session, {"type": "step", "data": {"command": command}})["data"]


def reset(session: ClientConnection, task: Task, **more: Any) -> dict[str, Any]:
    return ask(session, {"type": "reset", "data": {"task": task.to_json(), "seed": 5, **more}})[
        "data"
    ]


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=300) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.nightly
def test_an_episode_frame_by_frame(server: EnvServerProcess) -> None:
    task = instantiate(201, seed=3)
    with open_session(server) as session:
        early = ask(session, {"type": "step", "data": {"command": "aws s3 ls"}, "id": 1})
        assert (
            early["type"] == "error"
            and early["data"]["code"] == "EXECUTION_ERROR"
            and early["id"] == 1
        )
        first = reset(session, task, episode_id="mine")
        assert set(first) == {"observation", "reward", "done"} and first["done"] is False
        assert set(first["observation"]) == OBSERVATION_KEYS
        assert (
            first["observation"]["episode_id"] == "mine" and first["observation"]["steps_left"] == 4
        )
        assert first["observation"]["task"] == {
            "task_id": 201,
            "difficulty": "intermediate",
            "description": task.description,
        }
        rewards = []
        for command in task.solution:
            reply = step(session, command)
            rewards.append(reply["reward"])
        assert (
            reply["done"]
            and reply["observation"]["task_achieved"]
            and sum(rewards) == pytest.approx(1.0)
        )
        after = step(session, "aws s3 ls")
        assert (
            after["done"] and after["reward"] == 0 and "finished" in after["observation"]["error"]
        )
        state = ask(session, {"type": "state"})
        assert state["type"] == "state" and state["data"]["step_count"] == 2
        assert state["data"]["tracker"]["commands_executed"] == [*task.solution]
        assert reset(session, task)["observation"]["step_count"] == 0
        session.send('{"type":"close"}')
        with pytest.raises(ConnectionClosed) as closed:
            session.recv(timeout=300)
        assert closed.value.rcvd is not None and (
            closed.value.rcvd.code,
            closed.value.rcvd.reason,
        ) == (1000, "")


def test_an_episode_without_success_is_truncated(server: EnvServerProcess) -> None:
    with open_session(server) as session:
        reset(session, instantiate(101, seed=1))
        replies = [step(session, "aws s3api list-buckets") for _ in range(4)]
        assert [reply["done"] for reply in replies] == [False, False, False, True]
        assert (
            replies[-1]["observation"]["truncated"]
            and not replies[-1]["observation"]["task_achieved"]
        )


def test_task_by_id_and_by_chance(server: EnvServerProcess) -> None:
    with open_session(server) as session:
        reply = ask(
            session, {"type": "reset", "data": {"task_id": 101, "seed": 8, "split": "heldout"}}
        )
        expected = instantiate(101, 8, "heldout").description
        assert reply["data"]["observation"]["task"]["description"] == expected
        assert ask(session, {"type": "reset"})["data"]["observation"]["task"]["description"]
        for bad in (
            {"task_id": 987654},
            {"task": {"task_id": 1}},
            {"task_id": 101, "split": "moon"},
        ):
            error = ask(session, {"type": "reset", "data": bad})
            assert error["type"] == "error" and error["data"]["code"] == "VALIDATION_ERROR", error


def test_a_frame_beyond_the_limit_closes_1009(server: EnvServerProcess) -> None:
    with open_session(server) as session:
        session.send("x" * ((1 << 20) + 1))
        with pytest.raises(ConnectionClosed) as closed:
            session.recv(timeout=300)
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1009
    wait_until_free(server)


def test_sessions_do_not_see_each_other(server: EnvServerProcess) -> None:
    with open_session(server) as one, open_session(server) as two:
        for session in (one, two):
            reset(session, instantiate(201, seed=3))
        assert step(one, "aws s3api create-bucket --bucket shared-name")["observation"][
            "command_success"
        ]
        assert "shared-name" in step(one, "aws s3api list-buckets")["observation"]["command_output"]
        assert (
            "shared-name"
            not in step(two, "aws s3api list-buckets")["observation"]["command_output"]
        )
    with open_session(server) as one, open_session(server) as two:
        for session in (one, two):
            reset(session, instantiate(201, seed=3))
            assert (
                "shared-name"
                not in step(session, "aws s3api list-buckets")["observation"]["command_output"]
            )


def wait_until_free(server: EnvServerProcess, limit_s: float = 10.0) -> None:
    """Until all slots can be leased again."""
    began = time.monotonic()
    while f"realhf_env_pool_free {float(POOL)}" not in get(server.url + "/metrics")[1]:
        assert time.monotonic() - began < limit_s, "a slot is still leased"
        time.sleep(0.02)


def test_capacity_is_refused_before_accept_and_comes_back(server: EnvServerProcess) -> None:
    sessions = [open_session(server) for _ in range(POOL)]
    with pytest.raises(InvalidStatus) as refused:
        open_session(server)
    response = refused.value.response
    assert response.status_code == 503 and response.headers["Retry-After"] == "1"
    body = json.loads(response.body or b"")
    assert (body["code"], body["active_sessions"], body["max_sessions"]) == (
        "CAPACITY_REACHED",
        POOL,
        POOL,
    )
    for round_index in range(5):
        sessions[round_index % POOL].close()
        sessions[round_index % POOL] = open_session(server)
    for session in sessions:
        session.close()
    wait_until_free(server)


def children_of(server: EnvServerProcess, module: str) -> list[psutil.Process]:
    """The forked children of a zygote of the server."""
    pythons = {
        p.pid: p
        for p, line in family(server.process.pid).items()
        if module in line and "python" in line[0]
    }
    return [p for p in pythons.values() if p.ppid() in pythons]


def test_a_client_that_vanishes_in_mid_command_frees_its_slot(server: EnvServerProcess) -> None:
    wait_until_free(server)
    session = open_session(server)
    reset(session, instantiate(101, seed=1))
    workers = children_of(server, "realhf.aws.cli.zygote")
    assert len(workers) in (POOL, POOL + 1), "one a slot, and one where the bench plays"
    for worker in workers:
        worker.suspend()
    try:
        session.send(json.dumps({"type": "step", "data": {"command": "aws s3api list-buckets"}}))
        time.sleep(0.1)
        session.socket.shutdown(socket.SHUT_RDWR)
        wait_until_free(server)
    finally:
        for worker in workers:
            if worker.is_running():
                worker.resume()
    assert "realhf_env_workers_killed_total 0.0" not in get(server.url + "/metrics")[1]
    with open_session(server) as one, open_session(server) as two:
        for fresh in (one, two):
            reset(fresh, instantiate(101, seed=1))
            assert step(fresh, "aws s3api list-buckets")["observation"]["command_success"]


def test_a_dead_simulator_is_an_environment_failure_until_the_next_reset(
    server: EnvServerProcess,
) -> None:
    with open_session(server) as session:
        task = instantiate(201, seed=3)
        reset(session, task)
        for simulator in children_of(server, "realhf.aws.simulator.ministack_server"):
            simulator.kill()
        for command in ("aws s3api list-buckets", task.solution[0]):
            reply = ask(session, {"type": "step", "data": {"command": command}})
            assert reply["type"] == "error" and reply["data"]["code"] == "EXECUTION_ERROR", reply
        reset(session, task)
        assert [step(session, command)["done"] for command in task.solution] == [False, True]


def test_no_frame_reveals_the_criteria(server: EnvServerProcess) -> None:
    task = instantiate(206, seed=4)
    with open_session(server) as session:
        frames = [
            reset(session, task),
            ask(session, {"type": "state"}),
            step(session, "aws s3api list-buckets"),
            step(session, "aws nonsense"),
            ask(session, {"type": "state"}),
        ]
    text = json.dumps(frames)
    for secret in (
        "success_criteria",
        "solution",
        "setup",
        "json_path",
        "DescribeLogStreams",
        *task.solution,
    ):
        assert secret not in text


def test_http_routes(server: EnvServerProcess) -> None:
    assert get(server.url + "/health") == (200, '{"status":"healthy"}')
    status, schema = get(server.url + "/schema")
    assert status == 200 and set(json.loads(schema)) == {"action", "observation", "state"}
    rare = {"account_changes", "account_key", "simulator_lost", "account_unreadable"}
    assert set(json.loads(schema)["observation"]["properties"]) == OBSERVATION_KEYS | rare
    assert json.loads(get(server.url + "/metadata")[1])["max_concurrent_envs"] == POOL
    page = get(server.url + "/metrics")[1]
    assert "realhf_env_step_seconds_count" in page and f"realhf_env_pool_size {float(POOL)}" in page
    assert get(server.url + "/web")[0] == 404


def test_a_fork_of_an_environment_leaves_the_port() -> None:
    """It used to keep the port taken, and the server's connections open, as long as it lived."""
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    read, write = os.pipe()
    with socket.create_connection(("127.0.0.1", port)) as client:
        session = listener.accept()[0]
        child = os.fork()
        if child == 0:
            os.write(write, b"forked")
            time.sleep(60)
            os._exit(0)
        try:
            assert os.read(read, 6) == b"forked", "the child has its pipe"
            session.close()
            listener.close()
            client.settimeout(60)
            assert client.recv(1) == b"", "the client sees the end of its session"
            listen("127.0.0.1", port).close()
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(read)
            os.close(write)


@pytest.mark.nightly
def test_sigterm_closes_sessions_and_leaves_nothing() -> None:
    with EnvServerProcess(2) as server:
        children = family(server.process.pid)
        assert children
        session = open_session(server)
        reset(session, instantiate(101, seed=1))
        began = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - began < 40
        with pytest.raises(ConnectionClosed) as closed:
            session.recv(timeout=300)
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1001
        assert gone(children, 60)
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", int(server.url.rpartition(":")[2]))) != 0


@pytest.mark.nightly
@pytest.mark.parametrize("option", ["--port", "--ministack-base-port"])
def test_a_taken_port_is_one_clear_message(option: str) -> None:
    with socket.socket() as occupant:
        occupant.bind(("127.0.0.1", 0))
        occupant.listen()
        port = str(occupant.getsockname()[1])
        others = {"--port": "0", "--ministack-base-port": "0", option: port}
        command = [
            sys.executable,
            "-m",
            "workers.env_worker",
            *(word for pair in others.items() for word in pair),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert port in done.stderr and len(done.stderr.strip().splitlines()) == 1, done.stderr
