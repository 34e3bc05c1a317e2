"""MCP servers as environments, played for real (``make test-mcp`` installs the SDK)."""

from __future__ import annotations

import asyncio
import gzip
import json
import shlex
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from realhf.api.environment import (
    AssistantMessage,
    Environment,
    EnvironmentFailure,
    EnvironmentSpec,
    ToolCall,
)
from realhf.env.adapters.mcp_tools import MAX_KEPT_CHARS
from realhf.env.containment import sandbox as containment
from realhf.env.loader.load import build_environment, passport_file
from realhf.env.loader.mixture import mixture_reference
from tests.process_family import gone, until

HERE = Path(__file__).resolve().parent
LEDGER = HERE / "ledger_server.py"
HOSTILE = HERE / "hostile_server.py"
ROWS = [
    {"id": f"save-{name}", "prompt": f"Let {name} hold {goal}.", "who": name, "goal": goal}
    for name, goal in (("ada", 5), ("bob", 7), ("cleo", 9), ("dan", 11))
]
VERIFIERS = """
import json

def by_answer(completion, goal):
    return float(completion == str(goal))

async def by_asking(completion, call, who, goal):
    return float(await call("balance", {"account": who}) == str(goal))

def by_thread(completion, call, calls, who, goal, **row):
    held = call("balance", {"account": who})
    return {"reward": float(held == str(goal)), "calls": float(len(calls))}

def by_file(completion, folder, who, goal):
    book = folder / "book.json"
    return float(book.exists() and json.loads(book.read_text()).get(who) == goal)

def by_length(completion, calls):
    return {"reward": 1.0, "characters": float(sum(len(call["result"]) for call in calls))}

def broken(completion):
    raise OSError("no disk")

def by_mistake(completion, call):
    call("deposit", {"account": "ada", "amount": -1})

def swallows(completion, call):
    try:
        return float(bool(call("misbehave", {"how": "die"})))
    except Exception:
        return 0.0

def never(completion):
    import time
    time.sleep(600)
"""
PACKAGES = [folder for folder in sys.path if folder.endswith("site-packages")]
"""What a server may read in bubblewrap: the side environment takes packages from another one."""
needs_sdk = pytest.mark.skipif(
    find_spec("mcp") is None, reason="the SDK is not installed; `make test-mcp` installs it"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "verifier.py").write_text(VERIFIERS)
    return tmp_path


def command(*words: object) -> str:
    return shlex.join(["mcp:" + sys.executable, *map(str, words)])


def build(folder: Path, reference: str, reward: str = "by_answer", **more: Any) -> EnvironmentSpec:
    options = {"data": str(folder / "tasks.jsonl"), "files": PACKAGES}
    return build_environment(
        reference, options | {"reward": f"{folder / 'verifier.py'}:{reward}"} | more
    )


@asynccontextmanager
async def episode(spec: EnvironmentSpec) -> AsyncIterator[tuple[Environment, Mapping[str, Any]]]:
    """An environment, and the row of the task that it can be reset to."""
    tasks = spec.tasks("train")
    environment = spec.make("")
    try:
        yield environment, tasks.instantiate(next(iter(tasks.group_of)), 0).payload
    finally:
        await environment.close()


def say(text: str) -> AssistantMessage:
    return AssistantMessage(text)


def ask(name: str, **arguments: Any) -> AssistantMessage:
    return AssistantMessage("", (ToolCall(name, arguments, "call-1"),))


@pytest.mark.skipif(find_spec("mcp") is not None, reason="the SDK is installed here")
def test_without_the_sdk_the_extra_is_named(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"env.path=mcp needs the package mcp: pip install"):
        build(folder, command(LEDGER))


@needs_sdk
@pytest.mark.parametrize(
    ("reference", "options", "told"),
    [
        ("mcp", {}, "env.server is missing"),
        ("mcp:", {}, "env.server is missing"),
        ("mcp:no-such-program", {}, "there is no program no-such-program"),
        ("mcp:python 'x", {}, "No closing quotation"),
        ("mcp:python x.py", {"server": "y"}, "env.server has no effect: env.path names it"),
        ("mcp:python x.py", {"reward": ""}, "env.reward is missing"),
        ("mcp:python x.py", {"reward": "nowhere.py:reward"}, "env.reward=nowhere.py:reward"),
        ("mcp:python x.py", {"data": ""}, "set env.data"),
        ("mcp:python x.py", {"files": ["/no/such/file"]}, "there is no file or folder"),
        ("mcp:python x.py", {"token_file": "t"}, "env.token_file has no effect"),
        ("mcp:python x.py", {"prompt_column": "question"}, "no column 'question'"),
        ("mcp:http://127.0.0.1:1/mcp", {"memory_mb": 100}, "env.memory_mb has no effect"),
        ("mcp:http:///mcp", {}, "this is no address"),
    ],
)
def test_options_that_do_not_fit_are_named(
    folder: Path, reference: str, options: dict[str, Any], told: str
) -> None:
    chosen = {"data": str(folder / "tasks.jsonl"), "reward": f"{folder / 'verifier.py'}:broken"}
    with pytest.raises(ValueError, match=r".*") as raised:
        build_environment(reference, chosen | options)
    assert told in str(raised.value) and "\n" not in str(raised.value)


