"""Builds the pools that the settings of the environment server ask for."""

from __future__ import annotations

from realhf.aws.cli.command_result import OutputLimits
from realhf.aws.server.config import AwsServerConfig
from realhf.aws.simulator.pool import MiniStackPool


def output_limits(config: AwsServerConfig) -> OutputLimits:
    """Return what every command of a session is held to."""
    return OutputLimits(
        config.cmd_timeout_s, config.max_stdout_bytes, config.max_stderr_bytes, config.max_command_bytes
    )


def simulator_pool(config: AwsServerConfig, size: int, base_port: int) -> MiniStackPool:
    """Return a pool of ``size`` simulators, contained as ``config`` says; it is not started yet."""
    return MiniStackPool(
        size,
        base_port,
        sandbox=config.containment,
        limits=output_limits(config),
        lambda_mode=config.lambda_mode,
        may_lack=config.missing_layers,
        memory_mb=config.simulator_memory_mb,
    )
