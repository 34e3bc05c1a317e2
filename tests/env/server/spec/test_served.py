"""A server of ``sql`` and of an environment that misbehaves, as processes, over real WebSockets."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from realhf.api.environment import DemonstrationRequest
from realhf.env.loader.load import build_environment
from realhf.env.openenv_client import CapacityError, OpenEnvClient
from realhf.env.server.process import ServerProcess
from realhf.env.server.server import EnvServer, listen
from realhf.env.server.spec.program import SpecServerConfig, prepare
from tests.process_family import family, gone

pytestmark = pytest.mark.slow

ODD = f"{Path(__file__).with_name('odd_environment.py')}:ODD"
DEADLINE_S = 60.0
SESSIONS = 64


@pytest.fixture(scope="module")
def sql() -> Iterator[ServerProcess]:
    with ServerProcess("--env", "sql", "--pool-size", str(SESSIONS)) as process:
        yield process


@pytest.fixture(scope="module")
def odd() -> Iterator[ServerProcess]:
    with ServerProcess("--env", ODD, "--pool-size", "3", "--call-timeout-s", "0.5") as process:
        yield process


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Path]:
    """A pipe that keeps its reader waiting until the test is over."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    yield path
    with (
        suppress(OSError),
        open(os.open(path, os.O_WRONLY | os.O_NONBLOCK), "w", encoding="utf-8") as end,
    ):
        end.write("done")


def address(server: ServerProcess) -> str:
    return server.url.replace("http", "ws") + "/ws"


@asynccontextmanager
async def session(server: ServerProcess) -> AsyncIterator[Callable[..., Any]]:
    """A session; the value sends a request and returns the frame that answers it."""
    async with connect(address(server), proxy=None, compression=None) as socket:

        async def ask(kind: str, data: Any = None, **more: Any) -> dict[str, Any]:
            return await exchange(
                socket, json.dumps({"type": kind, **({"data": data} if data else {}), **more})
            )

        yield ask


async def exchange(socket: ClientConnection, frame: str | bytes) -> dict[str, Any]:
    await socket.send(frame)
    return json.loads(await asyncio.wait_for(socket.recv(), DEADLINE_S))


def metric(server: ServerProcess, name: str) -> float:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=DEADLINE_S) as page:
        lines = page.read().decode().splitlines()
    return next(
        (float(line.rpartition(" ")[2]) for line in lines if line.rpartition(" ")[0] == name), 0.0
    )


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "condition not reached"
        time.sleep(0.02)


async def wait_until(condition: Callable[[], bool]) -> None:
    await asyncio.to_thread(wait_for, condition)


async def test_every_demonstration_plays_to_success(sql: ServerProcess) -> None:
    """A task that is sent whole is the task that was meant, and the state tells which one it is."""
    spec = build_environment("sql", {})
    assert spec.demonstrate is not None
    env = OpenEnvClient(sql.url, correlate=True)
    await env.connect()
    played = 0
    for demonstration in spec.demonstrate(DemonstrationRequest(1, seed=3)):
        result = await env.reset(
            task=dict(demonstration.task.payload), seed=demonstration.task.seed
        )
        assert [message["role"] for message in result.observation["messages"]] == ["system", "user"]
        earned = 0.0
        for turn in demonstration.turns:
            assert not result.done
            result = await env.step({"content": turn})
            earned += result.reward or 0.0
        assert (
            result.done
            and result.observation["metrics"]["success"] == 1.0
            and earned == pytest.approx(1.0)
        )
        played += 1
    assert played == 18
    await env.close()


