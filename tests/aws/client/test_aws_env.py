"""The client of one session, async, sync and as a tool of a trainer, against a fake and a real
server."""

import asyncio
import gc
import inspect
import json
import os
import subprocess
import sys
import threading

import httpx
import pytest

from realhf.api.environment import AssistantMessage
from realhf.aws.client.aws_env import AwsEnv
from realhf.aws.client.trl_tool import AwsToolEnv
from realhf.aws.environment import AwsEnvironment
from realhf.aws.models import AwsAction, AwsObservation, AwsState
from realhf.aws.server.program import EnvServerProcess
from realhf.aws.tasks.loader import instantiate
from realhf.env.openenv_client import (
    CapacityError,
    ConnectionLost,
    ConnectionPoisoned,
    fetch_metadata,
)
from realhf.rollout.player import SlotEnvironment
from tests.rollout.fake_env_server import FakeEnvServer

pytestmark = pytest.mark.sim


@pytest.fixture(scope="module")
def server():
    with EnvServerProcess(2) as process:
        yield process


@pytest.mark.nightly
async def test_an_episode_loses_no_field(server: EnvServerProcess) -> None:
    task = instantiate(1, 3)
    async with AwsEnv(server.url) as env:
        assert env.metadata["correlation"] is True and env.metadata["max_concurrent_envs"] == 2
        first = await env.reset(task=task.to_json(), seed=task.seed, episode_id="mine")
        assert (
            first.observation.task is not None
            and first.observation.task.description == task.description
        )
        assert first.observation.episode_id == "mine" and not first.done
        hinted = await env.step("aws help --task-hint")
        assert hinted.observation.hints_used == 1 and hinted.observation.hint_text
        last = await env.step(AwsAction(command=task.solution[0]))
        assert (
            last.done
            and last.observation.task_achieved
            and last.observation.partial_progress == 1.0
        )
        state = await env.state()
        assert (
            isinstance(state, AwsState)
            and state.step_count == 2
            and state.tracker["hints_used"] == 1
        )
        raw = await env._open().state()
        assert set(raw) <= set(state.model_dump()), "a field of the state was dropped"


async def test_a_real_episode_is_resumed_where_its_session_was_lost(
    server: EnvServerProcess,
) -> None:
    made: list[AwsEnvironment] = []

    def make() -> AwsEnvironment:
        made.append(AwsEnvironment(server.url))
        return made[-1]

    env = SlotEnvironment("aws", make, message_timeout_s=30, patience_s=10)
    for task_id in (1, 101, 203, 302, 404):
        task = instantiate(task_id, 5)
        said = [
            AssistantMessage(command, text=command)
            for command in ("aws iam list-users", *task.solution)
        ]
        played = []
        for losses in (0, 1):
            env.prepare(1)
            opening = await env.reset({"task": task.to_json(), "chaos": True}, seed=task.seed)
            assert opening.messages == [{"role": "user", "content": task.description}]
            turns = [await env.step(message) for message in said[:-1]]
            if losses:
                client = made[-1]._client
                assert client is not None
                client.abort()
            turns.append(await env.step(said[-1]))
            played.append([(turn.reward, turn.done, turn.metrics, turn.messages) for turn in turns])
            assert env.resumed == losses and env.failures == ({"lost": 1} if losses else {})
        assert played[0] == played[1] and played[0][-1][2]["progress"] > 0.6, (
            "chaos may have the last word"
        )
    await env.close()


def test_unknown_fields_are_kept_and_missing_ones_neutral() -> None:
    parsed = AwsObservation.model_validate({"echoed_message": "hi", "message_length": 2})
    assert (
        parsed.model_dump()["echoed_message"] == "hi"
        and parsed.task is None
        and parsed.command_success
    )


def test_sync_facade(server: EnvServerProcess) -> None:
    before = set(threading.enumerate())
    with AwsEnv(server.url.replace("http", "ws") + "/ws").sync() as env:
        assert env.usable and env.reset(task_id=1, seed=3).observation.task is not None
        assert env.step("aws s3api list-buckets").observation.step_count == 1
        assert env.state().step_count == 1

        async def inside() -> None:
            env.step("aws s3api list-buckets")

        with pytest.raises(RuntimeError, match="AwsEnv"):
            asyncio.run(inside())
    assert set(threading.enumerate()) <= before and not env.usable
    with pytest.raises(ConnectionPoisoned):
        env.step("aws s3api list-buckets")
    env.connect()
    assert env.reset(task_id=1).observation.step_count == 0
    env.close()
    env.close()


