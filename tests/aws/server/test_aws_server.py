"""Settings of the AWS environment's server, and how the episodes on it are counted, over real
simulators."""

import os
import signal
import urllib.request
from types import SimpleNamespace
from typing import cast

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from realhf.aws.client.aws_env import AwsEnv
from realhf.aws.episode.player import EpisodePlayer
from realhf.aws.server.program import AwsServed
from realhf.aws.server_config import AwsServerConfig
from realhf.aws.simulator.pool import MiniStackPool
from realhf.aws.tasks.loader import instantiate
from realhf.env.openenv_client import EnvError
from realhf.env.server.server import EnvServer, listen
from realhf.web.settings import SettingError


def parse(argv: list[str], environ: dict[str, str]) -> AwsServerConfig:
    return AwsServerConfig.parse(argv, environ)


def test_flags_win_over_variables_and_variables_over_defaults() -> None:
    config = parse(
        ["--port", "0"], {"AWS_RL_ENV_PORT": "9000", "AWS_RL_ENV_POOL_SIZE": "4", "HOME": "/"}
    )
    assert config == AwsServerConfig(port=0, pool_size=4)


@pytest.mark.parametrize(
    ("argv", "environ", "named"),
    [
        (["--pool-size", "0"], {}, "POOL_SIZE"),
        (["--pool-size", "x"], {}, "POOL_SIZE"),
        ([], {"AWS_RL_ENV_POOLSIZE": "1"}, "AWS_RL_ENV_POOLSIZE"),
        ([], {"AWS_RL_ENV_MAX_STEPS": "0"}, "MAX_STEPS"),
        (["--ministack-base-port", "65535", "--pool-size", "2"], {}, "MINISTACK_BASE_PORT"),
        (["--host", "0.0.0.0"], {}, "HOST"),
        (["--sandbox", "none"], {}, "SANDBOX"),
        (["--host", "0.0.0.0", "--token", "t", "--sandbox", "plain"], {}, "SANDBOX"),
        (["--backend-type", "aws"], {}, "AWS_RL_ENV_ALLOW_REAL_AWS"),
        (["--may-lack", "filter,moat"], {}, "MAY_LACK"),
        (["--host", "0.0.0.0", "--token", "t", "--may-lack", "filter"], {}, "MAY_LACK"),
        (["--backend-type", "aws", "--token", "t"], {"AWS_RL_ENV_MAY_LACK": "hooks"}, "MAY_LACK"),
        (
            ["--web", "dedicated", "--pool-size", "8", "--web-ministack-port", "4570"],
            {},
            "WEB_MINISTACK_PORT",
        ),
        ([], {"AWS_RL_ENV_LAMBDA": "docker"}, "AWS_RL_ENV_LAMBDA"),
        ([], {"AWS_RL_ENV_ENABLE_CHAOS": "perhaps"}, "AWS_RL_ENV_ENABLE_CHAOS"),
        ([], {"BACKEND_TYPE": "azure"}, "BACKEND_TYPE"),
    ],
)
def test_a_bad_setting_is_named(argv: list[str], environ: dict[str, str], named: str) -> None:
    with pytest.raises(SettingError, match=named):
        parse(argv, environ)


def test_the_client_variable_is_not_a_server_setting() -> None:
    assert parse([], {"AWS_RL_ENV_URL": "http://localhost:1"}) == AwsServerConfig()


def test_defaults_of_the_design() -> None:
    config = parse([], {})
    assert (config.pool_size, config.ministack_base_port, config.backend_type) == (
        1,
        4566,
        "simulator",
    )
    assert (config.max_steps, config.capacity_mode, config.cmd_timeout_s) == (15, "reject", 10)
    assert (config.max_stdout_bytes, config.max_stderr_bytes, config.max_command_bytes) == (
        16384,
        4096,
        8192,
    )
    assert (config.idle_timeout_s, config.ws_ping_interval_s, config.ws_ping_timeout_s) == (
        3600,
        20,
        600,
    )
    assert (config.web, config.web_ministack_port, config.lambda_mode) == ("auto", 4565, "stub")
    assert (config.sandbox, config.enable_chaos, config.reward_mode) == ("auto", True, "potential")
    assert (config.host, config.port, config.token, config.allow_real_aws) == (
        "127.0.0.1",
        8100,
        "",
        "",
    )