async def test_a_template_and_a_seed_name_a_task(sql: ServerProcess) -> None:
    """The server draws the same instance as a trainer does, in either split; with nothing given it
    goes through the templates."""
    async with session(sql) as ask:
        for split in ("train", "heldout"):
            task = build_environment("sql", {}).tasks(split).instantiate("total", 7)
            named = await ask(
                "reset", {"split": split, "task_id": "total", "seed": 7, "episode_id": "mine"}
            )
            state = (await ask("state"))["data"]
            assert (state["task_id"], state["split"], state["seed"]) == (task.id, split, task.seed)
            assert (state["episode_id"], state["template"], state["step_count"]) == (
                "mine",
                "total",
                0,
            )
            whole = await ask("reset", {"task": dict(task.payload), "seed": task.seed})
            assert named == whole
        counted = []
        for _ in range(3):
            await ask("reset")
            counted.append((await ask("state"))["data"]["template"])
        assert len(set(counted)) == 3


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        ("{", "INVALID_JSON"),
        ("[" * 100_000, "INVALID_JSON"),
        ('{"type":"listen"}', "UNKNOWN_TYPE"),
        ('{"type":"reset","data":{"taskid":"count"}}', "VALIDATION_ERROR"),
        ('{"type":"reset","data":{"task_id":"nothing"}}', "VALIDATION_ERROR"),
        ('{"type":"reset","data":{"split":"test"}}', "VALIDATION_ERROR"),
        ('{"type":"reset","data":{"task":{},"split":"train"}}', "VALIDATION_ERROR"),
        ('{"type":"reset","data":{"seed":"1"}}', "VALIDATION_ERROR"),
        ('{"type":"step"}', "VALIDATION_ERROR"),
        ('{"type":"step","data":{}}', "VALIDATION_ERROR"),
        ('{"type":"step","data":{"command":"aws s3 ls"}}', "VALIDATION_ERROR"),
        ('{"type":"step","data":{"content":3}}', "VALIDATION_ERROR"),
        ('{"type":"step","data":{"content":"\\ud800"}}', "VALIDATION_ERROR"),
        ('{"type":"step","data":{"content":"x","tool_calls":{}}}', "VALIDATION_ERROR"),
        ('{"type":"step","data":{"content":"x","token_count":-1}}', "VALIDATION_ERROR"),
        ('{"type":"step","data":{"content":"SELECT 1"}}', "VALIDATION_ERROR"),
        (b"\xff", "VALIDATION_ERROR"),
        ('{"type":"reset","data":{"task":{"template":"nothing"}}}', "EXECUTION_ERROR"),
    ],
)
async def test_a_wrong_frame_is_answered_and_the_session_goes_on(
    sql: ServerProcess, frame: str | bytes, code: str
) -> None:
    async with connect(address(sql), proxy=None) as socket:
        answer = await exchange(socket, frame)
        assert (answer["type"], answer["data"]["code"]) == ("error", code) and answer["data"][
            "message"
        ]
        assert (await exchange(socket, '{"type":"reset","data":{"seed":1}}'))[
            "type"
        ] == "observation"


async def test_sixty_four_sessions_play_at_once_and_one_more_is_refused(sql: ServerProcess) -> None:
    """Every session has a place to itself; the client too many is told to come back; all places are
    free afterwards."""
    spec = build_environment("sql", {})
    assert spec.demonstrate is not None
    scripts = [*spec.demonstrate(DemonstrationRequest(4, seed=5))][:SESSIONS]
    clients = [
        OpenEnvClient(sql.url, correlate=True, connect_timeout_s=DEADLINE_S) for _ in scripts
    ]
    await asyncio.gather(*(client.connect() for client in clients))
    with pytest.raises(CapacityError) as refused:
        await OpenEnvClient(sql.url, connect_timeout_s=DEADLINE_S).connect()
    assert refused.value.retry_after_s == 1.0
    request = urllib.request.Request(
        f"{sql.url}/reset", b"{}", {"Content-Type": "application/json"}, method="POST"
    )
    with pytest.raises(urllib.error.HTTPError) as full:
        await asyncio.to_thread(urllib.request.urlopen, request, timeout=DEADLINE_S)
    assert full.value.code == 503 and full.value.headers["Retry-After"] == "1"

    async def play(client: OpenEnvClient, number: int) -> float:
        result = await client.reset(task=dict(scripts[number].task.payload))
        for turn in scripts[number].turns:
            result = await client.step({"content": turn})
        return result.observation["metrics"]["success"]

    solved = await asyncio.gather(*(play(client, number) for number, client in enumerate(clients)))
    assert solved == [1.0] * SESSIONS
    await asyncio.gather(*(client.close() for client in clients))
    await wait_until(lambda: metric(sql, "realhf_env_pool_free") == SESSIONS)


