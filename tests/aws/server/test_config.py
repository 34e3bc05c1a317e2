"""Settings of the AWS environment's server: variables, flags and their errors."""

from __future__ import annotations

import pytest

from realhf.aws.server_config import AwsServerConfig
from realhf.env.server.config import ConfigError
from realhf.env.server.config import parse as parse_any


def parse(argv: list[str], environ: dict[str, str]) -> AwsServerConfig:
    return parse_any(argv, AwsServerConfig, environ)


def test_flags_win_over_variables_and_variables_over_defaults() -> None:
    config = parse(["--port", "0"], {"AWS_RL_ENV_PORT": "9000", "AWS_RL_ENV_POOL_SIZE": "4", "HOME": "/"})
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
        (["--web", "dedicated", "--pool-size", "8", "--web-ministack-port", "4570"], {}, "WEB_MINISTACK_PORT"),
        ([], {"AWS_RL_ENV_LAMBDA": "docker"}, "AWS_RL_ENV_LAMBDA"),
        ([], {"AWS_RL_ENV_ENABLE_CHAOS": "perhaps"}, "AWS_RL_ENV_ENABLE_CHAOS"),
        ([], {"BACKEND_TYPE": "azure"}, "BACKEND_TYPE"),
    ],
)
def test_a_bad_setting_is_named(argv: list[str], environ: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse(argv, environ)


def test_the_client_variable_is_not_a_server_setting() -> None:
    assert parse([], {"AWS_RL_ENV_URL": "http://localhost:1"}) == AwsServerConfig()


def test_defaults_of_the_design() -> None:
    config = parse([], {})
    assert (config.pool_size, config.ministack_base_port, config.backend_type) == (1, 4566, "simulator")
    assert (config.max_steps, config.capacity_mode, config.cmd_timeout_s) == (15, "reject", 10)
    assert (config.max_stdout_bytes, config.max_stderr_bytes, config.max_command_bytes) == (16384, 4096, 8192)
    assert (config.idle_timeout_s, config.ws_ping_interval_s, config.ws_ping_timeout_s) == (3600, 20, 600)
    assert (config.web, config.web_ministack_port, config.lambda_mode) == ("auto", 4565, "stub")
    assert (config.sandbox, config.enable_chaos, config.reward_mode) == ("auto", True, "potential")
    assert (config.host, config.port, config.token, config.allow_real_aws) == ("127.0.0.1", 8100, "", "")


def test_variables_set_every_kind_of_setting() -> None:
    environ = {
        "AWS_RL_ENV_LAMBDA": "sandbox",
        "AWS_RL_ENV_ENABLE_CHAOS": "false",
        "BACKEND_TYPE": "simulator",
        "AWS_RL_ENV_CMD_TIMEOUT_S": "2.5",
        "AWS_RL_ENV_WEB_SOLUTIONS": "1",
    }
    config = parse([], environ)
    assert (config.lambda_mode, config.enable_chaos, config.cmd_timeout_s) == ("sandbox", False, 2.5)
    assert config.web_solutions


@pytest.mark.parametrize(
    ("web", "size", "mounted"), [("auto", 1, True), ("auto", 2, False), ("dedicated", 8, True), ("off", 1, False)]
)
def test_where_the_playground_is_mounted(web: str, size: int, mounted: bool) -> None:
    assert parse(["--web", web, "--pool-size", str(size)], {}).web_mounted is mounted


def test_an_open_address_is_never_served_without_bubblewrap() -> None:
    assert parse(["--host", "0.0.0.0", "--token", "t"], {}).containment == "bwrap"
    assert parse([], {}).containment == "auto"