def test_a_blocking_client_begins_its_thread_with_its_first_call() -> None:
    before = set(threading.enumerate())

    def begun() -> int:
        return sum(each.name == "aws-env" for each in set(threading.enumerate()) - before)

    with FakeEnvServer() as fake:
        AwsEnv(fake.url).sync().close()
        env = AwsEnv(fake.url).sync()
        assert begun() == 0 and not env.usable
        env.connect()
        assert begun() == 1 and env.usable
        env.close()
    assert begun() == 0


def test_a_forgotten_client_gives_its_session_back() -> None:
    with FakeEnvServer() as fake:
        env = AwsEnv(fake.url).sync()
        env.connect()
        assert fake.open == 1
        del env
        gc.collect()
        assert fake.open == 0


def test_a_forked_child_must_not_use_it() -> None:
    with FakeEnvServer() as fake, AwsEnv(fake.url).sync() as env:
        child = os.fork()
        if child == 0:
            try:
                env.reset()
            except RuntimeError as error:
                os._exit(0 if "forked" in str(error) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert env.reset().reward is None, "the parent goes on"


async def test_capacity_states_the_arithmetic(server: EnvServerProcess) -> None:
    async with AwsEnv(server.url), AwsEnv(server.url):
        with pytest.raises(CapacityError, match=r"2/2 sessions.*accumulation.*--pool-size"):
            await AwsEnv(server.url).connect()


async def test_requests_are_numbered_where_the_server_echoes() -> None:
    with FakeEnvServer(metadata={"correlation": True}) as fake:
        async with AwsEnv(fake.url) as env:
            await env.reset(seed=1)
            await env.step("a")
        assert [message["id"] for _, message in fake.messages if message["type"] != "close"] == [
            0,
            1,
            2,
        ]
    with FakeEnvServer(metadata={"correlation": False}) as fake:
        async with AwsEnv(fake.url) as env:
            await env.reset()
        assert not any("id" in message for _, message in fake.messages)


async def test_a_reply_to_another_request_is_given_up() -> None:
    stale = '{"type":"observation","id":0,"data":{"observation":{},"reward":0.5,"done":false}}'
    with FakeEnvServer(
        lambda number, message: stale if message["type"] == "step" else None, {"correlation": True}
    ) as fake:
        env = AwsEnv(fake.url)
        await env.reset()
        with pytest.raises(ConnectionLost, match="request 2 was due, not to 0"):
            await env.step("a")
        await env.connect()
        assert (await env.reset()).observation.task is not None


async def test_another_environments_action_is_sent_as_it_is() -> None:
    with FakeEnvServer() as fake:
        async with AwsEnv(fake.url) as env:
            await env.reset()
            await env.step({"message": "hello"})
        assert ("step", {"message": "hello"}) in [
            (m["type"], m.get("data")) for _, m in fake.messages
        ]


async def test_the_token_is_sent() -> None:
    with FakeEnvServer() as fake:
        async with AwsEnv(fake.url, "sesame"):
            assert fake.headers["Authorization"] == "Bearer sesame"
        await fetch_metadata(fake.url, "other")
        assert fake.headers["Authorization"] == "Bearer other"


@pytest.mark.parametrize("metadata", [None, {"reward_mode": "level"}])
async def test_metadata(metadata) -> None:
    with FakeEnvServer(metadata=metadata) as fake:
        assert await fetch_metadata(fake.url) == (metadata or {})
    assert await fetch_metadata("http://127.0.0.1:1") == {}
    with pytest.raises(ValueError, match="address"):
        await fetch_metadata("nowhere")


@pytest.fixture
def tool(server: EnvServerProcess, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AWS_RL_ENV_URL", server.url)
    env = AwsToolEnv()
    yield env
    env._env.close()


def test_every_public_method_is_meant_for_a_model() -> None:
    public = [
        name
        for name, _ in inspect.getmembers(AwsToolEnv, inspect.isfunction)
        if not name.startswith("_")
    ]
    assert public == ["aws", "get_reward", "reset"]
    from transformers.utils.chat_template_utils import get_json_schema

    schema = get_json_schema(AwsToolEnv.aws)["function"]
    assert schema["name"] == "aws" and schema["parameters"]["required"] == ["command"]
    assert schema["parameters"]["properties"]["command"]["type"] == "string"
    assert schema["parameters"]["properties"]["command"]["description"]
    assert schema["description"] == "Run one AWS CLI command and return its output."


@pytest.mark.nightly
def test_episodes_on_one_instance(tool: AwsToolEnv) -> None:
    task = instantiate(205, 2)
    rows = [
        {"task": task.to_json(), "seed": task.seed},
        {"task": json.dumps(task.to_json()), "seed": task.seed},
        {
            "task_id": 205,
            "seed": task.seed,
            "prompt": [{"role": "user", "content": ""}],
            "task": None,
        },
    ]
    for row in rows:
        assert tool.reset(**row) == task.description
        assert tool.get_reward() == 0.0
        assert "error" in tool.aws("rm -rf /")
        assert "at most" in tool.aws("aws " + "x" * 9000)
        for command in task.solution:
            tool.aws(command)
        assert tool.get_reward() == pytest.approx(1.0)
        with pytest.raises(ValueError, match="Episode finished"):
            tool.aws("aws s3api list-buckets")
        assert tool.get_reward() == pytest.approx(1.0)


def test_before_the_first_reset(tool: AwsToolEnv) -> None:
    with pytest.raises(ValueError, match="finished"):
        tool.aws("aws s3api list-buckets")
    assert tool.get_reward() is None


def test_a_lost_environment_has_no_reward_and_comes_back_with_the_next_episode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    losses = ["drop"]
    with FakeEnvServer(
        lambda number, message: losses.pop() if message["type"] == "step" and losses else None,
        {"reward_mode": "level"},
    ) as fake:
        monkeypatch.setenv("AWS_RL_ENV_URL", fake.url)
        tool = AwsToolEnv()
        assert tool.reset() == "task"
        with pytest.raises(ConnectionLost):
            tool.aws("aws a")
        with pytest.raises(ValueError, match="finished"):
            tool.aws("aws a")
        assert tool.get_reward() is None and fake.connections == 1, (
            "no new session inside an episode"
        )
        tool.reset()
        assert fake.connections == 2
        tool.aws("aws a")
        tool.aws("aws b")
        assert tool.get_reward() == 0.5, "in level mode the last reward counts"
        tool._env.close()


def test_making_one_needs_no_network_and_no_torch() -> None:
    make = "from realhf.aws.client.trl_tool import AwsToolEnv; AwsToolEnv()"
    code = f"import sys; {make}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


WRITTEN = (
    "aws s3api head-bucket \\\n  --bucket {name}",
    "aws s3api head-bucket \\\r\n  --bucket {name}\r\n",
    "```bash\naws s3api head-bucket \\\n  --bucket {name}\n```",
    "$ aws s3api head-bucket --bucket {name}",
)
SEVERAL = "```bash\naws s3api list-buckets\naws s3api delete-bucket --bucket {name}\n```"


async def test_a_command_is_read_alike_at_every_door(
    server: EnvServerProcess, tool: AwsToolEnv
) -> None:
    """Over several lines, in a fence and behind a prompt it used to be refused everywhere but in a
    turn of a policy."""
    task = instantiate(1, 3)
    refusal = "one command at a time"
    async with AwsEnv(server.url) as env, httpx.AsyncClient(base_url=server.url, timeout=60) as web:
        said = [form.format(name=task.params["name"]) for form in WRITTEN]
        several = SEVERAL.format(name=task.params["name"])
        await env.reset(task=task.to_json(), seed=task.seed)
        for command in said:
            stepped = await env.step(command)
            assert stepped.observation.command_success, stepped.observation.error
        sent = (await env.state()).tracker["commands_executed"]
        assert sent == [f"aws s3api head-bucket --bucket {task.params['name']}"] * len(said)
        refused = await env.step(several)
        assert refused.observation.refusal == "newline" and refusal in refused.observation.error
        for command in said:
            made = await web.post(
                "/step", json={"action": {"command": command.replace("head", "create")}}
            )
            assert made.json()["observation"]["command_success"], made.text
            call = {"name": "aws", "arguments": {"command": command.replace("head", "create")}}
            body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call}
            answered = (await web.post("/mcp", json=body)).json()
            assert answered["result"]["isError"] is False, answered
        assert refusal in (await web.post("/step", json={"action": {"command": several}})).text
        body["params"] = {"name": "aws", "arguments": {"command": several}}
        assert refusal in (await web.post("/mcp", json=body)).text
    await asyncio.to_thread(tool.reset, task=task.to_json(), seed=task.seed)
    for command in said:
        assert "error" not in await asyncio.to_thread(tool.aws, command)
    assert refusal in await asyncio.to_thread(tool.aws, several)
    assert "hint" in await asyncio.to_thread(tool.aws, "```\n$ aws help \\\n --task-hint\n```")