async def test_a_client_that_is_killed_frees_its_place(odd: ServerProcess) -> None:
    """Its step is broken off, and the environment is closed."""
    code = (
        "import sys\nfrom websockets.sync.client import connect\n"
        "socket = connect(sys.argv[1], proxy=None)\n"
        'socket.send(\'{"type":"reset"}\')\nprint(socket.recv(), flush=True)\nsys.stdin.read()\n'
    )
    await wait_until(lambda: metric(odd, "realhf_env_pool_free") == 3)
    with subprocess.Popen(
        [sys.executable, "-c", code, address(odd)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as client:
        assert client.stdout is not None and "seed" in await asyncio.to_thread(
            client.stdout.readline
        )
        assert metric(odd, "realhf_env_pool_free") == 2
        client.kill()
        await wait_until(lambda: metric(odd, "realhf_env_pool_free") == 3)


async def test_a_fork_of_the_environment_does_not_serve(odd: ServerProcess) -> None:
    """A child that comes back out of the environment's code used to answer beside the server."""
    async with session(odd) as ask:
        await ask("reset", {"task": {"step": "fork"}, "seed": 9})
        for _ in range(2):
            assert (await ask("step", {"content": "on"}))["data"]["reward"] == 0.25
        assert (await ask("state"))["data"]["step_count"] == 2


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("mode", "kind", "named"),
    [
        ("hang", "timeout", "no answer within 0.5 s"),
        ("spin", "timeout", "odd_environment.py, line"),
        ("read", "timeout", "odd_environment.py, line"),
        ("stubborn", "timeout", "did not end within 0.5 s, nor when it was cancelled"),
        ("raise", "internal", "KeyError: 'mistake of the author' ("),
        ("exit", "internal", "SystemExit"),
        ("exit hard", "internal", "os._exit(3) would end its process"),
        ("crash", "lost", "its process has crashed: Segmentation fault ("),
        ("nan", "internal", "reward must be a finite number"),
        ("not messages", "internal", "messages[0] must be a map"),
    ],
)
async def test_a_failure_has_a_kind_and_costs_its_own_session_alone(
    odd: ServerProcess, pipe: Path, mode: str, kind: str, named: str
) -> None:
    """The error names environment, task and cause; the next reset plays on a new instance;
    meanwhile others play."""
    async with session(odd) as ask, session(odd) as other:
        await other("reset", {"seed": 1})
        await ask("reset", {"task": {"step": mode, "pipe": str(pipe)}, "seed": 9})
        failing = asyncio.ensure_future(ask("step", {"content": "go"}))
        for _ in range(5):
            assert (await other("step", {"content": "on"}))["data"]["reward"] == 0.25
        answer = (await failing)["data"]
        assert (answer["code"], answer["kind"]) == ("EXECUTION_ERROR", kind)
        assert "environment odd: step" in answer["message"] and named in answer["message"]
        assert "seed 9" in answer["message"] and "reward" not in answer
        assert pipe.name not in answer["message"], (
            "a payload, which may hold the answer, is not quoted"
        )
        late = (await ask("step", {"content": "go"}))["data"]
        assert late["code"] == "VALIDATION_ERROR" and "send a reset" in late["message"]
        assert (await ask("reset", {"seed": 2}))["data"]["observation"]["messages"][-1][
            "content"
        ] == "seed 2"
        assert (await ask("step", {"content": "end"}))["data"]["done"] is True
    await wait_until(lambda: metric(odd, "realhf_env_pool_free") == 3)


async def test_threads_that_were_left_behind_are_counted_and_end(
    odd: ServerProcess, pipe: Path
) -> None:
    """A loop without a pause is ended by force; what waits in the system is counted until it
    returns."""
    async with session(odd) as ask:
        await ask("reset", {"task": {"step": "spin"}})
        await ask("step", {"content": "go"})
        await wait_until(lambda: metric(odd, "realhf_env_pool_stuck_threads") == 0)
        await ask("reset", {"task": {"step": "read", "pipe": str(pipe)}})
        await ask("step", {"content": "go"})
        assert metric(odd, "realhf_env_pool_stuck_threads") == 1
        with suppress(BrokenPipeError):  # the reader was asked to end, and has by the first word
            await asyncio.to_thread(pipe.write_text, "done")
        await wait_until(lambda: metric(odd, "realhf_env_pool_stuck_threads") == 0)
    assert metric(odd, 'realhf_env_pool_failures{kind="timeout"}') >= 2


async def test_a_step_that_was_not_executed_may_be_sent_again(odd: ServerProcess) -> None:
    async with session(odd) as ask:
        await ask("reset", {"task": {"step": "unavailable"}})
        first = (await ask("step", {"content": "go"}))["data"]
        assert (first["code"], first["kind"], first["retryable"]) == (
            "UNAVAILABLE",
            "unavailable",
            True,
        )
        assert (await ask("step", {"content": "go"}))["type"] == "observation"


async def test_a_reset_that_hangs_or_raises_is_an_error(odd: ServerProcess) -> None:
    async with session(odd) as ask:
        for mode, kind in (("hang", "timeout"), ("raise", "internal")):
            answer = (await ask("reset", {"task": {"reset": mode}}))["data"]
            assert answer["kind"] == kind and "environment odd: " in answer["message"]
        absent = (await ask("reset", {"split": "heldout"}))["data"]
        assert (
            absent["code"] == "VALIDATION_ERROR"
            and "the held-out file is not there" in absent["message"]
        )
        assert (await ask("reset", {"seed": 2}))["type"] == "observation"


async def test_calls_reach_the_environment_as_the_policy_wrote_them(odd: ServerProcess) -> None:
    """Both forms of a call are read; one that is wrong reaches the environment with the reason."""
    calls = [
        {"name": "say", "arguments": {"word": "a"}},
        {"id": "c7", "type": "function", "function": {"name": "say", "arguments": '{"word": "b"}'}},
        {"name": "say", "arguments": "{"},
        {"name": "say", "arguments": [1]},
        {"arguments": {}},
        "say",
    ]
    async with session(odd) as ask:
        opened = (await ask("reset", {"seed": 4}))["data"]["observation"]
        assert opened["messages"][0] == {"role": "system", "content": "Be odd."}
        assert opened["tools"][0]["function"]["name"] == "say" and opened["metrics"] == {}
        assert "info" not in opened, "it may hold the solution, and was not asked for"
        turn = (await ask("step", {"tool_calls": calls}))["data"]["observation"]
        told = turn["messages"][0]["content"].partition("|")[2].split("; ")
        assert told[0] == "say{'word': 'a'}call_0: " and told[1] == "say{'word': 'b'}c7: "
        assert "no JSON" in told[2] and "a JSON object, not a list" in told[3]
        assert "the name of a call" in told[4] and "a call is a JSON object, not a text" in told[5]
        assert (turn["metrics"], turn["rewards"]) == ({"success": 1.0}, {"said": 0.25})
        many = (await ask("step", {"tool_calls": calls[:1] * 65}))["data"]["observation"]
        assert many["messages"][0]["content"].endswith("a turn has at most 64 calls")


async def test_the_tools_are_those_of_a_protocol_server(odd: ServerProcess) -> None:
    call = {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "tools/call",
        "params": {"name": "say", "arguments": {"a": 1}},
    }
    listing = {"jsonrpc": "2.0", "id": 2, "method": "tools/list"}
    async with session(odd) as ask:
        assert "send a reset" in (await ask("mcp", listing))["data"]["error"]["message"]
        await ask("reset", {"seed": 1})
        tools = (await ask("mcp", listing))["data"]["result"]["tools"]
        assert [(tool["name"], tool["inputSchema"]["type"]) for tool in tools] == [
            ("say", "object")
        ]
        result = (await ask("mcp", call))["data"]["result"]
        assert (
            "say{'a': 1}" in result["content"][0]["text"]
            and result["structuredContent"]["reward"] == 0.25
        )


def test_descriptors_and_threads_balance(sql: ServerProcess, odd: ServerProcess) -> None:
    """After sessions of all kinds there is as much as before them. Runs behind the tests above,
    which warm it up."""

    def held(server: ServerProcess) -> tuple[int, int]:
        folder = Path(f"/proc/{server.process.pid}")
        return len(os.listdir(folder / "fd")), len(os.listdir(folder / "task"))

    async def rounds(server: ServerProcess, count: int) -> None:
        for _ in range(count):
            async with session(server) as ask, session(server) as other:
                await asyncio.gather(ask("reset", {"seed": 1}), other("reset", {"seed": 2}))
                await asyncio.gather(
                    ask("step", {"content": "go"}), other("step", {"content": "end"})
                )
            await wait_until(lambda: metric(server, "realhf_env_sessions_active") == 0)

    def balances(server: ServerProcess, free: int) -> bool:
        """Whether five rounds leave no more than there was. Threads of a pool are made when all
        others are busy."""
        before = held(server)
        asyncio.run(rounds(server, 5))
        wait_for(lambda: metric(server, "realhf_env_pool_free") == free)
        deadline = time.monotonic() + 3.0
        while not (
            level := all(now <= then for now, then in zip(held(server), before, strict=True))
        ):
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        return level

    for server, free in ((sql, SESSIONS), (odd, 3)):
        wait_for(lambda server=server, free=free: metric(server, "realhf_env_pool_free") == free)
        assert any(balances(server, free) for _ in range(6)), (
            "there was more after every five rounds"
        )


async def test_sigterm_lets_a_step_end_and_leaves_nothing(tmp_path: Path) -> None:
    """Sessions are closed with 1001, and the process ends with 0."""
    began = tmp_path / "began"
    with ServerProcess("--env", ODD, "--call-timeout-s", "30") as server:
        children = [server.process.pid, *family(server.process.pid)]
        async with (
            connect(address(server), proxy=None) as idle,
            connect(address(server), proxy=None) as busy,
        ):
            await exchange(idle, '{"type":"reset"}')
            task = {"step": "pause", "began": str(began)}
            await exchange(busy, json.dumps({"type": "reset", "data": {"task": task}}))
            await busy.send('{"type":"step","data":{"content":"slow"}}')
            await wait_until(began.exists)
            server.process.send_signal(signal.SIGTERM)
            assert (
                json.loads(await asyncio.wait_for(busy.recv(), DEADLINE_S))["data"]["reward"]
                == 0.25
            )
            for socket in (idle, busy):
                with pytest.raises(ConnectionClosed) as closed:
                    await asyncio.wait_for(socket.recv(), DEADLINE_S)
                assert closed.value.rcvd is not None and closed.value.rcvd.code == 1001
        assert await asyncio.to_thread(server.process.wait, DEADLINE_S) == 0
        assert gone(children, 60)


async def test_a_silent_session_gives_its_place_back() -> None:
    """And a server that was asked for it sends ``info``."""
    config = SpecServerConfig(port=0, pool_size=1, idle_timeout_s=0.3, info=True)
    served, _ = prepare(argparse.Namespace(env="sql", option=[]), config)
    server = EnvServer(served, config, listen("127.0.0.1", 0))
    server.start()
    try:
        url = server.url.replace("http", "ws") + "/ws"
        async with connect(url, proxy=None) as socket:
            opened = await exchange(socket, '{"type":"reset"}')
            assert opened["data"]["observation"]["info"]["tables"] and served.pool.free_count == 0
            with pytest.raises(ConnectionClosed) as closed:
                await asyncio.wait_for(socket.recv(), DEADLINE_S)
            assert closed.value.rcvd is not None and closed.value.rcvd.reason == "idle timeout"
        await wait_until(lambda: served.pool.free_count == 1)
    finally:
        await asyncio.to_thread(server.stop)
        served.pool.stop()


def test_there_are_no_more_sessions_than_instances(tmp_path: Path) -> None:
    """What the environment allows at once bounds the sessions, also in what the server says of
    itself."""
    file = tmp_path / "narrow.py"
    file.write_text(
        "class Narrow:\n    concurrency = 3\n"
        "    async def reset(self, task, *, seed):\n        return {'messages': []}\n"
        "    async def step(self, message):\n        return {'done': True}\n"
    )
    arguments = argparse.Namespace(env=f"{file}:Narrow", option=[])
    served, config = prepare(arguments, SpecServerConfig(pool_size=8))
    assert (
        config.pool_size == served.pool.free_count == served.metadata()["max_concurrent_envs"] == 3
    )
    served.pool.stop()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--env", "sqll"), "did you mean 'sql'"),
        (("--env", "sql", "--option", "max_rows=0"), "max_rows"),
        (("--env", "sql", "--option", "rows=1"), "rows"),
        (
            ("--env", "sql", "--call-timeout-s", "0"),
            "REALHF_ENV_CALL_TIMEOUT_S (--call-timeout-s) is 0.0",
        ),
        (("--env", "sql", "--host", "0.0.0.0"), "REALHF_ENV_TOKEN (--token)"),
        (("--env", "aws"), "is played on a server of its own"),
    ],
)
def test_a_wrong_start_is_one_line(
    arguments: tuple[str, ...],
    told: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from workers import env_worker

    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert (
        env_worker.main([*arguments, "--port", "0"] if "--port" not in arguments else [*arguments])
        == 2
    )
    error = capsys.readouterr().err
    assert error.startswith("env_worker: ") and told in error and error.count("\n") == 1
