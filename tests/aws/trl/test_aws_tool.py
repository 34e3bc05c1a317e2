"""The tool class as a trainer sees it."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from realhf.aws.client.trl_tool import AwsToolEnv
from realhf.aws.server.program import EnvServerProcess
from realhf.aws.tasks.loader import instantiate
from realhf.env.openenv_client import CapacityError, ConnectionLost
from tests.rollout.fake_env_server import FakeEnvServer

pytestmark = pytest.mark.sim


@pytest.fixture(scope="module")
def server() -> Iterator[EnvServerProcess]:
    with EnvServerProcess(1) as process:
        yield process


@pytest.fixture
def tool(server: EnvServerProcess, monkeypatch: pytest.MonkeyPatch) -> Iterator[AwsToolEnv]:
    monkeypatch.setenv("AWS_RL_ENV_URL", server.url)
    env = AwsToolEnv()
    yield env
    env._env.close()


def test_every_public_method_is_meant_for_a_model() -> None:
    public = [name for name, _ in inspect.getmembers(AwsToolEnv, inspect.isfunction) if not name.startswith("_")]
    assert public == ["aws", "get_reward", "reset"]
    from transformers.utils import get_json_schema

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
        {"task_id": 205, "seed": task.seed, "prompt": [{"role": "user", "content": ""}], "task": None},
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


def test_a_second_client_learns_why_there_is_no_room(tool: AwsToolEnv) -> None:
    tool.reset(task_id=1)
    with pytest.raises(CapacityError, match="accumulation"):
        AwsToolEnv().reset(task_id=1)


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
        assert tool.get_reward() is None and fake.connections == 1, "no new session inside an episode"
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