def test_a_command_has_no_passport() -> None:
    with pytest.raises(ValueError, match="has no passport"):
        passport_file("mcp:python x.py")


@needs_sdk
@pytest.mark.slow
@pytest.mark.parametrize("reward", ["by_asking", "by_thread", "by_file"])
async def test_an_episode_is_played_and_judged_on_the_servers_state(
    folder: Path, reward: str
) -> None:
    spec = build(folder, command(LEDGER), reward)
    async with episode(spec) as (environment, row):
        for is_solved in (True, False):
            opening = await environment.reset(row, seed=0)
            assert opening.messages == [{"role": "user", "content": row["prompt"]}]
            names = [tool["function"]["name"] for tool in opening.tools]
            assert names == ["deposit", "balance", "misbehave"]
            assert "amount" in opening.tools[0]["function"]["parameters"]["properties"]
            turn = await environment.step(ask("balance", account=row["who"]))
            [answer] = turn.messages
            assert answer["content"] == "0" and answer["tool_call_id"] == "call-1"
            assert turn.reward is None and not turn.done
            goal = row["goal"] if is_solved else row["goal"] + 1
            turn = await environment.step(ask("deposit", account=row["who"], amount=goal))
            assert turn.messages[0]["content"] == f"{row['who']} holds {goal}"
            turn = await environment.step(say("done"))
            assert turn.done and turn.final and turn.reward == float(is_solved)
            assert turn.metrics["success"] == float(is_solved)
            assert turn.metrics["tool_calls"] == 2
            if reward == "by_thread":
                assert turn.rewards == {"calls": 2.0}
            with pytest.raises(EnvironmentFailure, match="reset comes first"):
                await environment.step(say("again"))


@needs_sdk
@pytest.mark.slow
async def test_mistakes_of_the_policy_are_answered(folder: Path) -> None:
    spec = build(folder, command(LEDGER), max_turns=5, tools=["deposit", "balance"])
    async with episode(spec) as (environment, row):
        await environment.reset(row, seed=0)
        for message, told in (
            (ask("deposit", account="ada", amount=-1), "amounts are positive"),
            (ask("deposit", account="ada"), "amount"),
            (ask("balence", account="ada"), "did you mean 'balance'"),
            (ask("misbehave", how="die"), "there is no tool 'misbehave'"),
        ):
            turn = await environment.step(message)
            assert turn.messages[0]["content"].startswith("error: ")
            assert told in turn.messages[0]["content"]
            assert not turn.done and turn.reward is None
        wrong = AssistantMessage("", (ToolCall("", problem="the call is no JSON"),))
        turn = await environment.step(wrong)
        assert turn.messages[0]["content"] == "error: the call is no JSON"
        assert turn.done and turn.reward == 0.0 and turn.metrics["tool_failures"] == 5


@needs_sdk
@pytest.mark.slow
async def test_the_results_that_are_kept_for_the_verifier_are_bounded(folder: Path) -> None:
    spec = build(folder, command(LEDGER), "by_length", max_turns=5)
    async with episode(spec) as (environment, row):
        for calls in (1, 3):
            await environment.reset(row, seed=0)
            for _ in range(calls):
                await environment.step(ask("misbehave", how="long"))
            turn = await environment.step(say(""))
            wanted = min(calls * (3 << 20), MAX_KEPT_CHARS)
            assert wanted <= turn.rewards["characters"] < wanted + 100


