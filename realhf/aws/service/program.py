"""Puts the server of the AWS environment together: simulators or a real account, episodes, playground."""

from __future__ import annotations

import argparse
from typing import Any

from realhf.aws.episode.player import EpisodePlayer
from realhf.aws.playground.routes import mount
from realhf.aws.real_aws.account import RealAwsPool
from realhf.aws.server.config import AwsServerConfig, aws_endpoints
from realhf.aws.server.served import AwsServed
from realhf.aws.simulator.configured_pool import output_limits, simulator_pool
from realhf.aws.simulator.pool import MiniStackPool
from realhf.aws.tasks.loader import load_templates
from realhf.env.server.config import ConfigError, ServerConfig

ABOUT = "Serve AWS episodes on MiniStack over the OpenEnv wire, one simulator per session."


def make_pool(config: AwsServerConfig) -> MiniStackPool | RealAwsPool:
    """Return simulators, or the real account where that is confirmed; not started yet."""
    simulators = simulator_pool(config, config.pool_size, config.ministack_base_port)
    if config.backend_type == "aws":
        limits = output_limits(config)
        return RealAwsPool(config.allow_real_aws, config.allow_file, limits, simulators, aws_endpoints())
    return simulators


def prepare(arguments: argparse.Namespace, config: ServerConfig) -> tuple[AwsServed, ServerConfig]:
    """Return the environment as the server sees it, not started yet. Raises ConfigError for options of another
    environment."""
    assert isinstance(config, AwsServerConfig)
    if arguments.option:
        raise ConfigError(f"--option {arguments.option[0]!r} has no effect without --env; the settings are flags here")
    chaos = config.enable_chaos and config.backend_type == "simulator"

    def make_player(slot: Any) -> EpisodePlayer:
        return EpisodePlayer(slot, config.max_steps, reward_mode=config.reward_mode, chaos=chaos)

    templates = frozenset(template.task_id for template in load_templates())
    return AwsServed(config, make_pool(config), make_player, mount, templates=templates), config