def test_variables_set_every_kind_of_setting() -> None:
    environ = {
        "AWS_RL_ENV_LAMBDA": "sandbox",
        "AWS_RL_ENV_ENABLE_CHAOS": "false",
        "BACKEND_TYPE": "simulator",
        "AWS_RL_ENV_CMD_TIMEOUT_S": "2.5",
        "AWS_RL_ENV_WEB_SOLUTIONS": "1",
    }
    config = parse([], environ)
    assert (config.lambda_mode, config.enable_chaos, config.cmd_timeout_s) == (
        "sandbox",
        False,
        2.5,
    )
    assert config.web_solutions


@pytest.mark.parametrize(
    ("web", "size", "mounted"),
    [("auto", 1, True), ("auto", 2, False), ("dedicated", 8, True), ("off", 1, False)],
)
def test_where_the_playground_is_mounted(web: str, size: int, mounted: bool) -> None:
    assert parse(["--web", web, "--pool-size", str(size)], {}).web_mounted is mounted


def test_a_playground_that_is_not_served_is_explained_where_one_may_be_expected() -> None:
    """A server with several sessions used to answer 404 at /web, and said nothing about it at its
    start either."""
    config = parse(["--pool-size", "8"], {})
    assert (
        config.web_absent == "no playground at /web beside 8 sessions; --web dedicated serves one"
    )
    served = AwsServed(
        config, cast(MiniStackPool, SimpleNamespace(containment=lambda: "contained"))
    )
    assert served.announcement().splitlines()[-1] == f"aws-env: {config.web_absent}"
    app = FastAPI()
    assert served.mount(app) is None
    answer = TestClient(app).get("/web")
    assert (answer.status_code, answer.text) == (404, f"{config.web_absent}\n")
    for quiet in ([], ["--web", "off"], ["--pool-size", "8", "--web", "dedicated"]):
        assert parse(quiet, {}).web_absent == ""


def test_an_open_address_is_never_served_without_bubblewrap() -> None:
    assert parse(["--host", "0.0.0.0", "--token", "t"], {}).containment == "bwrap"
    assert parse([], {}).containment == "auto"


VERSIONED = 201


@pytest.mark.sim
def test_episodes_are_counted_by_outcome_and_template(pool: MiniStackPool) -> None:
    config = AwsServerConfig(port=0, pool_size=1)
    served = AwsServed(config, pool, lambda slot: EpisodePlayer(slot, 2, chaos=False))
    server = EnvServer(served, config, listen("127.0.0.1", 0))
    server.start()
    try:
        with AwsEnv(server.url).sync() as env:
            env.reset(task_id=VERSIONED, seed=1)
            slot = env.state().slot_id
            assert slot is not None
            os.kill(pool.slots[slot].ministack.pid, signal.SIGKILL)
            with pytest.raises(EnvError, match="simulator lost"):
                env.step("aws s3 ls")
            env.reset(task_id=VERSIONED, seed=1)
            assert [env.step("aws s3 ls").done for _ in range(2)] == [False, True]
            env.reset(task_id=VERSIONED, seed=1)
            assert [env.step(command).done for command in instantiate(VERSIONED, 1).solution] == [
                False,
                True,
            ]
        with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as page:
            text = page.read().decode()
    finally:
        server.stop()
    for outcome in ("environment_failed", "truncated", "achieved"):
        assert (
            f'realhf_env_episodes_total{{outcome="{outcome}",template="{VERSIONED}"}} 1.0' in text
        )


@pytest.mark.parametrize(
    ("seen", "outcome"),
    [
        (
            {"task_achieved": False, "simulator_lost": True, "account_unreadable": "answer"},
            "simulator_lost",
        ),
        ({"task_achieved": False, "account_unreadable": "answer"}, "unreadable_answer"),
        ({"task_achieved": True, "account_unreadable": "answer"}, "achieved"),
        ({"task_achieved": False}, "truncated"),
    ],
)
def test_each_episode_has_one_outcome(seen: dict[str, object], outcome: str) -> None:
    served = AwsServed(AwsServerConfig(port=0), MiniStackPool(1))
    assert served.outcome(seen) == outcome
    assert served.template({"task": {"task_id": VERSIONED}}) == str(VERSIONED)
    assert served.template({"task": {"task_id": 10**9}}) == served.template({}) == "other", (
        "a client wrote it"
    )