@needs_sdk
@pytest.mark.slow
@pytest.mark.parametrize(("sandbox", "warnings"), [("auto", 1), ("plain", 0)])
async def test_a_server_without_bubblewrap_that_was_not_chosen_is_logged_once(
    folder: Path,
    sandbox: str,
    warnings: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(containment, "PROGRAM_PATH", str(folder))
    spec = build(folder, command(LEDGER), sandbox=sandbox)
    async with episode(spec) as (environment, row):
        for _ in range(2):
            await environment.reset(row, seed=0)
    logged = [each.getMessage() for each in caplog.records if "bubblewrap" in each.getMessage()]
    assert len(logged) == warnings
    assert all(text.startswith("env.sandbox=auto: bubblewrap") for text in logged)


async def failed(awaited: Any) -> EnvironmentFailure:
    with pytest.raises(EnvironmentFailure) as raised:
        await asyncio.wait_for(awaited, 60)
    assert "\n" not in str(raised.value)
    return raised.value


@needs_sdk
@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "options", "kind", "told"),
    [
        ("die", {}, "lost", "ended with code 7"),
        (
            "hang",
            {"timeout_s": 1.0},
            "timeout",
            "has not answered within 1 s: the tool 'misbehave'",
        ),
        ("fill", {}, "internal", "sent a message of more than 8 MiB"),
        ("eat", {"memory_mb": 256}, "", "MemoryError"),
    ],
)
async def test_a_server_that_fails_is_a_failure_and_no_reward(
    folder: Path, how: str, options: dict[str, Any], kind: str, told: str
) -> None:
    async with episode(build(folder, command(LEDGER), **options)) as (environment, row):
        await environment.reset(row, seed=0)
        if not kind:
            turn = await environment.step(ask("misbehave", how=how))
            assert turn.messages[0]["content"].startswith("error: ")
        else:
            failure = await failed(environment.step(ask("misbehave", how=how)))
            assert failure.kind == kind and told in str(failure)
            lost = await failed(environment.step(say("5")))
            assert lost.kind == "lost"
        await environment.reset(row, seed=0)
        assert (await environment.step(ask("balance", account="ada"))).messages[0]["content"] == "0"


@needs_sdk
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "kind", "told"),
    [
        ("exits", "lost", "ended with code 3: no licence"),
        ("silent", "timeout", "its start"),
        ("babbles", "internal", "sends no messages but text, such as 'starting up ...\\n'"),
        ("one line", "internal", "a message of more than 8 MiB"),
        ("no object", "internal", "inputSchema.type"),
        ("no schema", "internal", "inputSchema"),
        ("twice", "internal", "lists a tool twice"),
        ("no name", "internal", "the MCP server's tools[0]"),
        ("none", "internal", "has no tools"),
        ("many", "internal", "more than 256 tools"),
        ("endless", "internal", "list of tools does not end"),
        ("refuses", "internal", "answered its start with an error: no list today"),
    ],
)
async def test_a_server_that_breaks_its_start_is_a_failure(
    folder: Path, mode: str, kind: str, told: str
) -> None:
    limit_s = 4.0 if mode == "silent" else 60.0
    spec = build(folder, command(HOSTILE, mode), start_timeout_s=limit_s)
    async with episode(spec) as (environment, row):
        failure = await failed(environment.reset(row, seed=0))
        assert failure.kind == kind and told in str(failure)


@needs_sdk
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "kind", "told"),
    [
        ("notifies", "internal", "sent more than 32 MiB at once"),
        ("internal", "internal", "with an error: cannot do that"),
        ("unknown", "internal", "with an error: cannot do that"),
        ("no result", "internal", "failed at the tool 'a'"),
        ("wrong", "", "error: cannot do that"),
        ("greets", "", "done"),
    ],
)
async def test_answers_of_a_server_are_checked(
    folder: Path, mode: str, kind: str, told: str
) -> None:
    async with episode(build(folder, command(HOSTILE, mode))) as (environment, row):
        await environment.reset(row, seed=0)
        if not kind:
            assert (await environment.step(ask("a"))).messages[0]["content"] == told
        else:
            failure = await failed(environment.step(ask("a")))
            assert failure.kind == kind and told in str(failure)


@needs_sdk
@pytest.mark.slow
@pytest.mark.parametrize(
    ("reward", "kind", "told"),
    [
        ("broken", "internal", "OSError: no disk"),
        ("by_mistake", "internal", "amounts are positive"),
        ("never", "timeout", "has not judged within env.timeout_s=2 s"),
        ("swallows", "lost", "ended with code 7"),
    ],
)
async def test_a_verifier_that_fails_is_a_failure(
    folder: Path, reward: str, kind: str, told: str
) -> None:
    async with episode(build(folder, command(LEDGER), reward, timeout_s=2.0)) as (environment, row):
        await environment.reset(row, seed=0)
        failure = await failed(environment.step(say("5")))
        assert failure.kind == kind and told in str(failure)


@needs_sdk
@pytest.mark.slow
async def test_a_failure_within_a_mixture_names_the_option_of_its_entry(folder: Path) -> None:
    own = {"data": str(folder / "tasks.jsonl"), "files": PACKAGES, "tools": ["balanse"]}
    own["reward"] = f"{folder / 'verifier.py'}:by_answer"
    members = [f"bank={command(LEDGER)}", "countdown"]
    spec = build_environment(mixture_reference(members), {"mix": members, "of": {"bank": own}})
    async with episode(spec) as (environment, row):
        failure = await failed(environment.reset(row, seed=0))
        assert str(failure).startswith("env.of.bank.tools: the MCP server has no tool 'balanse'")


