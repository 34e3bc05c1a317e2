"""Settings of the environment server: variables, flags and their errors."""

from __future__ import annotations

import pytest

from realhf.env.server_config import ConfigError, ServerConfig, parse


def test_flags_win_over_variables_and_variables_over_defaults() -> None:
    config = parse(["--port", "0"], {"AWS_RL_ENV_PORT": "9000", "AWS_RL_ENV_POOL_SIZE": "4", "HOME": "/"})
    assert config == ServerConfig(port=0, pool_size=4)


@pytest.mark.parametrize(
    ("argv", "environ", "named"),
    [
        (["--pool-size", "0"], {}, "POOL_SIZE"),
        (["--pool-size", "x"], {}, "POOL_SIZE"),
        ([], {"AWS_RL_ENV_POOLSIZE": "1"}, "AWS_RL_ENV_POOLSIZE"),
        ([], {"AWS_RL_ENV_MAX_STEPS": "0"}, "MAX_STEPS"),
        (["--ministack-base-port", "65535"], {}, "MINISTACK_BASE_PORT"),
        (["--host", "0.0.0.0"], {}, "HOST"),
        (["--sandbox", "none"], {}, "SANDBOX"),
    ],
)
def test_a_bad_setting_is_named(argv: list[str], environ: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse(argv, environ)


def test_the_client_variable_is_not_a_server_setting() -> None:
    assert parse([], {"AWS_RL_ENV_URL": "http://localhost:1"}) == ServerConfig()