@needs_sdk
@pytest.mark.slow
async def test_a_server_is_contained_and_leaves_nothing(folder: Path) -> None:
    """No network, no inherited secret, and nothing lives on: not what has left its group."""
    secret = folder / "secret"
    secret.write_text("the answer")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        spec = build(folder, command(LEDGER, secret, port), variables={"LEVEL": "7"})
        before = {process.pid for process in psutil.Process().children(recursive=True)}
        async with episode(spec) as (environment, row):
            await environment.reset(row, seed=0)
            turn = await environment.step(ask("misbehave", how="connect"))
            assert "connected" not in turn.messages[0]["content"]
            turn = await environment.step(ask("misbehave", how="secrets"))
            variables = json.loads(turn.messages[0]["content"])
            assert variables["LEVEL"] == "7"
            assert {*variables} <= {"PATH", "LANG", "HOME", "TMPDIR", "LEVEL", "LC_CTYPE", "PWD"}
            home = Path(variables["HOME"])
            assert home.is_dir()
            await environment.step(ask("misbehave", how="fork"))
            started = [
                process
                for process in psutil.Process().children(recursive=True)
                if process.pid not in before
            ]
            assert len(started) >= 2
        assert gone(started, 20) and not home.exists()


@needs_sdk
@pytest.mark.slow
async def test_episodes_at_once_have_servers_of_their_own(folder: Path) -> None:
    spec = build(folder, command(LEDGER), "by_asking")
    tasks = spec.tasks("train")
    rows = [tasks.instantiate(name, 0).payload for name in tasks.group_of]

    async def play(row: Mapping[str, Any], amount: int) -> float | None:
        environment = spec.make("")
        try:
            await environment.reset(row, seed=0)
            await environment.step(ask("deposit", account=row["who"], amount=amount))
            return (await environment.step(say(""))).reward
        finally:
            await environment.close()

    plays = [play(row, row["goal"] + wrong) for row in rows for wrong in (0, 1)]
    assert await asyncio.gather(*plays) == [1.0, 0.0] * len(rows)


@needs_sdk
@pytest.mark.slow
async def test_a_cancelled_call_ends_its_server(folder: Path) -> None:
    spec = build(folder, command(LEDGER))
    async with episode(spec) as (environment, row):
        await environment.reset(row, seed=0)
        started = psutil.Process().children(recursive=True)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await environment.step(ask("misbehave", how="hang"))
        assert await asyncio.to_thread(gone, started, 20)
        await environment.reset(row, seed=0)
        assert (await environment.step(say(str(row["goal"])))).reward == 1.0


@needs_sdk
@pytest.mark.slow
async def test_a_server_at_an_address_is_a_session_each(folder: Path) -> None:
    """The server is the one of this project, whose sessions are episodes of its own."""
    from tests.env.loader.counter import COUNTER
    from tests.env.server.test_mcp_clients import TASKS, Served

    counter = folder / "counter.py"
    counter.write_text(COUNTER + TASKS)
    served = Served(counter)
    try:
        spec = build(folder, f"mcp:{served.url}?task_id=to-5", files=[])
        async with episode(spec) as (environment, row):
            for _ in range(2):
                opening = await environment.reset(row, seed=0)
                names = [tool["function"]["name"] for tool in opening.tools]
                assert names == ["add", "stop"] and served.free == 1
                turn = await environment.step(ask("add", amount=2))
                assert turn.messages[0]["content"] == "2"
                assert (await environment.step(say(str(row["goal"])))).reward == 1.0
        assert until(lambda: served.free == 2)
    finally:
        await asyncio.to_thread(served.stop)
    async with episode(build(folder, f"mcp:{served.url}", files=[])) as (environment, row):
        failure = await failed(environment.reset(row, seed=0))
        assert failure.kind == "lost"


@needs_sdk
@pytest.mark.slow
@pytest.mark.nightly
def test_env_check_finds_nothing_wrong(folder: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "realhf.env", "check", command(LEDGER)),
            *("data=tasks.jsonl", "reward=verifier.py:by_asking", "deterministic=true"),
            f"files={json.dumps(PACKAGES)}",
            *("max_turns=4", 'tools=["deposit","balance"]', "--instances", "3"),
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@needs_sdk
async def test_a_compressed_answer_is_refused(folder: Path) -> None:
    """A few kilobytes of it could fill the memory of the trainer."""
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        body = gzip.compress(bytes(1 << 20))
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Encoding: gzip\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        spec = build(folder, f"mcp:http://127.0.0.1:{port}/mcp", files=[], start_timeout_s=20.0)
        async with episode(spec) as (environment, row):
            failure = await failed(environment.reset(row, seed=0))
    assert failure.kind == "lost" and "compressed" in str(failure)
    assert b"accept-encoding: identity" in asked[0].lower()
